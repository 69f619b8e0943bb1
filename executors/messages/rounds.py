"""In which groups the messages of a plan are sent and received by libraries that match them in order, without tags.

Rule: all ranks compute the same groups from the same programs. A group is a round of the plan (`planner.rounds`) on one wire
(`planner.wires`), or a part of that: answers come after what they answer, and what is packed fits the window of every rank. A
rank puts its groups on streams in ascending order, those of a wire on one. That never deadlocks, whatever of it runs at once:
with group g the first that isn't complete, all its ranks have ended those before, and what g waits for is in these, be it by an
event, by its stream or by a queue of the device that streams share.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.messages.messages import NO_ROWS, Messages
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import ranges
from shardroute.planner.rounds import rounds_of
from shardroute.planner.simulator import in_order
from shardroute.planner.wires import wires_of

NO_WIRE = -1

# The queue column is one byte.
_QUEUES = 1 << 8


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups, numbered in the order in which every rank puts them on streams.

    of_message      int64[n_messages]
    first_of_step   int64[n_steps]      where its copies within a rank belong
    wires           the plan's wires that ranks meet on, ascending
    wire            int64[n_groups]     which of them, NO_WIRE for a group of nothing but what stays within ranks
    out_at, in_at   int64[n_messages]   place in the window of the sender and of the receiver, NO_ROWS where it isn't packed there
    out_after, in_after   of each message, the last group of each wire whose messages must have left that place
    """

    of_message: Ints
    first_of_step: Ints
    wires: tuple[int, ...]
    wire: Ints
    out_at: Ints
    in_at: Ints
    out_after: list[tuple[int, ...]]
    in_after: list[tuple[int, ...]]


class Ring:
    """Places in a window of n_bytes, given in turn: what was placed first makes room first."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes, self._next = n_bytes, 0
        self._held: deque[tuple[int, int]] = deque()  # start, who

    def peek(self, n_bytes: int) -> tuple[int, list[int]]:
        """Where the next n_bytes would lie, and who must have left before. Raises AssertionError when they never fit."""
        assert 0 < n_bytes <= self._n_bytes
        wraps = self._next + n_bytes > self._n_bytes
        start = 0 if wraps else self._next
        leave = []
        for at, who in self._held:  # first those of the lap before, at and behind the next place; each lap ascends
            if not (at >= self._next and (wraps or at < start + n_bytes)) and not (wraps and at < n_bytes):
                break
            leave.append(who)
        return start, leave

    def take(self, n_bytes: int, who: int) -> tuple[int, list[int]]:
        """The same, and give it to `who`."""
        start, leave = self.peek(n_bytes)
        for _ in leave:
            self._held.popleft()
        self._held.append((start, who))
        self._next = start + n_bytes
        return start, leave


def find_rounds(programs: Programs, messages: Messages) -> Ints:
    """The round of each step (`planner.rounds`); it waits for those that used its slots before it, too."""
    actions, n_steps = programs.actions, len(programs.cells.ptr) - 1
    driver = np.repeat(np.arange(programs.n_drivers), np.diff(actions.ptr))
    queue_ptr, before = in_order(driver * _QUEUES + actions.queue)
    touched, message = ranges(np.stack([messages.clear_first, messages.clear_last]).T.ravel(), 2 * np.arange(len(messages.step)))
    step = np.concatenate(
        [
            np.repeat(actions.step, np.diff(actions.wait_ptr)),
            np.repeat(actions.step, np.diff(actions.own_ptr)),
            np.repeat(actions.step, np.diff(queue_ptr)),
            messages.step[message],
        ]
    )
    dep = np.concatenate([actions.wait, actions.own, actions.step[before], messages.touches[touched]])
    earlier = dep < step
    step, dep = step[earlier], dep[earlier]
    dep_ptr = np.concatenate([[0], np.cumsum(np.bincount(step, minlength=n_steps))])
    return rounds_of(dep_ptr, dep[np.argsort(step, kind="stable")])


def find_groups(programs: Programs, messages: Messages) -> Groups:
    """The groups of all ranks, and where each message lies in the windows (of `Messages.window_bytes`)."""
    rounds = find_rounds(programs, messages)
    n = len(messages.step)
    of_round = rounds[messages.step] if n else np.zeros(0, dtype=np.int64)
    part = np.zeros(n, dtype=np.int64)  # of its round, among its answers or the others
    rings = [[Ring(int(size)) for size in sizes] for sizes in messages.window_bytes]
    at = np.full((2, n), NO_ROWS, dtype=np.int64)
    left: list[tuple[int, int, list[int]]] = []  # side, message, who left for it
    now, latest = (-1, False), dict[int, int]()
    order = np.lexsort((np.arange(n), messages.answers, of_round))
    columns = [x.tolist() for x in (order, of_round[order], messages.answers[order], messages.src[order], messages.dst[order])]
    placed: dict[int, tuple[int, bool, int]] = {}
    for message, round_, answers, src, dst in zip(*columns, strict=True):
        if (round_, answers) != now:
            now, latest = (round_, answers), {}
        n_bytes = int(messages.n_bytes[message])
        sides = [
            (side, rings[rank][side])
            for side, rank, place in ((0, src, messages.src_at), (1, dst, messages.dst_at))
            if n_bytes and place[message] == NO_ROWS
        ]
        number = max(latest.get(src, 0), latest.get(dst, 0))
        if any(placed[who] >= (*now, number) for _, ring in sides for who in ring.peek(n_bytes)[1]):
            number += 1
        for side, ring in sides:
            at[side, message], leave = ring.take(n_bytes, message)
            left.append((side, message, leave))
        part[message] = latest[src] = latest[dst] = number
        placed[message] = (*now, number)
    of_step = _wires(programs)
    keys = np.stack([of_round, messages.answers.astype(np.int64), part, of_step[messages.step]], axis=1)
    starts = np.stack([rounds, np.zeros_like(rounds), np.zeros_like(rounds), of_step], axis=1)
    groups, number_of = np.unique(np.concatenate([keys, starts]), axis=0, return_inverse=True)
    group, first = number_of.ravel()[:n], number_of.ravel()[n:]
    meets = np.diff(programs.cells.ptr) > 1
    meets[messages.step] = True
    wires = np.unique(of_step[meets])
    found = np.minimum(np.searchsorted(wires, groups[:, 3]), len(wires) - 1)
    wire = np.where(wires[found] == groups[:, 3], found, NO_WIRE) if len(wires) else np.full(len(groups), NO_WIRE)
    after: list[list[tuple[int, ...]]] = [[()] * n, [()] * n]
    for side, message, leave in left:
        last: dict[int, int] = {}
        for each in sorted(int(group[who]) for who in leave):
            last[int(wire[each])] = each
        after[side][message] = tuple(last.values())
    return Groups(group, first, tuple(wires.tolist()), wire, at[0], at[1], after[0], after[1])


def _wires(programs: Programs) -> Ints:
    """The wire of each step."""
    actions = programs.actions
    found = np.zeros(len(programs.cells.ptr) - 1, dtype=np.int64)
    found[actions.step] = wires_of(actions.queue)
    return found
