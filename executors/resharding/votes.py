"""What ranks tell each other about a transfer: before it what each is about to move, after it whether all of it is there.

Rule: weights change only after every rank has said that its own are complete; what any rank says against that, all hear.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.piece_sums import NONE, PieceRows, Sums, describe_wrong, first_wrong
from shardroute.executors.transports.following import pack_sums, unpack_sums
from shardroute.executors.transports.seam import Deadline, World
from shardroute.planner.plans import Plan
from shardroute.topologies.errors import RunError


class _Ready(msgspec.Struct, frozen=True, array_like=True):
    settings: str
    failure: str


class _Opening(msgspec.Struct, frozen=True, array_like=True):
    digest: str
    version: int
    has: list[bool]  # of each bucket, whether the rank's part of it is there already


class _Vote(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part is there; with the checksums that it took, if any."""

    sent: bytes = b""
    kept: bytes = b""


def agree_on_ready(world: World, settings: str, failure: str, deadline: Deadline) -> None:
    """Return when every rank is ready to move, with the same settings. Raises RunError on every rank with what those say that
    aren't.
    """
    mine = msgspec.msgpack.encode(_Ready(settings, failure))
    told = [msgspec.msgpack.decode(text, type=_Ready) for text in world.exchange(mine, deadline)]
    words = [f"rank {rank} couldn't get ready: {each.failure}" for rank, each in enumerate(told) if each.failure]
    if words:
        raise RunError("; ".join(words) + "; no byte was moved")
    _compare("have different settings", [each.settings for each in told])


def agree_on_version(world: World, digest: str, version: int, has: list[bool], deadline: Deadline) -> list[bool]:
    """Return when every rank is about to move the same version by the same plans: of each bucket, whether it need not be moved,
    for all ranks have it from a transfer that failed later on. If they have all buckets, all are moved. Raises RunError on every
    rank if they differ.
    """
    mine = msgspec.msgpack.encode(_Opening(digest, version, has))
    told = [msgspec.msgpack.decode(text, type=_Opening) for text in world.exchange(mine, deadline)]
    _compare("would move different plans", [each.digest[:12] for each in told])
    _compare("would move different versions", [str(each.version) for each in told])
    had = [all(of_ranks) for of_ranks in zip(*(each.has for each in told), strict=True)]
    return [False] * len(had) if all(had) else had


def agree_on_end(world: World, plan: Plan, rows: PieceRows | None, sums: Sums | None, deadline: Deadline) -> None:
    """Return when every rank has all of its weights and, with checksums, each piece is what was sent. Raises RunError on every
    rank if not.
    """
    vote = _Vote() if rows is None or sums is None else _Vote(pack_sums(sums), sums.kept[sums.landing].tobytes())
    told = world.exchange(msgspec.msgpack.encode(vote), deadline)
    if rows is None:
        return
    votes = [msgspec.msgpack.decode(text, type=_Vote) for text in told]
    sent, kept = (np.zeros(len(rows.step), dtype=np.uint64) for _ in range(2))
    unpack_sums(rows, sent, [vote.sent for vote in votes])
    _unpack_kept(rows, kept, [vote.kept for vote in votes])
    row = first_wrong(rows, sent, kept)
    if row != NONE:
        raise RunError(describe_wrong(plan, rows, row))


def _compare(what: str, values: list[str]) -> None:
    if len(set(values)) > 1:
        most = max(sorted(set(values)), key=values.count)
        odd = [f"rank {rank} {value}" for rank, value in enumerate(values) if value != most]
        raise RunError(f"the ranks {what}: most {most}, {', '.join(odd)}; no byte was moved")


def _unpack_kept(rows: PieceRows, kept: NDArray[np.uint64], given: list[bytes]) -> None:
    landing = np.flatnonzero(rows.lands)
    landing = landing[np.argsort(rows.to[landing], kind="stable")]
    ranks = np.unique(rows.to[landing]).tolist()
    kept[landing] = np.frombuffer(b"".join(given[rank] for rank in ranks), np.uint64)
