"""Copies on a GPU machine: what each costs before its bytes flow, how fast they may flow, and over which links.

- NCCL send and receive: start and rate by the channel law (`channels`), where the calibration has one; else launch and latency,
  and the links alone bound the rate. What a rank sends and receives in one round of the plan is one group (`groups`): its
  messages begin behind one launch, which takes the longer the more of them there are (`group_delay_s`).
- One-sided puts (NCCL put/signal, NVSHMEM): start and rate of a copy engine over NVLink, of RDMA over NICs.
- A copy within a rank reads and writes the GPU's memory.

What does not lie in one run of memory is packed into a buffer before it is sent, and unpacked after: reading and writing the
GPU's memory once each time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.channels import Path, put_law
from shardroute.planner.backends.groups import group_law, in_groups
from shardroute.planner.backends.links import Links, path_costs
from shardroute.planner.backends.runs import packed_bytes
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Backend, Op, Plan
from shardroute.planner.rounds import group_sizes
from shardroute.planner.wires import wires_of
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.topologies import Topology

Floats = NDArray[np.float64]

_PUTS = (Backend.NCCL_PUT, Backend.NVSHMEM)


@dataclass(frozen=True, slots=True, eq=False)
class CopyCosts:
    """One row a step; rows of other ops hold nothing of use. `links[i][used[i]]` is the route of step i.

    delay_s           from the start to the first byte, but for packing and unpacking
    pack_s, unpack_s  what is packed at the source and unpacked at the destination, at their memory's rate
    engine            the GPU whose copy engine carries the step, -1 for none: one engine carries one copy at a time
    """

    delay_s: Floats
    pack_s: Floats
    unpack_s: Floats
    cap_Bps: Floats
    links: NDArray[np.int32]
    used: NDArray[np.bool_]
    engine: NDArray[np.int32]


def copy_costs(plan: Plan, topology: Topology, calibration: Calibration, links: Links) -> CopyCosts:
    """What the COPY steps cost, by the backend of each."""
    steps = plan.steps
    src, dst = np.maximum(steps.src, 0), np.maximum(steps.dst, 0)
    local = src == dst
    near = topology.domain[src] == topology.domain[dst]
    start_s, cap_Bps = _sent(plan, topology, calibration, near)
    start_s = np.where(local, calibration.launch_s, start_s)
    cap_Bps = np.where(local, np.inf, cap_Bps)
    delay_s = start_s + plan.step_pieces * calibration.piece_s
    pack_s, unpack_s = np.zeros(len(steps)), np.zeros(len(steps))
    if calibration.memory is not None:
        # A byte packed is read once and written once.
        rate_Bps = topology.hbm_Bps * calibration.memory.efficiency / 2
        packed, unpacked = packed_bytes(plan)
        within = local | (steps.op != Op.COPY)
        pack_s, unpack_s = np.where(within, 0.0, packed / rate_Bps[src]), np.where(within, 0.0, unpacked / rate_Bps[dst])
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
    by_engine = np.isin(steps.backend, _PUTS) & (steps.op == Op.COPY) & near & ~local
    engine = np.where(by_engine, src, -1).astype(np.int32)
    return CopyCosts(delay_s, pack_s, unpack_s, cap_Bps, route.astype(np.int32), used, engine)


def group_delay_s(plan: Plan, rounds: Ints, calibration: Calibration) -> Floats:
    """What the other messages of its group add to each step's start, float64[n_steps]; rounds are those of the steps.

    A message flows when both of its ends have launched their groups: the larger of the two counts. Puts are calls of their own.
    What other systems do has no wires of ours: what a rank has of a round counts together.
    """
    ours = in_groups(plan, calibration).any()
    wires = wires_of(plan.steps.lane) if ours else np.zeros(len(plan.steps), np.int64)
    return np.asarray((group_sizes(plan, rounds, wires) - 1) * calibration.message_s, dtype=np.float64)


def _sent(plan: Plan, topology: Topology, calibration: Calibration, near: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Start and greatest rate of each step, were it a copy between two ranks."""
    nvlink, nic = path_costs(calibration)
    size = plan.step_bytes.astype(np.float64)
    start_s = calibration.launch_s + np.where(near, nvlink.latency_s, nic.latency_s)
    cap_Bps = np.full(len(size), np.inf)
    law = group_law(plan, topology, topology.machine, calibration)
    if law is not None:
        # Communicators span the plan's ranks.
        n_ranks = plan.problem.n_ranks
        one = len(np.unique(topology.domain[:n_ranks])) == 1
        start_s = np.where(near, law.start_s(size), law.start_s(size, Path.NIC))
        # NICs may be unlike: the links bound them, each at its own rate.
        by_channels = _nic_channels(plan, topology, calibration, one) * law.cost.channel_Bps
        cap_Bps = np.where(near, law.rate_Bps(size, n_ranks, one), by_channels)
    puts = np.isin(plan.steps.backend, _PUTS)
    put = put_law(topology.machine, calibration)
    if put is not None and puts.any():
        start_s = np.where(puts, np.where(near, put.start_s(), put.start_s(Path.NIC)), start_s)
        cap_Bps = np.where(puts, np.where(near, put.rate_Bps(), np.inf), cap_Bps)
    return start_s, cap_Bps


def _nic_channels(plan: Plan, topology: Topology, calibration: Calibration, one_domain: bool) -> Ints:
    """Channels of each step, went it over NICs: between unlike machines as many as both give, as a channel has two ends."""
    steps = plan.steps
    given = []
    for machine, _ in topology.parts:
        law = group_law(plan, topology, machine, calibration)
        assert law is not None
        given.append(law.channels(plan.step_bytes, plan.problem.n_ranks, one_domain, Path.NIC))
    part = np.repeat(np.arange(len(given)), [n for _, n in topology.parts])
    by_part, rows = np.stack(given), np.arange(len(steps))
    ends = (part[np.maximum(rank, 0)] for rank in (steps.src, steps.dst))
    return np.asarray(np.minimum(*(by_part[end, rows] for end in ends)))
