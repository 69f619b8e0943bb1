"""`optimal`: the choices of `greedy` as a linear program over trees, with a bound from a second program over domains.

See docs/routing.md for both programs and their assumptions. Trees are columns. The first come from balancing fine chunks; more
are priced by the duals: a tree that crosses cheap links is worth having. The fractions that the program gives are cut back to
chunks, so the plan's gap is stated for the plan, not for the program.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import Backend, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing.balance import Balanced, Chunks, link_loads, price_trees, routes_of, sent_by
from shardroute.planner.routing.carriage import carry
from shardroute.planner.routing.chunked import Chunked, cut_into_chunks, look_at
from shardroute.planner.routing.contests import Entrant, arranged_entrant, best_plan, entrant_of
from shardroute.planner.routing.costs import costs_of
from shardroute.planner.routing.greedy import balanced, one_backend_each, ways, with_level
from shardroute.planner.routing.loads import busiest_s
from shardroute.planner.routing.lowering import arrange
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.patterns import Patterns
from shardroute.planner.routing.programs import Program, solve
from shardroute.planner.routing.symmetries import merged
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

# Chunks are this share of what the busiest link carries, so that cutting fractions back to chunks costs little.
CHUNKS_OVER_BUSIEST_LINK = 400
# Balancing alone is taken where it is this near to the bound; the program could gain no more.
NEAR_ENOUGH = 1.005
# A plan's busiest link stays within this of the bound where a tree can be found.
MOST_OVER = 1.02
# Problems whose busiest link is done sooner than a message arrives (launch and latency take some 20 us) are left as they are.
LEAST_BOUND_S = 20e-6
# Rounds of pricing; each adds at most one tree a pattern.
MOST_ROUNDS = 8
# What the last program may take where the others have used up the limit; it has some hundred columns.
LEAST_TIME_S = 1.0
# What a byte of any hop costs beside the busiest link: it decides between routes that are equally fast.
HOP_COST = 1e-4
# What the seconds of the busiest source's NIC cost beside those of the busiest link: sources are levelled where they don't bind.
SENDER_COST = 0.01
# Columns of the program over domains above which it is left out: the cuts are the bound then.
MOST_DOMAIN_COLUMNS = 400_000
# Shares of planning that are over when links are balanced by programs, senders levelled, messages chosen, likewise. The rest are
# the ways of `greedy`.
_IMPROVED, _LEVELLED, _CARRIED = 0.3, 0.45, 0.6


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """A plan with its certificate: seconds of its busiest link at nominal rates, and the seconds that no plan beats."""

    plan: Plan
    objective_s: float
    bound_s: float
    solver: str

    @property
    def gap(self) -> float:
        """How far the plan is above the bound, as a share; 0 when nothing moves."""
        return self.objective_s / self.bound_s - 1 if self.bound_s else 0.0


def plan(problem: Problem, whole: Sequence[Pieces], topology: Topology, backend: Backend, options: Options) -> Plan:
    """The plan of `optimal`."""
    return solution(problem, whole, topology, backend, options).plan


def solution(problem: Problem, whole: Sequence[Pieces], topology: Topology, backend: Backend, options: Options) -> Solution:
    """The best plan found within `options.time_limit_s` of solving, with its gap."""
    began = time.perf_counter()
    seen = look_at(problem, whole, topology)
    chunked = cut_into_chunks(seen, options, CHUNKS_OVER_BUSIEST_LINK)
    bound_s, solver = chunked.bound_s, "none needed"
    found = balanced(chunked, topology, NEAR_ENOUGH)
    if found.busiest_s > bound_s * NEAR_ENOUGH and bound_s >= LEAST_BOUND_S and topology.machine.kind is MachineKind.GPU:
        left = options.time_limit_s - (time.perf_counter() - began)
        by_domains, solver = domain_bound_s(chunked.patterns, topology, problem.n_ranks, max(left / 4, 0.1))
        bound_s = max(bound_s, by_domains)
        if found.busiest_s > bound_s * NEAR_ENOUGH:
            found = _improved(chunked, topology, found, began + options.time_limit_s)
    options.tell(_IMPROVED)
    level = with_level(chunked, topology, found, MOST_OVER, afresh=True)
    options.tell(_LEVELLED)
    entrants = [entrant_of("optimal", problem, topology, backend, options, chunked, trees) for trees in level]
    left = max(began + options.time_limit_s - time.perf_counter(), LEAST_TIME_S)
    entrants += [e for trees in level for e in _carried(chunked, topology, backend, options, trees, left / len(level))]
    options.tell(_CARRIED)
    rest = options.part(_CARRIED, 1.0)
    entrants += [e for each in one_backend_each(rest) for e in ways("optimal", seen, topology, backend, each)]
    plan = best_plan(entrants, topology, problem.n_ranks, options, bound_s, MOST_OVER)
    objective_s = busiest_s(plan)
    return Solution(plan, objective_s, min(bound_s, objective_s), solver)


def _carried(
    chunked: Chunked, topology: Topology, backend: Backend, options: Options, trees: Balanced, time_limit_s: float
) -> list[Entrant]:
    """The entrant that moves each chunk by its tree, in messages of the sizes and by the libraries that the program chooses."""
    problem = chunked.whole.problem
    costs = costs_of(topology, problem.n_ranks, options)
    if costs is None:
        return []
    routes = routes_of(chunked.entries, chunked.chunks, trees)
    found = carry(routes, topology, costs, options, time_limit_s)
    if found is None:
        return []
    arranged = arrange(routes, topology, found.message_bytes, options, costs, (found.near, found.far))
    return [arranged_entrant("optimal", problem, topology, backend, options, chunked.boxes, arranged)]


def domain_bound_s(patterns: Patterns, topology: Topology, n_ranks: int, time_limit_s: float) -> tuple[float, str]:
    """The program over domains: how much each domain sends of each class of pieces; its cost is a bound on every plan.

    A class is a set of home domains and a set of away domains. Every away domain takes a class in once at least, so the domains
    send it that often, the homes once at least, and an away domain nothing to itself. Like domains are one variable.
    """
    classes: dict[tuple[bytes, int], int] = {}
    n_bytes: list[int] = []
    domains: list[NDArray[np.int32]] = []
    n_home: list[int] = []
    ptr = patterns.group_ptr
    for k, count in enumerate(patterns.n_bytes.tolist()):
        of = patterns.domain[ptr[k] : ptr[k + 1]]
        homes = int(patterns.home[ptr[k] : ptr[k + 1]].sum())
        if homes == len(of):
            continue
        number = classes.setdefault((of.tobytes(), homes), len(n_bytes))
        if number == len(n_bytes):
            n_bytes.append(0)
            domains.append(of)
            n_home.append(homes)
        n_bytes[number] += count
    n_classes = len(n_bytes)
    if not n_classes:
        return 0.0, "none needed"
    if sum(map(len, domains)) > MOST_DOMAIN_COLUMNS:
        return 0.0, "none: too many classes"
    ranks = slice(0, n_ranks)
    nic = np.bincount(topology.domain[ranks], weights=topology.nic_Bps[ranks], minlength=topology.n_domains)
    rate = np.minimum(nic, np.bincount(topology.domain, weights=topology.nic_Bps) / topology.machine.oversubscription)
    size = np.array([len(d) for d in domains])
    home = np.array(n_home)
    owner = np.repeat(np.arange(n_classes), size)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(size) - size, size)
    is_home = place < home[owner]
    away = size - home
    unit = np.array(n_bytes, dtype=np.float64)
    column = 1 + np.arange(len(owner))  # column 0 is T, the others shares of a class that a domain sends
    domain = np.concatenate(domains)
    program = Program(
        cost=np.concatenate([[1.0], np.zeros(len(owner))]),
        upper=np.concatenate([[np.inf], np.where(is_home, np.inf, away[owner] - 1.0)]),
        row=np.concatenate([owner, n_classes + owner[is_home], 2 * n_classes + domain, 2 * n_classes + np.arange(len(rate))]),
        column=np.concatenate([column, column[is_home], column, np.zeros(len(rate), dtype=np.int64)]),
        value=np.concatenate(
            [np.ones(len(owner) + int(is_home.sum())), unit[owner] / np.maximum(rate[domain], 1e-30), -np.ones(len(rate))]
        ),
        row_low=np.concatenate([away, np.ones(n_classes), np.full(len(rate), -np.inf)]),
        row_high=np.concatenate([away.astype(np.float64), np.full(n_classes, np.inf), np.zeros(len(rate))]),
    )
    found = solve(merged(program).program, time_limit_s)
    return (0.0, "none: out of time") if found is None or not np.isfinite(found.bound) else (found.bound, found.solver)


def _improved(chunked: Chunked, topology: Topology, start: Balanced, deadline: float) -> Balanced:
    """The best of `start` and what the program over trees gives, cut back to chunks."""
    problem = chunked.whole.problem
    best, best_cost = start, _cost(chunked, topology, start)
    pool = _pool_of(start, chunked.chunks.pattern)
    for trees in with_level(chunked, topology, start, MOST_OVER, afresh=True)[1:]:
        pool = _joined(pool, _pool_of(trees, chunked.chunks.pattern))
    for _ in range(MOST_ROUNDS):
        left = deadline - time.perf_counter()
        if left <= 0:
            break
        shares, duals = _master(chunked, pool, topology, left)
        if shares is None:
            break
        candidate = _cut_back(chunked, pool, shares, topology, problem.n_ranks)
        cost = _cost(chunked, topology, candidate)
        if cost < best_cost:
            best, best_cost = candidate, cost
        if duals is None or best.busiest_s <= chunked.bound_s * NEAR_ENOUGH:
            break
        priced = price_trees(
            chunked.patterns, topology, problem.n_ranks, duals, staging=chunked.staging, most_depth=chunked.most_depth
        )
        larger = _joined(pool, _pool_of(priced, np.arange(len(chunked.patterns))))
        if len(larger.pattern) == len(pool.pattern):
            break
        pool = larger
    return best


def _cost(chunked: Chunked, topology: Topology, trees: Balanced) -> float:
    """The objective of the program over trees, but for the cost of hops."""
    problem = chunked.whole.problem
    sources = problem.source.ranks
    sent = sent_by(trees, chunked.chunks, problem.n_ranks)[sources] / np.maximum(topology.nic_Bps[sources], 1.0)
    return trees.busiest_s + SENDER_COST * float(sent.max(initial=0.0))


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """Distinct trees of patterns: the pattern of each, and its hops as bytes-comparable rows (src, dst, parent, kind)."""

    pattern: Ints
    rows: tuple[NDArray[np.int32], ...]


def _pool_of(found: Balanced, pattern: Ints) -> _Pool:
    rows = []
    for first, count in zip(found.first.tolist(), found.count.tolist(), strict=True):
        hop = slice(first, first + count)
        rows.append(np.stack([found.src[hop], found.dst[hop], found.parent[hop], found.kind[hop].astype(np.int32)], axis=1))
    return _joined(_Pool(np.zeros(0, np.int64), ()), _Pool(pattern, tuple(rows)))


def _joined(first: _Pool, second: _Pool) -> _Pool:
    known: set[tuple[int, bytes]] = set()
    pattern, rows = [], []
    for k, tree in zip(np.concatenate([first.pattern, second.pattern]).tolist(), (*first.rows, *second.rows), strict=True):
        key = (k, tree.tobytes())
        if key not in known:
            known.add(key)
            pattern.append(k)
            rows.append(tree)
    return _Pool(np.array(pattern, dtype=np.int64), tuple(rows))


def _master(
    chunked: Chunked, pool: _Pool, topology: Topology, time_limit_s: float
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    """The program over trees: the share of its pattern that each tree of the pool carries, and the duals of the links."""
    problem, patterns = chunked.whole.problem, chunked.patterns
    length = np.array([len(r) for r in pool.rows])
    owner = np.repeat(np.arange(len(length)), length)
    hops = np.concatenate(pool.rows)
    link, hop, share = link_loads(hops, topology, problem.n_ranks, chunked.bound_s)
    unit = patterns.n_bytes.astype(np.float64)[pool.pattern]
    n_trees, n_patterns = len(pool.pattern), len(patterns)
    key, at = np.unique(owner[hop] * (link.max() + 1) + link, return_inverse=True)
    value = np.bincount(at, weights=share * unit[owner[hop]])
    used, row_of = np.unique(key % (link.max() + 1), return_inverse=True)
    per_tree = np.bincount(key // (link.max() + 1), weights=value, minlength=n_trees)
    # Columns: T, the busiest source S, the trees. Rows: patterns, links under T, links out of sources under S.
    out = np.flatnonzero(np.isin(used, problem.source.ranks))
    of_out = np.full(len(used), -1)
    of_out[out] = np.arange(len(out))
    sends = np.flatnonzero(of_out[row_of] >= 0)
    tree, n_links = 2 + key // (link.max() + 1), len(used)
    first_out = n_patterns + n_links
    program = Program(
        cost=np.concatenate([[1.0, SENDER_COST], HOP_COST * per_tree / max(float(per_tree.sum()), 1e-30)]),
        upper=np.concatenate([[np.inf, np.inf], np.ones(n_trees)]),
        row=np.concatenate([
            pool.pattern, n_patterns + row_of, n_patterns + np.arange(n_links), first_out + of_out[row_of[sends]],
            first_out + np.arange(len(out)),
        ]),
        column=np.concatenate([
            2 + np.arange(n_trees), tree, np.zeros(n_links, dtype=np.int64), tree[sends], np.ones(len(out), dtype=np.int64),
        ]),
        value=np.concatenate([np.ones(n_trees), value, -np.ones(n_links), value[sends], -np.ones(len(out))]),
        row_low=np.concatenate([np.ones(n_patterns), np.full(n_links + len(out), -np.inf)]),
        row_high=np.concatenate([np.ones(n_patterns), np.zeros(n_links + len(out))]),
    )  # fmt: skip
    like = merged(program)
    solved = solve(like.program, time_limit_s)
    if solved is None:
        return None, None
    found = like.expanded(solved)
    duals = None
    if found.duals is not None:
        duals = np.zeros(4 * topology.n_gpus + topology.n_domains)
        duals[used] = np.maximum(-found.duals[n_patterns:first_out], 0.0)
        duals[used[out]] += np.maximum(-found.duals[first_out:], 0.0)
    return found.x[2:], duals


def _cut_back(chunked: Chunked, pool: _Pool, shares: NDArray[np.float64], topology: Topology, n_ranks: int) -> Balanced:
    """Give each chunk a tree of its pattern, so that every tree gets its share of the bytes to within a chunk."""
    chunks: Chunks = chunked.chunks
    by_pattern = np.argsort(pool.pattern, kind="stable")
    ptr = np.searchsorted(pool.pattern[by_pattern], np.arange(len(chunked.patterns) + 1))
    tree_of = np.zeros(len(chunks.pattern), dtype=np.int64)
    left = shares * chunked.patterns.n_bytes[pool.pattern]
    sizes = chunks.n_bytes.astype(np.float64)
    for c in np.lexsort((np.arange(len(sizes)), -sizes)).tolist():
        k = chunks.pattern[c]
        options = by_pattern[ptr[k] : ptr[k + 1]]
        tree = options[int(np.argmax(left[options]))]
        tree_of[c] = tree
        left[tree] -= sizes[c]
    length = np.array([len(r) for r in pool.rows])
    count = length[tree_of]
    hops = np.concatenate([pool.rows[t] for t in tree_of.tolist()])
    link, hop, share = link_loads(hops, topology, n_ranks, 1.0)
    owner = np.repeat(np.arange(len(tree_of)), count)
    seconds = np.bincount(link, weights=share * sizes[owner[hop]])
    src, dst, parent, kind = hops.T
    return Balanced(
        np.cumsum(count) - count, count, src.astype(np.int32), dst.astype(np.int32), parent.astype(np.int32),
        kind.astype(np.uint8), float(seconds.max(initial=0.0)),
    )  # fmt: skip
