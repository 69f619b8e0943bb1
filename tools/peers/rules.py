"""The published rules in our own words, from what their planners were seen to do.

Each is checked against figures that the planners themselves gave (tests/test_peers.py); a star marks them in tables. A rule
sees the patterns of one tensor, as the planners do.
"""

from collections.abc import Mapping, Sequence

from peers.rounds import alpa
from peers.ways import Domains, Pattern, Refused, Rule, Way, by_trees, chain, hop
from shardroute.planner.routing.trees import Hop

# Rings and all-gathers as trees are as many hops as the square of the ranks; above this their loads alone are worked out.
MOST_STRIPES = 64
# What M2N 0.1.0 takes: source shards that feed one destination shard, and targets of a source (ring), and for its direct mode.
MOST_SOURCES, MOST_TARGETS = 16, 64
MOST_DIRECT_SOURCES, MOST_DIRECT_TARGETS = 32, 64


def _uniform(n_holders: int, n_needers: int) -> list[tuple[int, int, int]]:
    """M2N's uniform deal: (holder, first needer, end). Of several holders for one needer the first sends, the rest are idle."""
    if n_holders >= n_needers:
        per, extra = divmod(n_holders, n_needers)
        return [(i * per + min(i, extra), i, i + 1) for i in range(n_needers)]
    per, extra = divmod(n_needers, n_holders)
    cut = [i * per + min(i, extra) for i in range(n_holders + 1)]
    return [(i, cut[i], cut[i + 1]) for i in range(n_holders)]


def _by_node(n_holders: int, nodes: Sequence[int]) -> list[tuple[int, int, int]]:
    """M2N's node-aware deal: holder i serves the i-th node from the first needer's on, or a run of nodes where holders are fewer.

    Nodes are counted through from first to last, those without a needer too.
    """
    n_nodes = nodes[-1] - nodes[0] + 1
    n_senders = min(n_holders, n_nodes)
    per, extra = divmod(n_nodes, n_senders)
    dealt = []
    for i in range(n_senders):
        first = i * per + min(i, extra)
        served = [k for k, node in enumerate(nodes) if first <= node - nodes[0] < first + per + (i < extra)]
        if served:
            dealt.append((i, served[0], served[-1] + 1))
    return dealt


def _m2n(patterns: Sequence[Pattern], domain: Domains, *, by_node: bool) -> list[Way]:
    """A holder sends to one leader on the first node of its needers; leaders hand over on their node, and on to the next node's.

    The source shards that feed one destination shard are dealt over the needers of a node as whole shards, in runs.
    """
    feeding: dict[bytes, list[int]] = {}
    for i, (_, needers) in enumerate(patterns):
        feeding.setdefault(needers.tobytes(), []).append(i)
    ways: list[Way | None] = [None] * len(patterns)
    for members in feeding.values():
        members.sort(key=lambda i: int(patterns[i][0][0]))
        for k, i in enumerate(members):
            holders, needers = (ranks.tolist() for ranks in patterns[i])
            nodes = [int(domain[n]) for n in needers]
            deal = _by_node(len(holders), nodes) if by_node else _uniform(len(holders), len(needers))
            hops: list[Hop] = []
            for sender, first, end in deal:
                from_, parent = holders[sender], None
                for node in sorted({nodes[j] for j in range(first, end)}):
                    local = [needers[j] for j in range(first, end) if nodes[j] == node]
                    leader = local[_run(k, len(members), len(local))]
                    hops.append(hop(from_, leader, parent, domain))
                    from_, parent = leader, len(hops) - 1
                    hops += [hop(leader, other, parent, domain) for other in local if other != leader]
            ways[i] = by_trees([tuple(hops)])
    return [way for way in ways if way is not None]


def _run(item: int, n_items: int, n_bins: int) -> int:
    """The bin of an item when items are dealt over bins in runs, the first bins taking one more."""
    per, extra = divmod(n_items, n_bins)
    return item // (per + 1) if item < extra * (per + 1) else extra + (item - extra * (per + 1)) // per


def m2n_limits(patterns: Sequence[Pattern], *, direct: bool = False) -> None:
    """Raise Refused where M2N 0.1.0 has no room for the layout."""
    sources: dict[bytes, int] = {}
    targets: dict[bytes, int] = {}
    for holders, needers in patterns:
        sources[needers.tobytes()] = sources.get(needers.tobytes(), 0) + 1
        n_targets = max(1, len(needers) // len(holders)) if direct else 1
        targets[holders.tobytes()] = targets.get(holders.tobytes(), 0) + n_targets
    most = (MOST_DIRECT_SOURCES, MOST_DIRECT_TARGETS) if direct else (MOST_SOURCES, MOST_TARGETS)
    for found, limit, what in ((sources, most[0], "sources"), (targets, most[1], "targets")):
        if max(found.values(), default=0) > limit:
            raise Refused(f"{max(found.values())} {what} > {limit}")


def m2n_uniform(patterns: Sequence[Pattern], domain: Domains) -> list[Way]:
    """NCCL M2N Reshard 0.1.0, ring, uniform."""
    return _m2n(patterns, domain, by_node=False)


def m2n_node(patterns: Sequence[Pattern], domain: Domains) -> list[Way]:
    """NCCL M2N Reshard 0.1.0, ring, node-aware."""
    return _m2n(patterns, domain, by_node=True)


def m2n_direct(patterns: Sequence[Pattern], domain: Domains) -> list[Way]:
    """NCCL M2N Reshard 0.1.0, direct: every needer pulls from the holder that the uniform deal gives it."""
    ways = []
    for who, to in patterns:
        holders, needers = who.tolist(), to.tolist()
        deal = _uniform(len(holders), len(needers))
        hops = [hop(holders[i], needers[j], None, domain) for i, first, end in deal for j in range(first, end)]
        ways.append(by_trees([tuple(hops)]))
    return ways


def nemo_v1(patterns: Sequence[Pattern], domain: Domains) -> list[Way]:
    """NeMo RL's Python planner, v1: the first holder sends once, needers pass it on in a ring (a broadcast)."""
    return [by_trees([chain(int(who[0]), to.tolist(), domain)]) for who, to in patterns]


def nemo_striped(patterns: Sequence[Pattern], domain: Domains) -> list[Way]:
    """NeMo RL's Python planner, striped: a stripe for each needing replica, holders take turns; then a ring all-gather."""
    ways, turn = [], 0
    for who, to in patterns:
        holders, needers = who.tolist(), to.tolist()
        n = len(needers)
        senders = [holders[(turn + j) % len(holders)] for j in range(n)]
        turn += n
        if n <= MOST_STRIPES:
            ways.append(by_trees([chain(senders[j], needers[j:] + needers[:j], domain) for j in range(n)]))
            continue
        injected = [(senders[j], needers[j], 1 / n) for j in range(n)]
        passed = [(needers[j], needers[(j + 1) % n], (n - 1) / n) for j in range(n)]
        ways.append(Way(tuple(injected + passed), n, None))
    return ways


def awex(patterns: Sequence[Pattern], domain: Domains) -> list[Way]:
    """Awex: every needing replica gets a copy of its own, straight from a holding one; no relay."""
    return [
        by_trees([tuple(hop(int(who[j % len(who)]), int(rank), None, domain) for j, rank in enumerate(to))])
        for who, to in patterns
    ]


RULES: Mapping[str, Rule] = {
    "M2N uniform*": m2n_uniform,
    "M2N node-aware*": m2n_node,
    "M2N direct*": m2n_direct,
    "NeMo v1*": nemo_v1,
    "NeMo striped*": nemo_striped,
    "Awex*": awex,
    "Alpa greedy*": alpa,
}
