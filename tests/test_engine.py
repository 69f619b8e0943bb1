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


def holding(resource: list[int], n_slots: list[int], seconds: list[float], **columns: list[float]) -> TaskGraph:
    """Tasks without links that take these seconds and need these resources."""
    n = len(seconds)
    graph = graph_of([], [[] for _ in range(n)], seconds, cap=[1.0] * n, **columns)  # type: ignore[arg-type]
    return dataclasses.replace(graph, resource=np.array(resource), n_slots=np.array(n_slots))


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


def test_equal_input_gives_equal_bytes_in_every_process() -> None:
    code = (
        "import hashlib, sys; sys.path.insert(0, 'tests'); from test_engine import burst;"
        "from shardroute.planner.simulator import simulate;"
        "results = [simulate(burst(300, 12), tolerance=x) for x in (0.0, 0.02, 0.0, 0.02)];"
        "print([hashlib.sha256(r.finish_s.tobytes() + r.start_s.tobytes() + r.ready_s.tobytes()).hexdigest() for r in results])"
    )

    first, second = run_python(code, PYTHONHASHSEED="1"), run_python(code, PYTHONHASHSEED="2")

    assert first == second
    digests = first.strip("[]\n").split(", ")
    assert digests[:2] == digests[2:]


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

    assert run_python(code) == "True\ncompiled=True: Numba isn't installed or is off; mend that, or leave `compiled` out\n"


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

    # At a quarter each, the second ends at 4.16; the rates change once, at the mean of 4 and 4.16.
    assert exact.reached_tolerance == 0.0
    assert exact.finish_s.tolist()[:2] == pytest.approx([4.0, 4.12])
    assert rough.finish_s.tolist()[:2] == pytest.approx([4.0, 4.16])
    assert rough.finish_s.tolist()[2:] == pytest.approx(exact.finish_s.tolist()[2:], rel=0.01)
    assert rough.reached_tolerance == pytest.approx(0.08 / 4.0)
    assert rough.n_events == exact.n_events - 1


def test_a_tolerance_saves_most_solves_of_a_burst_and_every_flow_ends_near_its_time() -> None:
    graph = burst(600, 24)

    exact, rough = simulate(graph), simulate(graph, tolerance=0.01)

    off = rough.finish_s / exact.finish_s - 1
    assert rough.n_events < exact.n_events / 4
    assert np.abs(off).max() < 2 * 0.01
    assert np.median(np.abs(off)) < 0.01 / 10
    assert abs(off.mean()) < 0.01 / 10


def test_with_a_tolerance_what_lies_apart_is_exact() -> None:
    graph = graph_of([1.0, 1.0], [[0], [0], [0, 1], [1]], [1.0, 2.0, 4.0, 8.0], start_s=[0.0, 0.5, 3.0, 6.0])

    exact, rough = simulate(graph), simulate(graph, tolerance=0.01)

    assert rough.finish_s.tobytes() == exact.finish_s.tobytes()
    assert rough.reached_tolerance == 0.0


def test_a_tolerance_does_not_make_chains_drift() -> None:
    # A ring of 8: step k of g waits for its own last step and for its neighbour's. Equal steps, each followed by a latency.
    n, steps = 8, 7
    deps = [[] if k == 0 else sorted({(k - 1) * n + g, (k - 1) * n + (g - 1) % n}) for k in range(steps) for g in range(n)]
    routes = [[g, n + (g + 1) % n] for _ in range(steps) for g in range(n)]
    graph = graph_of([1.0] * (2 * n), routes, [10.0] * len(routes), delay_s=[0.01] * len(routes), deps=deps)

    rough = simulate(graph, tolerance=0.05)

    assert rough.makespan_s == pytest.approx(steps * 10.01, rel=1e-12)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, float("nan")])
def test_a_tolerance_outside_0_to_1_is_refused(tolerance: float) -> None:
    with pytest.raises(InputError, match=r"tolerance: found .*, expected a share in \[0, 1\)"):
        simulate(graph_of([1.0], [[0]], [1.0]), tolerance=tolerance)


# Exclusive resources


def test_tasks_of_a_resource_with_one_slot_take_turns_and_hold_it_through_their_delay() -> None:
    graph = holding([0, 0, 0], [1], [3.0, 2.0, 1.0], delay_s=[0.5, 0.5, 0.5])

    result = simulate(graph, compiled=False)

    assert result.finish_s.tolist() == [3.5, 6.0, 7.5]
    assert result.start_s.tolist() == [0.5, 4.0, 6.5]
    assert result.ready_s.tolist() == [0.0, 0.0, 0.0]


def test_a_resource_with_two_slots_serves_two_at_a_time() -> None:
    assert finish_times(holding([0, 0, 0], [2], [3.0, 2.0, 2.0])) == [3.0, 2.0, 4.0]


def test_who_is_ready_first_is_served_first_whatever_its_index() -> None:
    # Task 0 holds until 4; 2 is ready at 1, 1 at 2, 3 and 4 at 3.
    graph = holding([0] * 5, [1], [4.0, 1.0, 1.0, 1.0, 1.0], start_s=[0.0, 2.0, 1.0, 3.0, 3.0])

    assert finish_times(graph) == [4.0, 6.0, 5.0, 7.0, 8.0]


def test_a_resource_leaves_others_and_tasks_without_one_alone() -> None:
    assert finish_times(holding([0, 1, -1, 0], [1, 1], [2.0, 3.0, 1.0, 1.0])) == [2.0, 3.0, 1.0, 3.0]


def test_a_slot_is_held_until_a_shared_transfer_ends() -> None:
    # 0 and 1 share the link until 2 ends at 2; the slot of 0 goes to 3 when 0 ends.
    graph = dataclasses.replace(
        graph_of([2.0], [[0], [0], []], [2.0, 6.0, 1.0], cap=[np.inf, np.inf, 1.0]), resource=[0, -1, 0], n_slots=[1]
    )

    assert finish_times(graph) == [2.0, 4.0, 3.0]


def test_a_task_asks_for_its_resource_only_when_its_dependencies_are_done() -> None:
    # Were 1 to queue at 0, it would hold the slot before 2 does.
    graph = dataclasses.replace(holding([-1, 0, 0], [1], [2.0, 1.0, 3.0]), dep_ptr=[0, 0, 1, 1], dep_tasks=[0])

    assert finish_times(graph) == [2.0, 4.0, 3.0]


def test_with_a_tolerance_no_slot_is_held_twice() -> None:
    rng = np.random.default_rng(5)
    n = 200
    graph = dataclasses.replace(
        graph_of([1.0] * 4, [[i % 4] for i in range(n)], rng.uniform(1, 9, n).tolist()),
        resource=np.arange(n) % 7,
        n_slots=[1] * 7,
    )

    result = simulate(graph, tolerance=0.1)

    for resource in range(7):
        held = sorted(zip(result.start_s[resource::7], result.finish_s[resource::7], strict=True))
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(held))


# What is late


def lanes_of_two(seconds: list[float]) -> TaskGraph:
    """0 and 1 begin two lanes; 2 is behind 1, waits for 0 as well, and takes 2 more if it is late."""
    graph = graph_of([4.0], [[0]] * 3, seconds, cap=[1.0] * 3, deps=[[], [], [0, 1]])
    return dataclasses.replace(graph, late_amount=[0.0, 0.0, 2.0], behind=[-1, -1, 1])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_task_whose_lane_was_free_before_it_was_ready_moves_more(compiled: bool) -> None:
    result = simulate(lanes_of_two([5.0, 3.0, 1.0]), compiled=compiled)

    assert result.finish_s.tolist() == [5.0, 3.0, 8.0]
    assert result.link_amount.tolist() == [11.0]


@pytest.mark.parametrize("other_s", [3.0, 2.0])
def test_a_task_that_is_ready_when_its_lane_is_free_is_not_late(other_s: float) -> None:
    assert finish_times(lanes_of_two([other_s, 3.0, 1.0])) == [other_s, 3.0, 4.0]


def test_a_task_that_shares_nothing_can_be_late_too() -> None:
    graph = graph_of([], [[], []], [5.0, 1.0], cap=[1.0, 2.0], deps=[[], [0]])

    assert finish_times(dataclasses.replace(graph, late_amount=[0.0, 2.0])) == [5.0, 6.5]


def test_a_task_without_an_amount_can_not_be_late() -> None:
    with pytest.raises(InputError, match=r"late_amount\[1\]: found 1.0, expected 0 where amount is 0"):
        dataclasses.replace(graph_of([1.0], [[0], [0]], [1.0, 0.0], deps=[[], [0]]), late_amount=[0.0, 1.0])


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
        ("resource", [0, -1], r"resource\[0\]: found 0, expected -1 \(none\) or one of 0"),
        ("resource", [-1], "resource: found 1 rows, expected 2"),
        ("resource", [-2, -1], r"resource\[0\]: found -2"),
        ("n_slots", [2, 0], r"n_slots\[1\]: found 0, expected > 0"),
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
