"""A rank's own part of a plan: the steps that it drives or that deliver to it, and what these need.

Rule: a part is a plan too, only smaller, so whatever compiles a plan compiles a part; what a rank does in it is what it does in
the whole. It does not deliver everything, so `check` is for whole plans.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.changes import of_ranks
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plan_files import PlanRecord, contradictions, mapped_plan
from shardroute.planner.plans import Boxes, Bundles, Op, Plan, Steps, classes_of, ranges
from shardroute.planner.problems import Problem
from shardroute.topologies.errors import InputError, PlanError

Column = NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """What one rank needs of a plan.

    digest    of the whole plan: ranks that have the same run the same plan
    n_steps   of the whole plan
    step      int64[n]: the whole plan's number of each step of `plan`
    plan      the steps that the rank drives or that deliver to it, in the whole plan's order, with their bundles and pieces, and
              all fragments of the ranks that take part in these steps. Of `after` lists it has what the rank can know: of a copy
              to the rank none (who sends waits), of a collective the steps that are in the part.

    On the rank itself buffers and slots are those of the whole plan; of slots elsewhere only those that it writes to are known.
    """

    rank: int
    digest: str
    n_steps: int
    step: Ints
    plan: Plan


def part_of(plan: Plan, rank: int) -> RankPart:
    """The rank's part of a plan. Raises InputError for a rank that the plan doesn't have."""
    record = PlanRecord(
        plan.digest, plan.strategy, plan.topology, plan.problem, plan.boxes, plan.bundles, dict(plan.steps.columns()),
        plan.group_ptr, plan.group_ranks, plan.slot_bytes, plan.window_bytes,
    )  # fmt: skip
    _check_rank(record, rank)
    return _part(record, rank)


def load_part(path: str | Path, rank: int, digest: str | None = None) -> RankPart:
    """The rank's part of a plan file, without making the whole plan. The digest of the whole file is computed on the way.

    Raises InputError for a missing file and for a rank that the plan doesn't have, PlanError for a file that isn't a whole plan,
    whose digest isn't the one expected, or whose steps for this rank contradict each other.
    """
    with mapped_plan(path) as record:
        if digest is not None and record.digest != digest:
            raise PlanError(f"{path}: plan {record.digest[:12]}, but plan {digest[:12]} is to be run; give all ranks one file")
        _check_rank(record, rank)
        with contradictions(path):
            return _part(record, rank)


def _check_rank(record: PlanRecord, rank: int) -> None:
    n_ranks = record.problem.n_ranks
    if not 0 <= rank < n_ranks:
        raise InputError(f"rank {rank}: the plan has ranks 0 to {n_ranks - 1}")


def _part(record: PlanRecord, rank: int) -> RankPart:
    if (record.steps["op"].astype(np.int64) >= Op.COMPUTE).any():
        raise InputError("a plan that computes attention or adds up has no parts; load it whole")
    rows = _rows_of(record, rank)
    columns = {name: column[rows] for name, column in record.steps.items() if name not in ("after", "after_ptr")}
    columns["after_ptr"], columns["after"] = _after(record, rows, columns, rank)
    bundles, columns["bundle"] = _bundles(record.bundles, columns["bundle"])
    ranks = _ranks_in(columns, record, rank)
    inside = of_ranks(record.problem, ranks)
    boxes, bundles = _pieces(record, inside, bundles)
    steps = Steps(*(columns[name] for name in Steps.__dataclass_fields__))  # type: ignore[arg-type]  # cast when made
    plan = Plan(
        record.strategy, record.topology, inside, boxes, bundles, steps,
        record.group_ptr, record.group_ranks, record.slot_bytes, window_bytes=record.window_bytes,
    )  # fmt: skip
    return RankPart(rank, record.digest, len(record.steps["op"]), rows, plan)


def _rows_of(record: PlanRecord, rank: int) -> Ints:
    steps = record.steps
    n = len(steps["op"])
    if any(len(steps[name]) != n for name in ("src", "dst", "group")):
        raise PlanError("steps: columns differ in length")
    mine = (steps["src"] == rank) | (steps["dst"] == rank)
    groups = np.zeros(len(record.group_ptr), dtype=bool)  # one more than groups: -1, of a copy, finds False
    member = np.flatnonzero(record.group_ranks == rank)
    groups[np.searchsorted(record.group_ptr, member, side="right") - 1] = True
    together = np.flatnonzero(steps["op"] != Op.COPY)
    mine[together] |= groups[_within(steps["group"][together], len(groups) - 1, "group")]
    return np.flatnonzero(mine)


def _after(record: PlanRecord, rows: Ints, columns: Mapping[str, Column], rank: int) -> tuple[Ints, Ints]:
    """CSR: of each row, the steps of its `after` list that are in the part, by their numbers in it."""
    ptr, after = record.steps["after_ptr"], record.steps["after"]
    n = len(record.steps["op"])
    if len(ptr) != n + 1:
        raise PlanError(f"column steps.after_ptr: {len(ptr)} row starts for {n} steps")
    start, end = ptr[rows].astype(np.int64), ptr[rows + 1].astype(np.int64)
    if (start < 0).any() or (end < start).any() or (end > len(after)).any():
        raise PlanError(f"column steps.after_ptr: row starts must rise from 0 to {len(after)}")
    driven = (columns["op"] != Op.COPY) | (columns["src"] == rank)
    kept = np.flatnonzero(driven & (end > start))
    flat, owner = ranges(np.stack([start[kept], end[kept]], axis=1).ravel(), 2 * np.arange(len(kept)))
    owner, wanted = kept[owner], after[flat].astype(np.int64)
    at = np.minimum(np.searchsorted(rows, wanted), max(len(rows) - 1, 0))
    known = rows[at] == wanted if len(rows) else np.zeros(0, dtype=bool)
    blind = ~known & (columns["op"][owner] == Op.COPY)
    if blind.any():
        i = int(np.argmax(blind))
        raise PlanError(f"step {rows[owner[i]]} waits for step {wanted[i]}, in which its rank {rank} takes no part")
    count = np.bincount(owner[known], minlength=len(rows))
    return np.concatenate([[0], np.cumsum(count)]).astype(np.int64), at[known]


def _bundles(bundles: Bundles, column: Column) -> tuple[Bundles, Ints]:
    """The bundles that the column names, and the column with their new numbers."""
    used, number = np.unique(_within(column, len(bundles), "bundle"), return_inverse=True)
    entry, owner = ranges(bundles.ptr, used)
    ptr = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(used)))]).astype(np.int64)
    return Bundles(ptr, bundles.tensor[entry], bundles.piece[entry], bundles.offset[entry]), number.ravel()


def _ranks_in(columns: Mapping[str, Column], record: PlanRecord, rank: int) -> NDArray[np.bool_]:
    """Which ranks take part in steps."""
    n_ranks = record.problem.n_ranks
    found = np.zeros(n_ranks + 1, dtype=bool)  # the last for -1, of collectives
    found[rank] = True
    for name in ("src", "dst"):
        found[_within(columns[name], n_ranks, name, least=-1)] = True
    groups = np.unique(_within(columns["group"][columns["op"] != Op.COPY], len(record.group_ptr) - 1, "group"))
    member, _ = ranges(record.group_ptr, groups)
    found[_within(record.group_ranks[member], n_ranks, "group_ranks")] = True
    return found[:-1]


def _pieces(record: PlanRecord, inside: Problem, bundles: Bundles) -> tuple[tuple[Boxes, ...], Bundles]:
    """The pieces that the bundles name, by class of the restricted problem, and the bundles with their new numbers.

    Classes of the whole problem that are alike on these ranks are one here; their pieces follow each other.
    """
    class_of = classes_of(record.problem)
    n_pieces = np.array([len(b.lo) for b in record.boxes], dtype=np.int64)
    _within(bundles.tensor, len(inside.tensors), "bundles.tensor")
    piece, boxes = np.zeros(len(bundles.piece), dtype=np.int64), []
    entry_class = classes_of(inside)[bundles.tensor]
    order = np.argsort(entry_class, kind="stable")
    first = np.searchsorted(entry_class[order], np.arange(len(inside.classes) + 1))
    for i, cls in enumerate(inside.classes):
        entries = order[first[i] : first[i + 1]]
        n_dims = len(cls.shape)
        old = class_of[bundles.tensor[entries]]
        wanted = bundles.piece[entries].astype(np.int64)
        if ((wanted < 0) | (wanted >= n_pieces[old])).any():
            raise PlanError("column bundles.piece: a piece number is outside its tensor's class")
        pairs, number = np.unique(np.stack([old, wanted]), axis=1, return_inverse=True)
        piece[entries] = number.ravel()
        corners = np.zeros((2, pairs.shape[1], n_dims), dtype=np.int64)
        for k in np.unique(pairs[0]).tolist():
            rows = pairs[0] == k
            corners[0, rows], corners[1, rows] = record.boxes[k].lo[pairs[1, rows]], record.boxes[k].hi[pairs[1, rows]]
        boxes.append(Boxes(corners[0], corners[1]))
    return tuple(boxes), Bundles(bundles.ptr, bundles.tensor, piece, bundles.offset)  # type: ignore[arg-type]  # cast when made


def _within(column: Column, below: int, name: str, least: int = 0) -> Ints:
    """The column's values as indices; PlanError for one that is out of range."""
    values = column.astype(np.int64)
    if len(values) and (values.min() < least or values.max() >= below):
        raise PlanError(f"column {name}: values must lie in {least} to {below - 1}, found {values.min()} to {values.max()}")
    return values
