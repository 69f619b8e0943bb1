"""The strategies by name, and planning with one: problem in, plan out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.overlaps import Pieces, overlap, split_large
from shardroute.planner.plans import Backend, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing import direct, domain_relay, gather_broadcast
from shardroute.planner.routing.trees import TreeRule, plan_by_trees
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

# A message should be large against the latency of a hop (64 MiB at 50 GB/s take 1.3 ms, a hop some 20 us), and small against all
# that a rank takes in, so that the relays of a chain of domains overlap.
LARGEST_MESSAGE_BYTES = 64 * 2**20
SMALLEST_MESSAGE_BYTES = 2**20
MESSAGES_INTO_BUSIEST_RANK = 64

Planner = Callable[[Problem, Sequence[Pieces], Topology, Backend, int], Plan]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to route a problem: its name, one line for people, and the function that plans by it."""

    name: str
    summary: str
    plan: Planner


def _by_trees(name: str, rule: TreeRule) -> Planner:
    def plan(problem: Problem, pieces: Sequence[Pieces], topology: Topology, backend: Backend, message_bytes: int) -> Plan:
        return plan_by_trees(name, problem, pieces, topology, backend, rule, message_bytes)

    return plan


def _gather_broadcast(problem: Problem, pieces: Sequence[Pieces], topology: Topology, backend: Backend, _: int) -> Plan:
    return gather_broadcast.plan(problem, pieces, topology, backend)


STRATEGIES: Mapping[str, Strategy] = {
    s.name: s
    for s in (
        Strategy(
            "direct",
            "each needing rank fetches each piece from one holder",
            _by_trees("direct", direct.trees),
        ),
        Strategy(
            "domain-relay",
            "one copy of each piece into each NVLink domain, relayed on",
            _by_trees("domain-relay", domain_relay.trees),
        ),
        Strategy(
            "gather-broadcast",
            "all-gather whole tensors, broadcast them (the usual baseline)",
            _gather_broadcast,
        ),
    )
}


def pieces_of(problem: Problem) -> tuple[Pieces, ...]:
    """The pieces of each class of the problem. Raises InfeasibleError when a needed element is held nowhere."""
    return tuple(overlap(cls.source, cls.target) for cls in problem.classes)


def message_bytes_for(problem: Problem, pieces: Sequence[Pieces]) -> int:
    """The message size that suits the problem, from the constants above."""
    into = np.zeros(problem.n_ranks, dtype=np.int64)
    for cls, of_class in zip(problem.classes, pieces, strict=True):
        by_pattern = np.bincount(of_class.pattern, weights=of_class.n_elements, minlength=len(of_class.needers))
        for needers, n_elements in zip(of_class.needers, by_pattern, strict=True):
            into[needers] += int(n_elements) * cls.itemsize * len(cls.members)
    return int(np.clip(into.max(initial=0) // MESSAGES_INTO_BUSIEST_RANK, SMALLEST_MESSAGE_BYTES, LARGEST_MESSAGE_BYTES))


def make_plan(problem: Problem, topology: Topology, strategy: str, message_bytes: int | None = None) -> Plan:
    """The plan of `strategy` for the problem on the topology (rank i on GPU i).

    `message_bytes` bounds pieces and bundles; None chooses it by size. Raises InputError for an unknown strategy or too few GPUs,
    InfeasibleError when no source rank holds something that is needed.
    """
    if strategy not in STRATEGIES:
        raise InputError(f"strategy {strategy!r} is not known; expected one of {', '.join(STRATEGIES)}")
    if problem.n_ranks > topology.n_gpus:
        raise InputError(
            f"the layouts use {problem.n_ranks} GPUs, but {topology.machine.name} x {topology.n_units} has {topology.n_gpus}"
        )
    whole = pieces_of(problem)
    limit = message_bytes_for(problem, whole) if message_bytes is None else message_bytes
    pieces = [split_large(p, max(1, limit // cls.itemsize)) for p, cls in zip(whole, problem.classes, strict=True)]
    backend = Backend.PROCESSES if topology.machine.kind is MachineKind.CPU else Backend.NCCL
    return STRATEGIES[strategy].plan(problem, pieces, topology, backend, limit)
