"""How a contender moves the pieces of one pattern, and what that comes to on each rank.

Rule: a peer is judged by where its bytes go. What carries them (kernels, barriers, packing) is the same for all here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ranks
from shardroute.planner.plans import Lane
from shardroute.planner.routing.trees import Hop, Tree

Pattern = tuple[Ranks, Ranks]  # who holds a piece, who needs it; no rank does both
Domains = NDArray[np.int32]  # of each rank


@dataclass(frozen=True, slots=True)
class Way:
    """The way of a pattern's pieces.

    hops    (from, to, share of the bytes)
    depth   hops that the last byte makes
    trees   the same as trees of equal shares, for a plan; None where they would be too many
    """

    hops: tuple[tuple[int, int, float], ...]
    depth: int
    trees: tuple[Tree, ...] | None


# From the patterns of a tensor to their ways, in their order.
Rule = Callable[[Sequence[Pattern], Domains], list[Way]]


class Refused(Exception):
    """The peer refuses the layout; the text says why."""


def by_trees(trees: Sequence[Tree]) -> Way:
    """The way that deals pieces over these trees in turn."""
    depth = 0
    for tree in trees:
        depths: list[int] = []
        for hop in tree:
            depths.append(1 + (0 if hop.parent is None else depths[hop.parent]))
        depth = max(depth, *depths, 0)
    share = 1.0 / len(trees)
    return Way(tuple((hop.src, hop.dst, share) for tree in trees for hop in tree), depth, tuple(trees))


def hop(src: int, dst: int, parent: int | None, domain: Domains) -> Hop:
    """A hop; its lane follows from where its ends are."""
    near = domain[src] == domain[dst]
    lane = Lane.HAND_OVER if near and parent is not None else Lane.INJECT if parent is None else Lane.RELAY
    return Hop(src, dst, lane, parent)


def chain(sender: int, needers: Sequence[int], domain: Domains) -> Tree:
    """From the sender to the first needer, and from each needer to the next."""
    hops = [hop(sender, needers[0], None, domain)]
    for a, b in pairwise(needers):
        hops.append(hop(a, b, len(hops) - 1, domain))
    return tuple(hops)


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """Bytes of a contender by rank, float64[n_ranks], and in all.

    sent, nic_out, nic_in   by a rank to any other; over its NIC; into its NIC
    crossed                 into other domains
    """

    sent: NDArray[np.float64]
    nic_out: NDArray[np.float64]
    nic_in: NDArray[np.float64]
    crossed: float


def loads(n_ranks: int, src: NDArray[np.int64], dst: NDArray[np.int64], n_bytes: NDArray[np.float64], domain: Domains) -> Loads:
    """The loads of copies between ranks."""
    far = domain[src] != domain[dst]
    sent, nic_out, nic_in = (
        np.bincount(end[rows], weights=n_bytes[rows], minlength=n_ranks).astype(np.float64)
        for end, rows in ((src, src != dst), (src, far), (dst, far))
    )
    return Loads(sent, nic_out, nic_in, float(n_bytes[far].sum()))


def loads_of_ways(ways: Sequence[Way], n_bytes: Sequence[float], n_ranks: int, domain: Domains) -> Loads:
    """The loads of patterns of these sizes that go these ways."""
    rows = np.array([(a, b, share * size) for way, size in zip(ways, n_bytes, strict=True) for a, b, share in way.hops])
    rows = rows.reshape(-1, 3)
    return loads(n_ranks, rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64), rows[:, 2], domain)
