"""How near `greedy` and `optimal` come to the bound on the layouts that published planners were run on, and on whole models.

tools/bench_routes.py has all of them; those that take some ten seconds each, or minutes, are there only.
"""

from functools import cache

import numpy as np
import pytest

from peers.layouts import MODELS, TENSORS, problem_of
from shardroute.planner.plans import Lane, lane_of
from shardroute.planner.reports import traffic
from shardroute.planner.routing.bounds import cuts, demand
from shardroute.planner.routing.loads import busiest_s
from shardroute.planner.routing.strategies import make_plan, pieces_of
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import default_calibration, nominal_calibration
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

SLOW = (
    "EP16 -> DP12xTP4", "EP16 -> DP16xTP8", "EP32 -> DP16xTP16", "EP64 -> DP8xTP8", "DP8xEP8 -> DP2xEP32", "DP4xEP4 -> DP2xTP8",
)  # fmt: skip
LONG = {
    *(("DeepSeek-V3", machine) for machine in ("dgx-h100", "gb200-nvl72")),
    *((layout, "gb200-nvl72") for layout in ("Qwen3-235B", "EP16 -> DP8xTP32")),
}
LARGE = ("DP256xTP8 -> same", "EP16 -> DP128xTP32", "DP1024xTP8 -> same")
CASES = [
    (layout, machine)
    for layout in (*TENSORS, *MODELS)
    for machine in ("dgx-h100", "gb200-nvl72")
    if layout not in (*LARGE, *SLOW) and (layout, machine) not in LONG
]
SHORT = ("TP4 -> TP2xDP2", "DP8 -> TP4xDP4", "DP8xTP8 -> TP8", "DP2xTP8 -> DP2xTP16")


def planned(layout, machine, strategy):
    """A plan; those of SHORT, which several tests look at, are made once."""
    return _kept(layout, machine, strategy) if layout in SHORT else _made(layout, machine, strategy)


def _made(layout, machine, strategy):
    problem = problem_of(layout)
    return make_plan(problem, build_topology(load_machine(machine), None, problem.n_ranks), strategy)


_kept = cache(_made)


@pytest.mark.parametrize(("layout", "machine"), CASES)
def test_the_busiest_link_is_near_the_bound(layout, machine) -> None:
    problem = problem_of(layout)
    topology = build_topology(load_machine(machine), None, problem.n_ranks)
    found = cuts(demand(problem, pieces_of(problem), topology), topology, nominal_calibration(topology.machine))
    bound_s = next(cut.seconds for cut in found if not cut.name.startswith("latency"))

    greedy, optimal, relay, direct = (
        planned(layout, machine, strategy) for strategy in ("greedy", "optimal", "domain-relay", "direct")
    )

    assert bound_s * (1 - 1e-9) <= busiest_s(greedy) <= 1.10 * bound_s
    assert bound_s * (1 - 1e-9) <= busiest_s(optimal) <= 1.02 * bound_s
    assert busiest_s(greedy) <= min(busiest_s(relay), busiest_s(direct)) * 1.01
    assert traffic(greedy).n_bytes_cross_domain <= traffic(relay).n_bytes_cross_domain


@pytest.mark.parametrize("machine", ["dgx-h100", "gb200-nvl72"])
@pytest.mark.parametrize("layout", SHORT)
def test_balanced_strategies_are_not_predicted_slower_than_the_fixed_rules(layout, machine) -> None:
    calibration = default_calibration(machine)

    greedy, optimal, *fixed = (
        predict(planned(layout, machine, strategy), calibration).predicted_s
        for strategy in ("greedy", "optimal", "direct", "domain-relay")
    )

    assert max(greedy, optimal) <= 1.01 * min(fixed)


@pytest.mark.parametrize(
    ("layout", "machine"),
    [
        ("DP8 -> TP4xDP4", "dgx-h100"), ("DP8xTP8 -> TP8", "dgx-h100"), ("DP2xTP8 -> DP2xTP16", "gb200-nvl72"),
        ("EP64 -> DP8xTP8", "gb200-nvl72"),
    ],
)  # fmt: skip
def test_sources_send_evenly_where_published_planners_have_them_do_so(layout, machine) -> None:
    plan = planned(layout, machine, "greedy")

    far = lane_of(plan.steps.lane) < Lane.HAND_OVER
    n_ranks = plan.problem.n_ranks
    sent = np.bincount(plan.steps.src[far], weights=plan.step_bytes[far], minlength=n_ranks)[plan.problem.source.ranks]
    assert sent.max() <= 1.01 * sent.mean()
