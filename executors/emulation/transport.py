"""A rank of an emulated cluster: it runs its whole program on sockets whose rates are those of NVLink and NICs.

Queues run beside each other, as streams of a GPU do: an action begins when the one before it in its queue has ended and all that
it waits for is complete. A copy is one message, put where it belongs when it has come; a collective is pipelined rings (see
`collectives`). A step ends for its sender when the receiver has answered.
"""

import select
import socket
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.emulation.collectives import Pieces
from shardroute.executors.emulation.courses import Course
from shardroute.executors.emulation.flows import Message, Receiving, Sending
from shardroute.executors.emulation.gatherings import Gatherings
from shardroute.executors.emulation.ports import Port
from shardroute.executors.emulation.wirings import SIGNALS, Wiring, partners
from shardroute.executors.interpreting.arenas import Arena, Lent
from shardroute.executors.interpreting.blocks import LINEAR
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.packing import Rows
from shardroute.executors.transports.seam import Computing, Deadline, Following, LateError
from shardroute.planner.plans import Op
from shardroute.topologies.errors import RunError

_LOOK_AGAIN_S: Final = 0.5  # the longest that a rank sleeps before it looks at its deadline
_EPOLL_S: Final = 0.001  # what epoll counts in; Python rounds a time-out up to it
_NOTHING: Final = memoryview(b"")


class _Signal(IntEnum):
    """What a message without bytes says of a step; sent as its part."""

    COMES = 0  # to a barrier
    GO = 1  # all have come to it
    DONE = 2  # the sender's part in a collective


class EmulatedTransport:
    """An `Enqueuing` of the seam. `ports` are this rank's: NVLink out and in, NIC out and in; `line_up` returns when all ranks
    have called it.
    """

    use_graphs = False

    def __init__(
        self, programs: Programs, wiring: Wiring, arena: Arena, rank: int, deadline: Deadline,
        line_up: Callable[[Deadline], None], ports: Sequence[Port],
    ) -> None:  # fmt: skip
        self.deadline = deadline
        self._programs, self._wiring, self._arena, self._rank, self._line_up = programs, wiring, arena, rank, line_up
        self._packing, self._pieces, self._ports = Rows(programs, arena, rank), Pieces(programs), ports
        self._events = select.epoll()
        self._by_fd: dict[int, Sending | Receiving] = {}
        self._sending: dict[tuple[int, int], Sending] = {}  # by receiver and what for
        driven = programs.actions.step[int(programs.actions.ptr[rank]) : int(programs.actions.ptr[rank + 1])]
        self._sees = frozenset([*driven.tolist(), *np.flatnonzero(wiring.dst == rank).tolist()])
        self._brings = np.flatnonzero((wiring.op == Op.COPY) & (wiring.dst == rank) & (wiring.src != rank)).tolist()

    def add_sending(self, connection: socket.socket, to: int, use: int) -> None:
        """Send over this connection what goes to a rank for a use, see `wirings`."""
        flow = Sending(connection, to, self._port(to, outgoing=True))
        self._sending[to, use] = flow
        self._watch(connection, flow)

    def add_receiving(self, connection: socket.socket, source: int, use: int) -> None:
        """Receive over this connection what a rank sends for a use."""
        port = self._port(source, outgoing=False)
        self._watch(connection, Receiving(connection, source, port, partial(self._expect, use)))

    def why_not_capturable(self, *, first: bool = False) -> str | None:
        return "an emulated cluster has no GPU"

    def adopt(self, lent: Sequence[Lent] | None) -> None:
        raise RunError("an emulated cluster has no buffers on a device")

    def compute_by(self, make: Callable[[object], Computing]) -> None:
        raise RunError("an emulated cluster has no device to compute on")

    def follow_by(self, make: Callable[[object], Following]) -> None:
        raise RunError("an emulated cluster has no device to take checksums on")

    def begin(self, trial: int) -> None:
        """Nothing: ranks line up before and after each trial, and all that was sent has been answered by then."""

    def barrier(self) -> None:
        self._line_up(self.deadline)

    def run(self, start_s: NDArray[np.float64], end_s: NDArray[np.float64], at_step: NDArray[np.int64]) -> None:
        self._start_s, self._end_s, self._at_step = start_s, end_s, at_step
        self._course = Course(self._programs, self._rank, self._sees)
        self._missing = set(self._brings)
        self._gatherings = Gatherings(
            self._rank, self._programs, self._wiring, self._pieces, self._packing, self._sending, self._packed, self._gathered
        )
        self._signals: dict[tuple[int, int], int] = {}  # how many have come, by step and signal
        self._begin_actions()
        while not self._is_over:
            self._go_on()

    @property
    def _is_over(self) -> bool:
        return self._course.is_over and not self._missing and not any(flow.waits for flow in self._sending.values())

    def _go_on(self) -> None:
        """Move what may move now; unless that was all, sleep until more can, and look what happened meanwhile."""
        now_s = time.monotonic()
        if now_s >= self.deadline.at_s:
            raise LateError(self._awaited())
        try:
            wake_s = self._serve(now_s)
            if not self._is_over:  # nothing would wake this rank then
                self._look(wake_s)
        except RunError:
            if self.deadline.is_close:  # who gave up closed its connections
                raise LateError(self._awaited()) from None
            raise

    def _serve(self, now_s: float) -> float:
        """Let all ports move what they may; when one may move more, or when to look again."""
        wake_s = now_s + min(_LOOK_AGAIN_S, self.deadline.limit_s)
        for port in (*self._ports[1::2], *self._ports[::2]):  # incoming first: what comes may have to go on
            at_s = port.serve(now_s)
            if at_s is not None:
                wake_s = min(wake_s, at_s)
        return wake_s

    def _look(self, until_s: float) -> None:
        """Take up what sockets have or have room for, as soon as one does."""
        for fd, event in self._next_events(until_s):
            flow = self._by_fd[fd]
            if isinstance(flow, Receiving):
                flow.more()
                continue
            if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                flow.answered()
            if event & select.EPOLLOUT:
                flow.has_room()

    def _next_events(self, wake_s: float) -> list[tuple[int, int]]:
        """Events of sockets, waited for until wake_s at most. epoll counts milliseconds; what is left, select sleeps."""
        left_s = wake_s - time.monotonic()
        if left_s > _EPOLL_S:
            return self._events.poll(left_s - _EPOLL_S)
        if left_s > 0:
            select.select([self._events.fileno()], [], [], left_s)
        return self._events.poll(0)

    def _begin_actions(self) -> None:
        while actions := self._course.startable():
            for action in actions:
                self._begin(action)

    def _begin(self, action: int) -> None:
        actions = self._programs.actions
        step, op = int(actions.step[action]), int(self._wiring.op[int(actions.step[action])])
        self._at_step[0] = step
        self._start_s[actions.cell[action]] = time.monotonic()
        if op == Op.BARRIER:
            self._come(step)
        elif op != Op.COPY:
            self._packing.copy_local(action)
            self._gatherings.begin(action, step)
        elif self._wiring.dst[step] == self._rank:
            self._packing.copy_local(action)
            self._end(action)
            self._course.complete(step)
        else:
            first, last = actions.block_ptr[action : action + 2].tolist()
            to, queue = int(self._wiring.dst[step]), int(actions.queue[action])
            self._sending[to, queue].post(Message(step, 0, self._packed(first, last), partial(self._copied, action, step)))

    def _copied(self, action: int, step: int) -> None:
        self._end(action)
        self._complete(step)

    def _end(self, action: int) -> None:
        self._end_s[self._programs.actions.cell[action]] = time.monotonic()
        self._course.end(action)

    def _complete(self, step: int) -> None:
        self._course.complete(step)
        self._begin_actions()

    def _expect(self, use: int, flow: Receiving, step: int, part: int, n_bytes: int) -> Message | None:
        """The message that a head announces; None, and the flow is held, while its collective hasn't begun here."""
        if use == SIGNALS:
            return Message(step, part, _NOTHING, partial(self._signalled, step, _Signal(part)))
        if self._wiring.op[step] != Op.COPY:
            return self._gatherings.expect(flow, use, step, part)
        first, last = self._pieces.between(step, int(self._wiring.src[step]), self._rank)
        place = self._place(first, last)
        data = np.empty(n_bytes, dtype=np.uint8).data if place is None else place
        return Message(step, part, data, partial(self._delivered, step, first, last, data, place is None))

    def _delivered(self, step: int, first: int, last: int, data: memoryview, is_packed: bool) -> None:
        if is_packed:
            self._packing.unpack(first, last, np.frombuffer(data, np.uint8))
        self._missing.discard(step)
        self._complete(step)

    def _place(self, first: int, last: int) -> memoryview | None:
        """Where rows belong, if that is one run of bytes."""
        blocks = self._programs.blocks
        if last != first + 1 or blocks.form[first] != LINEAR:
            return None
        return self._arena.bytes(int(blocks.dst[first]), int(blocks.n_bytes[first])).data

    def _packed(self, first: int, last: int) -> memoryview:
        """The bytes of rows of this rank's, where they are if they lie in one run."""
        blocks = self._programs.blocks
        if last == first:
            return _NOTHING
        if last == first + 1 and blocks.form[first] == LINEAR:
            return self._arena.bytes(int(blocks.src[first]), int(blocks.n_bytes[first])).data
        packed = np.empty(int(blocks.n_bytes[first:last].sum()), dtype=np.uint8)
        self._packing.pack(first, last, packed)
        return packed.data

    def _gathered(self, action: int, step: int) -> None:
        """This rank's part in a collective is over: say so to those that wait for the step."""
        self._end(action)
        for rank in partners(self._programs, step)[1]:
            if rank != self._rank:
                self._signal(rank, step, _Signal.DONE)
        self._signalled(step, _Signal.DONE)

    def _come(self, step: int) -> None:
        """Tell the first of a barrier's group that this rank has come to it."""
        hub = int(self._wiring.members(step)[0])
        if hub == self._rank:
            self._signalled(step, _Signal.COMES)
        else:
            self._signal(hub, step, _Signal.COMES)

    def _signal(self, to: int, step: int, signal: _Signal) -> None:
        self._sending[to, SIGNALS].post(Message(step, signal, _NOTHING, _nothing))

    def _signalled(self, step: int, signal: _Signal) -> None:
        n = self._signals[step, signal] = self._signals.get((step, signal), 0) + 1
        members = self._wiring.members(step).tolist()
        if signal is _Signal.DONE:
            if n == self._n_cells(step):
                self._complete(step)
            return
        if signal is _Signal.COMES:
            if n < len(members):
                return
            for other in members:
                if other != self._rank:
                    self._signal(other, step, _Signal.GO)
        action = self._pieces.action(step, self._rank)
        assert action is not None
        self._end(action)
        self._complete(step)

    def _n_cells(self, step: int) -> int:
        return int(self._programs.cells.ptr[step + 1] - self._programs.cells.ptr[step])

    def _awaited(self) -> list[int]:
        """Ranks that this one waits for."""
        steps = self._course.holding_up() or sorted(self._missing)
        sources = {int(self._wiring.src[step]) for step in steps[:1] if self._wiring.op[step] == Op.COPY}
        return sorted({flow.peer for flow in self._sending.values() if flow.waits} or sources - {self._rank})

    def _port(self, peer: int, *, outgoing: bool) -> Port:
        near = self._wiring.domain[peer] == self._wiring.domain[self._rank]
        return self._ports[(0 if near else 2) + (0 if outgoing else 1)]

    def _watch(self, connection: socket.socket, flow: Sending | Receiving) -> None:
        connection.setblocking(False)
        self._by_fd[connection.fileno()] = flow
        wanted = select.EPOLLIN | (select.EPOLLOUT if isinstance(flow, Sending) else 0)
        self._events.register(connection, wanted | select.EPOLLET)

    def close(self) -> None:
        """Close all connections."""
        self._events.close()
        for flow in self._by_fd.values():
            flow.sock.close()


def _nothing() -> None:
    """What follows when a signal was answered."""
