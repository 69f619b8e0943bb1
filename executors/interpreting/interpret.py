"""From a plan to what each rank does: its actions in order, what each waits for, and the block copies that it makes.

Rule: no library is known here. A rank is one thread that drives its steps in plan order, whatever their lanes: plan order
is one global order in which everything waits for earlier steps only, so this never deadlocks.

Where ranks share their memory, one that computes has a second driver for that, so that copies go on meanwhile: driver r is rank r
moving, driver n_ranks + r is rank r computing. Elsewhere one driver does both, over a transport whose copies go on by themselves.
What follows says rank where the two are one.

An *action* is one rank's part in driving a step: a COPY is one action, a collective one for each rank of its group. Each
action has a *cell*, a number that counts through the actions step by step; a step is complete when all its cells are
marked.
"""

from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.blocks import Blocks, Forms, lay_blocks
from shardroute.executors.interpreting.calls import Calls, lay_calls, no_calls
from shardroute.executors.interpreting.cutting import cut_blocks
from shardroute.executors.interpreting.memories import Buffers, Holdings, Memory
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.parts import RankPart, load_part
from shardroute.planner.plans import Op, Plan, ranges

Group = TypeVar("Group")


@dataclass(frozen=True, slots=True, eq=False)
class Actions:
    """Actions ordered by rank, then step.

    ptr        int64[n_drivers + 1]  driver r drives actions ptr[r] to ptr[r + 1]
    step       int64[n]
    cell       int64[n]
    queue      uint8[n]              lane and queue of its step: one at a time in each
    meets      bool[n]               it must know that all ranks of the step are ready for it before it copies
    wait_ptr, wait     CSR: the steps that must be complete first; what the rank itself completes is left out
    own_ptr, own       CSR: those that were left out, for transports that begin a step before an earlier one has ended
    block_ptr  int64[n + 1]          rows of the blocks
    """

    ptr: Ints
    step: Ints
    cell: Ints
    queue: NDArray[np.uint8]
    meets: NDArray[np.bool_]
    wait_ptr: Ints
    wait: Ints
    own_ptr: Ints
    own: Ints
    block_ptr: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """The cells of step i are ptr[i] to ptr[i + 1]; `rank` drives each. wake (CSR by step): the ranks that wait for the step."""

    ptr: Ints
    rank: NDArray[np.int32]
    wake_ptr: Ints
    wake: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Programs:
    """What all ranks need to run a plan: columns only, so that they can lie in memory that processes share.

    target_at, slots_at, arena_bytes   int64[n_ranks]: where the target buffers, which a run may write, begin in each arena; where
                                       its slots do; its end
    """

    target_at: Ints
    slots_at: Ints
    arena_bytes: Ints
    actions: Actions
    cells: Cells
    blocks: Blocks
    forms: Forms
    holdings: Holdings
    calls: Calls

    @property
    def n_drivers(self) -> int:
        """The ranks, and again as many where ranks compute."""
        return len(self.actions.ptr) - 1

    @property
    def n_ranks(self) -> int:
        """Ranks of the plan, idle ones too."""
        return len(self.arena_bytes)

    @property
    def n_bytes_copied(self) -> int:
        """Bytes that all block copies of one run write."""
        return int(self.blocks.n_bytes.sum())


def compile_plan(plan: Plan, *, apart: bool = True) -> tuple[Programs, Buffers]:
    """The programs of all ranks, and the buffers that they use; `apart`: ranks that compute have a driver for it.

    Raises PlanError when a step reads or writes outside of what its ranks have, InputError when a layout contradicts itself.
    """
    memory = Memory(plan)
    # Half of a window, so that one message is packed while another travels.
    block_step, block_rank, blocks, forms = cut_blocks(*lay_blocks(plan, memory), plan.window_bytes // 2)
    step, rank, n_drivers = _drivers(plan, apart)
    cell = np.lexsort((rank, step))  # the action of each cell
    cell_of = np.empty(len(cell), dtype=np.int64)
    cell_of[cell] = np.arange(len(cell))
    cell_ptr = np.searchsorted(step[cell], np.arange(len(plan.steps) + 1))

    n_steps = max(len(plan.steps), 1)
    key = rank * n_steps + step
    block_ptr = np.searchsorted(block_rank * n_steps + block_step, np.append(key, n_drivers * n_steps))
    wait_ptr, wait, own_ptr, own = _waits(plan, step, rank, cell, cell_ptr)
    waiter = np.repeat(rank, np.diff(wait_ptr))
    pairs = np.unique(wait * n_drivers + waiter)
    cells = Cells(
        cell_ptr, rank[cell].astype(np.int32),
        np.searchsorted(pairs, np.arange(len(plan.steps) + 1) * n_drivers),
        (pairs % n_drivers).astype(np.int32),
    )  # fmt: skip
    meets = (np.diff(cell_ptr)[step] > 1) & (
        (np.diff(block_ptr) > 0) | np.isin(plan.steps.op[step], (Op.REDUCE_SCATTER, Op.ALL_REDUCE))
    )
    actions = Actions(
        np.searchsorted(rank, np.arange(n_drivers + 1)), step, cell_of, plan.steps.lane[step], meets,
        wait_ptr, wait, own_ptr, own, block_ptr,
    )  # fmt: skip
    buffers = memory.buffers
    return Programs(
        buffers.target_at, buffers.slots_at, buffers.arena_bytes, actions, cells, blocks, forms, memory.holdings(),
        lay_calls(plan, memory) if plan.attention is not None else no_calls(),
    ), buffers  # fmt: skip


def load_programs(path: str | Path, rank: int, digest: str | None = None) -> tuple[RankPart, Programs, Buffers]:
    """One rank's part of a plan file with its programs, without the whole plan: for a transport whose ranks start on their own.

    The programs number steps as the part does. An address in another rank's slot is one within the part: add its offset in the
    slot (see `Buffers`) to where that rank says that its slot lies. Raises as load_part and compile_plan do.
    """
    part = load_part(path, rank, digest)
    return part, *compile_plan(part.plan)


def _drivers(plan: Plan, apart: bool) -> tuple[Ints, Ints, int]:
    """Step and driver of every action, ordered by driver, then step; and how many drivers there are."""
    steps = plan.steps
    copies, collectives = np.flatnonzero(steps.op == Op.COPY), np.flatnonzero(steps.op != Op.COPY)
    member, owner = ranges(plan.group_ptr, steps.group[collectives])
    rooted = np.flatnonzero(steps.op == Op.BROADCAST)  # a root drives its broadcast even if its group leaves it out
    step = np.concatenate([copies, collectives[owner], rooted])
    rank = np.concatenate([steps.src[copies], plan.group_ranks[member], steps.src[rooted]]).astype(np.int64)
    n_ranks, n_steps = plan.problem.n_ranks, max(len(steps), 1)
    two = apart and len(plan.computes) > 0
    if two:
        rank = np.where(steps.op[step] == Op.COMPUTE, rank + n_ranks, rank)
    key = np.unique(rank * n_steps + step)
    return key % n_steps, key // n_steps, n_ranks * (2 if two else 1)


def _waits(plan: Plan, step: Ints, rank: Ints, cell: Ints, cell_ptr: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """CSR by action: the steps of its `after` list and, behind a collective, the one before it in its queue. First those that
    other ranks complete, then those that the rank itself does.
    """
    steps = plan.steps
    at, action = ranges(steps.after_ptr, step)
    dep = steps.after[at].astype(np.int64)
    # A queue runs one step at a time, and a rank's part in a collective can be done before the collective is.
    lane = steps.lane[step]
    order = np.lexsort((step, lane, rank))
    before, behind = order[:-1], order[1:]
    held = (rank[before] == rank[behind]) & (lane[before] == lane[behind]) & (steps.op[step[before]] != Op.COPY)
    action = np.concatenate([action, behind[held]])
    dep = np.concatenate([dep, step[before[held]]])
    # What a barrier waits for is known to the ranks that take part in it; the barrier tells the others.
    other = (steps.op[step[action]] == Op.BARRIER) & (steps.op[dep] == Op.COPY) & (steps.dst[dep] != rank[action])
    action, dep = action[~other], dep[~other]
    own = (np.diff(cell_ptr)[dep] == 1) & (rank[cell[np.minimum(cell_ptr[dep], len(cell) - 1)]] == rank[action])
    n_steps = max(len(steps), 1)
    others, ours = (np.unique(action[rows] * n_steps + dep[rows]) for rows in (~own, own))
    n = np.arange(len(step) + 1)
    return np.searchsorted(others // n_steps, n), others % n_steps, np.searchsorted(ours // n_steps, n), ours % n_steps


def to_columns(group: object, prefix: str = "") -> dict[str, NDArray[np.generic]]:
    """All arrays of a dataclass of arrays and of such dataclasses, by dotted name."""
    columns: dict[str, NDArray[np.generic]] = {}
    for entry in fields(group):  # type: ignore[arg-type]  # typing has no public name for "a dataclass"
        value = getattr(group, entry.name)
        if is_dataclass(value):
            columns |= to_columns(value, f"{prefix}{entry.name}.")
        else:
            columns[prefix + entry.name] = value
    return columns


def from_columns(kind: type[Group], columns: dict[str, NDArray[Any]], prefix: str = "") -> Group:
    """The dataclass that to_columns took apart."""
    values = {
        entry.name: from_columns(entry.type, columns, f"{prefix}{entry.name}.")
        if isinstance(entry.type, type) and is_dataclass(entry.type)
        else columns[prefix + entry.name]
        for entry in fields(kind)  # type: ignore[arg-type]  # as above
    }
    return kind(**values)
