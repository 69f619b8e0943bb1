"""A world whose ranks go by the numbers that they have in a plan, which may have gaps: ranks that have gone.

Rule: a number that nobody has takes part in nothing of a plan, and agrees with whatever this rank says.
"""

from collections.abc import Sequence
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.messages.messages import Messages
from shardroute.executors.transports.exchanges import MessageTransport
from shardroute.executors.transports.roll_calls import RollCall
from shardroute.executors.transports.seam import Deadline, Handle, Wire, Wired, World
from shardroute.topologies.errors import InputError


class NumberedWorld:
    """The ranks of a world, of which the one of rank i there is called ranks[i] here.

    size   as many as the plan has, those that have gone too

    Raises InputError for other than one number a rank, and for a world whose library numbers its ranks itself.
    """

    def __init__(self, world: World, ranks: Sequence[int], size: int) -> None:
        if len(ranks) != world.size or len(set(ranks)) < len(ranks) or min(ranks, default=0) < 0:
            raise InputError(f"ranks {list(ranks)}: expected one number for each of the {world.size} ranks that are there")
        if not isinstance(world, Wired):
            raise InputError(f"{type(world).__name__}: its library numbers ranks itself; plan for ranks without gaps there")
        self._world, self._ranks = world, list(ranks)
        self.rank, self.size, self.key = self._ranks[world.rank], max(size, *(rank + 1 for rank in ranks)), world.key
        self.present = sorted(ranks)
        self.wire: Wire[object] = _NumberedWire(world.wire, {number: i for i, number in enumerate(ranks)})
        self.pools, self.call_tag = world.pools, world.call_tag
        self._calls = RollCall(self.wire, self.rank, self._ranks, self.call_tag)

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        sizes = self._calls.lengths(len(payload), deadline)
        given = dict(zip(self._ranks, self._calls.gather(payload, sizes, deadline), strict=True))
        return [given.get(number, payload) for number in range(self.size)]

    def open(self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline) -> MessageTransport[object]:
        return MessageTransport(self.wire, self._line_up, programs, messages, arena, self.rank, deadline, self.pools)

    def close(self) -> None:
        self._world.close()

    def abandon(self) -> None:
        self._world.abandon()

    def give_up(self, words: str) -> None:
        self._calls.give_up(words)

    def _line_up(self, deadline: Deadline) -> None:
        self._calls.lengths(0, deadline)


class _NumberedWire(Generic[Handle]):
    """A Wire whose peers go by other numbers."""

    def __init__(self, wire: Wire[Handle], at: dict[int, int]) -> None:
        self._wire, self._at = wire, at

    def send(self, data: NDArray[np.uint8], to: int, tag: int) -> Handle:
        return self._wire.send(data, self._at[to], tag)

    def receive(self, data: NDArray[np.uint8], source: int, tag: int) -> Handle:
        return self._wire.receive(data, self._at[source], tag)

    def wait(self, handle: Handle, deadline: Deadline) -> None:
        self._wire.wait(handle, deadline)
