"""NCCL's groups as tasks: what a rank sends, receives and takes part in within a round of a plan on one wire is a launch.

Rule: what the transports `nccl` and `torch-nccl` do. A rank has a stream for each wire (`planner.wires`), and runs the groups
of a wire in the order of rounds (`planner.rounds`). A group begins when the one before it has ended, when all that its rank's
steps wait for is done, and when what they send is packed; so all of its messages begin together, each as soon as the group of
its other end has begun, too. It ends with the last of them. What came is unpacked behind it, beside the next group. Copies
within the rank, puts and what a rank computes are no part of a group; they wait for the groups that bring what they need.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.channels import ChannelLaw, channel_law
from shardroute.planner.backends.rates import shipped_sms
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Backend, Op, Plan, ranges
from shardroute.planner.shares import Told, part, untold
from shardroute.planner.simulator import TaskGraph
from shardroute.planner.wires import MOST_CHANNELS, channels_of, is_credit, wires_of
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.machines import Machine
from shardroute.topologies.topologies import Topology

Floats = NDArray[np.float64]
Pairs = tuple[Ints, Ints]  # who waits, for what

# Strategies that say what a system of others does, by the first words of their names. These systems send without our transports,
# each call on a stream of its own: NCCL M2N puts from kernels of its own, and NeMo RL broadcasts.
SYSTEMS: Final = frozenset({"gather-broadcast", "hybrid", "m2n-pack", "m2n-window"})
# Shares of the time that it took on plans of 165,000 and 660,000 steps until who takes part was known, what waits for what, and
# within the rest until that was put together and in order.
_PARTED, _WAITED, _PLACED, _SORTED = 0.12, 0.3, 0.15, 0.6
_FEWEST_SMS: Final = 132  # of the machines whose numbers ship: what H100 and H200 have


class Kind(IntEnum):
    """What a task is. The order is that of the tasks of one round."""

    ALONE = 0  # a step, or a part of it, that is in no group
    BEGIN = 1  # a rank's group begins, once what it sends is packed
    MEMBER = 2  # a step, or a part of it, in the groups of its ranks
    END = 3  # a rank's group has ended
    UNPACK = 4  # what a group brought is unpacked
    HELD = 5  # SMs that a copy holds


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """Tasks with those of groups among them, in an order in which each waits for earlier ones only.

    place       int64[n]        where each task has gone
    step, kind  int64[n_tasks]  the step of each task (-1: of none), and its kind
    begins      int64[n_steps]  the task that begins the sender's group, -1 for a step in none
    unpacks     int64[n_steps]  the task that unpacks what the step brings, -1 for none
    """

    graph: TaskGraph
    place: Ints
    step: Ints
    kind: Ints
    begins: Ints
    unpacks: Ints


def in_groups(plan: Plan, calibration: Calibration) -> NDArray[np.bool_]:
    """Which steps go in NCCL's groups, bool[n_steps]: messages by send and receive, and what a group of ranks does together.

    None where the calibration has no [p2p]: then it isn't NCCL that carries them, as on an emulated cluster.
    """
    steps = plan.steps
    if calibration.p2p is None or plan.strategy.split(",")[0] in SYSTEMS:
        return np.zeros(len(steps), dtype=bool)
    of_ranks = ~np.isin(steps.op, (Op.COPY, Op.COMPUTE))
    return np.asarray((steps.backend == Backend.NCCL) & (of_ranks | ((steps.op == Op.COPY) & (steps.src != steps.dst))))


def group_law(plan: Plan, topology: Topology, machine: Machine, calibration: Calibration) -> ChannelLaw | None:
    """The law of the plan's messages on a machine of the topology, whose wires share its SMs; None without [p2p]."""
    grouped = in_groups(plan, calibration)
    if not grouped.any():
        return channel_law(machine, calibration)
    wires = np.unique(wires_of(plan.steps.lane[grouped])).tolist()
    n_sms = min(shipped_sms(part.name) or _FEWEST_SMS for part, _ in topology.parts)
    data = [n for wire, n in zip(wires, channels_of(wires, n_sms), strict=True) if not is_credit(wire)]
    return channel_law(machine, calibration, min(data, default=MOST_CHANNELS))


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Each task's part on each rank that takes part in it, ordered by task, then rank; `group` is that of the rank in the task's
    round on its wire, -1 for a task that goes in none. The number of each group's stream, one a rank and wire, and its round come
    behind.
    """

    task: Ints
    rank: Ints
    group: Ints
    is_member: NDArray[np.bool_]
    stream: Ints
    round: Ints

    @property
    def n_groups(self) -> int:
        """Groups of all ranks, those of a stream one after the other, by rounds."""
        return len(self.stream)


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """The task that begins each group, that ends it, and that unpacks what it brought (-1 where there is nothing to unpack)."""

    begin: Ints
    end: Ints
    unpack: Ints


def with_groups(
    graph: TaskGraph, step: Ints, rounds: Ints, plan: Plan, grouped: NDArray[np.bool_], pack_s: Floats | None,
    unpack_s: Floats | None, progress: Told = untold,
) -> Grouped:  # fmt: skip
    """The graph with the groups of all ranks; progress is told the share that is done.

    step, rounds        of each task
    grouped             bool[n_steps], those of `in_groups`
    pack_s, unpack_s    float64[n_steps], seconds of packing at the sender and unpacking at the receiver (None: none)
    """
    n, n_steps = graph.n_tasks, len(plan.steps)
    pack_s, unpack_s = (np.zeros(n_steps) if each is None else each for each in (pack_s, unpack_s))
    parts = _parts(plan, step, rounds, grouped)
    progress(_PARTED)
    sent = np.flatnonzero(grouped & (plan.steps.op == Op.COPY))
    of_sender, of_receiver = (_group_of(parts, step, side, sent) for side in (plan.steps.src, plan.steps.dst))
    packed_s = np.bincount(of_sender, pack_s[sent], parts.n_groups)
    unpacked_s = np.bincount(of_receiver, unpack_s[sent], parts.n_groups)
    unpacking = np.flatnonzero(unpacked_s > 0)
    begin, end = n + np.arange(parts.n_groups), n + parts.n_groups + np.arange(parts.n_groups)
    unpack = np.full(parts.n_groups, -1)
    unpack[unpacking] = n + 2 * parts.n_groups + np.arange(len(unpacking))
    nodes = _Nodes(begin, end, unpack)
    pairs = [*_bounds(parts, nodes, unpacking), *_waits(graph, grouped[step], plan, step, parts, nodes)]
    progress(_WAITED)
    kind = np.repeat([Kind.ALONE, Kind.BEGIN, Kind.END, Kind.UNPACK], [n, parts.n_groups, parts.n_groups, len(unpacking)])
    kind[:n] = np.where(grouped[step], Kind.MEMBER, Kind.ALONE)
    order = np.lexsort((kind, np.concatenate([rounds, *[parts.round] * 2, parts.round[unpacking]])))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    delay_s = np.concatenate([graph.delay_s, packed_s, np.zeros(parts.n_groups), unpacked_s[unpacking]])
    step_of = np.concatenate([step, np.full(len(order) - n, -1)])[order]
    begins, unpacks = np.full(n_steps, -1), np.full(n_steps, -1)
    begins[sent], unpacks[sent] = place[begin[of_sender]], np.where(unpack_s[sent] > 0, place[unpack[of_receiver]], -1)
    ordered = _ordered(graph, order, place, delay_s, pairs, part(progress, _WAITED, 1.0))
    return Grouped(ordered, place[:n], step_of, kind[order], begins, unpacks)


def _parts(plan: Plan, step: Ints, rounds: Ints, grouped: NDArray[np.bool_]) -> _Parts:
    """Who takes part in what, in which group."""
    of_step, rank = _ranks_of(plan)
    row, task = ranges(np.searchsorted(of_step, np.arange(len(plan.steps) + 1)), step)
    wires, wire = np.unique(wires_of(plan.steps.lane), return_inverse=True)
    n_rounds = int(rounds.max(initial=0)) + 1
    key = (rank[row] * len(wires) + wire[step[task]]) * n_rounds + rounds[task]
    is_member = grouped[step[task]]
    groups, of_member = np.unique(key[is_member], return_inverse=True)
    group = np.full(len(key), -1)
    group[is_member] = of_member
    stream, group_round = np.divmod(groups, n_rounds)
    return _Parts(task, rank[row], group, is_member, stream, group_round)


def _group_of(parts: _Parts, step: Ints, side: NDArray[np.integer], sent: Ints) -> Ints:
    """The group of one end of each message."""
    first = np.searchsorted(parts.task, np.searchsorted(step, sent))
    # A message has two parts, by rank.
    return np.asarray(parts.group[first + (parts.rank[first] != side[sent])])


def _bounds(parts: _Parts, nodes: _Nodes, unpacking: Ints) -> list[Pairs]:
    """What groups wait for beside their steps, and what waits for them: members, ends, the stream's next group, unpacking."""
    member, stream = parts.is_member, parts.stream
    again = np.flatnonzero(stream[1:] == stream[:-1]) + 1
    next_unpack = np.flatnonzero(stream[unpacking[1:]] == stream[unpacking[:-1]]) + 1
    return [
        (parts.task[member], nodes.begin[parts.group[member]]),
        (nodes.end[parts.group[member]], parts.task[member]),
        (nodes.end, nodes.begin),
        (nodes.begin[again], nodes.end[again - 1]),
        (nodes.unpack[unpacking], nodes.end[unpacking]),
        (nodes.unpack[unpacking[next_unpack]], nodes.unpack[unpacking[next_unpack - 1]]),
    ]


def without_groups(graph: TaskGraph, step: Ints, n_steps: int) -> Grouped:
    """The graph as it is, of steps that go in no group."""
    none = np.full(n_steps, -1)
    return Grouped(graph, np.arange(graph.n_tasks), step, np.full(graph.n_tasks, Kind.ALONE), none, none)


def _ranks_of(plan: Plan) -> Pairs:
    """The steps and the ranks that take part in each, by step: a copy's two, or the one; all of a group."""
    steps = plan.steps
    copies = np.flatnonzero(steps.op == Op.COPY)
    apart = copies[steps.src[copies] != steps.dst[copies]]
    others = np.flatnonzero(steps.op != Op.COPY)
    member, owner = ranges(plan.group_ptr, steps.group[others])
    step = np.concatenate([copies, apart, others[owner]])
    rank = np.concatenate([steps.src[copies], steps.dst[apart], plan.group_ranks[member]]).astype(np.int64)
    order = np.lexsort((rank, step))
    return step[order], rank[order]


def _waits(
    graph: TaskGraph, member: NDArray[np.bool_], plan: Plan, step: Ints, parts: _Parts, nodes: _Nodes
) -> list[Pairs]:
    """What the graph's dependencies come to: of a member its rank's group waits, and for a member others wait by its group."""
    n_ranks = plan.problem.n_ranks
    key = parts.task * n_ranks + parts.rank  # ascending
    owner, dep = np.repeat(np.arange(graph.n_tasks), np.diff(graph.dep_ptr)), graph.dep_tasks.astype(np.int64)
    # Ranks that drive the step that waits: the source of a copy, all of a group.
    part, row = ranges(np.searchsorted(parts.task, np.arange(graph.n_tasks + 1)), owner)
    waiting = step[owner[row]]
    drives = (plan.steps.op[waiting] != Op.COPY) | (parts.rank[part] == plan.steps.src[waiting])
    part, row = part[drives], row[drives]
    wanted = dep[row] * n_ranks + parts.rank[part]
    found = np.minimum(np.searchsorted(key, wanted), len(key) - 1)
    here = key[found] == wanted  # what it waits for ends on this rank
    unseen = np.ones(len(owner), dtype=bool)
    unseen[row[here]] = False
    part, row, found = part[here], row[here], found[here]
    waits, brings = member[owner[row]], member[dep[row]]
    waiter = np.where(waits, nodes.begin[parts.group[part]], owner[row])
    before = step[dep[row]]
    lands = brings & ((plan.steps.op[before] != Op.COPY) | (parts.rank[part] == plan.steps.dst[before]))
    unpack = np.where(lands, nodes.unpack[parts.group[found]], -1)
    in_turn = waits & brings & (parts.stream[parts.group[part]] == parts.stream[parts.group[found]])  # they are anyway
    alone, by_end, landed = ~brings, brings & ~in_turn, unpack >= 0
    return [
        (owner[unseen], dep[unseen]),
        (waiter[alone], dep[row][alone]),
        (waiter[by_end], nodes.end[parts.group[found]][by_end]),
        (waiter[landed], unpack[landed]),
    ]


def _ordered(
    graph: TaskGraph, order: Ints, place: Ints, delay_s: Floats, pairs: list[Pairs], progress: Told
) -> TaskGraph:
    """The graph's tasks and those behind them, in this order, with these dependencies."""
    n, extra = len(order), len(order) - graph.n_tasks
    owner, dep = (place[np.concatenate([pair[side] for pair in pairs])] for side in (0, 1))
    progress(_PLACED)
    merged = np.sort(owner * n + dep)
    progress(_SORTED)
    owner, dep = np.divmod(merged[np.diff(merged, prepend=-1) != 0], n)
    lengths = np.concatenate([np.diff(graph.route_ptr), np.zeros(extra, np.int64)])[order]
    old = order[order < graph.n_tasks]
    at, _ = ranges(graph.route_ptr, old)

    def column(values: Floats, filling: float) -> Floats:
        return np.concatenate([values, np.full(extra, filling)])[order]

    return TaskGraph(
        start_s=column(graph.start_s, 0.0), delay_s=delay_s[order], amount=column(graph.amount, 0.0),
        cap=column(graph.cap, np.inf), weight=column(graph.weight, 1.0),
        route_ptr=np.concatenate([[0], np.cumsum(lengths)]), route_links=graph.route_links[at],
        dep_ptr=np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=n))]), dep_tasks=dep.astype(np.int32),
        capacity=graph.capacity,
    )  # fmt: skip
