"""How near `greedy` and `optimal` come to the bound on the layouts that published planners were run on, and on whole models.

tools/bench_routes.py has all of them; those that take some ten seconds each, or minutes, are there only.
"""

import pytest

from peers.layouts import MODELS, TENSORS, problem_of
from shardroute.planner.reports import traffic
from shardroute.planner.routing.bounds import cuts, demand
from shardroute.planner.routing.loads import busiest_s
from shardroute.planner.routing.strategies import make_plan, pieces_of
from shardroute.topologies.calibrations import nominal_calibration
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


@pytest.mark.parametrize(("layout", "machine"), CASES)
def test_the_busiest_link_is_near_the_bound(layout, machine) -> None:
    problem = problem_of(layout)
    topology = build_topology(load_machine(machine), None, problem.n_ranks)
    found = cuts(demand(problem, pieces_of(problem), topology), topology, nominal_calibration(topology.machine))
    bound_s = next(cut.seconds for cut in found if not cut.name.startswith("latency"))

    greedy, optimal, relay, direct = (
        make_plan(problem, topology, strategy) for strategy in ("greedy", "optimal", "domain-relay", "direct")
    )

    assert bound_s * (1 - 1e-9) <= busiest_s(greedy) <= 1.10 * bound_s
    assert bound_s * (1 - 1e-9) <= busiest_s(optimal) <= 1.02 * bound_s
    assert busiest_s(greedy) <= min(busiest_s(relay), busiest_s(direct)) * 1.01
    assert traffic(greedy).n_bytes_cross_domain <= traffic(relay).n_bytes_cross_domain
