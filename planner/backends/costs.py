"""What the steps of a plan cost on a machine, as tasks for the event kernel.

GPU machines: a copy costs its driving rank a start, then its bytes share the links of its route, no faster than its library
sends them (`copy_steps`); a collective is pipelined rings (`group_steps`); what a rank does in one round by NCCL is one group
(`groups`). CPU machines: `cpu_steps`.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.copy_steps import copy_costs, group_delay_s
from shardroute.planner.backends.cpu_steps import cpu_tasks
from shardroute.planner.backends.group_steps import group_rings
from shardroute.planner.backends.groups import Kind, in_groups, with_groups, without_groups
from shardroute.planner.backends.held_sms import with_held_sms
from shardroute.planner.backends.links import Links, links_of
from shardroute.planner.backends.step_tasks import StepTasks
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Op, Plan, ranges
from shardroute.planner.rounds import rounds_of
from shardroute.planner.shares import Told, heard, part
from shardroute.planner.simulator import TaskGraph, in_order, merge_dependencies
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

_LANES = 1 << 8  # the lane column is one byte


@dataclass(frozen=True, slots=True, eq=False)
class PlanTasks:
    """The tasks of a plan: the step of each (-1: of none, as a group's beginning is), its kind, and by step the task that begins
    its sender's group and the one that unpacks it (-1: none). `n_bytes` is what all of them copy or send.
    """

    graph: TaskGraph
    step: Ints
    kind: Ints
    begins: Ints
    unpacks: Ints
    links: Links
    n_bytes: int


# Shares of the time that it took on plans of 165,000 to 660,000 steps until steps had costs, and of the rest until rounds were
# numbered and groups were made; and until steps had costs in plans of attention, of which each COMPUTE has its own.
_COSTED, _NUMBERED, _GROUPED = 0.15, 0.25, 0.95
_COMPUTED = 0.7


def tasks_of(plan: Plan, topology: Topology, calibration: Calibration, progress: Told | None = None) -> PlanTasks:
    """The plan's tasks on the topology (rank i on GPU i), at the rates of the calibration. progress is told the share done."""
    told = heard(progress)
    costed = _COMPUTED if len(plan.computes) else _COSTED
    rest = part(told, costed, 1.0)
    links = links_of(topology, calibration)
    cpu = topology.machine.kind is MachineKind.CPU
    first_part = part(told, 0.0, costed)
    tasks = cpu_tasks(plan, calibration, first_part) if cpu else _gpu_tasks(plan, topology, calibration, links, first_part)
    rest(0.0)
    first = np.searchsorted(tasks.step, np.arange(len(plan.steps) + 1)).astype(np.int64)
    lane_ptr, lane_tasks = in_order(tasks.lane)
    dep_sets = [_after(plan, first), (lane_ptr, lane_tasks)]
    if not cpu:
        dep_sets.append(_collectives_in_order(plan, first))
    dep_ptr, dep_tasks = merge_dependencies(*dep_sets)
    delay_s = tasks.delay_s
    grouped = np.zeros(len(plan.steps), dtype=bool) if cpu else in_groups(plan, calibration)
    rounds = np.zeros(0, np.int64)
    if grouped.any() or (not cpu and calibration.message_s):
        rounds = rounds_of(dep_ptr, dep_tasks)
        delay_s = delay_s + group_delay_s(plan, rounds[first[:-1]], calibration)[tasks.step]
    n = len(tasks.step)
    behind = np.full(n, -1)
    behind[np.diff(lane_ptr) > 0] = lane_tasks
    graph = TaskGraph(
        start_s=np.zeros(n), delay_s=delay_s, amount=tasks.amount, cap=tasks.cap, weight=np.ones(n),
        route_ptr=tasks.route_ptr, route_links=tasks.route_links, dep_ptr=dep_ptr, dep_tasks=dep_tasks, capacity=links.capacity,
        late_amount=np.zeros(n) if tasks.late is None else tasks.late, behind=behind,
    )  # fmt: skip
    rest(_NUMBERED)
    if grouped.any():
        grouping = part(rest, _NUMBERED, _GROUPED)
        found = with_groups(graph, tasks.step, rounds, plan, grouped, tasks.pack_s, tasks.unpack_s, grouping)
    else:
        found = without_groups(graph, tasks.step, len(plan.steps))
    rest(_GROUPED)
    graph, kind, step = _one_at_a_time(found.graph, tasks.engine, found.place), found.kind, found.step
    if not cpu and len(plan.computes):
        graph = with_held_sms(graph, found.place[first[:-1]], plan, topology, calibration, links)
        n_held = graph.n_tasks - len(step)
        kind, step = np.concatenate([kind, np.full(n_held, Kind.HELD)]), np.concatenate([step, np.full(n_held, -1)])
    rest(1.0)
    return PlanTasks(graph, step, kind, found.begins, found.unpacks, links, tasks.n_bytes)


def _one_at_a_time(graph: TaskGraph, engine: NDArray[np.int32] | None, place: Ints) -> TaskGraph:
    """The graph with what a copy engine carries one after the other, in the order of tasks; place[i] is the task of engine[i]."""
    if engine is None or (engine < 0).all():
        return graph
    by_task = np.full(graph.n_tasks, -1, dtype=np.int64)
    by_task[place] = engine
    dep_ptr, dep_tasks = merge_dependencies((graph.dep_ptr, graph.dep_tasks), in_order(by_task))
    return replace(graph, dep_ptr=dep_ptr, dep_tasks=dep_tasks)


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
    """A collective starts when all its members are done with the collectives before it in its queue."""
    pairs: list[tuple[int, int]] = []
    queues = np.unique(plan.steps.lane[plan.steps.op != Op.COPY])
    last = np.full((len(queues), plan.problem.n_ranks), -1, dtype=np.int64)
    for step in np.flatnonzero(plan.steps.op != Op.COPY).tolist():
        members = plan.group(int(plan.steps.group[step]))
        of_queue = last[int(np.searchsorted(queues, plan.steps.lane[step]))]
        pairs += [(step, before) for before in np.unique(of_queue[members]).tolist() if before >= 0]
        of_queue[members] = step
    deps = [
        (task, dep)
        for step, before in pairs
        for task in range(first[step], first[step + 1])
        for dep in range(first[before], first[before + 1])
    ]
    table = np.array(deps, dtype=np.int64).reshape(-1, 2)
    return np.concatenate([[0], np.cumsum(np.bincount(table[:, 0], minlength=int(first[-1])))]), table[:, 1].astype(np.int32)


def _gpu_tasks(plan: Plan, topology: Topology, calibration: Calibration, links: Links, progress: Told) -> StepTasks:
    steps = plan.steps
    copy = steps.op == Op.COPY
    costs = copy_costs(plan, topology, calibration, links)
    rings = group_rings(plan, topology, calibration, links, progress)
    n_tasks = np.ones(len(steps), dtype=np.int64)
    for i, found in rings.items():
        n_tasks[i] = len(found)
    step = np.repeat(np.arange(len(steps)), n_tasks)
    first = np.cumsum(n_tasks) - n_tasks
    # What isn't in a group packs and unpacks by itself.
    alone_s = costs.delay_s + np.where(in_groups(plan, calibration), 0.0, costs.pack_s + costs.unpack_s)
    delay_s, cap, amount = alone_s[step], costs.cap_Bps[step], plan.step_bytes[step].astype(np.float64)
    lane = np.where(copy, steps.src.astype(np.int64) * _LANES + steps.lane, -1)[step]
    lengths = costs.used.sum(axis=1)[step]
    for i, found in rings.items():
        for task, ring in enumerate(found, start=int(first[i])):
            delay_s[task], amount[task], cap[task], lengths[task] = ring.delay_s, ring.n_bytes, ring.cap_Bps, len(ring.links)
    route_ptr = np.concatenate([[0], np.cumsum(lengths)])
    route_links = np.zeros(int(route_ptr[-1]), dtype=np.int32)
    of_copy = np.repeat(copy[step], lengths)
    route_links[of_copy] = costs.links[copy][costs.used[copy]]
    for i, found in rings.items():
        for task, ring in enumerate(found, start=int(first[i])):
            route_links[route_ptr[task] : route_ptr[task + 1]] = ring.links
    n_bytes = int(amount[steps.op[step] != Op.COMPUTE].sum())
    return StepTasks(
        step, lane, delay_s, amount, cap, route_ptr, route_links, n_bytes, costs.engine[step],
        pack_s=costs.pack_s, unpack_s=costs.unpack_s,
    )  # fmt: skip
