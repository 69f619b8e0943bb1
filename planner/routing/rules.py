"""The fixed rules `direct` and `domain-relay`: from the holders and needers of a pattern to trees, for all patterns at once.

`direct`: each needing rank fetches each piece from one holder, straight. The needers are spread over the holders in contiguous,
even ranges (as NCCL M2N's uniform rule does), but a rank that holds the piece itself copies locally, and one with a holder in its
NVLink domain fetches it there.

`domain-relay`: one copy of each piece into each NVLink domain, passed from domain to domain, handed over inside by NVLink. The
idea is NCCL M2N Reshard's (its node-aware rule): in each domain one needer is the leader of a piece; the domains form as many
chains as there are holders, each holder feeds the first leader of its chain, each leader the next, and leaders hand over to the
other needers of their domain. Unlike M2N's, the leader's role goes round the needers of a domain, a chain starts at another
domain for another holder, and bundles are passed on while later ones arrive.

A rule has several equally good trees for a pattern, which differ by their *turn*; what a pattern has is dealt over them, so that
all replicas work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.compiling import compiled
from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import Backend, Boxes, Plan, places
from shardroute.planner.problems import Problem
from shardroute.planner.routing import rules_kernel
from shardroute.planner.routing.costs import costs_of
from shardroute.planner.routing.lowering import Arranged, arrange, finish
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.patterns import Patterns, by_pattern, entries_of, patterns_of
from shardroute.planner.routing.routes import Routes
from shardroute.planner.routing.sizes import bytes_into_busiest_rank, message_bytes_for, split_all
from shardroute.topologies.topologies import Topology

# Hops from which the kernel is compiled: plain, it writes some 300,000 a second; Numba takes 0.5 s to import and load its cache.
COMPILE_HOPS = 150_000
# Shares of planning that are over when trees are made, and steps arranged: roughly, as it is with DeepSeek-V3 between 256 and 256
# GPUs. For those who wait.
_TREES, _ARRANGED = 0.15, 0.9


class Rule(StrEnum):
    """A fixed rule, by the name of its strategy."""

    DIRECT = "direct"
    RELAY = "domain-relay"


@dataclass(frozen=True, slots=True, eq=False)
class RuleTrees:
    """Trees of a rule: those of pattern k begin at tree first[k], count[k] of them. Hops CSR, as in `Routes`."""

    first: Ints
    count: Ints
    ptr: Ints
    src: Ranks
    dst: Ranks
    parent: Ranks
    kind: NDArray[np.uint8]


def n_turns(rule: Rule, patterns: Patterns) -> Ints:
    """How many trees the rule has for each pattern."""
    holders = np.diff(patterns.holders[0][patterns.group_ptr])
    away, of_group = ~patterns.home, np.diff(patterns.needers[0])
    n_left = by_pattern(patterns, np.where(away, of_group, 0))
    if rule is Rule.DIRECT:
        # One tree uses all holders evenly where they divide the needers.
        return np.asarray(np.where((n_left > 0) & (n_left % holders == 0), 1, holders))
    n_away = by_pattern(patterns, away.astype(np.int64))
    most = np.zeros(len(patterns), dtype=np.int64)
    np.maximum.at(most, np.repeat(np.arange(len(patterns)), np.diff(patterns.group_ptr)), np.where(away, of_group, 0))
    return np.asarray(np.maximum(np.maximum(most, 1), np.where(n_away < holders, holders, 0)))


def rule_trees(rule: Rule, patterns: Patterns, most: Ints) -> RuleTrees:
    """The rule's trees for every pattern, for `most` pieces (of each pattern) to be dealt over in turn.

    Turns go on from one pattern of the same holders to the next, so that none of these is first more often than others.
    """
    count = np.minimum(n_turns(rule, patterns), np.maximum(most, 0))
    pattern = np.repeat(np.arange(len(patterns)), count)
    turn = np.arange(len(pattern)) - np.repeat(np.cumsum(count) - count - _dealt_before(patterns, most), count)
    n_hops = (np.diff(patterns.local[0]) + by_pattern(patterns, np.diff(patterns.needers[0])))[pattern]
    ptr = np.concatenate([[0], np.cumsum(n_hops)]).astype(np.int64)
    src, dst, parent = (np.zeros(int(ptr[-1]), dtype=np.int32) for _ in range(3))
    kind = np.zeros(int(ptr[-1]), dtype=np.uint8)
    kernel = compiled(rules_kernel) if ptr[-1] > COMPILE_HOPS else rules_kernel
    run = kernel.direct if rule is Rule.DIRECT else kernel.relay
    run(
        pattern, turn, ptr[:-1], *patterns.local, patterns.group_ptr, patterns.home, *patterns.holders, *patterns.needers,
        src, dst, parent, kind,
    )  # fmt: skip
    return RuleTrees(np.cumsum(count) - count, count, ptr, src, dst, parent, kind)


def _dealt_before(patterns: Patterns, most: Ints) -> Ints:
    """Of each pattern: the pieces of the patterns before it that the same ranks hold."""
    # Equal sets of holders are one array, see `entries_of`.
    same = np.unique([id(holders) for holders in patterns.holder_sets], return_inverse=True)[1]
    order = np.argsort(same, kind="stable")
    before = np.cumsum(most[order]) - most[order]
    first = np.searchsorted(same[order], same[order])
    found = np.empty(len(order), dtype=np.int64)
    found[order] = before - before[first]
    return found


def plan_by_rule(
    rule: Rule, problem: Problem, whole: Sequence[Pieces], topology: Topology, backend: Backend, options: Options
) -> Plan:
    """The plan that moves every piece by a tree of the rule. `whole` are the pieces of each class of the problem, uncut."""
    patterns = patterns_of(*entries_of(problem, whole), topology)
    boxes, arranged = arranged_by_rule(rule, problem, whole, patterns, topology, options)
    options.tell(_ARRANGED)
    return finish(rule.value, problem, boxes, topology, backend, arranged, options)


def arranged_by_rule(
    rule: Rule, problem: Problem, whole: Sequence[Pieces], patterns: Patterns, topology: Topology, options: Options
) -> tuple[tuple[Boxes, ...], Arranged]:
    """The same before it becomes a plan: boxes of the pieces, and the routes in bundles and in order."""
    limit = options.message_bytes
    if limit is None:
        limit = message_bytes_for(bytes_into_busiest_rank(patterns, problem.n_ranks))
    pieces = split_all(problem, whole, limit)
    entries = entries_of(problem, pieces)[0]
    trees = rule_trees(rule, patterns, np.bincount(entries.pattern, minlength=len(patterns)))
    options.tell(_TREES)
    turn = deal(entries.pattern, entries.n_bytes, entries.tensor)
    tree = trees.first[entries.pattern] + turn % np.maximum(trees.count, 1)[entries.pattern]
    routes = Routes(
        tree_ptr=trees.ptr, src=trees.src, dst=trees.dst, lane=trees.kind, parent=trees.parent.astype(np.int64),
        staged=np.zeros(len(trees.src), dtype=bool),
        tensor=entries.tensor, piece=entries.piece, n_bytes=entries.n_bytes, tree=tree,
    )  # fmt: skip
    arranged = arrange(routes, topology, limit, options, costs_of(topology, problem.n_ranks, options))
    return tuple(Boxes(p.lo, p.hi) for p in pieces), arranged


def deal(pattern: Ints, n_bytes: Ints, tie: Ints) -> Ints:
    """Each row's turn among those of its pattern: dealt largest first, ties by `tie`."""
    order = np.lexsort((tie, -n_bytes, pattern))
    dealt = np.empty(len(order), dtype=np.int64)
    dealt[order] = places(pattern[order])
    return dealt
