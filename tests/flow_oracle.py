"""Max-min sharing as plainly as it can be written: one level raised step by step, everything solved anew at every event."""

import itertools

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.simulator import SimulationResult, TaskGraph

Floats = NDArray[np.float64]
REL = 1e-9


def graph_of(
    capacity: list[float],
    routes: list[list[int]],
    amount: list[float],
    *,
    start_s: list[float] | None = None,
    delay_s: list[float] | None = None,
    cap: list[float] | None = None,
    weight: list[float] | None = None,
    deps: list[list[int]] | None = None,
) -> TaskGraph:
    """A task graph from plain lists, one entry a task."""
    n = len(routes)
    waits = [[] for _ in range(n)] if deps is None else deps
    return TaskGraph(
        start_s=np.array([0.0] * n if start_s is None else start_s),
        delay_s=np.array([0.0] * n if delay_s is None else delay_s),
        amount=np.array(amount, np.float64),
        cap=np.array([np.inf] * n if cap is None else cap),
        weight=np.array([1.0] * n if weight is None else weight),
        route_ptr=np.cumsum([0, *map(len, routes)]),
        route_links=np.array([link for route in routes for link in route], np.int32),
        dep_ptr=np.cumsum([0, *map(len, waits)]),
        dep_tasks=np.array([task for tasks in waits for task in tasks], np.int32),
        capacity=np.array(capacity, np.float64),
    )


def rates_of(graph: TaskGraph, flows: list[int]) -> Floats:
    """Max-min rates of these flows together, by progressive filling; then proved to be so by `assert_max_min`."""
    use = uses_of(graph, flows)
    weight, cap = graph.weight[flows], graph.cap[flows]
    rates = np.zeros(len(flows))
    rising = np.ones(len(flows), bool)
    while rising.any():
        room = graph.capacity - use @ np.where(rising, 0.0, rates)
        share = use @ np.where(rising, weight, 0.0)
        full_at = np.full(len(room), np.inf)
        full_at[share > 0] = room[share > 0] / share[share > 0]
        level = min(full_at.min(initial=np.inf), (cap / weight)[rising].min())
        full = full_at <= level * (1 + 1e-12)
        stops = rising & ((use[full] > 0).any(0) | (cap / weight <= level * (1 + 1e-12)))
        rates[stops] = np.minimum(level * weight, cap)[stops]
        rising &= ~stops
    assert_max_min(graph, flows, rates)
    return rates


def assert_max_min(graph: TaskGraph, flows: list[int], rates: Floats) -> None:
    """No link over capacity; each flow at its cap, or on a full link on which no rate / weight is larger than its own."""
    use = uses_of(graph, flows)
    level = rates / graph.weight[flows]
    assert (use @ rates <= graph.capacity * (1 + REL)).all()
    full = use @ rates >= graph.capacity * (1 - REL)
    for at, flow in enumerate(flows):
        has_bottleneck = any(
            level[at] >= level[use[link] > 0].max() * (1 - REL) for link in np.flatnonzero(full & (use[:, at] > 0))
        )
        assert has_bottleneck or rates[at] >= graph.cap[flow] * (1 - REL)


def uses_of(graph: TaskGraph, flows: list[int]) -> Floats:
    """[link, flow] how many times each route names each link."""
    use = np.zeros((graph.n_links, len(flows)))
    for at, flow in enumerate(flows):
        np.add.at(use[:, at], graph.route_links[graph.route_ptr[flow] : graph.route_ptr[flow + 1]], 1.0)
    return use


def simulate_plainly(graph: TaskGraph) -> Floats:
    """Finish time of each task; every rate solved anew whenever a flow begins or ends."""
    n = graph.n_tasks
    finish_s, left = np.full(n, np.nan), graph.amount.copy()
    deps = [graph.dep_tasks[graph.dep_ptr[i] : graph.dep_ptr[i + 1]] for i in range(n)]
    begin_s = np.full(n, np.nan)
    now_s = 0.0
    while np.isnan(finish_s).any():
        for i in range(n):
            if np.isnan(begin_s[i]) and not np.isnan(finish_s[deps[i]]).any():
                ready_s = max([graph.start_s[i], *finish_s[deps[i]]])
                begin_s[i] = ready_s + graph.delay_s[i]
                behind = graph.behind[i]
                if len(deps[i]) and (behind < 0 or finish_s[behind] < ready_s * (1 - 1e-12)):
                    left[i] += graph.late_amount[i]
        flows = [i for i in range(n) if begin_s[i] <= now_s and np.isnan(finish_s[i])]
        if any(left[i] <= 0 for i in flows):
            for i in flows:
                if left[i] <= 0:
                    finish_s[i] = now_s
            continue
        rates = rates_of(graph, flows)
        end_s = now_s + left[flows] / rates
        next_s = min(begin_s[begin_s > now_s].min(initial=np.inf), end_s.min(initial=np.inf))
        left[flows] -= rates * (next_s - now_s)
        left[np.array(flows, int)[end_s <= next_s * (1 + 1e-13)]] = 0.0  # ends that differ by rounding only
        now_s = next_s
    return finish_s


def served_amounts(graph: TaskGraph, result: SimulationResult) -> Floats:
    """What each flow moves when, between the times of the result, all flows have their max-min rates."""
    served = np.zeros(graph.n_tasks)
    moments = np.unique(np.concatenate([result.start_s, result.finish_s]))
    for first_s, last_s in itertools.pairwise(moments):
        middle_s = (first_s + last_s) / 2
        flows = np.flatnonzero((result.start_s < middle_s) & (middle_s < result.finish_s)).tolist()
        if flows:
            served[flows] += rates_of(graph, flows) * (last_s - first_s)
    return served
