"""Like rows and like columns of a linear program, taken as one: like domains need no variables of their own.

Rule: colour refinement. Rows are alike that have the same sides and, colour by colour of columns, the same values; columns
likewise. In the coarsest such colouring a program has an optimum that is constant on each colour of columns, so one row and
one column a colour have the same optimum (Grohe, Kersting, Mladenov, Selman, "Dimension reduction via colour refinement", ESA
2014).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.routing.programs import Program, Solved


@dataclass(frozen=True, slots=True, eq=False)
class Merged:
    """A program with one row and one column for all that are alike, and which these are for each row and column of the first."""

    program: Program
    rows: Ints
    columns: Ints

    def expanded(self, found: Solved) -> Solved:
        """The same optimum as a point of the first program: like columns have like values, and like rows share a dual."""
        sizes = np.bincount(self.rows)
        duals = None if found.duals is None else found.duals[self.rows] / sizes[self.rows]
        return replace(found, x=found.x[self.columns], duals=duals)


def merged(program: Program) -> Merged:
    """The program with like rows and columns taken as one; its optimum is the same."""
    rows, columns = _colours(program)
    n_columns = int(columns.max(initial=-1)) + 1
    first_row, first_column = (np.unique(colour, return_index=True)[1] for colour in (rows, columns))
    kept = np.isin(program.row, first_row)
    key, at = np.unique(rows[program.row[kept]] * n_columns + columns[program.column[kept]], return_inverse=True)
    reduced = Program(
        cost=np.bincount(columns, weights=program.cost, minlength=n_columns).astype(np.float64),
        upper=program.upper[first_column],
        row=key // n_columns, column=key % n_columns,
        value=np.bincount(at, weights=program.value[kept], minlength=len(key)).astype(np.float64),
        row_low=program.row_low[first_row], row_high=program.row_high[first_row],
    )  # fmt: skip
    return Merged(reduced, rows, columns)


def _colours(program: Program) -> tuple[Ints, Ints]:
    """The colour of each row and of each column."""
    values = np.unique(program.value, return_inverse=True)[1]
    rows = _numbered(program.row_low, program.row_high)
    columns = _numbered(program.cost, program.upper)
    found = -1
    while (n := int(rows.max(initial=-1)) + int(columns.max(initial=-1))) > found:
        found = n
        rows = _refined(rows, program.row, values, columns[program.column])
        columns = _refined(columns, program.column, values, rows[program.row])
    return rows, columns


def _refined(colour: Ints, owner: Ints, value: Ints, other: Ints) -> Ints:
    """Colours told apart by what stands beside each: the set of pairs (value, the other side's colour), with repetitions.

    Such sets are compared by sums of two random 64-bit numbers a pair, always the same ones.
    """
    pair = np.unique(value * (int(other.max(initial=0)) + 1) + other, return_inverse=True)[1]
    tags = np.random.default_rng(0).integers(0, 2**63, size=(2, int(pair.max(initial=-1)) + 1), dtype=np.uint64)
    sums = np.zeros((2, len(colour)), dtype=np.uint64)
    for of_side, tag in zip(sums, tags, strict=True):
        np.add.at(of_side, owner, tag[pair])  # wraps, as sums of tags may
    return _numbered(colour, *sums)


def _numbered(*parts: NDArray[np.generic]) -> Ints:
    """0, 1, ... for each distinct row of columns."""
    order = np.lexsort(parts)
    change = np.zeros(len(order), dtype=bool)
    for part in parts:
        change[1:] |= part[order][1:] != part[order][:-1]
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.cumsum(change)
    return number
