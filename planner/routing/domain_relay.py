"""`domain-relay`: one copy of each piece into each NVLink domain, passed from domain to domain, handed over inside by NVLink.

The idea is NCCL M2N Reshard's (its node-aware rule): in each domain one needer is the leader of a piece; the domains form as
many chains as there are holders, each holder feeds the first leader of its chain, each leader the next, and leaders hand over
to the other needers of their domain. Unlike M2N's, the leader's role goes round the needers of a domain, a chain starts at
another domain for another holder, and bundles are passed on while later ones arrive.
"""

from collections.abc import Sequence

from shardroute.planner.layouts.fragments import Ranks
from shardroute.planner.plans import Lane
from shardroute.planner.routing.direct import at_home
from shardroute.planner.routing.trees import Hop, Tree
from shardroute.topologies.topologies import Topology


def trees(holders: Ranks, needers: Ranks, topology: Topology) -> Sequence[Tree]:
    """The trees of `domain-relay`: as many as the most needers in a domain, or the holders if they outnumber the chains."""
    _, left = at_home(holders, needers, topology, 0)
    domains = _by_domain(left, topology)
    n_chains = min(len(holders), len(domains))
    n_turns = max([1, *map(len, domains)])
    if n_chains < len(holders):
        n_turns = max(n_turns, len(holders))
    return [_tree(holders, needers, topology, turn) for turn in range(n_turns)]


def _by_domain(ranks: Sequence[int], topology: Topology) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for rank in ranks:
        groups.setdefault(int(topology.domain[rank]), []).append(rank)
    return [groups[d] for d in sorted(groups)]


def _tree(holders: Ranks, needers: Ranks, topology: Topology, turn: int) -> Tree:
    hops, left = at_home(holders, needers, topology, turn)
    domains = _by_domain(left, topology)
    if not domains:
        return tuple(hops)
    # Which domain comes first depends on the holder, so that the first legs of many pieces don't all enter one domain.
    start = int(holders[0]) % len(domains)
    domains = domains[start:] + domains[:start]
    n_chains = min(len(holders), len(domains))
    for chain in range(n_chains):
        sender, parent, lane = int(holders[(chain + turn) % len(holders)]), None, Lane.INJECT
        for domain in domains[chain * len(domains) // n_chains : (chain + 1) * len(domains) // n_chains]:
            leader = domain[turn % len(domain)]
            hops.append(Hop(sender, leader, lane, parent))
            sender, parent, lane = leader, len(hops) - 1, Lane.RELAY
            hops += [Hop(leader, other, Lane.HAND_OVER, parent) for other in domain if other != leader]
    return tuple(hops)
