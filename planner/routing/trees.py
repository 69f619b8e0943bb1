"""Rules for one pattern at a time: trees, dealt over the pieces of a pattern. For rules that need not be fast; `rules` has ours.

A *tree* is how one piece travels: copies from holders to needers, some of them from a rank that has just received it. A
strategy gives, for the holders and needers of a piece, one tree or several equally good ones; pieces are dealt over these in
turn, largest first, so that all replicas work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.fragments import Ranks
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import Backend, Boxes, Lane, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing.costs import costs_of
from shardroute.planner.routing.lowering import arrange, finish
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.patterns import entries_of
from shardroute.planner.routing.routes import Routes
from shardroute.planner.routing.rules import deal
from shardroute.topologies.topologies import Topology


@dataclass(frozen=True, slots=True)
class Hop:
    """One copy of a tree: from `src` to `dst`; `parent` is the index of the hop that brought the piece to `src` (None = it
    holds it).
    """

    src: int
    dst: int
    lane: Lane
    parent: int | None = None


Tree = tuple[Hop, ...]
TreeRule = Callable[[Ranks, Ranks, Topology], Sequence[Tree]]


def plan_by_trees(
    strategy: str,
    problem: Problem,
    pieces: Sequence[Pieces],
    topology: Topology,
    backend: Backend,
    rule: TreeRule,
    message_bytes: int,
    options: Options,
) -> Plan:
    """The plan that moves every piece by the trees of `rule`. `pieces` are those of each class, none above `message_bytes`."""
    entries, holders, needers = entries_of(problem, pieces)
    trees: list[Tree] = []
    first, count = (np.zeros(len(holders), dtype=np.int64) for _ in range(2))
    for i, (who, to) in enumerate(zip(holders, needers, strict=True)):
        alternatives = rule(who, to, topology)
        first[i], count[i] = len(trees), len(alternatives)
        trees.extend(alternatives)
    turn = deal(entries.pattern, entries.n_bytes, entries.tensor)
    tree = first[entries.pattern] + turn % np.maximum(count[entries.pattern], 1)
    hops = [hop for tree in trees for hop in tree]
    routes = Routes(
        tree_ptr=np.cumsum([0, *(len(tree) for tree in trees)], dtype=np.int64),
        src=np.array([h.src for h in hops], dtype=np.int32),
        dst=np.array([h.dst for h in hops], dtype=np.int32),
        lane=np.array([h.lane for h in hops], dtype=np.uint8),
        parent=np.array([-1 if h.parent is None else h.parent for h in hops], dtype=np.int64),
        staged=np.zeros(len(hops), dtype=bool),
        tensor=entries.tensor,
        piece=entries.piece,
        n_bytes=entries.n_bytes,
        tree=tree,
    )
    boxes = tuple(Boxes(p.lo, p.hi) for p in pieces)
    arranged = arrange(routes, topology, message_bytes, options, costs_of(topology, problem.n_ranks, options))
    return finish(strategy, problem, boxes, topology, backend, arranged, options)
