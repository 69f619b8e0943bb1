"""Proof that a plan delivers its problem: every needed element once, from a rank that holds it, and nothing else.

The proof trusts nothing that planning worked out. Per class it shows that the plan's pieces are disjoint and that those inside
each needed box fill it (no overlap and equal volumes; `piece_tables`). Then it follows every step: each read must find the piece
there, each delivery must be needed and the only one (`deliveries`), and staging memory must not be overwritten before it is read
(`slots`). Element data is never touched.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.deliveries import Deliveries, check_deliveries, check_reads, check_single
from shardroute.planner.memories import check_memory
from shardroute.planner.piece_tables import PieceTables
from shardroute.planner.plans import Op, Plan
from shardroute.planner.shares import Told, parts
from shardroute.planner.slots import check_slots
from shardroute.planner.sums import check_places, summed_deliveries
from shardroute.topologies.errors import InputError, PlanError

# Microseconds that parts of a proof took, on one core of a Xeon (2026-11-30): tables by fragment and box; reads and deliveries by
# step; what steps wait for; slots by step that uses one and by step that it waits for. DeepSeek-V3, by `greedy` on 2,048 GPUs and
# by `domain-relay`, `gather-broadcast` and `m2n-pack` on 512: 0.2 to 2 million steps.
_TABLES_US: Final = 5.0
_READS_US: Final = 0.15
_DELIVERIES_US: Final = 0.7
_WAITS_US: Final = 0.06
_SLOTS_US: Final = (12.0, 3.0)


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved: deliveries of a piece to a rank, and their bytes."""

    n_deliveries: int
    n_bytes: int


def check(plan: Plan, progress: Told | None = None) -> Proof:
    """Prove that the plan delivers, or computes its attention call; progress is told the share done. Raises PlanError naming the
    tensor, box, rank or step that is wrong.
    """
    if plan.attention is not None:
        from shardroute.planner.ring.proofs import check_attention  # which builds on this module

        return check_attention(plan, progress)
    tabled, read, delivered, waited, slotted = parts(progress, _weights(plan))
    try:
        check_memory(plan.problem.tensors, plan.problem.target)
    except InputError as error:
        raise PlanError(str(error)) from error
    tables = PieceTables(plan, tabled)
    if plan.problem.summed:
        check_places(plan)
        read(1.0)
        n_deliveries, n_bytes = check_single(plan, tables, Deliveries(*summed_deliveries(plan, tables)))
    else:
        check_reads(plan, tables)
        read(1.0)
        n_deliveries, n_bytes = check_deliveries(plan, tables, delivered)
    delivered(1.0)
    check_waits(plan)
    waited(1.0)
    check_slots(plan, slotted)
    slotted(1.0)
    return Proof(n_deliveries, n_bytes)


def checking_us(plan: Plan) -> float:
    """About the microseconds that `check` takes of the plan, for shares."""
    return 0.0 if plan.attention is not None else sum(_weights(plan))


def _weights(plan: Plan) -> list[float]:
    """What the parts of a proof are foreseen to take: tables, reads, deliveries, waits, slots."""
    steps = plan.steps
    n_rows = sum(len(c.source) + len(c.target) + len(b.lo) for c, b in zip(plan.problem.classes, plan.boxes, strict=True))
    staged = (steps.src_at >= 0) | (steps.dst_at >= 0)
    n_waits = int(np.diff(steps.after_ptr)[staged].sum())
    return [
        _TABLES_US * n_rows,
        _READS_US * len(steps),
        _DELIVERIES_US * len(steps),
        _WAITS_US * len(steps.after),
        _SLOTS_US[0] * int(staged.sum()) + _SLOTS_US[1] * n_waits,
    ]


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
