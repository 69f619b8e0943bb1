"""What two-sided libraries exchange: the messages of all ranks, in an order that both sides of each agree on.

Rule: a message is rows of the blocks of one action that go to one rank. It lies in order without gaps on a side, and is then sent
from or received into its place straight, or is packed there. A step that moves nothing, but that someone waits for, is an empty
message: arrival is the signal.

Why this never deadlocks, with one thread a rank: let i be the first step that isn't complete. A rank begins its actions in plan
order and waits for earlier steps only, all of which are complete, so whoever sends in step i comes to it. Before a rank goes past
step i it has begun to receive all that step i brings it, for which it waits at most for uses of the slot by earlier steps and for
room in its window, which earlier messages hold until they have arrived. So both sides of step i's messages are begun.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import is_dense
from shardroute.executors.interpreting.blocks import LINEAR
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.memories import Buffers
from shardroute.executors.messages.windows import count_within, rounds_of_messages, window_bytes_of
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Mode, Op, Plan, ranges
from shardroute.topologies.errors import PlanError

# Rows this long are messages of their own, sent without packing; shorter ones share messages of up to PACKED_BYTES. gloo takes
# some 25 us a message and copies 1 to 2.6 GB/s (2-core Xeon, torch 2.13), so 256 KiB are some 5 times the cost to start.
STRAIGHT_BYTES = 256 * 2**10
PACKED_BYTES = 4 * 2**20
# Of small windows a message takes at most this part, and half of the window more by its last row (see `cutting`).
_WINDOW_SHARE = 4

NO_ROWS = -1


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Messages between two ranks, ordered by step, then round, sender, receiver and place in the bundle.

    step, src, dst   int64[n]
    tag              int64[n]   counts the messages of the pair (src, dst)
    first, last      int64[n]   its rows of the blocks; none for an empty one
    n_bytes          int64[n]
    src_at, dst_at   int64[n]   where all of it lies in order without gaps on that side, NO_ROWS if it is packed there, as addends
                                always are on the receiving side
    answers          bool[n]    it may be sent only when all that the step brings to its sender has arrived
    clear_first, clear_last   int64[n]: rows of `touches`: what must be complete before it may be written, for its slot is in use
    touches          int64[m]   steps, in runs for each slot of each rank
    round            int64[n]   of a collective that brings, or takes, more than fits a window: those of one round are together on
                                their way, and a rank ends its part in a round before it begins the next; else 0
    window_bytes     int64[n_ranks, 2]: memory that the rank takes to pack what it sends, and what it receives; never more than
                                the plan declares (`stagings`)

    in_ptr, into, out_ptr, out   CSR by rank: the messages that come to it and that it sends, ascending
    """

    step: Ints
    src: Ints
    dst: Ints
    tag: Ints
    first: Ints
    last: Ints
    n_bytes: Ints
    src_at: Ints
    dst_at: Ints
    answers: NDArray[np.bool_]
    clear_first: Ints
    clear_last: Ints
    touches: Ints
    round: Ints
    window_bytes: Ints
    in_ptr: Ints
    into: Ints
    out_ptr: Ints
    out: Ints


def lay_messages(plan: Plan, programs: Programs, buffers: Buffers, *, library_sums: bool = False) -> Messages:
    """The messages of a plan whose programs were compiled. With `library_sums` a library adds up, so no message brings addends.

    Raises PlanError when a rank waits for what it can't see, InputError when it would pack more than the plan declares.
    """
    _check_seen(plan, programs)
    first, last, step, src, dst = _rows_of_messages(programs, plan.window_bytes, library_sums=library_sums)
    empty = _empty_messages(plan, step)
    n_empty = len(empty[0])
    step, src, dst = (np.concatenate(pair) for pair in zip((step, src, dst), empty, strict=True))
    first, last = (np.concatenate([rows, np.zeros(n_empty, np.int64)]) for rows in (first, last))
    order = np.lexsort((first, dst, src, step))
    step, src, dst, first, last = step[order], src[order], dst[order], first[order], last[order]

    total = np.concatenate([[0], np.cumsum(programs.blocks.n_bytes)])
    n_bytes = total[last] - total[first]
    src_at = _in_order(programs, buffers, first, last, src, sending=True)
    dst_at = np.where(_is_added(programs, first, last), NO_ROWS, _in_order(programs, buffers, first, last, dst, sending=False))
    packs = [np.where(at == NO_ROWS, n_bytes, 0) for at in (src_at, dst_at)]
    window_bytes = window_bytes_of(plan, step, (src, dst), packs)
    round_ = rounds_of_messages(plan, step, (src, dst), packs, window_bytes, _is_added(programs, first, last))
    if round_.any():
        order = np.lexsort((np.arange(len(step)), round_, step))
        step, round_, src, dst, first, last, n_bytes, src_at, dst_at = (
            column[order] for column in (step, round_, src, dst, first, last, n_bytes, src_at, dst_at)
        )
    steps = plan.steps
    hub = plan.group_ranks[plan.group_ptr[np.maximum(steps.group[step], 0)]] if len(plan.group_ranks) else dst
    touches, clear_first, clear_last = _clearances(plan, step, dst)
    n_ranks = plan.problem.n_ranks
    into, out = np.argsort(dst, kind="stable"), np.argsort(src, kind="stable")
    return Messages(
        step, src, dst, count_within(src * n_ranks + dst), first, last, n_bytes, src_at, dst_at,
        (steps.op[step] == Op.BARRIER) & (src == hub), clear_first, clear_last, touches,
        round_, window_bytes, np.searchsorted(dst[into], np.arange(n_ranks + 1)), into,
        np.searchsorted(src[out], np.arange(n_ranks + 1)), out,
    )  # fmt: skip


def _check_seen(plan: Plan, programs: Programs) -> None:
    """Raise PlanError where a copy waits for a step in which its driver takes no part: no message tells of that."""
    actions, steps = programs.actions, plan.steps
    action = np.repeat(np.arange(len(actions.step)), np.diff(actions.wait_ptr))
    waiter, dep = actions.step[action], actions.wait
    rank = np.repeat(np.arange(programs.n_ranks), np.diff(actions.ptr))[action]
    rows = np.flatnonzero((steps.op[waiter] == Op.COPY) & (steps.op[dep] == Op.COPY) & (steps.dst[dep] != rank))
    if len(rows):
        i = int(rows[0])
        raise PlanError(
            f"step {waiter[i]} of rank {rank[i]} waits for step {dep[i]}, in which that rank takes no part; `shardroute check` "
            "refuses such plans"
        )


def _is_added(programs: Programs, first: Ints, last: Ints) -> NDArray[np.bool_]:
    """Which messages bring addends: they are unpacked by adding, never received in place."""
    adds = np.append(programs.blocks.sums > 0, False)
    return np.asarray((last > first) & adds[first])


def _rows_of_messages(programs: Programs, window_bytes: int, *, library_sums: bool) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """First and last block row, step, sender and receiver of all messages that carry bytes between two ranks."""
    actions, blocks = programs.actions, programs.blocks
    n_rows = len(blocks.src)
    action = np.repeat(np.arange(len(actions.step)), np.diff(actions.block_ptr))
    rank = np.repeat(np.arange(programs.n_ranks), np.diff(actions.ptr))[action]
    if not n_rows:
        return (np.zeros(0, np.int64),) * 5
    new = np.ones(n_rows, dtype=bool)
    new[1:] = (np.diff(action) != 0) | (np.diff(blocks.to) != 0)
    start = np.cumsum(blocks.n_bytes) - blocks.n_bytes
    start -= np.maximum.accumulate(np.where(new, start, 0))  # within its message
    packed_bytes = max(1, min(PACKED_BYTES, window_bytes // _WINDOW_SHARE))
    long = (blocks.form == LINEAR) & (blocks.n_bytes >= min(STRAIGHT_BYTES, packed_bytes))
    new |= long
    new[1:] |= long[:-1] | (np.diff(start // packed_bytes) != 0)
    first = np.flatnonzero(new)
    last = np.append(first[1:], n_rows)
    away = blocks.to[first] != rank[first]
    if library_sums:
        away &= blocks.sums[first] == 0
    first, last = first[away], last[away]
    return first, last, actions.step[action[first]], rank[first], blocks.to[first].astype(np.int64)


def _empty_messages(plan: Plan, step: Ints) -> tuple[Ints, Ints, Ints]:
    """Step, sender and receiver of what tells of a step and carries nothing: copies without bytes, and both ways of barriers.

    A barrier's ranks tell the first of their group, which answers all when it has come to the barrier itself.
    """
    steps = plan.steps
    silent = (steps.op == Op.COPY) & (steps.src != steps.dst)
    silent[step] = False
    copies = np.flatnonzero(silent)
    barriers = np.flatnonzero(steps.op == Op.BARRIER)
    member, owner = ranges(plan.group_ptr, steps.group[barriers])
    rank, first = plan.group_ranks[member].astype(np.int64), plan.group_ranks[plan.group_ptr[steps.group[barriers]]][owner]
    away = rank != first
    rank, first, at = rank[away], first[away].astype(np.int64), barriers[owner[away]]
    return (
        np.concatenate([copies, at, at]),
        np.concatenate([steps.src[copies].astype(np.int64), rank, first]),
        np.concatenate([steps.dst[copies].astype(np.int64), first, rank]),
    )


def _in_order(programs: Programs, buffers: Buffers, first: Ints, last: Ints, rank: Ints, *, sending: bool) -> Ints:
    """The address at which each message lies in order without gaps, in one buffer of its rank; NO_ROWS where it doesn't."""
    blocks, forms = programs.blocks, programs.forms
    if not len(blocks.src):
        return np.full(len(first), NO_ROWS, dtype=np.int64)
    address = blocks.src if sending else blocks.dst
    dense = np.append(is_dense(forms, forms.src_stride if sending else forms.dst_stride), True)[blocks.form]  # LINEAR is -1
    joined = np.zeros(len(address), dtype=bool)  # continues the row before it
    joined[1:] = address[:-1] + blocks.n_bytes[:-1] == address[1:]
    bad = np.concatenate([[0], np.cumsum(~dense)])
    broken = np.concatenate([[0], np.cumsum(~joined)])
    carries = last > first
    inner = np.minimum(first + 1, last)
    fits = carries & (bad[last] == bad[first]) & (broken[last] == broken[inner])
    at = np.where(fits, address[np.where(fits, first, 0)], NO_ROWS)
    total = np.concatenate([[0], np.cumsum(blocks.n_bytes)])
    return np.where(fits & _leaves_buffer(buffers, rank, at, total[last] - total[first]), NO_ROWS, at)


def _leaves_buffer(buffers: Buffers, rank: Ints, at: Ints, n_bytes: Ints) -> NDArray[np.bool_]:
    """Whether bytes that begin in one buffer of a rank reach into the next, which may lie elsewhere."""
    base = np.cumsum(buffers.arena_bytes) - buffers.arena_bytes  # arenas laid end to end
    start = base[buffers.rank] + buffers.offset
    if not len(start):
        return np.zeros(len(at), dtype=bool)
    begin = base[rank] + np.maximum(at, 0)
    row = np.searchsorted(start, begin, side="right") - 1
    leaves: NDArray[np.bool_] = begin + n_bytes > start[row] + buffers.n_bytes[row]
    return leaves


def _clearances(plan: Plan, step: Ints, dst: Ints) -> tuple[Ints, Ints, Ints]:
    """All uses of slots, by rank, slot and step; for each message the uses that must be over before it may write to its slot:
    the write before it, and what came between.
    """
    steps = plan.steps
    n_slots, n_steps = max(len(plan.slot_bytes), 1), max(len(steps), 1)
    own = np.flatnonzero(steps.src >= 0)
    to = np.flatnonzero(steps.dst >= 0)
    grouped = np.flatnonzero(steps.group >= 0)
    member, owner = ranges(plan.group_ptr, steps.group[grouped])
    ranks, at = plan.group_ranks[member].astype(np.int64), grouped[owner]
    parts: list[tuple[NDArray[np.integer], Ints, NDArray[np.integer], bool]] = [
        (steps.src[own], own, steps.src_at[own], False),
        (steps.dst[to], to, steps.dst_at[to], True),
        (ranks, at, steps.src_at[at], False),
        (ranks, at, steps.dst_at[at], True),
    ]
    computes = plan.computes
    operand, of = ranges(computes.ptr, np.arange(len(computes)))
    at = computes.step[of].astype(np.int64)
    driver = plan.group_ranks[plan.group_ptr[steps.group[at]]].astype(np.int64)
    mode = computes.mode[operand]
    parts += [(driver[rows], at[rows], computes.at[operand][rows], wrote) for wrote in (False, True)
              for rows in [(mode != Mode.READ) == wrote]]
    key = np.concatenate(
        [
            ((rank[slot >= 0].astype(np.int64) * n_slots + slot[slot >= 0]) * n_steps + of[slot >= 0]) * 2 + write
            for rank, of, slot, write in parts
        ]
    )
    key = np.unique(key)
    place, use, writes = key // 2 // n_steps, key // 2 % n_steps, key % 2 == 1
    rows = np.arange(len(key))
    last_write: Ints = np.maximum.accumulate(np.where(writes, rows, -1)) if len(key) else rows
    start: Ints = np.searchsorted(place, place)
    wanted = (dst * n_slots + np.maximum(steps.dst_at[step], 0)) * n_steps + step
    staged = steps.dst_at[step] >= 0
    here = np.searchsorted(key // 2, wanted)  # the first use of its slot by its own step
    before = here - 1
    inside = staged & (before >= 0) & (before >= start[np.minimum(here, max(len(key) - 1, 0))]) if len(key) else staged
    since: Ints = np.maximum(last_write[before], start[before]) if len(key) else before
    clear_first, clear_last = np.where(inside, since, 0), np.where(inside, here, 0)
    return use, clear_first, clear_last
