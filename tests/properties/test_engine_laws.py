"""Laws of the event kernel on random graphs: it agrees with a plain simulator, and with itself under symmetries."""

import dataclasses
import itertools

import numpy as np
import pytest
from flow_oracle import graph_of, served_amounts, simulate_plainly
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.planner.simulator import SimulationResult, TaskGraph, simulate

# Whole numbers make ties, the hard case for an event loop; the others make sure that nothing depends on them.
AMOUNTS = st.one_of(st.integers(0, 12).map(float), st.floats(1e-3, 1e3))
CAPACITIES = st.one_of(st.integers(1, 4).map(float), st.floats(0.1, 100.0))
TIMES = st.one_of(st.just(0.0), st.integers(0, 4).map(float), st.floats(0.0, 10.0))


@st.composite
def graphs(draw: st.DrawFn, max_tasks: int = 12, with_deps: bool = True, same_start: bool = False) -> TaskGraph:
    n_links = draw(st.integers(1, 6))
    n = draw(st.integers(1, max_tasks))
    route = st.lists(st.integers(0, n_links - 1), min_size=0, max_size=3)
    routes = draw(st.lists(route, min_size=n, max_size=n))
    has_caps, has_weights = draw(st.booleans()), draw(st.booleans())
    caps = [draw(st.sampled_from([0.25, 0.5, 1.0, 3.0, np.inf])) if has_caps else np.inf for _ in range(n)]
    return graph_of(
        capacity=draw(st.lists(CAPACITIES, min_size=n_links, max_size=n_links)),
        routes=routes,
        amount=draw(st.lists(AMOUNTS, min_size=n, max_size=n)),
        start_s=[0.0 if same_start else draw(TIMES) for _ in range(n)],
        delay_s=[0.0 if same_start else draw(TIMES) for _ in range(n)],
        cap=[2.0 if not route and cap == np.inf else cap for route, cap in zip(routes, caps, strict=True)],
        weight=[draw(st.sampled_from([0.5, 1.0, 2.0, 3.0])) if has_weights else 1.0 for _ in range(n)],
        deps=[sorted(draw(st.sets(st.integers(0, i - 1), max_size=2))) if with_deps and i else [] for i in range(n)],
    )


def bits(result: SimulationResult) -> list[bytes | float]:
    values = [getattr(result, field.name) for field in dataclasses.fields(result)]
    return [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]


@given(graphs())
@settings(max_examples=300, deadline=None)
def test_every_task_finishes_when_a_plain_simulator_says(graph: TaskGraph) -> None:
    expected_s = simulate_plainly(graph)

    result = simulate(graph, compiled=False)

    np.testing.assert_allclose(result.finish_s, expected_s, rtol=1e-9)


@given(graphs(), st.data())
@settings(max_examples=150, deadline=None)
def test_tasks_that_are_late_move_more_as_a_plain_simulator_says(graph: TaskGraph, data: st.DataObject) -> None:
    late = [data.draw(st.sampled_from([0.0, 1.0, 2.5])) if amount > 0 else 0.0 for amount in graph.amount]
    waits_for = [graph.dep_tasks[first:last].tolist() for first, last in itertools.pairwise(graph.dep_ptr)]
    behind = [data.draw(st.sampled_from([-1, *tasks])) for tasks in waits_for]
    graph = dataclasses.replace(graph, late_amount=late, behind=behind)

    result = simulate(graph, compiled=False)

    np.testing.assert_allclose(result.finish_s, simulate_plainly(graph), rtol=1e-9)


@given(graphs())
@settings(max_examples=200, deadline=None)
def test_max_min_rates_between_the_events_move_every_amount_exactly(graph: TaskGraph) -> None:
    result = simulate(graph, compiled=False)

    np.testing.assert_allclose(served_amounts(graph, result), graph.amount, rtol=1e-9, atol=1e-9)


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_no_link_moves_more_in_any_span_of_time_than_its_capacity_allows(graph: TaskGraph) -> None:
    result = simulate(graph, compiled=False)

    for first_s, last_s in itertools.product(result.start_s, result.finish_s):
        within = (result.start_s >= first_s) & (result.finish_s <= last_s)
        owner = np.repeat(np.arange(graph.n_tasks), np.diff(graph.route_ptr))
        moved = np.bincount(graph.route_links, (graph.amount * within)[owner], graph.n_links)
        assert (moved <= graph.capacity * max(last_s - first_s, 0.0) * (1 + 1e-9) + 1e-9).all()


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_no_flow_is_faster_than_its_cap_and_its_slowest_link_allow(graph: TaskGraph) -> None:
    result = simulate(graph, compiled=False)

    for task in range(graph.n_tasks):
        route = graph.route_links[graph.route_ptr[task] : graph.route_ptr[task + 1]]
        fastest = min([graph.cap[task], *graph.capacity[route]])
        assert result.finish_s[task] - result.start_s[task] >= graph.amount[task] / fastest * (1 - 1e-9) - 1e-12


@given(graphs(with_deps=False), st.floats(1.0, 10.0))
@settings(max_examples=100, deadline=None)
def test_more_capacity_makes_no_flow_of_a_single_bottleneck_later(graph: TaskGraph, factor: float) -> None:
    # All flows cross one link, and no other can be full. With several bottlenecks, or with dependencies, this is no law.
    routes = [[0] if amount > 0 else [] for amount in graph.amount]
    one = graph_of([1.0], routes, graph.amount.tolist(), start_s=graph.start_s.tolist(), cap=[9.0] * len(routes))

    wider = simulate(dataclasses.replace(one, capacity=one.capacity * factor), compiled=False)

    assert (wider.finish_s <= simulate(one, compiled=False).finish_s * (1 + 1e-9)).all()


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_a_task_is_ready_after_its_dependencies_starts_after_its_delay_and_then_finishes(graph: TaskGraph) -> None:
    result = simulate(graph, compiled=False)

    for task in range(graph.n_tasks):
        deps = graph.dep_tasks[graph.dep_ptr[task] : graph.dep_ptr[task + 1]]
        assert result.ready_s[task] == max([graph.start_s[task], *result.finish_s[deps]])
        assert result.start_s[task] == result.ready_s[task] + graph.delay_s[task]
        assert result.finish_s[task] >= result.start_s[task]


@given(graphs())
@settings(max_examples=100, deadline=None)
def test_no_makespan_is_under_what_the_busiest_link_needs(graph: TaskGraph) -> None:
    result = simulate(graph, compiled=False)

    carried = np.zeros(graph.n_links)
    for task, (first, last) in enumerate(itertools.pairwise(graph.route_ptr)):
        for link in graph.route_links[first:last]:
            carried[link] += graph.amount[task]
    np.testing.assert_allclose(result.link_amount, carried)
    np.testing.assert_allclose(result.link_busy_s, carried / graph.capacity)
    assert result.makespan_s >= result.link_busy_s.max() * (1 - 1e-12)
    assert result.makespan_s == result.finish_s.max()


@given(graphs(with_deps=False), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_the_order_of_tasks_and_links_changes_nothing(graph: TaskGraph, seed: int) -> None:
    rng = np.random.default_rng(seed)
    order, links = rng.permutation(graph.n_tasks), rng.permutation(graph.n_links)
    routes = [graph.route_links[graph.route_ptr[i] : graph.route_ptr[i + 1]].copy() for i in range(graph.n_tasks)]
    name_of = np.argsort(links)
    shuffled = graph_of(
        capacity=graph.capacity[links].tolist(),
        routes=[name_of[rng.permutation(routes[i])].tolist() for i in order],
        amount=graph.amount[order].tolist(),
        start_s=graph.start_s[order].tolist(),
        delay_s=graph.delay_s[order].tolist(),
        cap=graph.cap[order].tolist(),
        weight=graph.weight[order].tolist(),
    )

    result = simulate(shuffled, compiled=False)

    np.testing.assert_allclose(result.finish_s, simulate(graph, compiled=False).finish_s[order], rtol=1e-9)


@given(graphs(), st.integers(-20, 20))
@settings(max_examples=100, deadline=None)
def test_units_of_amount_and_of_time_change_no_bit(graph: TaskGraph, exponent: int) -> None:
    scale = 2.0**exponent
    other_units = dataclasses.replace(graph, amount=graph.amount * scale, capacity=graph.capacity * scale, cap=graph.cap * scale)
    slower = dataclasses.replace(
        graph,
        start_s=graph.start_s * scale,
        delay_s=graph.delay_s * scale,
        capacity=graph.capacity / scale,
        cap=graph.cap / scale,
    )

    result = simulate(graph, compiled=False)

    assert simulate(other_units, compiled=False).finish_s.tobytes() == result.finish_s.tobytes()
    assert simulate(slower, compiled=False).finish_s.tobytes() == (result.finish_s * scale).tobytes()


@given(graphs(max_tasks=24), st.integers(0, 2), st.sampled_from([0.0, 0.1]))
@settings(max_examples=100, deadline=None)
def test_the_compiled_kernel_gives_the_bits_of_the_plain_one(graph: TaskGraph, n_resources: int, tolerance: float) -> None:
    pytest.importorskip("numba")
    resource = np.arange(graph.n_tasks) % (n_resources + 2) - 2  # some have none
    graph = dataclasses.replace(graph, resource=np.maximum(resource, -1), n_slots=np.arange(1, n_resources + 1))

    compiled = simulate(graph, tolerance=tolerance, compiled=True)

    assert bits(compiled) == bits(simulate(graph, tolerance=tolerance, compiled=False))


@given(st.lists(AMOUNTS.filter(lambda amount: amount > 0), min_size=1, max_size=12), st.sampled_from([0.01, 0.05]))
@settings(max_examples=200, deadline=None)
def test_with_a_tolerance_flows_that_share_one_link_end_near_their_time(amount: list[float], tolerance: float) -> None:
    graph = graph_of([2.0], [[0]] * len(amount), amount)

    result = simulate(graph, tolerance=tolerance, compiled=False)

    # Flows that a batch ends keep the rate of its first: at most the batch's width late. A batch of b of n flows misplaces at
    # most b / n of the link for tolerance of the time until now, and the sum of b / n over all batches is at most 1 + 1/2 + ...
    harmonic = sum(1 / k for k in range(1, len(amount) + 1))
    limit = tolerance * (harmonic + 2 / (1 - tolerance))
    np.testing.assert_allclose(result.finish_s, simulate(graph, compiled=False).finish_s, rtol=limit)


@given(graphs(), st.sampled_from([0.01, 0.2]))
@settings(max_examples=100, deadline=None)
def test_with_a_tolerance_tasks_still_follow_their_dependencies(graph: TaskGraph, tolerance: float) -> None:
    result = simulate(graph, tolerance=tolerance, compiled=False)

    assert result.reached_tolerance <= tolerance * (1 + 1e-9)
    assert (result.start_s >= result.ready_s + graph.delay_s).all()
    assert (result.finish_s >= result.start_s).all()
    for task in range(graph.n_tasks):
        deps = graph.dep_tasks[graph.dep_ptr[task] : graph.dep_ptr[task + 1]]
        assert result.ready_s[task] == max([graph.start_s[task], *result.finish_s[deps]])
