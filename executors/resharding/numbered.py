"""A world whose ranks go by the numbers that they have in a plan, which may have gaps: ranks that have gone.

Rule: a number that nobody has takes part in nothing of a plan, and agrees with whatever this rank says.
"""

from collections.abc import Sequence

from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.messages.messages import Messages
from shardroute.executors.transports.exchanges import MessageTransport
from shardroute.executors.transports.numbers import NumberedWire, Numbers
from shardroute.executors.transports.roll_calls import RollCall
from shardroute.executors.transports.seam import Deadline, Enqueuing, Renaming, Transport, Wire, Wired, World
from shardroute.topologies.errors import InputError


def numbered(world: World, ranks: Sequence[int], size: int) -> "NumberedWorld | RenamedWorld":
    """The ranks of a world, of which the one of rank i there is called ranks[i]; `size` is as many as the plan has, those that
    have gone too. Raises InputError for other than one number a rank, and for a world that can't call its ranks so.
    """
    if len(ranks) != world.size or len(set(ranks)) < len(ranks) or min(ranks, default=0) < 0:
        raise InputError(f"ranks {list(ranks)}: expected one number for each of the {world.size} ranks that are there")
    if isinstance(world, Wired):
        return NumberedWorld(world, ranks, size)
    if isinstance(world, Renaming):
        return RenamedWorld(world, ranks, size)
    raise InputError(f"{type(world).__name__}: its library numbers ranks itself; plan for ranks without gaps there")


class RenamedWorld:
    """A world that knows by itself what its ranks are called."""

    def __init__(self, world: World, ranks: Sequence[int], size: int) -> None:
        assert isinstance(world, Renaming)
        world.rename(ranks)
        self._world, self._ranks = world, list(ranks)
        self.rank, self.size, self.key = self._ranks[world.rank], max(size, *(rank + 1 for rank in ranks)), world.key
        self.present = sorted(ranks)

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        given = dict(zip(self._ranks, self._world.exchange(payload, deadline), strict=True))
        return [given.get(number, payload) for number in range(self.size)]

    def open(self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline) -> Transport | Enqueuing:
        return self._world.open(programs, messages, arena, deadline)

    def close(self) -> None:
        self._world.close()

    def abandon(self) -> None:
        self._world.abandon()


class NumberedWorld:
    """A world of ranks that send each other tagged messages; by these all of it goes."""

    def __init__(self, world: World, ranks: Sequence[int], size: int) -> None:
        assert isinstance(world, Wired)
        self._world, self._ranks = world, list(ranks)
        self.rank, self.size, self.key = self._ranks[world.rank], max(size, *(rank + 1 for rank in ranks)), world.key
        self.present = sorted(ranks)
        self.wire: Wire[object] = NumberedWire(world.wire, Numbers(ranks))
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
