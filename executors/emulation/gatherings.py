"""Collectives under way on one rank: parts that come along rings, go on while they come, and are put in their place.

Rule: a part is taken in only when the collective has begun here, for only then may what lies in its place be overwritten; until
then the flow that brings it is held.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from shardroute.executors.emulation.collectives import Pieces, parts_of
from shardroute.executors.emulation.flows import Message, Receiving, Sending
from shardroute.executors.emulation.wirings import Wiring, ring_code, ring_of
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.packing import Rows


@dataclass(slots=True, eq=False)
class _Gathering:
    """One collective: the messages that come, by origin and ring; parts of each origin that are still to come; how many messages
    are still on their way to the next rank.
    """

    messages: dict[tuple[int, int], Message] = field(default_factory=dict)
    left_of: dict[int, int] = field(default_factory=dict)
    unsent: int = 0
    is_over: bool = False


class Gatherings:
    """The collectives of one run. `packed` gives the bytes of rows of this rank's; `over` is told an action and its step when
    the rank's part in it is over.
    """

    def __init__(
        self, rank: int, programs: Programs, wiring: Wiring, pieces: Pieces, packing: Rows,
        sending: Mapping[tuple[int, int], Sending], packed: Callable[[int, int], memoryview], over: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        self._rank, self._programs, self._wiring, self._pieces = rank, programs, wiring, pieces
        self._packing, self._sending, self._packed, self._over = packing, sending, packed, over
        self._begun: dict[int, _Gathering] = {}
        self._held: dict[int, list[Receiving]] = {}

    def begin(self, action: int, step: int) -> None:
        """Send this rank's own parts, and take in and pass on those of others."""
        queue = int(self._programs.actions.queue[action])
        found = self._begun[step] = _Gathering()
        data: dict[int, memoryview] = {}
        for part in parts_of(step, self._rank, self._wiring, self._pieces):
            if part.origin not in data:
                data[part.origin] = self._memory(step, part.origin, part.to)
            view = data[part.origin][part.first : part.end]
            incoming = None
            if part.source >= 0:
                came = partial(self._came, action, step, part.origin, data[part.origin])
                incoming = found.messages[part.origin, part.ring] = Message(step, part.origin, view, came)
                found.left_of[part.origin] = found.left_of.get(part.origin, 0) + 1
            if part.to >= 0:
                found.unsent += 1
                flow = self._sending[part.to, ring_code(queue, part.ring)]
                if incoming is not None:
                    incoming.onward = (flow,)
                flow.post(Message(step, part.origin, view, partial(self._went, action, step), source=incoming))
        for held in self._held.pop(step, ()):
            held.more()
        self._end(action, step)

    def expect(self, flow: Receiving, use: int, step: int, origin: int) -> Message | None:
        """The message of an origin on a channel; None, and the flow is held, while the collective hasn't begun here."""
        if step not in self._begun:
            self._held.setdefault(step, []).append(flow)
            return None
        return self._begun[step].messages[origin, ring_of(use)]

    def _memory(self, step: int, origin: int, to: int) -> memoryview:
        """An origin's bytes: this rank's own, or room for another's."""
        if origin == self._rank:
            return self._packed(*self._pieces.between(step, origin, to))
        return np.empty(self._pieces.n_bytes(step, origin, self._rank), dtype=np.uint8).data

    def _came(self, action: int, step: int, origin: int, data: memoryview) -> None:
        found = self._begun[step]
        found.left_of[origin] -= 1
        if not found.left_of[origin]:
            del found.left_of[origin]
            self._packing.unpack(*self._pieces.between(step, origin, self._rank), np.frombuffer(data, np.uint8))
            self._end(action, step)

    def _went(self, action: int, step: int) -> None:
        self._begun[step].unsent -= 1
        self._end(action, step)

    def _end(self, action: int, step: int) -> None:
        found = self._begun[step]
        if not found.left_of and not found.unsent and not found.is_over:
            found.is_over = True
            self._over(action, step)
