"""SMs that NCCL's kernels hold while they send, and that attention on the same GPU has to do without.

A copy by send and receive holds an SM for each of its channels, on the rank that sends. In a ring each rank sends and receives
at once, by the same channels, so the receiving end isn't counted again. A collective holds those of `collective_sms` on each of
its ranks, and none where nobody knows how many. Beside either runs a task of its own over the SMs of that GPU, as long as it
takes alone: one that others slow down holds its SMs a little shorter here than it would. Puts hold none.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.channels import Path
from shardroute.planner.backends.collective_sms import collective_sms
from shardroute.planner.backends.collectives import collective_s
from shardroute.planner.backends.group_steps import COLLECTIVES
from shardroute.planner.backends.groups import group_law
from shardroute.planner.backends.links import Links
from shardroute.planner.backends.rates import load_rates
from shardroute.planner.backends.tuning import Group
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Backend, Op, Plan, ranges
from shardroute.planner.simulator import TaskGraph
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.collectives import Collective
from shardroute.topologies.topologies import Topology

# The weight of what holds SMs: these come first, whatever share of all they are, and what is computed has the rest.
HELD_FIRST = 1e3


def with_held_sms(
    graph: TaskGraph, task_of: Ints, plan: Plan, topology: Topology, calibration: Calibration, links: Links
) -> TaskGraph:
    """The graph of an attention plan on GPUs, and behind its tasks one for each copy, or rank of a collective, that holds SMs.

    task_of[i] is the first task of step i. A held task waits for what its step waits for, and nothing waits for it.
    """
    found = [_sends(graph, task_of, plan, topology, calibration), _collectives(plan, topology, calibration)]
    step, gpu = (np.concatenate([rows[i] for rows in found]).astype(np.int64) for i in (0, 1))
    sms, alone_s = (np.concatenate([rows[i] for rows in found]).astype(np.float64) for i in (2, 3))
    n = len(step)
    if not n:
        return graph
    share = np.minimum(sms / load_rates(topology.machine.name).n_sms, 1.0)
    dep_at, dep_of = ranges(graph.dep_ptr, task_of[step])
    return TaskGraph(
        start_s=np.concatenate([graph.start_s, np.zeros(n)]),
        delay_s=np.concatenate([graph.delay_s, np.zeros(n)]),
        amount=np.concatenate([graph.amount, share * alone_s]),
        cap=np.concatenate([graph.cap, share]),
        weight=np.concatenate([graph.weight, np.full(n, HELD_FIRST)]),
        route_ptr=np.concatenate([graph.route_ptr, graph.route_ptr[-1] + np.arange(1, n + 1)]),
        route_links=np.concatenate([graph.route_links, links.sms(gpu.astype(np.int32))]),
        dep_ptr=np.concatenate([graph.dep_ptr, graph.dep_ptr[-1] + np.cumsum(np.bincount(dep_of, minlength=n))]),
        dep_tasks=np.concatenate([graph.dep_tasks, graph.dep_tasks[dep_at]]),
        capacity=graph.capacity,
    )


Column = NDArray[np.generic]
_Rows = tuple[Column, Column, Column, Column]  # step, GPU, SMs, seconds alone


def _sends(graph: TaskGraph, task_of: Ints, plan: Plan, topology: Topology, calibration: Calibration) -> _Rows:
    """What sends hold: SMs of the rank that sends."""
    law = group_law(plan, topology, topology.machine, calibration)
    steps, n_ranks = plan.steps, plan.problem.n_ranks
    sends = np.flatnonzero((steps.op == Op.COPY) & (steps.backend == Backend.NCCL) & (steps.src != steps.dst))
    if law is None or not len(sends):
        return (np.zeros(0),) * 4
    src, size, copy = steps.src[sends], plan.step_bytes[sends], task_of[sends]
    one_domain = len(np.unique(topology.domain[:n_ranks])) == 1
    near = topology.domain[src] == topology.domain[steps.dst[sends]]
    by_path = [law.channels(size, n_ranks, one_domain, path) for path in (Path.NVLINK, Path.NIC)]
    at, owner = ranges(graph.route_ptr, copy)
    slowest = np.full(len(sends), np.inf)
    np.minimum.at(slowest, owner, graph.capacity[graph.route_links[at]])
    alone_s = graph.delay_s[copy] + graph.amount[copy] / np.minimum(graph.cap[copy], slowest)
    return sends, src, np.where(near, *by_path), alone_s


def _collectives(plan: Plan, topology: Topology, calibration: Calibration) -> _Rows:
    """What collectives hold: SMs of each of their ranks."""
    steps = plan.steps
    if calibration.collectives is None:
        return (np.zeros(0),) * 4
    channels = load_rates(topology.machine.name).channels

    @cache
    def held(op: Collective, n_bytes: int, group: Group) -> tuple[int, float]:
        sms = collective_sms(op, n_bytes, group, topology.machine, calibration, channels)
        return 0 if sms is None else sms, collective_s(op, n_bytes, group, topology.machine, calibration)[0]

    rows: list[tuple[int, int, int, float]] = []
    for step in np.flatnonzero(np.isin(steps.op, [*COLLECTIVES]) & (steps.backend == Backend.NCCL)).tolist():
        ranks = plan.group(int(steps.group[step]))
        group = Group(len(ranks), len(np.unique(topology.domain[ranks])))
        sms, alone_s = held(COLLECTIVES[Op(int(steps.op[step]))], int(plan.step_bytes[step]), group)
        if sms and alone_s:
            rows += [(step, rank, sms, alone_s) for rank in ranks.tolist()]
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]
