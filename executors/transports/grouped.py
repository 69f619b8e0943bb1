"""The Transport of libraries that match grouped sends and receives in order: NCCL's, and torch.distributed's over it.

Rule: a run is put on streams as a whole, then waited for; the host makes no decision in between, so a run can be captured as a
graph. Streams: two for each wire (`planner.wires`), of its groups and of what they bring being unpacked, and one for each queue
of a lane, on which its steps pack and copy within the rank. An event stands wherever one of these waits for another.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.gpus.areas import Area, Areas
from shardroute.executors.gpus.devices import Capturing, Device, Gathering, Memory, Streaming, wait_for, within
from shardroute.executors.gpus.mirrors import Mirror
from shardroute.executors.interpreting.arenas import Arena, Lent
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.messages.messages import NO_ROWS, Messages
from shardroute.executors.messages.multicasts import Multicast, find_multicasts
from shardroute.executors.messages.rounds import NO_WIRE, find_groups
from shardroute.executors.transports.schedules import Schedule
from shardroute.executors.transports.seam import Computing, Deadline, Following
from shardroute.executors.transports.summing import LibrarySums
from shardroute.topologies.errors import RunError

Part = tuple[int, int, int]  # pointer, bytes, peer

TOKEN_BYTES = 1  # what a message that carries nothing sends: libraries may leave out those of 0 bytes
_TOKEN_ROOM = 256
_MOST_SETS = 64  # of ranks that broadcast among themselves: each is a communicator, which takes memory and time to make


class Pairs(Streaming, Protocol):
    """What a library does with a group; on one wire, sends and receives of one pair of ranks match in order."""

    def connect(self, wires: Sequence[int]) -> None:
        """Make what groups on these wires take (numbers as `planner.wires` has them). All ranks call it with the same wires."""

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], wire: int, stream: int) -> None:
        """Put a group on a stream, by wires[wire] of those that were connected."""


@runtime_checkable
class Broadcasting(Pairs, Protocol):
    """Pairs of a library that broadcasts, too."""

    def prepare(self, ranks: Sequence[tuple[int, ...]]) -> None:
        """Make what broadcasts among these sets of ranks take. All ranks call it with the same sets."""

    def broadcast(self, parts: Sequence[tuple[int, int, int, tuple[int, ...]]], stream: int) -> None:
        """Put broadcasts on a stream: pointer (to what the root sends, or to where it comes), bytes, root, ranks. All ranks of a
        set call it with the same broadcasts in one order.
        """


class GroupedTransport:
    """One rank's side. `line_up` returns when all ranks have called it, and takes the deadline."""

    overlaps = True
    use_graphs = False  # replay a CUDA graph from the second run on

    def __init__(
        self, device: Device, pairs: Pairs, line_up: Callable[[Deadline], None], programs: Programs, messages: Messages,
        arena: Arena, rank: int, deadline: Deadline, areas: Areas,
    ) -> None:  # fmt: skip
        self.deadline = deadline
        device.use()
        self.device, self._pairs, self._line_up, self._areas = device, pairs, line_up, areas
        self._programs, self._messages, self._rank = programs, messages, rank
        self._groups = find_groups(programs, messages)
        self._schedule = Schedule(programs, messages, self._groups, rank)
        self.memory = Memory([0], [0])
        self._gathering = Gathering(device, programs.blocks, programs.forms, self.memory)
        self._token = device.allocate(2 * _TOKEN_ROOM)
        self._main = device.stream()
        self._queues = {queue: device.stream() for queue in self._schedule.queues}
        wires = sorted({wire for wire in self._schedule.wire if wire != NO_WIRE})
        self._wires, self._scatters = ({wire: device.stream() for wire in wires} for _ in range(2))
        within(deadline, lambda: pairs.connect(self._groups.wires))
        self._mirror = Mirror(device, programs, rank, arena, self.memory, self._main)
        self._base, self._moved = device.event(), device.event()
        n = len(self._schedule.numbers)
        self._sent, self._scattered = ([device.event() for _ in range(n)] for _ in range(2))
        self._began: dict[int, int] = {action: device.event() for action in self._schedule.actions}
        self._here: dict[int, int] = {action: device.event() for action in self._schedule.actions}
        self._packed: dict[tuple[int, int], int] = {}
        self._multicast_of: dict[int, int] = {}
        self._multicasts: list[Multicast] = []
        if isinstance(pairs, Broadcasting):
            self._plan_broadcasts(pairs)
        self._sums = LibrarySums(programs, rank, pairs, deadline)
        for group in self._schedule.numbers:
            for action in self._schedule.begins[group]:
                self._schedule.expect_sums(group, int(programs.actions.step[action]), self._sums)
        self._lent: Sequence[Lent] | None = None
        self._computing: Computing | None = None
        self._following: Following | None = None
        self._on_device = self._has_run = False
        self._graph: int | None = None
        self._captured: object = None

    def compute_by(self, make: Callable[[object], Computing]) -> None:
        """Compute by what `make` makes of the device."""
        self._computing = make(self.device)

    def follow_by(self, make: Callable[[object], Following]) -> None:
        """Take checksums by what `make` makes of the device."""
        self._following = make(self.device)

    def adopt(self, lent: Sequence[Lent] | None) -> None:
        """Run on these buffers of the caller's, in place of the arena in host memory; None for that again."""
        self._lent = lent

    def _use_lent(self, lent: Sequence[Lent]) -> None:
        """Lay the arena out: the caller's buffers, and behind them the plan's slots, which are ours."""
        self.device.use()
        self.device.adopt(lent)
        slots_at = int(self._programs.slots_at[self._rank])
        slots = self._areas.at_least(Area.ARENA, int(self._programs.arena_bytes[self._rank]) - slots_at)
        self.memory.bind([*(each.start for each in lent), slots_at], [*(each.pointer for each in lent), slots])

    def _plan_broadcasts(self, pairs: Broadcasting) -> None:
        found = find_multicasts(self._programs, self._messages, self._groups)
        sets = sorted({each.ranks for each in found})
        if not 0 < len(sets) <= _MOST_SETS:
            return
        within(self.deadline, lambda: pairs.prepare(sets))
        self._multicasts = found
        self._multicast_of = {message: k for k, each in enumerate(found) for message in each.messages}

    def begin(self, trial: int) -> None:
        self._on_device = False

    def barrier(self) -> None:
        """Line up; before the run bring to the device what the host has filled, after it what has arrived back."""
        if not self._on_device:
            self._upload()
        else:
            self._download()
        self._line_up(self.deadline)

    def run(self, start_s: NDArray[np.float64], end_s: NDArray[np.float64], at_step: NDArray[np.int64]) -> None:
        """Run the whole program of the rank, in the order of groups, and note when each of its actions began and ended."""
        mirrored = not self._on_device and self._lent is None
        if mirrored:
            self._upload()
        elif self._lent is not None:
            self._use_lent(self._lent)
        if self.use_graphs and self._has_run:
            self._run_graph(start_s, end_s)
            if mirrored:
                self._download()
            return
        self.device.record(self._base, self._main)
        began_s = time.monotonic()
        for stream in self._streams:  # so that no time is before the base
            self.device.follow(stream, self._base)
        within(self.deadline, self._enqueue, self._schedule.peers)
        self._await(at_step)
        self._has_run = True
        self._stamp(start_s, end_s, began_s)
        if self._following is not None:
            self._following.put_kept(self.memory, self._main)
            self._finish_move()
            self._following.collect()
        if mirrored:
            self._download()

    def _run_graph(self, start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> None:
        """Replay the run, captured anew if memory has moved since. Steps have the times of the whole: a graph tells no others."""
        where = self.memory.layout
        if self._graph is None or where != self._captured:
            self.capture()
            self._captured = where
        began_s = time.monotonic()
        took_s = self.replay()
        cells = self._programs.actions.cell[self._schedule.actions]
        start_s[cells], end_s[cells] = began_s, began_s + took_s

    def why_not_capturable(self, *, first: bool = False) -> str | None:
        """Why a run can't be captured as a CUDA graph, None if it can; with `first`, why it never can."""
        if self._computing is not None:
            return "it computes attention by torch, whose memory for what lies between isn't the graph's"
        if self._following is not None:
            return "its checksums are taken by torch, whose memory for what lies between isn't the graph's"
        if not isinstance(self.device, Capturing):
            return f"{self.device.name}, as its library drives it, captures no graphs here"
        if not self._has_run and not first:
            return "nothing has run yet: the first run connects the ranks, which can't be captured"
        return None

    def capture(self) -> None:
        """Capture a run as a graph, for `replay`. All ranks call it, after a run. Raises RunError where it isn't legal."""
        reason = self.why_not_capturable()
        device = self.device
        if reason is not None or not isinstance(device, Capturing):
            raise RunError(f"a run can't be captured: {reason}")
        others = self._streams
        fork, joins = device.event(), [device.event() for _ in others]

        def record() -> int:
            device.use()
            device.begin_capture(self._main)
            try:
                device.record(fork, self._main)
                for stream in others:
                    device.follow(stream, fork)
                self._enqueue()
                for stream, join in zip(others, joins, strict=True):
                    device.record(join, stream)
                    device.follow(self._main, join)
            finally:
                graph = device.end_capture(self._main)
            return graph

        self._graph = within(self.deadline, record, self._schedule.peers)

    def replay(self) -> float:
        """Run the captured graph; the seconds that the device took. What lies in the arena is used as it is."""
        device = self.device
        assert isinstance(device, Capturing)
        assert self._graph is not None
        device.record(self._base, self._main)
        device.launch(self._graph, self._main)
        device.record(self._moved, self._main)
        self._wait_for(self._moved, self._schedule.peers)
        return device.elapsed_s(self._base, self._moved)

    def _upload(self) -> None:
        self.device.use()
        n_bytes = int(self._programs.arena_bytes[self._rank])
        self.memory.bind([0], [self._areas.at_least(Area.ARENA, n_bytes)])
        self._mirror.upload()
        self._finish_move()
        self._on_device = True

    def _download(self) -> None:
        self.device.use()
        self._mirror.download()
        self._finish_move()

    def _finish_move(self) -> None:
        self.device.record(self._moved, self._main)
        self._wait_for(self._moved, ())

    @property
    def _streams(self) -> list[int]:
        """All but the main one, from which a run forks."""
        return [*self._queues.values(), *self._wires.values(), *self._scatters.values()]

    def _enqueue(self) -> None:
        self.device.use()
        done = _Done()
        for number, group in enumerate(self._schedule.numbers):
            self._enqueue_group(number, group, done)

    def _enqueue_group(self, number: int, group: int, done: "_Done") -> None:
        device, schedule, messages, groups = self.device, self._schedule, self._messages, self._groups
        ready: set[int] = set()  # actions whose events the group waits for
        sends: list[Part] = []
        broadcasts: dict[int, tuple[int, int]] = {}
        for action in schedule.begins[group]:
            self._begin_action(action, done)
            if int(self._programs.actions.step[action]) in schedule.exchanged:  # else messages would wait for attention
                ready.add(action)
        if schedule.wire[number] == NO_WIRE:
            return
        wire, scatter = self._wires[schedule.wire[number]], self._scatters[schedule.wire[number]]
        for message, action in schedule.sends[group]:
            multicast = self._multicast_of.get(message)
            if multicast in broadcasts:
                continue
            queue = self._queues[schedule.queue_of[action]]
            pointer, n_bytes = self._token, TOKEN_BYTES
            if messages.answers[message]:
                self._follow(queue, int(messages.step[message]), done)
            if messages.n_bytes[message]:
                n_bytes = int(messages.n_bytes[message])
                pointer = self._out(message)
                if groups.out_at[message] != NO_ROWS:
                    self._follow_sent(queue, schedule.numbers_of(groups.out_after[message]), done)
                    self._gathering.pack(int(messages.first[message]), int(messages.last[message]), pointer, queue)
            if multicast is None:
                sends.append((pointer, n_bytes, int(messages.dst[message])))
            else:
                broadcasts[multicast] = (pointer, n_bytes)
            ready.add(action)
        for action in sorted(ready):
            if (number, action) not in self._packed:
                self._packed[number, action] = device.event()
            packed = self._packed[number, action]
            device.record(packed, self._queues[schedule.queue_of[action]])
            device.follow(wire, packed)
        receives, scattered = [], []
        for message in schedule.receives[group]:
            n_bytes = int(messages.n_bytes[message])
            pointer = self._token + _TOKEN_ROOM
            if n_bytes:
                self._follow_uses(wire, message, done)
                pointer = self._into(message)
                if groups.in_at[message] != NO_ROWS:
                    self._follow_scattered(wire, schedule.numbers_of(groups.in_after[message]), done)
                    scattered.append((message, pointer))
            if message in self._multicast_of:
                broadcasts[self._multicast_of[message]] = (pointer, n_bytes)
            else:
                receives.append((pointer, n_bytes or TOKEN_BYTES, int(messages.src[message])))
        if sends or receives:
            self._pairs.exchange(sends, receives, schedule.wire[number], wire)
        if broadcasts:
            assert isinstance(self._pairs, Broadcasting)
            parts = [(*broadcasts[k], self._multicasts[k].src, self._multicasts[k].ranks) for k in sorted(broadcasts)]
            self._pairs.broadcast(parts, wire)
        for action in schedule.begins[group]:
            step = int(self._programs.actions.step[action])
            if step in self._sums:
                self._sums.put(step, self.memory.at, wire)
        device.record(self._sent[number], wire)
        if scattered:
            device.follow(scatter, self._sent[number])
            for message, pointer in scattered:
                self._gathering.unpack(int(messages.first[message]), int(messages.last[message]), pointer, scatter)
            device.record(self._scattered[number], scatter)
        for step in schedule.sent_steps[group]:
            done.sent_of[step] = number
        for message, _ in scattered:
            done.scattered_of[int(messages.step[message])] = number

    def _begin_action(self, action: int, done: "_Done") -> None:
        device, actions = self.device, self._programs.actions
        queue = self._queues[self._schedule.queue_of[action]]
        for ptr, steps in ((actions.wait_ptr, actions.wait), (actions.own_ptr, actions.own)):
            for step in steps[ptr[action] : ptr[action + 1]].tolist():
                self._follow(queue, step, done)
        before = self._schedule.before.get(action)
        if before is not None:
            self._follow(queue, before, done)
        for message in self._schedule.into_of.get(int(actions.step[action]), ()):  # a collective's own part goes to the same slot
            self._follow_uses(queue, message, done)
        device.record(self._began[action], queue)
        for first, last in self._schedule.local[action]:
            self._gathering.copy(first, last, self.memory.at, queue)
        if self._computing is not None:
            self._computing.put(int(actions.step[action]), self.memory, queue)
        if self._following is not None:  # what the step reads is there, and stays until its event has passed
            self._following.put_sent(int(actions.step[action]), self.memory, queue)
        device.record(self._here[action], queue)
        done.local_of[int(actions.step[action])] = action

    def _follow(self, stream: int, step: int, done: "_Done") -> None:
        """What comes next on the stream waits for this rank's part in a step."""
        if step in done.local_of:
            self.device.follow(stream, self._here[done.local_of[step]])
        for known, follow in ((done.sent_of, self._follow_sent), (done.scattered_of, self._follow_scattered)):
            if step in known:
                follow(stream, [known[step]], done)

    def _follow_uses(self, stream: int, message: int, done: "_Done") -> None:
        """What comes next on the stream waits until the slot that the message comes to is in use no more."""
        messages = self._messages
        for step in messages.touches[messages.clear_first[message] : messages.clear_last[message]].tolist():
            self._follow(stream, step, done)

    def _follow_sent(self, stream: int, numbers: Sequence[int], done: "_Done") -> None:
        """What comes next on the stream waits until the messages of these groups have left, or come."""
        for number in numbers:
            wire = self._wires[self._schedule.wire[number]]
            if stream != wire and number > done.seen_sent[stream, wire]:
                self.device.follow(stream, self._sent[number])
                done.seen_sent[stream, wire] = number

    def _follow_scattered(self, stream: int, numbers: Sequence[int], done: "_Done") -> None:
        """What comes next on the stream waits until what these groups brought is unpacked."""
        for number in numbers:
            scatter = self._scatters[self._schedule.wire[number]]
            if number > done.seen_scattered[stream, scatter]:
                self.device.follow(stream, self._scattered[number])
                done.seen_scattered[stream, scatter] = number

    def _out(self, message: int) -> int:
        at = int(self._groups.out_at[message])
        return self.memory.at(int(self._messages.src_at[message])) if at == NO_ROWS else self._window(Area.OUT) + at

    def _into(self, message: int) -> int:
        at = int(self._groups.in_at[message])
        return self.memory.at(int(self._messages.dst_at[message])) if at == NO_ROWS else self._window(Area.IN) + at

    def _window(self, area: Area) -> int:
        return self._areas.at_least(area, int(self._messages.window_bytes[self._rank, 0 if area is Area.OUT else 1]))

    def _await(self, at_step: NDArray[np.int64]) -> None:
        """Wait until everything has passed, group after group."""
        schedule = self._schedule
        self._wait_for(self._base, ())
        for number, group in enumerate(schedule.numbers):
            at_step[0] = schedule.first_step[group]
            self._wait_for(self._sent[number], schedule.peers_of[group])
        for event in [*self._scattered, *self._here.values()]:  # those that were never recorded are done
            self._wait_for(event, ())

    def _wait_for(self, event: int, peers: Sequence[int]) -> None:
        wait_for(self.device, event, self._pairs, self.deadline, peers)

    def _stamp(self, start_s: NDArray[np.float64], end_s: NDArray[np.float64], began_s: float) -> None:
        actions, schedule = self._programs.actions, self._schedule
        ends: dict[int, float] = defaultdict(float)
        for events, steps_of in ((self._sent, schedule.sent_steps), (self._scattered, schedule.scattered_steps)):
            for number, group in enumerate(schedule.numbers):
                if steps_of[group]:
                    at_s = self.device.elapsed_s(self._base, events[number])
                    for step in steps_of[group]:
                        ends[step] = max(ends[step], at_s)
        for action in schedule.actions:
            step, cell = int(actions.step[action]), int(actions.cell[action])
            start_s[cell] = began_s + self.device.elapsed_s(self._base, self._began[action])
            end_s[cell] = began_s + max(ends[step], self.device.elapsed_s(self._base, self._here[action]))


class _Done:
    """What has been put on streams so far: by step the action and the last groups, and how far each stream waits for others."""

    def __init__(self) -> None:
        self.local_of: dict[int, int] = {}
        self.sent_of: dict[int, int] = {}
        self.scattered_of: dict[int, int] = {}
        self.seen_sent: dict[tuple[int, int], int] = defaultdict(lambda: -1)
        self.seen_scattered: dict[tuple[int, int], int] = defaultdict(lambda: -1)
