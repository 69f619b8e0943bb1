"""How the ranks of an emulated cluster are joined: the rates of their ports, and the channels that a plan needs.

A *channel* carries messages from one rank to another in order. Each is a socket of its own, so that messages share links as flows
do: a channel a pair and queue for copies, one a pair and ring for collectives, one a pair for signals.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.interpret import Programs
from shardroute.planner.backends.ring_orders import ring_orders
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Op, Plan
from shardroute.topologies.topologies import Topology

Channel = tuple[int, int, int]  # sender, receiver, what for
# What channels are for: 0 to 255 are queues of copies, as the `lane` column has them; signals; and above that rings.
SIGNALS: Final = 1 << 8
_FIRST_RING: Final = 1 << 9


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """Columns that the ranks of a run share.

    domain            int32[n_ranks]
    nvlink_Bps, nic_Bps   float64[n_ranks]: of each rank's ports, one way
    namespace         int64[n_ranks]: descriptor of the network namespace that a rank works in; -1: none, ranks keep to rates
    op, queue, src, dst, group   as in the plan, one row a step; `queue` is its lane column
    group_ptr, group_ranks       CSR: the ranks of each group
    """

    domain: NDArray[np.int32]
    nvlink_Bps: NDArray[np.float64]
    nic_Bps: NDArray[np.float64]
    namespace: Ints
    op: NDArray[np.uint8]
    queue: NDArray[np.uint8]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    group: NDArray[np.int32]
    group_ptr: Ints
    group_ranks: NDArray[np.int32]

    def members(self, step: int) -> NDArray[np.int32]:
        """The ranks of a collective, in the order of its group."""
        at = int(self.group[step])
        return self.group_ranks[self.group_ptr[at] : self.group_ptr[at + 1]]

    def rings(self, step: int) -> list[list[int]]:
        """The rings of a collective, each an order of its ranks."""
        orders = ring_orders(self.members(step), int(self.src[step]), self.domain)
        return [order.tolist() for order in orders]


def wiring_of(plan: Plan, topology: Topology, namespaces: Ints) -> Wiring:
    """The wiring of a plan's ranks, rank i as GPU i of the topology."""
    n, steps = plan.problem.n_ranks, plan.steps
    return Wiring(
        topology.domain[:n].copy(), topology.nvlink_Bps[:n].copy(), topology.nic_Bps[:n].copy(), namespaces, steps.op, steps.lane,
        steps.src, steps.dst, steps.group, plan.group_ptr.astype(np.int64), plan.group_ranks,
    )  # fmt: skip


def ring_code(queue: int, ring: int) -> int:
    """What the channel of a ring is for; collectives of one queue use it one after the other."""
    return _FIRST_RING + (ring << 8) + queue


def ring_of(use: int) -> int:
    """The ring that a channel is for."""
    return (use - _FIRST_RING) >> 8


def hops_of(order: list[int], op: int) -> list[tuple[int, int]]:
    """Who sends to whom along a ring: round for an all-gather, to the last one for a broadcast."""
    round_ = op == Op.ALL_GATHER and len(order) > 1
    return list(zip(order, [*order[1:], order[0]] if round_ else order[1:], strict=False))


def channels_of(wiring: Wiring, programs: Programs) -> list[Channel]:
    """All channels of a plan, ascending."""
    copies = np.flatnonzero((wiring.op == Op.COPY) & (wiring.src != wiring.dst))
    table = np.stack([wiring.src[copies], wiring.dst[copies], wiring.queue[copies].astype(np.int32)], axis=1)
    found = {(src, dst, queue) for src, dst, queue in np.unique(table, axis=0).tolist()}
    return sorted(found | set(_of_collectives(wiring)) | set(_to_waiting(wiring, programs)))


def _to_waiting(wiring: Wiring, programs: Programs) -> Iterator[Channel]:
    """Among the ranks of each collective, to those that wait for it."""
    for step in np.flatnonzero((wiring.op != Op.COPY) & (wiring.op != Op.BARRIER)).tolist():
        ranks, waiting = partners(programs, step)
        yield from ((src, dst, SIGNALS) for src in ranks for dst in waiting if dst != src)


def partners(programs: Programs, step: int) -> tuple[list[int], list[int]]:
    """The ranks that drive a step, and those of them that wait for it later. Others need not be told: a step by which they see
    anything of it has waited for it itself.
    """
    cells = programs.cells
    ranks = cells.rank[cells.ptr[step] : cells.ptr[step + 1]].tolist()
    waiting = cells.wake[cells.wake_ptr[step] : cells.wake_ptr[step + 1]].tolist()
    return ranks, [rank for rank in waiting if rank in ranks]


def _of_collectives(wiring: Wiring) -> Iterator[Channel]:
    kinds = np.stack([wiring.op, wiring.queue, wiring.src, wiring.group], axis=1)
    _, first = np.unique(kinds, axis=0, return_index=True)
    for step in first.tolist():
        op, queue = int(wiring.op[step]), int(wiring.queue[step])
        if op == Op.COPY:
            continue
        members = wiring.members(step).tolist()
        if op == Op.BARRIER:
            yield from (pair for rank in members[1:] for pair in ((rank, members[0], SIGNALS), (members[0], rank, SIGNALS)))
        else:
            for ring, order in enumerate(wiring.rings(step)):
                yield from ((src, dst, ring_code(queue, ring)) for src, dst in hops_of(order, op))
