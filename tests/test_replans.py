"""Replanning keeps what a change leaves alone; the cache gives the same plan again; `auto` says why."""

from dataclasses import replace

import numpy as np
import pytest
from plan_oracle import deliver, wanted

from shardroute.planner.arguments import tensor_problem
from shardroute.planner.check import check
from shardroute.planner.routing.auto import choose
from shardroute.planner.routing.caches import cached_plan, plan_key
from shardroute.planner.routing.loads import busiest_s, link_seconds
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.replans import replan
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

H100 = load_machine("dgx-h100")


def layout(shape="8192,1024", to_mesh="dp=4,tp=8"):
    return tensor_problem(shape, "bf16", "dp=2,ep=8", "R,S0", to_mesh, "R,S0")


def test_nothing_changes_where_nothing_changed() -> None:
    problem = layout()
    topology = build_topology(H100, None, problem.n_ranks)
    plan = make_plan(problem, topology, "greedy")

    again = replan(plan, problem, topology)

    assert again.n_bytes_anew == 0
    assert again.n_bytes_kept == problem.n_bytes
    assert sorted(zip(again.plan.steps.src, again.plan.steps.dst, strict=True)) == sorted(
        zip(plan.steps.src, plan.steps.dst, strict=True)
    )


def test_a_slower_nic_moves_some_pieces_and_leaves_most_alone() -> None:
    problem = layout("8192,8192")
    topology = build_topology(H100, None, problem.n_ranks)
    plan = make_plan(problem, topology, "greedy")
    slow = replace(topology, own_nic_Bps=((17, 25e9),))

    after = replan(plan, problem, slow)

    check(after.plan)
    assert 0 < after.n_bytes_anew < problem.n_bytes / 2
    assert after.n_bytes_kept + after.n_bytes_anew == problem.n_bytes
    assert busiest_s(after.plan) <= 1.10 * busiest_s(make_plan(problem, slow, "greedy"))


def test_a_nic_that_is_down_carries_nothing() -> None:
    problem = layout()
    topology = build_topology(H100, None, problem.n_ranks)
    down = replace(topology, own_nic_Bps=((3, 0.0), (17, 0.0)))

    after = replan(make_plan(problem, topology, "greedy"), problem, down)

    check(after.plan)
    assert np.isfinite(link_seconds(after.plan)).all()
    assert after.n_bytes_kept > 0


def test_ranks_that_leave_and_come_are_served_and_the_others_keep_their_pieces() -> None:
    # Of four inference groups the last one leaves; then it comes back. Small enough for the interpreter.
    four, three = layout("64,16"), layout("64,16", "dp=3,tp=8")
    topology = build_topology(H100, None, four.n_ranks)
    options = Options(message_bytes=256)

    fewer = replan(make_plan(four, topology, "greedy", options=options), three, topology, options)
    more = replan(fewer.plan, four, topology, options)

    for plan in (fewer.plan, more.plan):
        assert deliver(plan) == wanted(plan)
        check(plan)


def test_a_plan_of_collectives_is_not_replanned() -> None:
    problem = layout("64,16")
    topology = build_topology(H100, None, problem.n_ranks)

    with pytest.raises(InputError, match="collectives"):
        replan(make_plan(problem, topology, "gather-broadcast"), problem, topology)


def test_the_second_call_loads_the_plan(tmp_path) -> None:
    problem = layout("64,16")
    topology = build_topology(H100, None, problem.n_ranks)
    first, was_there = cached_plan(problem, topology, "greedy", tmp_path)
    (path,) = tmp_path.iterdir()
    written = path.stat()

    second, is_there = cached_plan(layout("64,16"), topology, "greedy", tmp_path)

    assert (was_there, is_there) == (False, True)
    assert second.digest == first.digest
    assert [(p.suffix, p.stat()[:2]) for p in tmp_path.iterdir()] == [(".plan", written[:2])]


def test_a_damaged_file_is_planned_anew(tmp_path) -> None:
    problem = layout("64,16")
    topology = build_topology(H100, None, problem.n_ranks)
    plan, _ = cached_plan(problem, topology, "greedy", tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:100])

    again, was_there = cached_plan(problem, topology, "greedy", tmp_path)

    assert not was_there
    assert again.digest == plan.digest


def test_whatever_planning_reads_is_in_the_key() -> None:
    problem = layout("64,16")
    topology = build_topology(H100, None, problem.n_ranks)
    options = Options()

    keys = {
        plan_key(problem, topology, "greedy", options),
        plan_key(problem, topology, "optimal", options),
        plan_key(problem, replace(topology, own_nic_Bps=((0, 1e9),)), "greedy", options),
        plan_key(problem, build_topology(H100, 9), "greedy", options),
        plan_key(problem, topology, "greedy", Options(staging_bytes=0)),
        plan_key(layout("64,16", "dp=2,tp=16"), topology, "greedy", options),
        plan_key(layout("64,32"), topology, "greedy", options),
    }

    assert len(keys) == 7


def test_auto_takes_the_fastest_and_says_why() -> None:
    problem = layout()
    topology = build_topology(H100, None, problem.n_ranks)

    choice = choose(problem, topology, default_calibration("dgx-h100"))

    seconds = dict(choice.predicted_s)
    assert choice.plan.strategy == min(seconds, key=lambda name: seconds[name])
    assert set(seconds) == {"greedy", "optimal", "domain-relay", "direct"}
    assert choice.reason.startswith(f"{choice.plan.strategy} is predicted at")
