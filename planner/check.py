"""Proof that a plan delivers its problem: every needed element once, from a rank that holds it, and nothing else.

The proof trusts nothing that planning worked out. Per class it shows that the plan's pieces are disjoint and that those inside
each needed box fill it (no overlap and equal volumes; `piece_tables`). Then it follows every step: each read must find the piece
there, each delivery must be needed and the only one (`deliveries`), and staging memory must not be overwritten before it is read
(`slots`). Element data is never touched.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.deliveries import Deliveries, check_deliveries, check_reads, check_single
from shardroute.planner.memories import check_memory
from shardroute.planner.piece_tables import PieceTables
from shardroute.planner.plans import Op, Plan
from shardroute.planner.slots import check_slots
from shardroute.planner.sums import check_places, summed_deliveries
from shardroute.topologies.errors import InputError, PlanError

# Shares of the time that are over after the tables, the reads and the deliveries: DeepSeek-V3, 276 thousand steps, 0.9 s.
_TABLES: Final = 0.5
_READS: Final = 0.55
_DELIVERIES: Final = 0.98


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
        check_places(plan)
        n_deliveries, n_bytes = check_single(plan, tables, Deliveries(*summed_deliveries(plan, tables)))
    else:
        check_reads(plan, tables)
        done(_READS)
        n_deliveries, n_bytes = check_deliveries(plan, tables, lambda share: done(_READS + share * (_DELIVERIES - _READS)))
    done(_DELIVERIES)
    check_waits(plan)
    check_slots(plan)
    return Proof(n_deliveries, n_bytes)


def _untold(_share: float) -> None:
    pass


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
