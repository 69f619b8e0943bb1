"""Collectives and what they were measured to take: time over bytes for one operation and one shape of group."""

import math
from dataclasses import dataclass
from enum import StrEnum

from shardroute.topologies.errors import InputError


class Collective(StrEnum):
    """An operation that all ranks of a group do together.

    `n_bytes` of an operation is the whole tensor of one rank: what it holds after an all-gather, before a reduce-scatter,
    sends in all of an all-to-all (its own part included), reduces, broadcasts, or sends in a permute. nccl-tests counts the
    same way.
    """

    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    PERMUTE = "collective-permute"


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Measured seconds of `op` over groups of n_ranks in n_domains NVLink domains, by bytes, which rise.

    Raises InputError for numbers that no measurement gives: lists of unlike length, bytes that don't rise, times not above 0.
    """

    op: Collective
    n_ranks: int
    n_domains: int
    n_bytes: tuple[int, ...]
    time_s: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        what = f"{self.op} over {self.n_ranks} ranks"
        if not 1 <= self.n_domains <= self.n_ranks or self.n_ranks < 2:
            raise InputError(f"{what}: expected from 2 ranks, in 1 domain to as many as ranks, found {self.n_domains} domains")
        if not self.n_bytes or len(self.n_bytes) != len(self.time_s):
            raise InputError(f"{what}: found {len(self.n_bytes)} sizes and {len(self.time_s)} times, expected as many, from 1")
        if self.n_bytes[0] < 1 or any(a >= b for a, b in zip(self.n_bytes, self.n_bytes[1:], strict=False)):
            raise InputError(f"{what}: bytes must rise from 1 on")
        if any(not (math.isfinite(t) and t > 0) for t in self.time_s):
            raise InputError(f"{what}: expected times above 0 seconds, found {min(self.time_s)!r}")
        if not self.source.strip():
            raise InputError(f"{what}: source is empty; name the document or log that the times are from")
