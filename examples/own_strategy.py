"""A strategy of your own: say how one piece travels, and shardroute bundles, orders, proves and predicts it.

    python examples/own_strategy.py

`staircase` passes each piece from needing rank to needing rank, domain after domain: one copy leaves the source, and all
others come from the rank before. It is planned beside `direct` and `domain-relay` for 16 expert-parallel ranks to 4 replicas.
"""

from shardroute.planner import check, make_plan, predict
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.plans import Lane
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.sizes import split_all
from shardroute.planner.routing.strategies import backend_for, pieces_of
from shardroute.planner.routing.trees import Hop, plan_by_trees
from shardroute.topologies import build_topology, default_calibration, format_seconds, load_machine

MESSAGE_BYTES = 4 * 2**20


def staircase(holders, needers, topology):
    """One tree for each holder of a piece, from which pieces take turns: holder, first needer, second needer, and so on."""
    trees = []
    for holder in holders.tolist():
        hops, at, parent = [], holder, None
        for rank in sorted(needers.tolist(), key=lambda rank: (topology.domain[rank], rank)):
            if rank in holders:
                hops.append(Hop(rank, rank, Lane.LOCAL))
                continue
            near = topology.domain[at] == topology.domain[rank]
            lane = Lane.HAND_OVER if near else Lane.INJECT if parent is None else Lane.RELAY
            hops.append(Hop(at, rank, lane, parent))
            at, parent = rank, len(hops) - 1
        trees.append(tuple(hops))
    return trees


def main() -> None:
    """Plan one problem by three strategies, prove and predict each."""
    problem = tensor_problem("256,2048,1024", "bf16", "ep=16", "S0", "dp=4,tp=8", "R,S1")
    topology = build_topology(load_machine("dgx-h100"), min_gpus=problem.n_ranks)
    options = Options(message_bytes=MESSAGE_BYTES)
    pieces = split_all(problem, pieces_of(problem), MESSAGE_BYTES)
    backend = backend_for(problem, topology)
    mine = plan_by_trees("staircase", problem, pieces, topology, backend, staircase, MESSAGE_BYTES, options)
    others = [make_plan(problem, topology, name, options=options) for name in ("direct", "domain-relay")]
    for plan in (mine, *others):
        check(plan)
        print(f"{plan.strategy:14} {format_seconds(predict(plan, default_calibration('dgx-h100')).predicted_s)}")


if __name__ == "__main__":
    main()
