"""Linear programs: one value for all, solved through PuLP while they are small, straight by arrays in HiGHS where they are large.

PuLP's model is the one to read and to hand to another solver, but building it takes seconds from some 10^5 columns on. Where
HiGHS can't be imported, PuLP's own CBC solves.
"""

import ctypes
import os
import sys
import warnings
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints

# Columns from which the model goes to HiGHS as arrays: PuLP takes 0.5 s to build this many.
PULP_COLUMNS = 20_000
# How far a row may be exceeded, beside its size: HiGHS's and CBC's default is 1e-7 or 1e-6.
FEASIBLE = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Minimise cost @ x over 0 <= x <= upper with row_low <= A x <= row_high; A by its entries (row, column, value).

    Entries of one row and column must not occur twice. Infinite sides are plus or minus np.inf.
    """

    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    row: Ints
    column: Ints
    value: NDArray[np.float64]
    row_low: NDArray[np.float64]
    row_high: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Solved:
    """A feasible point, its cost, the cost that no point beats (-inf if unknown), and the duals of the rows (None if not given).
    """

    x: NDArray[np.float64]
    cost: float
    bound: float
    duals: NDArray[np.float64] | None
    solver: str


def solve(program: Program, time_limit_s: float, *, highs: bool | None = None) -> Solved | None:
    """The best point found in the time, or None when none was. `highs` False does without HiGHS; None looks if it is there."""
    if not (has_highs() if highs is None else highs):
        return _by_pulp(program, time_limit_s, highs=False)
    if len(program.cost) <= PULP_COLUMNS:
        return _by_pulp(program, time_limit_s, highs=True)
    return _by_arrays(program, time_limit_s)


@cache
def has_highs() -> bool:
    """Whether HiGHS can be imported. Its first object of a process prints a banner to standard output, where JSON may go: it is
    made here, with that output closed.
    """
    try:
        import highspy
    except ImportError:
        return False
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            highspy.Highs()  # type: ignore[no-untyped-call]  # highspy has types, but not for this
            flush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    return True


def _by_pulp(program: Program, time_limit_s: float, *, highs: bool) -> Solved | None:
    import pulp

    model = pulp.LpProblem("shardroute", pulp.LpMinimize)
    x = [model.add_variable(f"x{j}", 0, None if np.isinf(up) else float(up)) for j, up in enumerate(program.upper.tolist())]
    model += pulp.LpAffineExpression([(x[j], c) for j, c in enumerate(program.cost.tolist()) if c])
    order = np.argsort(program.row, kind="stable")
    ptr = np.searchsorted(program.row[order], np.arange(len(program.row_low) + 1))
    columns, values = program.column[order].tolist(), program.value[order].tolist()
    constraints = []
    for i, (low, high) in enumerate(zip(program.row_low.tolist(), program.row_high.tolist(), strict=True)):
        left = pulp.LpAffineExpression([(x[columns[k]], values[k]) for k in range(ptr[i], ptr[i + 1])])
        row = left == low if low == high else (left <= high if np.isinf(low) else left >= low)
        model += row
        constraints.append(row)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 will drop its own CBC; the version range ends before it
        solver = (pulp.HiGHS if highs else pulp.PULP_CBC_CMD)(msg=False, timeLimit=time_limit_s)
    model.solve(solver)
    # The status alone can say that all is well of a point that isn't feasible: sol_status is what tells.
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    best = model.sol_status == pulp.LpSolutionOptimal
    found = np.array([_known(v.value()) for v in x])
    if not _holds(program, found):
        return None
    cost = _known(pulp.value(model.objective))
    duals = [row.pi for row in constraints]
    return Solved(
        found, cost, cost if best else -np.inf,
        np.array(duals, dtype=np.float64) if best and all(d is not None for d in duals) else None,
        "HiGHS through PuLP" if highs else "CBC through PuLP",
    )  # fmt: skip


def _holds(program: Program, x: NDArray[np.float64]) -> bool:
    """Whether a point is within all rows, to what solvers take for feasible. PuLP calls points so that were never computed."""
    sums = np.bincount(program.row, weights=program.value * x[program.column], minlength=len(program.row_low))
    size = 1.0 + np.bincount(program.row, weights=np.abs(program.value * x[program.column]), minlength=len(program.row_low))
    low, high = program.row_low - FEASIBLE * size, program.row_high + FEASIBLE * size
    return bool(((sums >= low) & (sums <= high)).all())


def _known(value: float | None) -> float:
    """PuLP gives no value to what stands in no row and costs nothing."""
    return 0.0 if value is None else float(value)


def _by_arrays(program: Program, time_limit_s: float) -> Solved | None:
    import highspy

    n_rows, n_columns = len(program.row_low), len(program.cost)
    order = np.lexsort((program.row, program.column))
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = n_columns, n_rows
    model.col_cost_ = program.cost
    model.col_lower_ = np.zeros(n_columns)
    model.col_upper_ = np.where(np.isinf(program.upper), highspy.kHighsInf, program.upper)
    model.row_lower_ = np.where(np.isinf(program.row_low), -highspy.kHighsInf, program.row_low)
    model.row_upper_ = np.where(np.isinf(program.row_high), highspy.kHighsInf, program.row_high)
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = np.searchsorted(program.column[order], np.arange(n_columns + 1)).astype(np.int32)
    model.a_matrix_.index_ = program.row[order].astype(np.int32)
    model.a_matrix_.value_ = program.value[order]
    highs = highspy.Highs()  # type: ignore[no-untyped-call]  # highspy has types, but not for this
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("time_limit", float(time_limit_s))
    # A vertex has few fractions, and the serial simplex gives the same one each time. (Not `threads`: HiGHS refuses to run with
    # another number of threads than the first run of the process had, and PuLP's may have been that.)
    highs.setOptionValue("solver", "simplex")
    highs.setOptionValue("parallel", "off")
    highs.passModel(model)
    highs.run()
    info, solution = highs.getInfo(), highs.getSolution()
    best = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    if not best and info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None
    cost = float(info.objective_function_value)
    duals = np.array(solution.row_dual) if best else None
    return Solved(np.array(solution.col_value), cost, cost if best else -np.inf, duals, "HiGHS")
