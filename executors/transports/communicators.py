"""NCCL's communicators of ranks that have met: new ones, or the one that some of them had, shrunk or grown where NCCL can do so.

Rule: ranks tell each other what each had and what its NCCL can do, and all decide alike. What some had serves again only if these
are the first ranks now, in the order that they had, as NCCL leaves those that stay in order and puts those that come behind them.
"""

import ctypes
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from shardroute.executors.gpus.devices import Device, within
from shardroute.executors.gpus.gpu_stack import nccl_has
from shardroute.executors.transports.seam import Deadline
from shardroute.topologies.errors import RunError

if TYPE_CHECKING:
    from nccl.bindings import nccl

Result = TypeVar("Result")

_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES of nccl.h
_NAME_BYTES = 8
_SHRINK_DEFAULT = 0  # NCCL_SHRINK_DEFAULT of nccl.h: nothing is under way
_EXISTING = -1  # the rank that one which is in a communicator gives when it grows
_LIKE_PARENT = 0  # no configuration of its own


class Way(StrEnum):
    """What is done to get a communicator; names of parts of time, too."""

    NEW = "new communicator"
    SHRINK = "shrunk communicator"
    GROW = "grown communicator"


class Had(msgspec.Struct, frozen=True, array_like=True):
    """What a rank had: its rank among so many of a communicator, whose name is "" if it had none; and what its NCCL can do."""

    name: str
    rank: int
    size: int
    shrinks: bool
    grows: bool
    fresh: str = ""  # of rank 0: the name of what is made


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator of `size` ranks, of which this is one. `parts_s`: the seconds that each part of making it took."""

    handle: "nccl.Comm"
    name: str
    rank: int
    size: int
    parts_s: dict[str, float]


class Meeting(Protocol):
    """Ranks that have met."""

    rank: int
    size: int

    @property
    def device(self) -> Device:
        """This rank's."""

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """What every rank gave, by rank."""


def ways_to(told: Sequence[Had]) -> tuple[Way, ...]:
    """What is done, in order, when ranks had what they told; nothing where those of a communicator are there, and nobody else."""
    had = [each for each in told if each.name]
    ranks = [each.rank for each in had]
    alike = len({(each.name, each.size) for each in had}) == 1
    if not alike or list(told[: len(had)]) != had or ranks != sorted(set(ranks)):
        return (Way.NEW,)
    shrinks, grows = len(had) < had[0].size, len(had) < len(told)
    if (shrinks and not all(each.shrinks for each in had)) or (grows and not all(each.grows for each in told)):
        return (Way.NEW,)
    return (Way.SHRINK,) * shrinks + (Way.GROW,) * grows


def make_communicator(ranks: Meeting, had: Communicator | None, deadline: Deadline) -> Communicator:
    """A communicator of ranks that have met, from what this one had if it had any. All call it. Raises RunError, LateError."""
    shrinks, grows = nccl_has("ncclCommShrink"), nccl_has("ncclCommGrow", "ncclCommGetUniqueId")
    old = ("", 0, 0) if had is None else (had.name, had.rank, had.size)
    mine = msgspec.msgpack.encode(Had(*old, shrinks, grows, secrets.token_hex(_NAME_BYTES)))
    told = [msgspec.msgpack.decode(text, type=Had) for text in ranks.exchange(mine, deadline)]
    handle = None if had is None else had.handle
    parts_s: dict[str, float] = {}
    for way in ways_to(told):
        began_s = time.monotonic()
        match way:
            case Way.NEW:
                handle = _new(ranks, deadline)
            case Way.SHRINK:
                handle = _shrunk(ranks, handle, told, deadline)
            case Way.GROW:
                handle = _grown(ranks, handle, sum(bool(each.name) for each in told), deadline)
        parts_s[way] = time.monotonic() - began_s
    assert handle is not None
    return Communicator(handle, told[0].fresh, ranks.rank, ranks.size, parts_s)


def _new(ranks: Meeting, deadline: Deadline) -> "nccl.Comm":
    from nccl.bindings import nccl

    shared = _told_by_first(ranks, nccl.get_unique_id, deadline)
    call = lambda: nccl.comm_init_rank_config(ranks.size, shared, ranks.rank, nccl.Config())  # noqa: E731
    return _called(ranks, call, "making a communicator", deadline)


def _shrunk(ranks: Meeting, parent: "nccl.Comm | None", told: Sequence[Had], deadline: Deadline) -> "nccl.Comm | None":
    from nccl.bindings import nccl

    if parent is None:
        return None
    gone = sorted({*range(told[0].size)} - {each.rank for each in told if each.name})
    call = lambda: nccl.comm_shrink(parent, gone, len(gone), _LIKE_PARENT, _SHRINK_DEFAULT)  # noqa: E731
    return _called(ranks, call, f"shrinking a communicator by {len(gone)} ranks", deadline)


def _grown(ranks: Meeting, parent: "nccl.Comm | None", n_parent: int, deadline: Deadline) -> "nccl.Comm":
    from nccl.bindings import nccl

    shared = _told_by_first(ranks, lambda: nccl.comm_get_unique_id(parent), deadline)
    comes = ranks.rank >= n_parent
    knows = comes or ranks.rank == 0  # the others of the parent get the id by it
    old, rank = (nccl.Comm(), ranks.rank) if comes else (parent, _EXISTING)
    call = lambda: nccl.comm_grow(old, ranks.size, shared.ptr if knows else 0, rank, _LIKE_PARENT)  # noqa: E731
    return _called(ranks, call, f"growing a communicator to {ranks.size} ranks", deadline)


def _told_by_first(ranks: Meeting, make: "Callable[[], nccl.UniqueId]", deadline: Deadline) -> "nccl.UniqueId":
    """The id that rank 0 makes, on all ranks."""
    from nccl.bindings import nccl

    mine = b""
    if ranks.rank == 0:
        made = translated(make, "making a unique id")
        mine = ctypes.string_at(made.ptr, _ID_BYTES)
    return nccl.UniqueId.from_buffer(bytearray(ranks.exchange(mine, deadline)[0]))


def _called(ranks: Meeting, call: Callable[[], Result], what: str, deadline: Deadline) -> Result:
    """What a call that waits for other ranks returns. Raises LateError past the deadline."""

    def run() -> Result:
        ranks.device.use()
        return call()

    return within(deadline, lambda: translated(run, what))


def translated(call: Callable[[], Result], what: str) -> Result:
    """What a call of the bindings returns; RunError in place of what they raise."""
    from nccl.bindings import nccl

    try:
        return call()
    except nccl.NCCLError as error:
        raise RunError(f"NCCL failed at {what}: {error}; NCCL_DEBUG=INFO says more") from error
