"""SMs that NCCL's kernels hold while they send, and that attention on the same GPU has to do without.

A copy by send and receive holds an SM for each of its channels, on the rank that sends. In a ring each rank sends and receives
at once, by the same channels, so the receiving end isn't counted again. Beside the copy runs a task of its own over the SMs of
that GPU, as long as the copy takes alone: one that others slow down holds its SMs a little shorter here than it would. Puts hold
none. Collectives hold some too, not counted here.
"""

import numpy as np

from shardroute.planner.backends.channels import Path, channel_law
from shardroute.planner.backends.links import Links
from shardroute.planner.backends.rates import load_rates
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Backend, Op, Plan, ranges
from shardroute.planner.simulator import TaskGraph
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.topologies import Topology

# The weight of what holds SMs: these come first, whatever share of all they are, and what is computed has the rest.
HELD_FIRST = 1e3


def with_held_sms(
    graph: TaskGraph, first: Ints, plan: Plan, topology: Topology, calibration: Calibration, links: Links
) -> TaskGraph:
    """The graph of an attention plan on GPUs, and behind its tasks one for each copy that holds SMs.

    first[i] is the task of step i. A held task waits for what its copy waits for, and nothing waits for it.
    """
    law = channel_law(topology.machine, calibration)
    steps, n_ranks = plan.steps, plan.problem.n_ranks
    sends = np.flatnonzero((steps.op == Op.COPY) & (steps.backend == Backend.NCCL) & (steps.src != steps.dst))
    if law is None or not len(sends):
        return graph
    src, size, copy = steps.src[sends], plan.step_bytes[sends], first[sends]
    one_domain = len(np.unique(topology.domain[:n_ranks])) == 1
    near = topology.domain[src] == topology.domain[steps.dst[sends]]
    by_path = [law.channels(size, n_ranks, one_domain, path) for path in (Path.NVLINK, Path.NIC)]
    share = np.minimum(np.where(near, *by_path) / load_rates(topology.machine.name).n_sms, 1.0)
    at, owner = ranges(graph.route_ptr, copy)
    slowest = np.full(len(sends), np.inf)
    np.minimum.at(slowest, owner, graph.capacity[graph.route_links[at]])
    alone_s = graph.delay_s[copy] + graph.amount[copy] / np.minimum(graph.cap[copy], slowest)
    dep_at, dep_of = ranges(graph.dep_ptr, copy)
    n = len(sends)
    return TaskGraph(
        start_s=np.concatenate([graph.start_s, np.zeros(n)]),
        delay_s=np.concatenate([graph.delay_s, np.zeros(n)]),
        amount=np.concatenate([graph.amount, share * alone_s]),
        cap=np.concatenate([graph.cap, share]),
        weight=np.concatenate([graph.weight, np.full(n, HELD_FIRST)]),
        route_ptr=np.concatenate([graph.route_ptr, graph.route_ptr[-1] + np.arange(1, n + 1)]),
        route_links=np.concatenate([graph.route_links, links.sms(src)]),
        dep_ptr=np.concatenate([graph.dep_ptr, graph.dep_ptr[-1] + np.cumsum(np.bincount(dep_of, minlength=n))]),
        dep_tasks=np.concatenate([graph.dep_tasks, graph.dep_tasks[dep_at]]),
        capacity=graph.capacity,
    )
