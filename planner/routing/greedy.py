"""`greedy`: balances all tensors at once, without a solver: source replica, entry GPU, exit GPU, relays and hand-over, chunk by
chunk; or takes the trees of a fixed rule where these serve better.

See `balance` for how chunks are balanced and `contests` for how ways are compared. It spends a bounded effort, so it serves
problems of any size.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import Backend, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing.balance import (
    LEVEL,
    ROUNDING,
    Balanced,
    balance,
    level,
    sent_by,
    unevenness,
    with_busiest,
)
from shardroute.planner.routing.chunked import Chunked, Whole, cut_into_chunks, look_at
from shardroute.planner.routing.contests import ENTRANT_STEPS, Entrant, arranged_entrant, best_plan, entrant_of, is_long
from shardroute.planner.routing.costs import costs_of
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.rules import Rule, arranged_by_rule, rule_trees
from shardroute.topologies.topologies import Topology

# A chunk is at most this share of what a NIC carries in the least time: rounding to chunks costs a percent of a link's load.
CHUNKS_OVER_BUSIEST_LINK = 200
# Chunks over the busiest link, and how much larger messages are, that are tried beside where plans are small enough to simulate:
# a message costs its start, and NCCL gives a small one few channels, so small payloads want few.
COARSER = ((40.0, 1.0), (8.0, 1.0), (8.0, 5.0), (8.0, 25.0))
# Balancing stops when the busiest link is this near to the bound.
GOOD_ENOUGH = 1.01
# A plan's busiest link stays within this of the bound where a tree can be found.
MOST_OVER = 1.10
# Hops from which only one way is made: the trees of `domain-relay` where they come this near to the bound, else balanced ones.
# Balancing takes longest of all, and in such problems gains a percent over such a rule.
RULE_ALONE_HOPS = 400_000
RULE_OVER = 1.03
# Steps of the balanced way up to which `direct` takes part: it wins where latency rules, and else each holder sends all copies
# itself, in one tangle of flows that takes longest to predict (Qwen3-235B from 128 to 128 GPUs: 10 s).
DIRECT_STEPS = 10_000
# Shares of planning that are over when chunks are cut, trees balanced, senders levelled, steps arranged: roughly, as it is with
# DeepSeek-V3 between 256 and 256 GPUs. For those who wait.
_CUT, _BALANCED, _LEVELLED, _ARRANGED = 0.1, 0.2, 0.65, 0.9


def plan(problem: Problem, whole: Sequence[Pieces], topology: Topology, backend: Backend, options: Options) -> Plan:
    """The plan of `greedy`. `whole` are the pieces of each class of the problem, uncut."""
    seen = look_at(problem, whole, topology)
    entrants = [e for each in one_backend_each(options) for e in ways("greedy", seen, topology, backend, each)]
    return best_plan(entrants, topology, problem.n_ranks, options, seen.bound_s, MOST_OVER)


def one_backend_each(options: Options) -> list[Options]:
    """The options, and where they allow several backends the same with each alone: so a mix is no slower than any one of them."""
    alone = [replace(options, backends=(backend,)) for backend in options.backends]
    found = [options, *(alone if len(alone) > 1 else ())]
    return [each.part(i / len(found), (i + 1) / len(found)) for i, each in enumerate(found)]


def ways(strategy: str, whole: Whole, topology: Topology, backend: Backend, options: Options) -> list[Entrant]:
    """Ways to route the problem: by the fixed rules, mended where a link is too busy, and balanced in chunks of several sizes."""
    problem = whole.problem

    def enter(chunked: Chunked, found: Balanced) -> Entrant:
        return entrant_of(strategy, problem, topology, backend, options, chunked, found)

    long = is_long(whole.bound_s, costs_of(topology, problem.n_ranks, options))
    chunked = cut_into_chunks(whole, options, CHUNKS_OVER_BUSIEST_LINK)
    n_hops = chunked.n_hops
    relay = by_rule(Rule.RELAY, chunked, topology)
    plain = relay
    options.tell(_CUT)
    if n_hops <= RULE_ALONE_HOPS or relay.busiest_s > chunked.bound_s * RULE_OVER:
        plain = balanced(chunked, topology, GOOD_ENOUGH)
    if n_hops > RULE_ALONE_HOPS:
        options.tell(_BALANCED)
        alone = [relay] if plain is relay else with_level(chunked, topology, plain, GOOD_ENOUGH, afresh=not long)
        options.tell(_LEVELLED)
        return [enter(chunked, alone[-1])]
    options.tell(_BALANCED)
    found = [*with_level(chunked, topology, plain, GOOD_ENOUGH, afresh=not long)]
    options.tell(_LEVELLED)
    mended = balanced(chunked, topology, GOOD_ENOUGH, relay)
    found += [mended] if long else with_level(chunked, topology, mended, GOOD_ENOUGH, relay, afresh=True)
    entrants = [enter(chunked, trees) for trees in found]
    options.tell(_ARRANGED)
    entrants.append(_exactly(strategy, Rule.RELAY, whole, topology, backend, options))
    if long:
        return entrants  # bytes are all that counts, and coarse chunks only balance worse
    for n_chunks, larger in COARSER:
        coarse = cut_into_chunks(whole, options, n_chunks, larger)
        is_new = coarse.n_hops != n_hops or (coarse.message_bytes > chunked.message_bytes and chunked.message_bytes < whole.into)
        if coarse.n_hops <= ENTRANT_STEPS and is_new:
            plain = balanced(coarse, topology, GOOD_ENOUGH)
            entrants += [enter(coarse, trees) for trees in with_level(coarse, topology, plain, GOOD_ENOUGH, afresh=True)]
    if entrants[0].n_steps <= DIRECT_STEPS:
        entrants.append(_exactly(strategy, Rule.DIRECT, whole, topology, backend, options))
    return entrants


def _exactly(strategy: str, rule: Rule, whole: Whole, topology: Topology, backend: Backend, options: Options) -> Entrant:
    """The very routes of a fixed rule: so the strategy is not slower, where links allow them to take part."""
    untold = replace(options, told=None)  # a rule's shares are those of planning by it alone
    boxes, arranged = arranged_by_rule(rule, whole.problem, whole.pieces, whole.patterns, topology, untold)
    return arranged_entrant(strategy, whole.problem, topology, backend, options, boxes, arranged, rule=True)


def balanced(
    chunked: Chunked, topology: Topology, good_enough: float, start: Balanced | None = None, *, eased: bool = False
) -> Balanced:
    """Trees for all chunks, from nothing or from trees that are mended; `eased` has source ranks send more of what they hold."""
    problem = chunked.whole.problem
    return balance(
        chunked.patterns, chunked.chunks, topology, problem.n_ranks, chunked.bound_s, staging=chunked.staging,
        most_depth=chunked.most_depth, good_enough=good_enough, start=start, eased=problem.source.ranks if eased else None,
    )  # fmt: skip


def with_level(
    chunked: Chunked, topology: Topology, found: Balanced, good_enough: float, start: Balanced | None = None, *,
    afresh: bool = False,
) -> list[Balanced]:  # fmt: skip
    """The trees, and where the source ranks send unevenly others in which they don't, as far as links allow.

    They are the same trees mended, or with `afresh` eased ones from `start` mended where their links are no busier.
    """
    problem = chunked.whole.problem
    sources = problem.source.ranks

    def uneven(trees: Balanced) -> float:
        return unevenness(sent_by(trees, chunked.chunks, problem.n_ranks)[sources])

    if uneven(found) <= LEVEL:
        return [found]
    most_s = max(found.busiest_s, chunked.bound_s * good_enough)
    for given in (*([balanced(chunked, topology, good_enough, start, eased=True)] if afresh else []), found):
        result = level(
            given, sources, chunked.patterns, chunked.chunks, topology, problem.n_ranks, chunked.bound_s,
            staging=chunked.staging, most_depth=chunked.most_depth, most_s=most_s,
        )  # fmt: skip
        if result.busiest_s <= most_s * (1 + ROUNDING) and uneven(result) < uneven(found):
            return [found, result]
    return [found]


def by_rule(rule: Rule, chunked: Chunked, topology: Topology) -> Balanced:
    """The trees that a fixed rule gives the chunks, dealt over the chunks of each pattern."""
    pattern = chunked.chunks.pattern
    n_chunks = np.bincount(pattern, minlength=len(chunked.patterns))
    trees = rule_trees(rule, chunked.patterns, n_chunks)
    turn = np.arange(len(pattern)) - np.repeat(np.cumsum(n_chunks) - n_chunks, n_chunks)  # chunks stand pattern by pattern
    tree = trees.first[pattern] + turn % np.maximum(trees.count[pattern], 1)
    found = Balanced(trees.ptr[tree], np.diff(trees.ptr)[tree], trees.src, trees.dst, trees.parent, trees.kind, 0.0)
    return with_busiest(found, chunked.chunks, topology, chunked.whole.problem.n_ranks)
