"""Who sends to whom in NCCL M2N Reshard (nccl-extensions 0.1.0), in our own words and for any pieces.

M2N knows meshes with one shard axis and one replica axis. Here a *source shard* is the ranks that hold the same pieces, its
replicas in ascending order, and a *destination shard* the ranks that need the same pieces; that is the same thing where M2N
plans at all, and defined for every layout. Ranks that hold what they need take no part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from shardroute.topologies.topologies import Topology

T = TypeVar("T")

# Ranks of a communicator above which M2N lets fewer source replicas send (reshardResolveAdaptiveScaleConfig).
_LARGE = 200
# Source replicas that send on a large communicator when a destination replica lies within one domain.
_MOST_SENDERS = 4


@dataclass(frozen=True, slots=True)
class Comm:
    """What a call's rules depend on beside the shards: ranks of the communicator, domains of its destination ranks, whether
    source and destination ranks are apart, and whether the tensor is whole on every rank of both sides.
    """

    n_ranks: int
    n_domains: int
    apart: bool
    whole: bool


@dataclass(frozen=True, slots=True)
class Chain:
    """A source replica, by number, and the destination ranks that its copy reaches: one list for each domain, in ring order."""

    replica: int
    nodes: tuple[tuple[int, ...], ...]


def is_split(comm: Comm, n_replicas: int) -> bool:
    """Whether the call is split: first all sources send into the first domains, then, behind a barrier, copies are passed on.

    Not where destination replicas and domains don't divide evenly, and not for a small broadcast.
    """
    even = comm.n_domains % n_replicas == 0 or n_replicas % comm.n_domains == 0
    return comm.apart and even and not (comm.whole and comm.n_ranks <= _LARGE)


def chains(n_holders: int, needers: Sequence[int], topology: Topology, comm: Comm) -> list[Chain]:
    """The chains by which `needers`, the ranks of one destination shard, get a copy from `n_holders` source replicas."""
    if comm.whole and comm.n_ranks <= _LARGE:
        return by_replicas(n_holders, needers, topology)
    if not is_split(comm, len(needers)):
        return by_domains(n_holders, needers, topology)
    nodes = _nodes(needers, topology)
    n_chains = min(n_holders, len(needers), len(nodes))
    if comm.n_ranks > _LARGE:
        n_chains = min(n_chains, 1 if comm.n_domains > len(needers) else _MOST_SENDERS)
    return [Chain(i, tuple(nodes[i::n_chains])) for i in range(n_chains)]


def by_domains(n_holders: int, needers: Sequence[int], topology: Topology) -> list[Chain]:
    """M2N's NODE_AWARE: source replica i serves domain i, the rest are idle; with fewer replicas each serves several in a row."""
    nodes = _nodes(needers, topology)
    return [Chain(i, part) for i, part in enumerate(_dealt(nodes, min(n_holders, len(nodes))))]


def by_replicas(n_holders: int, needers: Sequence[int], topology: Topology) -> list[Chain]:
    """M2N's UNIFORM: even ranges of destination replicas for each source replica, or the first of each group of these."""
    if n_holders >= len(needers):
        groups = np.array_split(np.arange(n_holders), len(needers))
        return [Chain(int(group[0]), ((rank,),)) for group, rank in zip(groups, needers, strict=True)]
    return [Chain(i, tuple(_nodes(part, topology))) for i, part in enumerate(_dealt(needers, n_holders))]


def leaders(chain: Chain, n_sources: int) -> list[tuple[range, tuple[int, ...]]]:
    """Which source shards (by number) enter by which leader, and the leader of each domain of the chain in turn.

    The source shards of a destination shard are dealt over the ranks of the first domain; a later domain with fewer ranks has its
    last rank lead for the rest.
    """
    first = len(chain.nodes[0])
    parts = _dealt(range(n_sources), first)
    return [
        (range(part[0], part[-1] + 1), tuple(node[min(i, len(node) - 1)] for node in chain.nodes))
        for i, part in enumerate(parts)
        if part
    ]


def _nodes(needers: Sequence[int], topology: Topology) -> list[tuple[int, ...]]:
    groups: dict[int, list[int]] = {}
    for rank in needers:
        groups.setdefault(int(topology.domain[rank]), []).append(rank)
    return [tuple(groups[domain]) for domain in sorted(groups)]


def _dealt(items: Sequence[T], n: int) -> list[tuple[T, ...]]:
    """Contiguous, even parts; the first ones get one more where they don't come out even."""
    each, extra = divmod(len(items), n)
    starts = [i * each + min(i, extra) for i in range(n + 1)]
    return [tuple(items[a:b]) for a, b in pairwise(starts)]
