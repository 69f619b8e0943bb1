"""`direct`: each needing rank fetches each piece from one holder, straight.

The needers of a piece are spread over its holders in contiguous, even ranges (as NCCL M2N's uniform rule does), but a rank that
holds the piece itself copies locally, and one with a holder in its NVLink domain fetches it there.
"""

from collections.abc import Sequence

from shardroute.planner.layouts.fragments import Ranks
from shardroute.planner.plans import Lane
from shardroute.planner.routing.trees import Hop, Tree
from shardroute.topologies.topologies import Topology


def at_home(holders: Ranks, needers: Ranks, topology: Topology, turn: int) -> tuple[list[Hop], list[int]]:
    """Hops for the needers that a holder of their own domain serves (or that hold the piece), and the needers that are left.

    Such a domain's holders are used in turn; `turn` says which is first.
    """
    local: dict[int, list[int]] = {}
    for holder in holders.tolist():
        local.setdefault(int(topology.domain[holder]), []).append(holder)
    held = set(holders.tolist())
    hops, left = [], []
    for i, needer in enumerate(needers.tolist()):
        near = local.get(int(topology.domain[needer]))
        if needer in held:
            hops.append(Hop(needer, needer, Lane.LOCAL))
        elif near:
            hops.append(Hop(near[(i + turn) % len(near)], needer, Lane.HAND_OVER))
        else:
            left.append(needer)
    return hops, left


def trees(holders: Ranks, needers: Ranks, topology: Topology) -> Sequence[Tree]:
    """The trees of `direct`: depth one. As many as there are holders, each shifted by one, when one alone would not use all
    evenly.
    """
    n_holders = len(holders)
    n_left = len(at_home(holders, needers, topology, 0)[1])
    n_trees = 1 if n_left and n_left % n_holders == 0 else n_holders
    found = []
    for turn in range(n_trees):
        hops, left = at_home(holders, needers, topology, turn)
        hops += [
            Hop(int(holders[(i * n_holders // len(left) + turn) % n_holders]), needer, Lane.INJECT)
            for i, needer in enumerate(left)
        ]
        found.append(tuple(hops))
    return found
