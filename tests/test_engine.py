"""The event kernel: closed forms, what it refuses, and that compiled, plain and switched runs are one."""

import dataclasses
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from flow_oracle import graph_of, simulate_plainly

import shardroute.planner.simulator as simulator
from shardroute.planner.simulator import TaskGraph, in_order, merge_dependencies, simulate
from shardroute.planner.simulator.engine import PLAIN_TASKS
from shardroute.topologies.errors import InputError, PlanError


def finish_times(graph: TaskGraph) -> list[float]:
    return simulate(graph, compiled=False).finish_s.tolist()


def burst(n: int, n_links: int, seed: int = 0) -> TaskGraph:
    """n flows of unequal amounts over two random links each, all at once: one event for each flow."""
    rng = np.random.default_rng(seed)
    routes = [rng.choice(n_links, 2, replace=False).tolist() for _ in range(n)]
    return graph_of([1.0] * n_links, routes, rng.uniform(1, 9, n).tolist())


def run_python(code: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return found.stdout


def test_the_package_offers_these_names() -> None:
    assert simulator.__all__ == ["SimulationResult", "TaskGraph", "in_order", "merge_dependencies", "simulate"]


# Closed forms


def test_a_flow_alone_takes_its_delay_and_its_amount_over_the_slowest_link() -> None:
    assert finish_times(graph_of([4.0, 2.0], [[0, 1]], [6.0], start_s=[1.0], delay_s=[0.5])) == [1.0 + 0.5 + 6.0 / 2.0]


def test_an_incast_of_n_equal_flows_takes_n_times_as_long_as_one_in_one_event_at_the_end() -> None:
    senders = [[1 + i, 0] for i in range(7)]

    result = simulate(graph_of([1.0] * 8, senders, [3.0] * 7), compiled=False)

    assert result.finish_s.tolist() == [21.0] * 7
    assert result.n_events == 2


def test_on_a_parking_lot_the_long_flow_gets_the_share_of_its_tightest_link() -> None:
    # Rates 1/2, 1/2, 3/2 until the first two end at 2; the last then has 2 - 3/2 * 2 = nothing left.
    assert finish_times(graph_of([1.0, 2.0], [[0, 1], [0], [1]], [1.0, 1.0, 3.0])) == [2.0, 2.0, 2.0]


def test_a_flow_that_ends_leaves_its_share_to_the_others() -> None:
    assert finish_times(graph_of([1.0], [[0], [0]], [1.0, 3.0])) == [2.0, 4.0]


def test_a_store_and_forward_chain_adds_up() -> None:
    graph = graph_of([1.0, 2.0, 4.0], [[0], [1], [2]], [8.0] * 3, delay_s=[0.5] * 3, deps=[[], [0], [1]])

    assert finish_times(graph) == [8.5, 8.5 + 4.5, 8.5 + 4.5 + 2.5]


def test_a_flow_never_passes_its_cap_and_leaves_the_rest_to_others() -> None:
    assert finish_times(graph_of([4.0], [[0], [0]], [2.0, 6.0], cap=[1.0, np.inf])) == [2.0, 2.0]


def test_rates_are_shared_by_weight() -> None:
    assert finish_times(graph_of([4.0], [[0], [0]], [2.0, 6.0], weight=[1.0, 3.0])) == [2.0, 2.0]


def test_a_task_without_a_route_moves_at_its_cap() -> None:
    assert finish_times(graph_of([], [[], []], [6.0, 0.0], cap=[2.0, np.inf], delay_s=[1.0, 5.0])) == [4.0, 5.0]


def test_a_link_named_twice_is_used_twice() -> None:
    assert finish_times(graph_of([2.0], [[0, 0]], [3.0])) == [3.0]


def test_chains_of_zero_length_finish_at_once() -> None:
    graph = graph_of([1.0], [[0], [], [], [0]], [2.0, 0.0, 0.0, 1.0], deps=[[], [0], [1], [2]])

    assert finish_times(graph) == [2.0, 2.0, 2.0, 3.0]


def test_a_lane_of_equal_flows_back_to_back_needs_no_new_rates_between_them() -> None:
    ptr, tasks = in_order([0] * 50)
    graph = dataclasses.replace(graph_of([1.0], [[0]] * 50, [1.0] * 50), dep_ptr=ptr, dep_tasks=tasks)

    result = simulate(graph, compiled=False)

    assert result.finish_s.tolist() == [i + 1.0 for i in range(50)]
    assert result.n_events == 2


def test_ends_that_differ_by_rounding_only_are_one_event_and_one_time() -> None:
    assert 0.1 + 0.1 + 0.1 != 0.3
    graph = graph_of([1.0, 1.0], [[0], [1], [1], [1]], [0.3, 0.1, 0.1, 0.1], deps=[[], [], [1], [2]])

    result = simulate(graph, compiled=False)

    assert result.finish_s[0] == result.finish_s[3]
    assert result.n_events == 2


def test_a_fabric_of_full_bisection_changes_nothing_and_one_of_half_does() -> None:
    # Four GPUs, ports 0..3 out and 4..7 in, two a leaf; leaf up 8, 9, leaf down 10, 11.
    pairs = [(0, 2), (1, 3), (2, 0), (3, 1)]
    ports = [[src, 4 + dst] for src, dst in pairs]
    fabric = [[src, 8 + src // 2, 10 + dst // 2, 4 + dst] for src, dst in pairs]

    direct = finish_times(graph_of([1.0] * 8 + [2.0] * 4, ports, [1.0, 2.0, 3.0, 4.0]))

    assert direct == [1.0, 2.0, 3.0, 4.0]
    assert finish_times(graph_of([1.0] * 8 + [2.0] * 4, fabric, [1.0, 2.0, 3.0, 4.0])) == direct
    assert finish_times(graph_of([1.0] * 8 + [1.0] * 4, fabric, [1.0, 2.0, 3.0, 4.0])) == [2.0, 3.0, 6.0, 7.0]


def test_an_empty_graph_takes_no_time() -> None:
    result = simulate(graph_of([1.0], [], []))

    assert result.makespan_s == 0.0
    assert result.n_events == 0
    assert result.link_busy_s.tolist() == [0.0]


def test_links_say_what_they_carried_and_for_how_long_at_full_rate() -> None:
    result = simulate(graph_of([2.0, 4.0, 0.0], [[0, 1], [1]], [6.0, 2.0]))

    assert result.link_amount.tolist() == [6.0, 8.0, 0.0]
    assert result.link_busy_s.tolist() == [3.0, 2.0, 0.0]


# One kernel, three ways to run it


def test_a_small_graph_with_much_work_goes_on_compiled_where_the_plain_kernel_stopped() -> None:
    pytest.importorskip("numba")
    graph = burst(900, 24)
    assert graph.n_tasks <= PLAIN_TASKS

    result = simulate(graph)

    for compiled in (True, False):
        other = simulate(graph, compiled=compiled)
        assert other.finish_s.tobytes() == result.finish_s.tobytes()
        assert other.n_events == result.n_events


def test_two_runs_give_the_same_bits() -> None:
    graph = burst(300, 12)

    assert simulate(graph).finish_s.tobytes() == simulate(graph).finish_s.tobytes()


def test_a_burst_on_few_links_agrees_with_the_plain_simulator() -> None:
    graph = burst(60, 6)

    np.testing.assert_allclose(simulate(graph).finish_s, simulate_plainly(graph), rtol=1e-9)


def test_neither_import_nor_a_small_simulation_loads_numba() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); from flow_oracle import graph_of;"
        "from shardroute.planner.simulator import simulate;"
        "simulate(graph_of([1.0], [[0]] * 9, [1.0] * 9)); print('numba' in sys.modules)"
    )

    assert run_python(code) == "False\n"


def test_without_numba_a_large_graph_runs_plain_and_compiled_true_is_refused() -> None:
    code = (
        "import sys; sys.path.insert(0, 'tests'); sys.modules['numba'] = None;"
        "import numpy as np; from flow_oracle import graph_of; from shardroute.planner.simulator import simulate, engine;"
        "n = engine.PLAIN_TASKS + 1; graph = graph_of([1.0], [[0]] * n, [1.0] * n);"
        "print(simulate(graph).makespan_s == n)\n"
        "try: simulate(graph, compiled=True)\n"
        "except engine.InputError as error: print(error)"
    )

    assert run_python(code) == "True\ncompiled=True: Numba isn't installed; install it, or leave `compiled` out\n"


def test_progress_rises_to_1() -> None:
    shares: list[float] = []

    simulate(burst(2500, 24), progress=shares.append)

    assert shares[0] < 1.0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


# Tolerance


def test_a_tolerance_takes_ends_that_are_near_together_and_says_how_near() -> None:
    graph = graph_of([1.0], [[0]] * 4, [1.0, 1.04, 1.2, 4.0])

    exact, rough = simulate(graph), simulate(graph, tolerance=0.05)

    assert exact.reached_tolerance == 0.0
    assert rough.finish_s.tolist()[:2] == [4.0, 4.0]
    assert rough.reached_tolerance == pytest.approx(0.04 / 1.04)
    assert rough.n_events == exact.n_events - 1


def test_a_tolerance_saves_many_solves_of_a_burst_and_keeps_its_makespan() -> None:
    graph = burst(600, 24)

    exact, rough = simulate(graph), simulate(graph, tolerance=0.01)

    assert rough.n_events < exact.n_events / 2
    assert rough.makespan_s == pytest.approx(exact.makespan_s, rel=0.01)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_a_tolerance_outside_0_to_1_is_refused(tolerance: float) -> None:
    with pytest.raises(InputError, match=r"tolerance: found .*, expected a share in \[0, 1\)"):
        simulate(graph_of([1.0], [[0]], [1.0]), tolerance=tolerance)


# Lanes and sets of dependencies


def test_in_order_links_each_task_to_the_one_before_in_its_lane() -> None:
    ptr, tasks = in_order([0, 1, 0, -1, 1, -1, 0])

    assert ptr.tolist() == [0, 0, 0, 1, 1, 2, 2, 3]
    assert tasks.tolist() == [0, 1, 2]


def test_in_order_of_nothing_is_nothing() -> None:
    ptr, tasks = in_order([])

    assert ptr.tolist() == [0]
    assert tasks.tolist() == []


@pytest.mark.parametrize("lane", [[0, -2], [0.5, 1.0], [[0, 1]]])
def test_in_order_refuses_what_is_no_lane(lane: list[float]) -> None:
    with pytest.raises(InputError, match="lane"):
        in_order(lane)


def test_merged_dependencies_hold_those_of_all_sets_once() -> None:
    lanes = in_order([0, 0, 1, 0, 1])
    others = np.array([0, 0, 1, 2, 2, 4]), np.array([0, 1, 0, 2], np.int32)

    ptr, tasks = merge_dependencies(lanes, others)

    assert [tasks[a:b].tolist() for a, b in itertools.pairwise(ptr)] == [[], [0], [1], [1], [0, 2]]


def test_dependency_sets_over_different_tasks_are_refused() -> None:
    with pytest.raises(InputError, match="dep_ptr: found 3 rows, expected 4"):
        merge_dependencies(in_order([0, 0, 0]), in_order([0, 0]))


# What a graph refuses


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("start_s", [0.0, -1.0], r"start_s\[1\]: found -1.0, expected finite and >= 0"),
        ("delay_s", [np.nan, 0.0], r"delay_s\[0\]: found nan"),
        ("amount", [1.0, np.inf], r"amount\[1\]: found inf"),
        ("amount", [1.0], "amount: found 1 rows, expected 2"),
        ("cap", [0.0, 1.0], r"cap\[0\]: found 0.0, expected > 0"),
        ("weight", [1.0, np.nan], r"weight\[1\]: found nan"),
        ("weight", [1.0, 1e7], "weight: found 1 to 1e[+]07, expected at most a factor 1e[+]06"),
        ("route_links", [0, 2], r"route_links\[1\]: found 2, expected a link in 0..1"),
        ("route_links", [0.0, 1.0], "route_links: found float64, expected integers"),
        ("route_ptr", [0, 2, 1], r"route_ptr: found 0..1, expected to rise from 0 to 2"),
        ("dep_tasks", [1], r"dep_tasks\[0\]: found 1, expected a task before its own index"),
        ("capacity", [1.0, np.inf], r"capacity\[1\]: found inf"),
        ("capacity", [[1.0, 1.0]], r"capacity: found shape \(1, 2\), expected one dim"),
    ],
)
def test_a_graph_refuses_a_column_and_names_the_row(column: str, values: list[float], words: str) -> None:
    good = graph_of([1.0, 1.0], [[0], [1]], [1.0, 1.0], deps=[[], [0]])

    with pytest.raises(InputError, match=words):
        dataclasses.replace(good, **{column: np.array(values)})  # type: ignore[arg-type]


def test_a_task_over_a_dead_link_is_named() -> None:
    with pytest.raises(PlanError, match="task 1 can never finish: it moves 5 over link 2, whose capacity is 0"):
        graph_of([1.0, 1.0, 0.0], [[0, 2], [1, 2]], [0.0, 5.0])


def test_a_task_at_an_unlimited_rate_is_named() -> None:
    with pytest.raises(PlanError, match="task 1 can never be timed: it moves 5 without a route or a cap"):
        graph_of([], [[], []], [0.0, 5.0])


def test_the_columns_of_a_graph_are_its_own_and_fixed() -> None:
    amount = np.array([1.0])
    graph = dataclasses.replace(graph_of([1.0], [[0]], [2.0]), amount=amount)

    amount[0] = 7.0

    assert graph.amount.tolist() == [1.0]
    with pytest.raises(ValueError, match="read-only"):
        graph.amount[0] = 3.0
