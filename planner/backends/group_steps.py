"""Steps of a group of ranks on a GPU machine: collectives as pipelined rings, and barriers.

A collective runs as many rings as the NICs that every domain of its group can give it; each ring is one flow over all its hops,
so that it shares links with whatever else runs. Where the calibration knows NCCL's collectives, alone it takes what
`collectives` says: its start is that of a single byte, and its rings are capped so that the rest follows.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.collectives import collective_s
from shardroute.planner.backends.computes import gpu_seconds
from shardroute.planner.backends.links import Links, path_costs
from shardroute.planner.backends.ring_orders import ring_orders
from shardroute.planner.backends.tuning import Algorithm, Group
from shardroute.planner.plans import Op, Plan
from shardroute.planner.shares import Told, part, untold
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.collectives import Collective
from shardroute.topologies.topologies import Topology

# What a collective step is to those who know collectives by themselves.
COLLECTIVES: Final = {
    Op.ALL_GATHER: Collective.ALL_GATHER,
    Op.BROADCAST: Collective.BROADCAST,
    Op.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    Op.ALL_REDUCE: Collective.ALL_REDUCE,
}
# The share of what attention takes in a plan that computes some.
_COMPUTED: Final = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """One pipelined ring of a collective: all its hops as one flow. A barrier has no bytes and no links.

    A COMPUTE has seconds for bytes, and the SMs of its rank for a link.
    """

    delay_s: float
    n_bytes: float
    cap_Bps: float
    links: NDArray[np.int32]


def group_rings(
    plan: Plan, topology: Topology, calibration: Calibration, links: Links, progress: Told = untold
) -> dict[int, list[Ring]]:
    """The rings of every step that is not a copy, by step; progress is told the share that is done."""

    @cache
    def alone_s(op: Collective, n_bytes: int, group: Group) -> tuple[float, str]:
        return collective_s(op, n_bytes, group, topology.machine, calibration)

    @cache
    def domain_ranks(group: int) -> NDArray[np.int64]:
        return np.unique(topology.domain[plan.group(group)], return_counts=True)[1]

    @cache
    def paths(group: int, root: int) -> list[_Path]:
        return _paths(plan.group(group), root, topology, calibration, links)

    found: dict[int, list[Ring]] = {}
    computing = part(progress, 0.0, _COMPUTED)
    computed_s = np.zeros(len(plan.steps))
    if len(plan.computes):
        computed_s[plan.computes.step] = gpu_seconds(plan, topology.machine, computing)
    for step in np.flatnonzero(plan.steps.op != Op.COPY).tolist():
        op = Op(int(plan.steps.op[step]))
        if op is Op.COMPUTE:
            found[step] = [Ring(0.0, float(computed_s[step]), 1.0, links.sms(plan.group(int(plan.steps.group[step]))))]
            continue
        if op is Op.BARRIER:
            found[step] = [_barrier(domain_ranks(int(plan.steps.group[step])), calibration)]
            continue
        root = int(plan.steps.src[step]) if op is Op.BROADCAST else -1
        rings = _rings(plan, step, paths(int(plan.steps.group[step]), root), calibration)
        if op in COLLECTIVES and calibration.collectives is not None and len(rings[0].links):
            ranks = domain_ranks(int(plan.steps.group[step]))
            group = Group(int(ranks.sum()), len(ranks))
            (start_s, _), (whole_s, how) = (alone_s(COLLECTIVES[op], n, group) for n in (1, int(plan.step_bytes[step])))
            if op is Op.ALL_REDUCE and Algorithm.NVLS in how:  # switches add up and multicast: links carry a byte once
                rings = [replace(ring, n_bytes=float(plan.step_bytes[step]) / len(rings)) for ring in rings]
            pieces_s = float(plan.step_pieces[step]) * calibration.piece_s
            rings = [_timed(ring, start_s + pieces_s, whole_s - start_s) for ring in rings]
        found[step] = rings
    return found


def _timed(ring: Ring, delay_s: float, flow_s: float) -> Ring:
    """The ring, so that alone it starts after delay_s and flows for flow_s, if its links let it."""
    return Ring(delay_s, ring.n_bytes, ring.n_bytes / flow_s if flow_s > 0 and ring.n_bytes else np.inf, ring.links)


def _barrier(domain_ranks: NDArray[np.int64], calibration: Calibration) -> Ring:
    """A barrier as a dissemination barrier (Hensgen, Finkel, Manber 1988): rounds of signals, log2 of how many take part.

    First inside each domain, then between the domains; domain_ranks counts the members in each.
    """
    nvlink, nic = path_costs(calibration)
    near, far = _rounds(int(domain_ranks.max(initial=1))), _rounds(len(domain_ranks))
    delay_s = calibration.launch_s + near * nvlink.latency_s + far * nic.latency_s
    return Ring(delay_s, 0.0, np.inf, np.zeros(0, np.int32))


def _rounds(n: int) -> int:
    """ceil(log2(n)): rounds in which all of n have heard of each other, 0 for one alone."""
    return max(n - 1, 0).bit_length()


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """All hops of a ring: their latencies together, and their links. No links where the group is one rank."""

    latency_s: float
    links: NDArray[np.int32]


def _rings(plan: Plan, step: int, paths: list[_Path], calibration: Calibration) -> list[Ring]:
    """The rings of a collective step; each carries an equal part."""
    n = len(plan.group(int(plan.steps.group[step])))
    op = Op(int(plan.steps.op[step]))
    # A ring that gathers or scatters passes n - 1 of n parts over each link, one that reduces to all does both.
    share = 1.0 if op is Op.BROADCAST else (2 if op is Op.ALL_REDUCE else 1) * (n - 1) / n
    n_bytes = float(plan.step_bytes[step]) / len(paths) * share if n > 1 else 0.0
    delay_s = calibration.launch_s + float(plan.step_pieces[step]) * calibration.piece_s
    return [Ring(delay_s + path.latency_s, n_bytes, np.inf, path.links) for path in paths]


def _paths(
    group: NDArray[np.int32], root: int, topology: Topology, calibration: Calibration, links: Links
) -> list[_Path]:
    """The rings of a group, from its root where it has one (-1: none). Each enters a domain by another GPU's NIC."""
    nvlink, nic = path_costs(calibration)
    n = len(group)
    found = []
    for order in ring_orders(group, root, topology.domain):
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
        found.append(_Path(latency, pairs.astype(np.int32)[: 0 if n == 1 else None]))
    return found
