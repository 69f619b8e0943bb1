"""What the steps of a plan cost on a machine, as tasks for the event kernel.

GPU machines: a copy costs its driving rank a launch, then the latency of the path and of its pieces, then its bytes share
the links of its route. A collective runs as pipelined rings, as many as the NICs that every domain of its group can give it;
each ring is one flow over all its hops.

CPU machines: a rank is one thread that runs all its steps in plan order; a step is CPU time (launch, wait, pieces, runs,
bytes); the cores are shared fairly by the ranks that have work.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.links import Links, links_of, path_costs
from shardroute.planner.backends.runs import step_runs
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.ownership import gathered_from
from shardroute.planner.plans import Op, Plan, ranges
from shardroute.planner.simulator import TaskGraph, in_order, merge_dependencies
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

_LANES = 1 << 8  # the lane column is one byte


@dataclass(frozen=True, slots=True, eq=False)
class PlanTasks:
    """The tasks of a plan: those of step i are first[i] to first[i + 1] - 1. `n_bytes` is what all of them copy or send."""

    graph: TaskGraph
    first: Ints
    links: Links
    n_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Tasks:
    """Tasks before their dependencies: which step each belongs to, its lane, its cost and route (CSR)."""

    step: Ints
    lane: NDArray[np.int64]
    delay_s: NDArray[np.float64]
    amount: NDArray[np.float64]
    cap: NDArray[np.float64]
    route_ptr: Ints
    route_links: NDArray[np.int32]
    n_bytes: int


def tasks_of(plan: Plan, topology: Topology, calibration: Calibration) -> PlanTasks:
    """The plan's tasks on the topology (rank i on GPU i), at the rates of the calibration."""
    links = links_of(topology, calibration)
    cpu = topology.machine.kind is MachineKind.CPU
    tasks = _cpu_tasks(plan, calibration) if cpu else _gpu_tasks(plan, topology, calibration, links)
    first = np.searchsorted(tasks.step, np.arange(len(plan.steps) + 1)).astype(np.int64)
    dep_sets = [_after(plan, first), in_order(tasks.lane)]
    if not cpu:
        dep_sets.append(_collectives_in_order(plan, first))
    dep_ptr, dep_tasks = merge_dependencies(*dep_sets)
    n = len(tasks.step)
    graph = TaskGraph(
        start_s=np.zeros(n), delay_s=tasks.delay_s, amount=tasks.amount, cap=tasks.cap, weight=np.ones(n),
        route_ptr=tasks.route_ptr, route_links=tasks.route_links, dep_ptr=dep_ptr, dep_tasks=dep_tasks, capacity=links.capacity,
    )  # fmt: skip
    return PlanTasks(graph, first, links, tasks.n_bytes)


def _after(plan: Plan, first: Ints) -> tuple[Ints, NDArray[np.int32]]:
    """Every task of a step waits for every task of the steps in its `after` list."""
    steps = plan.steps
    n_tasks = np.diff(first)
    owner = np.repeat(np.arange(len(steps)), n_tasks)
    at, task = ranges(steps.after_ptr, owner)
    dep, row = ranges(first, steps.after[at])
    counts = np.bincount(task[row], minlength=len(owner))
    return np.concatenate([[0], np.cumsum(counts)]), dep.astype(np.int32)


def _collectives_in_order(plan: Plan, first: Ints) -> tuple[Ints, NDArray[np.int32]]:
    """A collective starts when all its members are done with the collectives before it."""
    pairs: list[tuple[int, int]] = []
    last = np.full(plan.problem.n_ranks, -1, dtype=np.int64)
    for step in np.flatnonzero(plan.steps.op != Op.COPY).tolist():
        members = plan.group(int(plan.steps.group[step]))
        pairs += [(step, before) for before in np.unique(last[members]).tolist() if before >= 0]
        last[members] = step
    deps = [
        (task, dep)
        for step, before in pairs
        for task in range(first[step], first[step + 1])
        for dep in range(first[before], first[before + 1])
    ]
    table = np.array(deps, dtype=np.int64).reshape(-1, 2)
    return np.concatenate([[0], np.cumsum(np.bincount(table[:, 0], minlength=int(first[-1])))]), table[:, 1].astype(np.int32)


def _cpu_tasks(plan: Plan, calibration: Calibration) -> _Tasks:
    """One task for each step and rank that drives it; amounts are core-seconds on one shared link, at most one core each."""
    steps = plan.steps
    assert calibration.copy_Bps is not None
    copy = steps.op == Op.COPY
    size = np.where(copy, 1, np.diff(plan.group_ptr)[np.maximum(steps.group, 0)] if len(plan.group_ptr) > 1 else 1)
    step = np.repeat(np.arange(len(steps)), size)
    rank = np.repeat(steps.src.astype(np.int64), size)
    n_pieces = np.repeat(plan.step_pieces, size)
    n_bytes = np.repeat(plan.step_bytes, size)
    starts = np.cumsum(size) - size
    for i in np.flatnonzero(~copy).tolist():
        group = plan.group(int(steps.group[i]))
        rows = slice(starts[i], starts[i] + len(group))
        rank[rows] = group
        if steps.op[i] == Op.BROADCAST:
            share = np.where(group == steps.src[i], len(group) - 1, 0)
            n_pieces[rows], n_bytes[rows] = n_pieces[rows] * share, n_bytes[rows] * share
        else:
            owner, entry_bytes = gathered_from(plan, i)
            n_pieces[rows] = np.bincount(owner, minlength=len(group)) * len(group)
            n_bytes[rows] = np.bincount(owner, weights=entry_bytes, minlength=len(group)).astype(np.int64) * len(group)
    amount = calibration.launch_s + n_pieces * calibration.piece_s + n_bytes / calibration.copy_Bps
    amount += calibration.wait_s * np.repeat(_waits(plan), size)
    if calibration.run_s:  # a collective's runs are those of all its members together: pieces, shared out as its bytes are
        share = n_pieces / np.maximum(np.repeat(plan.step_pieces, size), 1)
        amount += calibration.run_s * np.repeat(step_runs(plan), size) * share
    n = len(step)
    return _Tasks(
        step,
        rank,
        np.zeros(n),
        amount,
        np.ones(n),
        np.arange(n + 1),
        np.zeros(n, dtype=np.int32),
        int(n_bytes.sum()),
    )


def _waits(plan: Plan) -> NDArray[np.bool_]:
    """Which steps wait for a step that another rank drives; collectives always do."""
    steps = plan.steps
    waits: NDArray[np.bool_] = steps.op != Op.COPY
    owner = np.repeat(np.arange(len(steps)), np.diff(steps.after_ptr))
    waits[owner[steps.src[steps.after] != steps.src[owner]]] = True
    return waits


def _gpu_tasks(plan: Plan, topology: Topology, calibration: Calibration, links: Links) -> _Tasks:
    nvlink, nic = path_costs(calibration)
    steps = plan.steps
    src, dst = np.maximum(steps.src, 0), np.maximum(steps.dst, 0)
    copy, local = steps.op == Op.COPY, src == dst
    near = topology.domain[src] == topology.domain[dst]
    latency = np.where(local, 0.0, np.where(near, nvlink.latency_s, nic.latency_s))
    delay = calibration.launch_s + latency + plan.step_pieces * calibration.piece_s
    spine = topology.machine.oversubscription > 1
    route = np.stack(
        [
            np.where(local, links.memory(src), np.where(near, links.nvlink_out(src), links.nic_out(src))),
            np.where(near, links.nvlink_in(dst), links.nic_in(dst)),
            links.uplink(src),
            links.downlink(dst),
        ],
        axis=1,
    )
    used = np.stack([np.ones_like(local), ~local, ~near & spine, ~near & spine], axis=1)
    n_tasks = np.ones(len(steps), dtype=np.int64)
    rings = {i: _rings(plan, i, topology, calibration, links) for i in np.flatnonzero(~copy).tolist()}
    for i, found in rings.items():
        n_tasks[i] = len(found)
    step = np.repeat(np.arange(len(steps)), n_tasks)
    first = np.cumsum(n_tasks) - n_tasks
    delay_s, amount = delay[step], plan.step_bytes[step].astype(np.float64)
    lane = np.where(copy, steps.src.astype(np.int64) * _LANES + steps.lane, -1)[step]
    lengths = used.sum(axis=1)[step]
    for i, found in rings.items():
        for k, ring in enumerate(found):
            delay_s[first[i] + k], amount[first[i] + k], lengths[first[i] + k] = (
                ring.delay_s,
                ring.n_bytes,
                len(ring.links),
            )
    route_ptr = np.concatenate([[0], np.cumsum(lengths)])
    route_links = np.zeros(int(route_ptr[-1]), dtype=np.int32)
    of_copy = np.repeat(copy[step], lengths)
    route_links[of_copy] = route[copy][used[copy]]
    for i, found in rings.items():
        for k, ring in enumerate(found):
            route_links[route_ptr[first[i] + k] : route_ptr[first[i] + k + 1]] = ring.links
    return _Tasks(step, lane, delay_s, amount, np.full(len(step), np.inf), route_ptr, route_links, int(amount.sum()))


@dataclass(frozen=True, slots=True, eq=False)
class _Ring:
    """One pipelined ring of a collective: all its hops as one flow."""

    delay_s: float
    n_bytes: float
    links: NDArray[np.int32]


def _rings(plan: Plan, step: int, topology: Topology, calibration: Calibration, links: Links) -> list[_Ring]:
    """The rings of a collective step. Each carries an equal part and enters a domain by another GPU's NIC."""
    nvlink, nic = path_costs(calibration)
    steps = plan.steps
    group = plan.group(int(steps.group[step]))
    root = int(steps.src[step]) if steps.op[step] == Op.BROADCAST else -1
    domains = [group[topology.domain[group] == d] for d in np.unique(topology.domain[group])]
    domains.sort(key=lambda members: root not in members)
    n_rings = min(len(members) for members in domains) if len(domains) > 1 else 1
    n = len(group)
    n_bytes = float(plan.step_bytes[step]) / n_rings * (1.0 if root >= 0 else (n - 1) / n)
    found = []
    for i in range(n_rings):
        order = np.concatenate([np.roll(members, -i) for members in domains])
        if root >= 0:
            order = np.concatenate([[root], order[order != root]]).astype(np.int32)
        hop_src, hop_dst = (order[:-1], order[1:]) if root >= 0 else (order, np.roll(order, -1))
        near = topology.domain[hop_src] == topology.domain[hop_dst]
        pairs = np.stack(
            [
                np.where(near, links.nvlink_out(hop_src), links.nic_out(hop_src)),
                np.where(near, links.nvlink_in(hop_dst), links.nic_in(hop_dst)),
            ],
            axis=1,
        ).ravel()
        if topology.machine.oversubscription > 1:
            pairs = np.concatenate([pairs, links.uplink(hop_src[~near]), links.downlink(hop_dst[~near])])
        n_far = int((~near).sum()) - (0 if root >= 0 or near.all() else 1)
        latency = n_far * nic.latency_s + max(0, n - 1 - n_far) * nvlink.latency_s
        delay = calibration.launch_s + latency + float(plan.step_pieces[step]) * calibration.piece_s
        found.append(_Ring(delay, n_bytes if n > 1 else 0.0, pairs.astype(np.int32) if n > 1 else np.zeros(0, np.int32)))
    return found
