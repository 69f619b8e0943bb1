"""Laws of every strategy, for random layouts: the plan delivers by a stupid interpreter, `check` agrees, bounds hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_oracle import deliver, wanted

from shardroute.planner.check import check
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.plans import Lane, lane_of
from shardroute.planner.reports import needs_of, report, traffic
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.testing import tensor_problems
from shardroute.topologies.calibrations import default_calibration, nominal_calibration
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

H100 = load_machine("dgx-h100")
MACHINES = [load_machine(name) for name in ("dgx-h100", "gb200-nvl72", "cpu-processes")]


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(problem=tensor_problems(), machine=st.sampled_from(MACHINES), message_bytes=st.integers(1, 200))
def test_a_plan_delivers_every_needed_element_once(strategy, problem, machine, message_bytes) -> None:
    plan = make_plan(problem, build_topology(machine, None, problem.n_ranks), strategy, message_bytes)

    assert deliver(plan) == wanted(plan)
    assert check(plan).n_deliveries >= 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(problem=tensor_problems())
def test_a_plan_survives_its_file_unchanged(strategy, problem, tmp_path_factory) -> None:
    plan = make_plan(problem, build_topology(H100, None, problem.n_ranks), strategy)
    path = tmp_path_factory.mktemp("plan") / "a.plan"

    save_plan(plan, path)

    assert load_plan(path).digest == plan.digest


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(problem=tensor_problems(), machine=st.sampled_from(MACHINES))
def test_no_prediction_beats_the_lower_bound(strategy, problem, machine) -> None:
    topology = build_topology(machine, None, problem.n_ranks)
    calibration = default_calibration(machine.name)
    plan = make_plan(problem, topology, strategy)

    found = report(plan, predict(plan, calibration), calibration)

    assert found.predicted_s >= found.lower_bound_s * (1 - 1e-9)


@given(problem=tensor_problems(n_ranks=20), message_bytes=st.integers(1, 200))
def test_domain_relay_moves_each_piece_into_each_domain_once(problem, message_bytes) -> None:
    plan = make_plan(problem, build_topology(H100, None, problem.n_ranks), "domain-relay", message_bytes)

    assert traffic(plan).n_bytes_cross_domain == needs_of(plan).n_bytes_cross_domain


@given(problem=tensor_problems(n_ranks=20))
def test_domain_relay_moves_no_byte_that_direct_would_not(problem) -> None:
    topology = build_topology(H100, None, problem.n_ranks)

    relayed, direct = (traffic(make_plan(problem, topology, s)) for s in ("domain-relay", "direct"))

    assert relayed.n_bytes_moved == direct.n_bytes_moved
    assert relayed.n_bytes_cross_domain <= direct.n_bytes_cross_domain


@settings(max_examples=30)
@given(problem=tensor_problems(), strategy=st.sampled_from(sorted(STRATEGIES)))
def test_planning_and_predicting_twice_gives_the_same(problem, strategy) -> None:
    topology = build_topology(H100, None, problem.n_ranks)
    calibration = nominal_calibration(H100)

    first, second = (make_plan(problem, topology, strategy) for _ in range(2))

    assert first.digest == second.digest
    ends = [predict(p, calibration).timeline.end_s for p in (first, second)]
    assert np.array_equal(*ends)


@settings(max_examples=30)
@given(
    problem=tensor_problems(n_ranks=20),
    strategy=st.sampled_from(["greedy", "optimal"]),
    machine=st.sampled_from(["dgx-h100", "gb200-nvl72"]),
)
def test_what_is_latency_alone_is_not_predicted_slower_than_by_the_fixed_rules(problem, strategy, machine) -> None:
    topology, calibration = build_topology(load_machine(machine), None, problem.n_ranks), default_calibration(machine)

    ours, *fixed = (
        predict(make_plan(problem, topology, s), calibration).predicted_s for s in (strategy, "direct", "domain-relay")
    )

    assert ours <= 1.01 * min(fixed) + 1e-12


@settings(max_examples=40)
@given(
    problem=tensor_problems(n_ranks=20),
    strategy=st.sampled_from(["direct", "domain-relay", "greedy", "optimal"]),
    message_bytes=st.integers(4, 60),
    most=st.integers(1, 3),
)
def test_a_limit_on_what_is_in_flight_holds_out_of_every_rank_and_into_it(problem, strategy, message_bytes, most) -> None:
    options = Options(max_ops_in_flight=most, message_bytes=message_bytes)

    plan = make_plan(problem, build_topology(H100, None, problem.n_ranks), strategy, options=options)

    assert deliver(plan) == wanted(plan)
    check(plan)
    done_before = happens_before(plan)
    steps, carries = plan.steps, lane_of(plan.steps.lane) != Lane.CREDIT
    for rank in range(problem.n_ranks):
        arrives = carries & (steps.dst == rank) & (steps.src != rank)
        for rows in (np.flatnonzero(carries & (steps.src == rank)), np.flatnonzero(arrives)):
            assert done_before[rows[most:], rows[:-most]].all()


def happens_before(plan):
    """bool[n, n]: whether the step of the column is complete when that of the row starts, whatever takes how long."""
    steps = plan.steps
    n = len(steps)
    before = np.zeros((n, n), dtype=bool)
    last = {}
    for i in range(n):
        waits = steps.after[steps.after_ptr[i] : steps.after_ptr[i + 1]].tolist()
        queue = (int(steps.src[i]), int(steps.lane[i]))
        for step in [*waits, *([last[queue]] if queue in last else [])]:
            before[i] |= before[step]
            before[i, step] = True
        last[queue] = i
    return before


@given(problem=tensor_problems(n_ranks=20), message_bytes=st.integers(1, 60))
def test_within_a_queue_a_rank_meets_steps_in_plan_order_and_waits_only_backwards(problem, message_bytes) -> None:
    plan = make_plan(problem, build_topology(H100, None, problem.n_ranks), "domain-relay", message_bytes)

    owner = np.repeat(np.arange(len(plan.steps)), np.diff(plan.steps.after_ptr))
    assert (plan.steps.after < owner).all()
    assert set(lane_of(plan.steps.lane).tolist()) <= {0, 1, 2, 3}
