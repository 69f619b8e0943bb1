"""The event part of the kernel (dependencies, start times, lanes, exclusive resources) against SimPy on random graphs."""

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from flow_oracle import graph_of
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.planner.simulator import TaskGraph, in_order, merge_dependencies, simulate

simpy = pytest.importorskip("simpy")


def finish_times_by_simpy(graph: TaskGraph) -> list[float]:
    """A SimPy process a task: wait for what it depends on and its start, queue for its resource, wait, hold, give back."""
    environment = simpy.Environment()
    resources = [simpy.PriorityResource(environment, int(n)) for n in graph.n_slots]
    finish_s = [float("nan")] * graph.n_tasks
    processes: list[Any] = []

    def run(task: int) -> Generator[Any, Any, None]:
        deps = graph.dep_tasks[graph.dep_ptr[task] : graph.dep_ptr[task + 1]]
        yield simpy.AllOf(environment, [processes[dep] for dep in deps])
        yield environment.timeout(max(0.0, graph.start_s[task] - environment.now))
        resource = graph.resource[task]
        request = resources[resource].request(priority=(environment.now, task)) if resource >= 0 else None
        if request is not None:
            yield request
        yield environment.timeout(graph.delay_s[task])
        yield environment.timeout(graph.amount[task] / graph.cap[task])
        finish_s[task] = environment.now
        if request is not None:
            resources[resource].release(request)

    processes.extend(environment.process(run(task)) for task in range(graph.n_tasks))
    environment.run()
    return finish_s


@st.composite
def graphs(draw: st.DrawFn) -> TaskGraph:
    """Tasks without links. Times are random reals, so that ties, which SimPy orders in its own way, don't come up."""
    n, n_resources = draw(st.integers(1, 30)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    waits = [sorted(set(rng.integers(0, i, rng.integers(0, 3)).tolist())) if i else [] for i in range(n)]
    graph = graph_of(
        [], [[] for _ in range(n)], rng.uniform(0.1, 5, n).tolist(), cap=rng.uniform(0.5, 2, n).tolist(), deps=waits,
        start_s=np.where(rng.random(n) < 0.3, rng.uniform(0, 20, n), 0.0).tolist(), delay_s=rng.uniform(0.1, 1, n).tolist(),
    )  # fmt: skip
    dep_ptr, dep_tasks = merge_dependencies((graph.dep_ptr, graph.dep_tasks), in_order(rng.integers(-1, 3, n)))
    return dataclasses.replace(
        graph, dep_ptr=dep_ptr, dep_tasks=dep_tasks,
        resource=rng.integers(-1, n_resources, n), n_slots=rng.integers(1, 3, n_resources),
    )  # fmt: skip


@given(graphs(), st.sampled_from([0.0, 0.1]))
@settings(max_examples=200, deadline=None)
def test_tasks_finish_when_simpy_says(graph: TaskGraph, tolerance: float) -> None:
    result = simulate(graph, tolerance=tolerance, compiled=False)

    np.testing.assert_allclose(result.finish_s, finish_times_by_simpy(graph), rtol=1e-12)
