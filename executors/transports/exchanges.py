"""The Transport of libraries with tagged messages: every put of the plan as a send, and the receives that go with it.

Rule: see `messages` for the order in which sends and receives are begun, which rules out deadlock. Memory to pack in (a window a
direction) is taken when the transport is made, is as large as `Messages.window_bytes` says, and is shared by all transports of a
world, of which one runs at a time. A collective that brings more goes in rounds (`Messages.round`), which a rank runs in order.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.packing import Pool, Rows, Window
from shardroute.executors.messages.messages import NO_ROWS, Messages
from shardroute.executors.transports.roll_calls import late, named
from shardroute.executors.transports.seam import Deadline, Handle, LateError, Wire
from shardroute.topologies.errors import RunError

# Messages that a rank begins to receive before its own place in the plan asks for them, so that they travel while it does other
# things. More only takes handles.
_AHEAD = 64


@dataclass(slots=True, eq=False)
class _Begun(Generic[Handle]):
    """A message on its way; `packed` is its part of the window, if it has one."""

    message: int
    handle: Handle
    packed: NDArray[np.uint8] | None


@dataclass(slots=True)
class _Sum:
    """A step that adds up, under way on this rank: the rank that began it (-1: none has), and whether its own part is in."""

    action: int
    step: int
    first: int = -1
    has_own: bool = False


def _adding(programs: Programs, rank: int) -> frozenset[int]:
    """The actions of a rank whose blocks, which it has for itself at least or none, are added up."""
    actions, sums = programs.actions, programs.blocks.sums
    rows = np.flatnonzero(sums)
    adds = np.unique(actions.step[np.searchsorted(actions.block_ptr, rows, side="right") - 1])
    mine = np.arange(*actions.ptr[[rank, rank + 1]].tolist())
    return frozenset(mine[np.isin(actions.step[mine], adds)].tolist())


def _rounds_of(messages: Messages, mine: NDArray[np.int64]) -> dict[int, list[int]]:
    """The rounds in which a rank takes part, ascending, for the steps that have more than one."""
    step, number = messages.step[mine], messages.round[mine]
    return {of: np.unique(number[step == of]).tolist() for of in np.unique(step[number > 0]).tolist()}


class MessageTransport(Generic[Handle]):
    """One rank's side: sends when `drive` posts, and begins receives up to where the rank is in the plan, and some ahead.

    `line_up` returns when all ranks have called it, and takes the deadline; that may be replaced between trials.
    """

    overlaps = True

    def __init__(
        self, wire: Wire[Handle], line_up: Callable[[Deadline], None], programs: Programs, messages: Messages, arena: Arena,
        rank: int, deadline: Deadline, pools: tuple[Pool, Pool],
    ) -> None:  # fmt: skip
        self.deadline = deadline
        self._wire, self._line_up, self._arena, self._messages = wire, line_up, arena, messages
        self._rows, self._rank = Rows(programs, arena, rank), rank
        self._action_step: list[int] = programs.actions.step.tolist()
        self._several: list[bool] = (np.diff(programs.cells.ptr) > 1).tolist()
        into, out = (
            order[ptr[rank] : ptr[rank + 1]]
            for order, ptr in ((messages.into, messages.in_ptr), (messages.out, messages.out_ptr))
        )
        self._in: list[int] = into.tolist()
        self._in_step: list[int] = messages.step[into].tolist()
        self._in_round: list[int] = messages.round[into].tolist()
        self._rounds = _rounds_of(messages, np.concatenate([into, out]))
        self._out_of_step: dict[int, list[int]] = {}
        for message, step in zip(out.tolist(), messages.step[out].tolist(), strict=True):
            self._out_of_step.setdefault(step, []).append(message)
        sizes = messages.window_bytes[rank].tolist()
        self._out_window, self._in_window = (Window(pool, n) for pool, n in zip(pools, sizes, strict=True))
        self._out: dict[int, deque[_Begun[Handle]]] = {}  # sends on their way, by step
        self._into: dict[int, deque[_Begun[Handle]]] = {}  # receives
        self._n_into = 0
        self._next_in = 0
        self._step = -1
        self._adding = _adding(programs, rank)
        self._sum: _Sum | None = None

    def begin(self, trial: int) -> None:
        assert not self._out
        assert not self._into
        self._out_window.begin()
        self._in_window.begin()
        self._next_in, self._step = 0, -1

    def enter(self, step: int) -> None:
        self._step = step
        self._receive_before(step)
        while self._n_into < _AHEAD and self._next_in < len(self._in) and self._receive(self._in[self._next_in], must=False):
            self._next_in += 1

    def wait(self, step: int) -> None:
        self._finish_sends(step)
        self._finish_receives(step)

    def meet(self, action: int, *, all_ready: bool) -> None:
        """Begin to receive what the collective brings first; no sender needs to hear of it, since it can't send before."""
        self._receive_before(self._action_step[action], rounds=1)

    def post(self, action: int) -> None:
        step = self._action_step[action]
        if action in self._adding:
            self._sum = _Sum(action, step)
        for number in self._rounds.get(step, (0,)):
            if number:
                self._finish_sends(step)
                self._finish_receives(step)
                self._receive_before(step, rounds=number + 1)
            for message in self._out_of_step.get(step, ()):
                if self._messages.round[message] == number:
                    if self._messages.answers[message]:
                        self._finish_receives(step)
                    self._send(message, step)
        if action not in self._adding:
            self._rows.copy_local(action)

    def finish(self, action: int) -> None:
        step = self._action_step[action]
        self._finish_sends(step)
        if self._several[step]:
            self._finish_receives(step)
        if self._sum is not None:
            self._add_own(self._sum)
            self._sum = None

    def mark(self, action: int) -> None:
        """Nothing: a message that arrives is the mark."""

    def drain(self) -> None:
        self._receive_before(self._in_step[-1] + 1 if self._in_step else 0)
        for step in sorted(self._out):
            self._finish_sends(step)
        for step in sorted(self._into):
            self._finish_receives(step)

    def barrier(self) -> None:
        self._line_up(self.deadline)

    def _send(self, message: int, step: int) -> None:
        messages = self._messages
        at, n_bytes = int(messages.src_at[message]), int(messages.n_bytes[message])
        packed = None
        if n_bytes and at == NO_ROWS:
            packed = self._room(self._out_window, n_bytes, step, self._finish_sends)
            self._rows.pack(int(messages.first[message]), int(messages.last[message]), packed)
        data = packed if packed is not None else self._arena.bytes(at, n_bytes) if n_bytes else _NOTHING
        handle = self._wire.send(data, int(messages.dst[message]), int(messages.tag[message]))
        self._out.setdefault(step, deque()).append(_Begun(message, handle, packed))

    def _receive_before(self, step: int, rounds: int = 0) -> None:
        """Begin to receive all that steps before this one bring, and its own first rounds."""
        until = (step, rounds)
        while self._next_in < len(self._in) and (self._in_step[self._next_in], self._in_round[self._next_in]) < until:
            self._receive(self._in[self._next_in], must=True)
            self._next_in += 1

    def _receive(self, message: int, *, must: bool) -> bool:
        """Begin to receive a message, if its place is free; where it must, wait until it is. Says whether it was begun."""
        messages = self._messages
        step, n_bytes = int(messages.step[message]), int(messages.n_bytes[message])
        at = int(messages.dst_at[message])
        for use in messages.touches[messages.clear_first[message] : messages.clear_last[message]].tolist():
            if must:
                self.wait(use)
            elif use >= self._step or use in self._out or use in self._into:
                return False
        if not must and messages.round[message]:
            return False
        packed = None
        if n_bytes and at == NO_ROWS:
            # All of a round must fit at once: ranks send in it before they look at what has come.
            fresh = self._several[step] and step not in self._into
            if not must and ((fresh and not self._in_window.is_empty) or not self._in_window.has_room(n_bytes)):
                return False
            while fresh and not self._in_window.is_empty:
                self._finish_receives(self._in_window.oldest)
            packed = self._room(self._in_window, n_bytes, step, self._finish_receives)
        data = packed if packed is not None else self._arena.bytes(at, n_bytes) if n_bytes else _NOTHING
        handle = self._wire.receive(data, int(messages.src[message]), int(messages.tag[message]))
        self._into.setdefault(step, deque()).append(_Begun(message, handle, packed))
        self._n_into += 1
        return True

    def _room(self, window: Window, n_bytes: int, step: int, finish: Callable[[int], None]) -> NDArray[np.uint8]:
        """A part of the window; waits for the oldest messages in it until there is one."""
        while not window.has_room(n_bytes):
            finish(window.oldest)
        return window.take(n_bytes, step)

    def _finish_sends(self, step: int) -> None:
        begun = self._out.get(step)
        while begun:
            self._wait(begun[0], int(self._messages.dst[begun[0].message]))
            done = begun.popleft()
            if done.packed is not None:
                self._out_window.give_back(done.packed)
        self._out.pop(step, None)

    def _finish_receives(self, step: int) -> None:
        begun = self._into.get(step)
        while begun:
            self._wait(begun[0], int(self._messages.src[begun[0].message]))
            done = begun.popleft()
            self._n_into -= 1
            if done.packed is not None:
                message, adds = done.message, False
                if self._sum is not None and self._sum.step == step:
                    adds = self._comes_to(self._sum, int(self._messages.src[message]))
                self._rows.unpack(int(self._messages.first[message]), int(self._messages.last[message]), done.packed, adds=adds)
                self._in_window.give_back(done.packed)
        self._into.pop(step, None)

    def _comes_to(self, one: _Sum, source: int) -> bool:
        """Whether what a rank brings to a sum is added to something: all but what the first of them brings, which begins it."""
        if source > self._rank:
            self._add_own(one)
        one.first = source if one.first < 0 else one.first
        return one.first != source

    def _add_own(self, one: _Sum) -> None:
        """Bring this rank's own addends, once, in its place among the ranks."""
        if not one.has_own:
            one.has_own = True
            self._rows.copy_local(one.action, adds=one.first >= 0)
            one.first = self._rank if one.first < 0 else one.first

    def _wait(self, begun: _Begun[Handle], peer: int) -> None:
        try:
            self._wire.wait(begun.handle, self.deadline)
        except LateError:
            raise late(peer, self._wire) from None
        except RunError as error:
            raise named(error, peer, self._wire) from error


_NOTHING: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
