"""Proof that a plan delivers its problem: every needed element once, from a rank that holds it, and nothing else.

The proof trusts nothing that planning worked out. Per class it shows that the plan's pieces are disjoint and that those inside
each needed box fill it (no overlap and equal volumes; `piece_tables`). Then it follows every step: each read must find the piece
there, each delivery must be needed and the only one, and staging memory must not be overwritten before it is read (`slots`).
Element data is never touched; the cost grows with the number of bundle entries times the steps that carry them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.memories import check_memory
from shardroute.planner.piece_tables import PieceTables
from shardroute.planner.plans import SOURCE, TARGET, Op, Plan, ranges
from shardroute.planner.slots import check_slots
from shardroute.planner.sums import check_places, summed_deliveries
from shardroute.topologies.errors import InputError, PlanError

# Shares of the time that are over after the tables, the deliveries and the relays: DeepSeek-V3, 280 thousand steps, 1.4 s.
_TABLES: Final = 0.55
_DELIVERIES: Final = 0.7
_RELAYS: Final = 0.95


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved: deliveries of a piece to a rank, and their bytes."""

    n_deliveries: int
    n_bytes: int


def check(plan: Plan, progress: Callable[[float], None] | None = None) -> Proof:
    """Prove that the plan delivers, or computes its attention call; progress is told the share done. Raises PlanError naming the
    tensor, box, rank or step that is wrong.
    """
    done = progress if progress is not None else _untold
    if plan.attention is not None:
        from shardroute.planner.ring.proofs import check_attention  # which builds on this module

        return check_attention(plan)
    try:
        check_memory(plan.problem.tensors, plan.problem.target)
    except InputError as error:
        raise PlanError(str(error)) from error
    tables = PieceTables(plan)
    done(_TABLES)
    if plan.problem.summed:
        deliveries = _sums(plan, tables)
    else:
        deliveries = _deliveries(plan, tables)
        done(_DELIVERIES)
        _check_relays(plan, tables, deliveries)
    done(_RELAYS)
    check_waits(plan)
    check_slots(plan)
    n_bytes = int(tables.piece_bytes[deliveries.piece].sum())
    return Proof(len(deliveries.step), n_bytes)


def _untold(_share: float) -> None:
    pass


@dataclass(frozen=True, slots=True)
class _Rows:
    """One row for each entry of each of some steps: the step, a rank, the global number of the (tensor, piece)."""

    step: Ints
    rank: Ints
    piece: Ints


def _rows(plan: Plan, tables: PieceTables, steps: Ints, ranks: NDArray[np.integer]) -> _Rows:
    entry, owner = ranges(plan.bundles.ptr, plan.steps.bundle[steps])
    return _Rows(steps[owner], ranks[owner].astype(np.int64), tables.entry_piece[entry].astype(np.int64))


def _deliveries(plan: Plan, tables: PieceTables) -> _Rows:
    """All deliveries to destination weights, proved to be needed, complete and single."""
    steps = plan.steps
    from_source = np.flatnonzero((steps.src_at == SOURCE) & (steps.src >= 0))
    reads = _rows(plan, tables, from_source, steps.src[from_source])
    wrong = ~tables.held[tables.class_row[reads.piece], tables.column[reads.rank]]
    if wrong.any():
        i = int(np.argmax(wrong))
        raise PlanError(
            f"step {reads.step[i]}: rank {reads.rank[i]} sends {tables.name(plan, int(reads.piece[i]))}, which it doesn't hold"
        )
    for step in np.flatnonzero(steps.op == Op.ALL_GATHER).tolist():
        row = slice(plan.bundles.ptr[steps.bundle[step]], plan.bundles.ptr[steps.bundle[step] + 1])
        members = tables.column[plan.group(int(steps.group[step]))]
        held = tables.held[tables.class_row[tables.entry_piece[row]]][:, members].any(axis=1)
        if not held.all():
            piece = int(tables.entry_piece[row][np.argmin(held)])
            raise PlanError(f"step {step}: no rank of the all-gather holds {tables.name(plan, piece)}")
    if ((steps.dst_at == TARGET) & (steps.op != Op.COPY) & (steps.op != Op.BARRIER)).any():
        raise PlanError("a collective must deliver to a staging slot")

    arriving = np.flatnonzero((steps.dst_at == TARGET) & (steps.op == Op.COPY))
    return _single(plan, tables, _rows(plan, tables, arriving, steps.dst[arriving]))


def _sums(plan: Plan, tables: PieceTables) -> _Rows:
    """All sums that land in destination weights, proved to have every addend once, to be needed, complete and single."""
    check_places(plan)
    return _single(plan, tables, _Rows(*summed_deliveries(plan, tables)))


def _single(plan: Plan, tables: PieceTables, found: _Rows) -> _Rows:
    """The deliveries by piece and rank, proved to be needed, complete and single."""
    order = np.lexsort((found.rank, found.piece))
    found = _Rows(found.step[order], found.rank[order], found.piece[order])
    wrong = ~tables.needed[tables.class_row[found.piece], tables.column[found.rank]]
    if wrong.any():
        i = int(np.argmax(wrong))
        raise PlanError(
            f"step {found.step[i]}: rank {found.rank[i]} gets {tables.name(plan, int(found.piece[i]))}, which it doesn't need"
        )
    twice = (np.diff(found.piece) == 0) & (np.diff(found.rank) == 0)
    if twice.any():
        i = int(np.argmax(twice))
        raise PlanError(
            f"steps {found.step[i]} and {found.step[i + 1]} both deliver {tables.name(plan, int(found.piece[i]))} "
            f"to rank {found.rank[i]}"
        )
    wanted = tables.needed.sum(axis=1)[tables.class_row]
    missing = wanted != np.bincount(found.piece, minlength=len(wanted))
    if missing.any():
        piece = int(np.argmax(missing))
        got = found.rank[found.piece == piece]
        needing = tables.needed[tables.class_row[piece]][tables.column]
        rank = next(r for r in np.flatnonzero(needing).tolist() if r not in got)
        raise PlanError(f"nothing delivers {tables.name(plan, piece)} to rank {rank}, which needs it")
    return found


def _check_relays(plan: Plan, tables: PieceTables, deliveries: _Rows) -> None:
    """A read of destination weights must wait for the delivery of that piece to that rank."""
    steps = plan.steps
    relaying = np.flatnonzero(steps.src_at == TARGET)
    reads = _rows(plan, tables, relaying, steps.src[relaying])
    n_ranks = plan.problem.n_ranks
    key = deliveries.piece * n_ranks + deliveries.rank
    wanted = reads.piece * n_ranks + reads.rank
    at = np.minimum(np.searchsorted(key, wanted), max(len(key) - 1, 0))
    if len(wanted) and (not len(key) or (key[at] != wanted).any()):
        i = int(np.argmax(key[at] != wanted)) if len(key) else 0
        raise PlanError(
            f"step {reads.step[i]}: rank {reads.rank[i]} relays {tables.name(plan, int(reads.piece[i]))}, which it never gets"
        )
    waits = np.repeat(np.arange(len(steps)), np.diff(steps.after_ptr)) * len(steps) + steps.after
    pairs = np.unique(reads.step * len(steps) + (deliveries.step[at] if len(at) else at))
    unordered = ~np.isin(pairs, waits)
    if unordered.any():
        step, delivery = divmod(int(pairs[np.argmax(unordered)]), len(steps))
        raise PlanError(f"step {step} relays what step {delivery} delivers, but doesn't wait for it")


def check_waits(plan: Plan) -> None:
    """Whoever drives a step must itself take part in the steps that it waits for, else it can't know that they are complete."""
    steps = plan.steps
    owner = np.repeat(np.arange(len(steps)), np.diff(steps.after_ptr))
    after = steps.after
    ours, theirs = steps.op[owner] == Op.COPY, steps.op[after] == Op.COPY
    blind = ours & theirs & (steps.src[after] != steps.src[owner]) & (steps.dst[after] != steps.src[owner])
    blind |= ours & ~theirs & ~_in_group(plan, steps.group[after], steps.src[owner])
    blind |= ~ours & theirs & ~(
        _in_group(plan, steps.group[owner], steps.src[after]) | _in_group(plan, steps.group[owner], steps.dst[after])
    )
    apart: dict[tuple[int, int], bool] = {}
    for i in np.flatnonzero(~ours & ~theirs).tolist():
        pair = int(steps.group[owner[i]]), int(steps.group[after[i]])
        if pair not in apart:
            apart[pair] = not len(np.intersect1d(plan.group(pair[0]), plan.group(pair[1])))
        blind[i] = apart[pair]
    if blind.any():
        i = int(np.argmax(blind))
        raise PlanError(f"step {owner[i]} waits for step {after[i]}, in which none of its driving ranks takes part")


def _in_group(plan: Plan, group: NDArray[np.int32], rank: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether each rank is in each group; False for group -1."""
    owner = np.repeat(np.arange(len(plan.group_ptr) - 1), np.diff(plan.group_ptr))
    n_ranks = plan.problem.n_ranks
    return np.isin(group.astype(np.int64) * n_ranks + rank, owner * n_ranks + plan.group_ranks)
