"""Simulations with a tolerance on many sparse links, exact ones that go on with one, and how a user asks for it."""

import json

import numpy as np
import pytest
from flow_oracle import graph_of
from typer.testing import CliRunner

from shardroute.planner.cli import app
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.plan_files import save_plan
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.planner.simulator import TaskGraph, engine, in_order, kernel, simulate
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology


def lanes(n_gpus: int, n_flows: int, seed: int = 3) -> TaskGraph:
    """Flows of unlike sizes from each of n_gpus to random others, in four lanes a sender: few at a time on every link."""
    rng = np.random.default_rng(seed)
    src, dst = np.arange(n_flows) % n_gpus, rng.integers(0, n_gpus, n_flows)
    lane = src * 4 + np.arange(n_flows) // n_gpus % 4
    dep_ptr, dep_tasks = in_order(lane)
    return TaskGraph(
        start_s=np.zeros(n_flows), delay_s=np.full(n_flows, 0.01), amount=rng.lognormal(0, 1.5, n_flows),
        cap=np.full(n_flows, np.inf), weight=np.ones(n_flows), route_ptr=np.arange(0, 2 * n_flows + 1, 2),
        route_links=np.stack([src, n_gpus + dst], axis=1).reshape(-1), dep_ptr=dep_ptr, dep_tasks=dep_tasks,
        capacity=np.ones(2 * n_gpus),
    )  # fmt: skip


def uses(graph: TaskGraph, state: kernel.State) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What each link carries at this moment, and of each slot of a class that has flows, the class and the link."""
    rates = np.array(state.class_rates).reshape(-1, kernel.WIDTH)
    codes = np.array(state.class_codes).reshape(-1, kernel.WIDTH)
    owner = np.repeat(np.arange(len(codes)), codes[:, kernel.ROUTE_TO] - codes[:, kernel.ROUTE_FROM])
    link = np.array(state.slots[kernel.LINK])
    active = codes[owner, kernel.COUNT] > 0
    owner, link = owner[active], link[active]
    flow = codes[:, kernel.COUNT] * rates[:, kernel.RATE]
    return np.bincount(link, flow[owner], graph.n_links), owner, link


def test_in_rounds_no_link_is_over_its_capacity_or_left_free_by_more_than_a_tenth_of_the_tolerance() -> None:
    tolerance = 0.2
    graph = lanes(60, 900)
    state = engine._as_lists(engine._lower(graph))
    slack = kernel.SLACK_SHARE * tolerance
    n_rounds = 0

    while not kernel.advance(state, tolerance, 500):
        use, owner, link = uses(graph, state)

        n_rounds = max(n_rounds, state.counts[kernel.N_MARKS] - state.counts[kernel.N_SOLVES])
        assert (use <= graph.capacity * (1 + slack + 1e-9)).all()
        fullest = np.zeros(int(owner.max(initial=-1)) + 1)
        np.maximum.at(fullest, owner, use[link])
        assert (fullest[np.unique(owner)] >= 1 - slack - 1e-9).all()
    assert n_rounds > 20


def test_windows_of_flows_on_sparse_links_need_few_solves_and_come_out_near() -> None:
    pytest.importorskip("numba")
    graph = lanes(400, 8000)

    exact, rough = simulate(graph, compiled=True), simulate(graph, tolerance=0.01, compiled=True)

    off = np.abs(rough.finish_s / exact.finish_s - 1)
    assert rough.n_events < exact.n_events / 8
    assert rough.reached_tolerance <= 0.01 * (1 + 1e-9)
    assert np.median(off) < 0.01
    assert rough.makespan_s == pytest.approx(exact.makespan_s, rel=0.02)
    assert rough.makespan_s * (1 + kernel.SLACK_SHARE * 0.01) >= rough.link_busy_s.max()


def test_a_short_flow_does_not_make_the_rates_of_long_ones_change_alone() -> None:
    # Flows of 10 s have come and gone, so one of 0.01 s may be noticed up to 0.1 s late; at 1 % of its own time it might not.
    graph = graph_of([1.0, 1.0], [[0], [0, 1], [0, 1], [0, 1]], [10.0, 10.0, 0.01, 0.01], start_s=[0.0, 20.0, 21.0, 21.05])

    exact, rough = simulate(graph), simulate(graph, tolerance=0.01)

    assert rough.n_events < exact.n_events
    assert rough.finish_s == pytest.approx(exact.finish_s, abs=0.1)
    assert 0.0 < rough.reached_tolerance <= 0.01 * (1 + 1e-9)


def test_what_takes_no_time_beside_the_clocks_steps_has_no_share_to_miss() -> None:
    """Found by random graphs: a flow of 1.5e-13 bytes that begins after days divided by nothing."""
    graph = TaskGraph(
        start_s=np.array([9.56553063719414e-06, 6.98317786156396e-08, 0.7650539572518145, 0.0006950007533391354, 0.0]),
        delay_s=np.array([0.0, 0.0, 1.3641733407654866e-07, 0.0, 0.0]),
        amount=np.array([379218678291981.44, 1.46873208332844e-13, 989729392280803.2, 9.991002934087129e-13, 383.6387259392684]),
        cap=np.array([1e9, np.inf, 93701.33520898368, np.inf, np.inf]),
        weight=np.array([5.371052595777659, 2.0151793421940134, 1.0, 1.0, 1.0]),
        route_ptr=np.array([0, 0, 1, 2, 3, 4]), route_links=np.zeros(4, np.int32), dep_ptr=np.array([0, 0, 1, 2, 2, 3]),
        dep_tasks=np.array([0, 1, 1], np.int32), capacity=np.array([928189178.259829]),
    )  # fmt: skip

    found = simulate(graph, tolerance=0.01)

    assert found.finish_s == pytest.approx(simulate(graph).finish_s, rel=0.01)


def test_an_exact_simulation_that_would_take_long_goes_on_with_the_tolerance_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PLAIN_WORK", 2_000)
    monkeypatch.setattr(engine, "_WORK_A_REPORT", 2_000)
    monkeypatch.setattr(engine, "FORESEEN_FROM", 4_000)
    graph = lanes(40, 800)
    exact = simulate(graph, compiled=False)

    monkeypatch.setattr(engine, "MOST_EXACT", 10_000)
    relaxed, asked = simulate(graph, may_relax=0.05, compiled=False), simulate(graph, compiled=False)

    assert (relaxed.tolerance, asked.tolerance) == (0.05, 0.0)
    assert relaxed.foreseen_s > 10_000 / engine.EXACT_WORK_A_SECOND
    assert relaxed.n_events < exact.n_events
    assert 0.0 < relaxed.reached_tolerance <= 0.05 * (1 + 1e-9)
    assert asked.finish_s.tobytes() == exact.finish_s.tobytes()
    first = np.sort(exact.finish_s)[:20]
    np.testing.assert_array_equal(np.sort(relaxed.finish_s)[:20], first)


def test_an_exact_simulation_that_takes_no_time_stays_exact() -> None:
    graph = lanes(20, 200)

    result = simulate(graph, may_relax=0.05)

    assert (result.tolerance, result.foreseen_s, result.reached_tolerance) == (0.0, 0.0, 0.0)
    assert result.finish_s.tobytes() == simulate(graph).finish_s.tobytes()


def test_a_tolerance_to_go_on_with_outside_0_to_1_is_refused() -> None:
    with pytest.raises(InputError, match=r"may_relax: found 1.5, expected a share in \[0, 1\)"):
        simulate(graph_of([1.0], [[0]], [1.0]), may_relax=1.5)


# On the command line


@pytest.fixture
def plan_file(tmp_path):
    shape = (64, 1 << 20)
    problem = one_tensor(
        shape,
        "u8",
        place(shape, Mesh.of({"x": 16}, range(16)), [Shard(0)]),
        place(shape, Mesh.of({"x": 16}, range(16, 32)), [Replicate()]),
    )
    path = tmp_path / "x.plan"
    save_plan(make_plan(problem, build_topology(load_machine("dgx-h100"), None, 32), "direct"), str(path))
    return str(path)


def test_simulate_says_which_tolerance_it_went_by(plan_file) -> None:
    found = {}
    for share in ("0", "0.05"):
        said = CliRunner().invoke(app, ["simulate", plan_file, "--tolerance", share, "--json"])
        found[share] = json.loads(said.stdout)

    assert (found["0"]["tolerance"], found["0"]["reached_tolerance"]) == (0.0, 0.0)
    assert found["0.05"]["tolerance"] == 0.05
    assert found["0.05"]["reached_tolerance"] <= 0.05 * (1 + 1e-9)


def test_simulate_says_when_it_went_on_with_a_tolerance_by_itself(plan_file, monkeypatch) -> None:
    for name, work in (("PLAIN_WORK", 100), ("_WORK_A_REPORT", 100), ("FORESEEN_FROM", 100), ("MOST_EXACT", 1000)):
        monkeypatch.setattr(engine, name, work)

    said = CliRunner().invoke(app, ["simulate", plan_file])

    assert said.exit_code == 0
    assert "predicted with a tolerance of 1%: exactly it was foreseen to take more than" in said.stderr
    assert "with a tolerance of 0.01" in " ".join(said.stdout.split())


@pytest.mark.parametrize("share", ["-0.1", "0.5", "0.999", "1", "nan"])
def test_a_tolerance_that_is_no_share_is_refused_in_words(plan_file, share) -> None:
    said = CliRunner().invoke(app, ["simulate", plan_file, "--tolerance", share])

    assert isinstance(said.exception, InputError)
    assert str(said.exception).startswith(f"--tolerance {share}: expected a share from 0 (exact) to below 0.5, such as 0.01; ")
