"""The Transport of libraries that put into another rank's memory and signal it, on streams: NCCL's put and signal, NVSHMEM.

Rule: as in `grouped`, a run is put on streams as a whole, then waited for. Streams: one a queue of a lane, on which the queue's
steps pack and put, and one a channel that comes to this rank, on which its signals are waited for in turn and what came is
unpacked.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.gpus.devices import Device, Gathering, Memory, Streaming, wait_for, within
from shardroute.executors.gpus.mirrors import Mirror
from shardroute.executors.interpreting.arenas import Arena, Lent
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.messages.messages import NO_ROWS, Messages
from shardroute.executors.messages.signals import Signals, Tells
from shardroute.executors.transports.schedules import local_rows
from shardroute.executors.transports.seam import Computing, Deadline, Following
from shardroute.executors.transports.summing import LibrarySums
from shardroute.planner.layouts.fragments import Ints

_PAGE = 4096  # NCCL's windows begin at such addresses; parts of ours do, too


class Puts(Streaming, Protocol):
    """What a library does to memory that all ranks have allocated together: places in it are offsets, the same on all ranks."""

    def put(self, peer: int, offset: int, src: int, n_bytes: int, word: int, value: int, stream: int) -> None:
        """Write bytes from a pointer (in this rank's part of that memory) to the peer's, then signal it. The stream passes when
        the source may be overwritten.
        """

    def signal(self, peer: int, word: int, value: int, stream: int) -> None:
        """Signal the peer after all that came before on the stream."""

    def wait(self, peer: int, word: int, value: int, stream: int) -> None:
        """The stream waits for the peer's signal on a channel to this rank; called once for each, in order."""

    def at_peer(self, peer: int, offset: int) -> int:
        """The pointer by which this rank writes to the peer's memory, where it reaches it."""


class Parts:
    """How memory that all ranks allocate together is divided on each: its arena, then its windows to pack in and to unpack
    from, then so many bytes at one place on all.
    """

    def __init__(self, programs: Programs, messages: Messages, common_bytes: int = 0) -> None:
        sizes = np.concatenate([programs.arena_bytes[:, None], messages.window_bytes], axis=1)
        ends = np.cumsum(-(-sizes // _PAGE) * _PAGE, axis=1)
        self.out_window: Ints = ends[:, 0]
        self.in_window: Ints = ends[:, 1]
        self.common = int(ends[:, 2].max(initial=_PAGE))
        self.n_bytes = self.common + -(-common_bytes // _PAGE) * _PAGE


@dataclass(slots=True)
class Heap:
    """A rank's part of memory that all ranks have allocated together. It is shared by transports of which one runs at a time, and
    moves when a plan is opened that needs more.
    """

    pointer: int = 0
    n_bytes: int = 0


class PutTransport:
    """One rank's side. `heap` has at least `Parts.n_bytes`. `line_up` returns when all ranks have called it."""

    overlaps = True
    use_graphs = False  # never, see why_not_capturable

    def __init__(
        self, device: Device, puts: Puts, line_up: Callable[[Deadline], None], programs: Programs, messages: Messages,
        arena: Arena, rank: int, deadline: Deadline, heap: Heap, parts: Parts, signals: Signals, reaches: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        self.deadline = deadline
        device.use()
        self.device, self._puts, self._line_up, self._rank = device, puts, line_up, rank
        self._programs, self._messages, self._signals, self._parts, self._heap = programs, messages, signals, parts, heap
        self._reaches = reaches
        self.memory = Memory([0], [heap.pointer])
        self._gathering = Gathering(device, programs.blocks, programs.forms, self.memory)
        self._moves = device.stream()
        self._mirror = Mirror(device, programs, rank, arena, self.memory, self._moves)
        actions = programs.actions
        self._actions = list(range(int(actions.ptr[rank]), int(actions.ptr[rank + 1])))
        self._action_of = {int(actions.step[action]): action for action in self._actions}
        self._queues = {q: device.stream() for q in sorted({int(actions.queue[action]) for action in self._actions})}
        self._local = {action: local_rows(programs, action, rank) for action in self._actions}
        mine = np.flatnonzero((signals.src == rank) | (signals.dst == rank))
        self._rows: list[int] = mine.tolist()
        channels = np.unique(signals.channel[mine])
        self._incoming = {c: device.stream() for c in channels[signals.channel_dst[channels] == rank].tolist()}
        frees = mine[(signals.tells[mine] == Tells.FREE) & (signals.src[mine] == rank)]
        self._credits = {c: device.stream() for c in np.unique(signals.channel[frees]).tolist()}
        self._into: dict[int, list[int]] = defaultdict(list)
        for message in messages.into[messages.in_ptr[rank] : messages.in_ptr[rank + 1]].tolist():
            self._into[int(messages.step[message])].append(message)
        self._per_run: Ints = np.bincount(signals.channel, minlength=len(signals.channel_src))
        self._began, self._here = ({action: device.event() for action in self._actions} for _ in range(2))
        self._passed: dict[int, int] = {row: device.event() for row in self._rows}
        self._sums, self._adding = LibrarySums(programs, rank, puts, deadline), device.stream()
        self._base, self._moved = device.event(), device.event()
        self._n_runs = 0
        self._lent: Sequence[Lent] | None = None
        self._computing: Computing | None = None
        self._following: Following | None = None
        self._on_device = False

    def compute_by(self, make: Callable[[object], Computing]) -> None:
        """Compute by what `make` makes of the device."""
        self._computing = make(self.device)

    def follow_by(self, make: Callable[[object], Following]) -> None:
        """Take checksums by what `make` makes of the device."""
        self._following = make(self.device)

    def adopt(self, lent: Sequence[Lent] | None) -> None:
        """Run on these buffers of the caller's, in place of the arena in host memory; None for that again."""
        self._lent = lent

    def begin(self, trial: int) -> None:
        self._on_device = False
        self._line_up(self.deadline)  # others may still bring back what the last trial put there

    def barrier(self) -> None:
        """Line up; before the run bring to the device what the host has filled, after it what has arrived back."""
        self._move(back=self._on_device)
        self._line_up(self.deadline)

    def run(self, start_s: NDArray[np.float64], end_s: NDArray[np.float64], at_step: NDArray[np.int64]) -> None:
        """Run the whole program of the rank, and note when each of its actions began and ended."""
        mirrored = not self._on_device
        if mirrored:
            self._move(back=False)
            self._line_up(self.deadline)  # nobody writes what is still being laid in place
        self.device.record(self._base, self._moves)
        began_s = time.monotonic()
        for stream in (*self._queues.values(), *self._incoming.values(), self._adding):  # so that no time is before the base
            self.device.follow(stream, self._base)
        peers = sorted({*self._signals.src[self._rows].tolist(), *self._signals.dst[self._rows].tolist()} - {self._rank})
        within(self.deadline, self._enqueue, peers)
        self._await(at_step)
        self._stamp(start_s, end_s, began_s)
        self._n_runs += 1
        if mirrored:
            self._move(back=True)
        if self._following is not None:
            self._following.put_kept(self._kept_in(), self._moves)
            self.device.record(self._moved, self._moves)
            self._wait_for(self._moved, ())
            self._following.collect()

    def why_not_capturable(self, *, first: bool = False) -> str | None:
        """Why a run can't be captured as a CUDA graph."""
        return (
            "a replay would wait for and write the signal values of the first run, which have passed already, or (NCCL) stand in "
            "lock-step with the receiver's acknowledgements"
        )

    def _move(self, *, back: bool) -> None:
        self.device.use()
        self.memory.bind([0], [self._heap.pointer])
        if self._lent is not None:
            self._move_lent(self._lent, back=back)
        elif back:
            self._mirror.download()
        else:
            self._mirror.upload()
        self.device.record(self._moved, self._moves)
        self._wait_for(self._moved, ())
        self._on_device = not back

    def _move_lent(self, lent: Sequence[Lent], *, back: bool) -> None:
        """Copy the caller's buffers into the common memory, or destinations out of it: only that can be put to and from."""
        for each in lent:
            here = self.memory.at(each.start)
            if not back:
                self.device.copy(here, each.pointer, each.n_bytes, self._moves)
            elif each.is_target:
                self.device.copy(each.pointer, here, each.n_bytes, self._moves)

    def _sent_from(self) -> Memory:
        """Where what this rank sends lies for checksums: the caller's source weights as they are, the rest in common memory."""
        if self._lent is None:
            return self.memory
        sources = [each for each in self._lent if not each.is_target]
        target_at = int(self._programs.target_at[self._rank])
        return Memory([*(s.start for s in sources), target_at], [*(s.pointer for s in sources), self.memory.at(target_at)])

    def _kept_in(self) -> Memory:
        """Where the destination weights lie in the end."""
        targets = [each for each in self._lent or () if each.is_target]
        return Memory([t.start for t in targets], [t.pointer for t in targets]) if targets else self.memory

    def _enqueue(self) -> None:
        """Everything in the order of signals; an action begins before the first signal of its step, or of a later one."""
        self.device.use()
        done = _Done()
        waiting = list(reversed(self._actions))
        actions, signals = self._programs.actions, self._signals
        for row in self._rows:
            step = int(signals.step[row])
            while waiting and int(actions.step[waiting[-1]]) < step:
                self._begin_action(waiting.pop(), done)
            if waiting and int(actions.step[waiting[-1]]) == step and signals.tells[row] != Tells.READY:
                self._begin_action(waiting.pop(), done)
            match Tells(int(signals.tells[row])):
                case Tells.READY:
                    self._tell_ready(row, step, done)
                case Tells.DATA if signals.src[row] == self._rank:
                    self._send(row, done)
                case Tells.DATA:
                    self._receive(row, done)
                case Tells.FREE:
                    self._free(row, done)
        while waiting:
            self._begin_action(waiting.pop(), done)

    def _begin_action(self, action: int, done: "_Done") -> None:
        device, actions = self.device, self._programs.actions
        queue, step = self._queues[int(actions.queue[action])], int(actions.step[action])
        self._follow_needs(action, queue, done)
        for row in done.ready[step]:
            device.follow(queue, self._passed[row])
        device.record(self._began[action], queue)
        for first, last in self._local[action]:
            self._gathering.copy(first, last, self.memory.at, queue)
        if self._computing is not None:
            self._computing.put(step, self.memory, queue)
        if self._following is not None:  # what the step reads is there, and stays until its event has passed
            self._following.put_sent(step, self._sent_from(), queue)
        if step in self._sums:  # on one stream, since a library takes calls among some ranks in one order
            device.record(self._here[action], queue)
            device.follow(self._adding, self._here[action])
            self._sums.put(step, self.memory.at, self._adding)
            device.record(self._here[action], self._adding)
            device.follow(queue, self._here[action])
        else:
            device.record(self._here[action], queue)
        done.begun[step] = action

    def _follow_needs(self, action: int, queue: int, done: "_Done") -> None:
        actions = self._programs.actions
        for ptr, steps in ((actions.wait_ptr, actions.wait), (actions.own_ptr, actions.own)):
            for step in steps[ptr[action] : ptr[action + 1]].tolist():
                self._follow(queue, step, done)
        messages = self._messages
        for message in self._into[int(actions.step[action])]:  # a collective's parts may all go to one slot
            for step in messages.touches[messages.clear_first[message] : messages.clear_last[message]].tolist():
                self._follow(queue, step, done)

    def _follow(self, stream: int, step: int, done: "_Done") -> None:
        """What comes next on the stream waits for this rank's part in a step."""
        if step in done.begun:
            self.device.follow(stream, self._here[done.begun[step]])
        for row in (*done.sent[step].values(), *done.arrived[step].values()):
            self.device.follow(stream, self._passed[row])

    def _tell_ready(self, row: int, step: int, done: "_Done") -> None:
        signals, device = self._signals, self.device
        if signals.dst[row] == self._rank:
            self._expect(row)
            done.ready[step].append(row)
            return
        action = self._action_of[step]
        queue = self._queues[int(self._programs.actions.queue[action])]
        self._follow_needs(action, queue, done)
        self._signal(row, queue, done)
        device.record(self._passed[row], queue)

    def _send(self, row: int, done: "_Done") -> None:
        signals, messages, device = self._signals, self._messages, self.device
        message, step = int(signals.message[row]), int(signals.step[row])
        peer, n_bytes = int(signals.dst[row]), int(messages.n_bytes[message])
        queue = self._queues[int(self._programs.actions.queue[self._action_of[step]])]
        if messages.answers[message]:
            self._follow(queue, step, done)
        if message in done.free:
            device.follow(queue, self._passed[done.free[message]])
        if not n_bytes:
            self._signal(row, queue, done)
        elif self._reaches[self._rank, peer]:
            first, last = int(messages.first[message]), int(messages.last[message])
            self._gathering.copy(first, last, lambda address: self._puts.at_peer(peer, address), queue)
            self._signal(row, queue, done)
        else:
            pointer = self._packed(message, queue, done)
            into = int(signals.in_at[message])
            offset = int(messages.dst_at[message]) if into == NO_ROWS else int(self._parts.in_window[peer]) + into
            self._follow_channel(row, queue, done)
            self._puts.put(peer, offset, pointer, n_bytes, int(signals.channel[row]), self._value(row), queue)
        device.record(self._passed[row], queue)
        done.last_of[int(signals.channel[row])] = (row, queue)
        done.sent[step][queue] = row
        done.row_of[message] = row

    def _packed(self, message: int, queue: int, done: "_Done") -> int:
        """Where all of a message lies without gaps, ready to be put."""
        messages, signals = self._messages, self._signals
        at = int(signals.out_at[message])
        if at == NO_ROWS:
            return self.memory.at(int(messages.src_at[message]))
        for left in signals.after_out.get(message, ()):
            self.device.follow(queue, self._passed[done.row_of[left]])
        pointer = self._heap.pointer + int(self._parts.out_window[self._rank]) + at
        self._gathering.pack(int(messages.first[message]), int(messages.last[message]), pointer, queue)
        return pointer

    def _receive(self, row: int, done: "_Done") -> None:
        signals, messages = self._signals, self._messages
        message, channel = int(signals.message[row]), int(signals.channel[row])
        self._expect(row)
        at = int(signals.in_at[message])
        if at != NO_ROWS:
            stream, pointer = self._incoming[channel], self._heap.pointer + int(self._parts.in_window[self._rank]) + at
            self._gathering.unpack(int(messages.first[message]), int(messages.last[message]), pointer, stream)
            self.device.record(self._passed[row], stream)
        done.arrived[int(signals.step[row])][channel] = row
        done.row_of[message] = row

    def _free(self, row: int, done: "_Done") -> None:
        signals = self._signals
        message = int(signals.message[row])
        if signals.dst[row] == self._rank:
            self._expect(row)
            done.free[message] = row
            return
        stream = self._credits[int(signals.channel[row])]
        for left in signals.after_in[message]:
            self.device.follow(stream, self._passed[done.row_of[left]])
        self._signal(row, stream, done)
        self.device.record(self._passed[row], stream)

    def _expect(self, row: int) -> None:
        """Wait for a signal on the stream of its channel."""
        signals, channel = self._signals, int(self._signals.channel[row])
        stream = self._incoming[channel]
        self._puts.wait(int(signals.src[row]), channel, self._value(row), stream)
        self.device.record(self._passed[row], stream)

    def _signal(self, row: int, stream: int, done: "_Done") -> None:
        signals = self._signals
        self._follow_channel(row, stream, done)
        self._puts.signal(int(signals.dst[row]), int(signals.channel[row]), self._value(row), stream)
        done.last_of[int(signals.channel[row])] = (row, stream)

    def _follow_channel(self, row: int, stream: int, done: "_Done") -> None:
        """Signals of a channel go out in order, from whatever stream."""
        last = done.last_of.get(int(self._signals.channel[row]))
        if last is not None and last[1] != stream:
            self.device.follow(stream, self._passed[last[0]])

    def _value(self, row: int) -> int:
        return self._n_runs * int(self._per_run[self._signals.channel[row]]) + int(self._signals.number[row])

    def _await(self, at_step: NDArray[np.int64]) -> None:
        signals = self._signals
        self._wait_for(self._base, ())
        for row in self._rows:
            at_step[0] = signals.step[row]
            incoming = signals.dst[row] == self._rank
            self._wait_for(self._passed[row], [int(signals.src[row] if incoming else signals.dst[row])])
        for event in self._here.values():
            self._wait_for(event, ())

    def _wait_for(self, event: int, peers: Sequence[int]) -> None:
        wait_for(self.device, event, self._puts, self.deadline, peers)

    def _stamp(self, start_s: NDArray[np.float64], end_s: NDArray[np.float64], began_s: float) -> None:
        actions, signals = self._programs.actions, self._signals
        ends: dict[int, float] = defaultdict(float)
        for row in self._rows:
            if signals.tells[row] == Tells.DATA:
                step = int(signals.step[row])
                ends[step] = max(ends[step], self.device.elapsed_s(self._base, self._passed[row]))
        for action in self._actions:
            step, cell = int(actions.step[action]), int(actions.cell[action])
            start_s[cell] = began_s + self.device.elapsed_s(self._base, self._began[action])
            end_s[cell] = began_s + max(ends[step], self.device.elapsed_s(self._base, self._here[action]))


class _Done:
    """What has been put on streams so far."""

    def __init__(self) -> None:
        self.begun: dict[int, int] = {}  # step -> action
        self.sent: dict[int, dict[int, int]] = defaultdict(dict)  # step -> stream -> its last signal
        self.arrived: dict[int, dict[int, int]] = defaultdict(dict)  # step -> channel -> its last signal
        self.ready: dict[int, list[int]] = defaultdict(list)
        self.free: dict[int, int] = {}  # message -> the signal that lets it come
        self.row_of: dict[int, int] = {}  # message -> its signal
        self.last_of: dict[int, tuple[int, int]] = {}  # channel -> the last signal that was sent on it, and from which stream
