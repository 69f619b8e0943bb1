"""What a training step moves, as flows: seconds before the first byte, bytes, and the rate that they can reach alone.

Ring hops follow NCCL's channel law or the law of puts; collectives are those of shardroute.planner.backends.
"""

import math
from dataclasses import dataclass, replace
from enum import IntEnum

from shardroute.planner.backends.channels import ChannelLaw, Path, PutLaw, channel_law, put_law
from shardroute.planner.backends.collective_sms import collective_sms
from shardroute.planner.backends.collectives import Group, collective_s
from shardroute.planner.backends.rates import StepRates, shipped_channels
from shardroute.planner.steps.settings import Carrier, StepLayout
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine


class Link(IntEnum):
    """A resource of one GPU that tasks share; NONE for a flow of no bytes. SMS counts all SMs as 1."""

    NONE = -1
    NVLINK = 0
    NIC = 1
    SMS = 2


@dataclass(frozen=True, slots=True)
class Flow:
    """`n_bytes` over a link at rate_Bps at most, after start_s; holds n_sms while it runs."""

    start_s: float
    n_bytes: float
    rate_Bps: float
    link: Link
    n_sms: int = 0

    @property
    def alone_s(self) -> float:
        """Seconds when nothing else uses the link."""
        return self.start_s + (self.n_bytes / self.rate_Bps if self.n_bytes else 0.0)


NOTHING = Flow(0.0, 0.0, 1.0, Link.NONE)


@dataclass(frozen=True, slots=True)
class Network:
    """A machine's links under a calibration, for a job of `n_gpus` GPUs laid out domain by domain.

    The job's GPUs are in one communicator, as XLA has them (one clique of all partitions until JAX 0.10.0). Groups of
    neighbouring GPUs up to a domain's size lie in one domain: a domain that isn't filled by whole groups keeps some GPUs idle.
    """

    machine: Machine
    calibration: Calibration
    n_gpus: int
    channels: ChannelLaw | None
    puts: PutLaw | None

    def group(self, n_ranks: int, stride: int = 1) -> Group:
        """A group of n_ranks GPUs that stand `stride` apart."""
        return Group(n_ranks, min(n_ranks, -(-n_ranks * stride // self.machine.gpus_per_domain)))

    @property
    def one_domain(self) -> bool:
        """Whether the whole job lies in one NVLink domain."""
        return self.n_gpus <= self.machine.gpus_per_domain

    def path(self, group: int) -> Path:
        """How the slowest pair of a group of neighbouring GPUs is joined."""
        return Path.NVLINK if group <= self.machine.gpus_per_domain else Path.NIC


def network(machine: Machine, calibration: Calibration, n_gpus: int) -> Network:
    """The network of a job."""
    return Network(machine, calibration, n_gpus, channel_law(machine, calibration), put_law(machine, calibration))


def carriers(net: Network, layout: StepLayout) -> list[Carrier]:
    """The carriers that could take the hops of a layout's ring: those calibrated, and able to reach the next rank."""
    found = [Carrier.NCCL] if net.channels is not None else []
    if net.puts is not None and net.path(layout.cp * layout.tp) is Path.NVLINK:
        found += [Carrier.NCCL_PUT, Carrier.NVSHMEM]
    return found


def hop(net: Network, layout: StepLayout, rates: StepRates, n_bytes: float) -> Flow:
    """One hop of the ring: every rank sends n_bytes to the next.

    Raises InputError for a carrier that the calibration doesn't cover, or that can't reach the next rank.
    """
    path = net.path(layout.cp * layout.tp)
    match layout.carrier:
        case Carrier.NCCL:
            if (law := net.channels) is None:
                raise uncalibrated(net, "p2p")
            flow = send_recv(law, n_bytes, net.n_gpus, net.one_domain, path)
            more_s = rates.channel_start_s * math.log2(flow.n_sms) if path is Path.NVLINK else 0.0
            return replace(flow, start_s=flow.start_s + more_s)
        case Carrier.NCCL_PUT | Carrier.NVSHMEM:
            if (puts := net.puts) is None:
                raise uncalibrated(net, "put")
            if path is Path.NIC:
                raise InputError(
                    f"carrier {layout.carrier} works inside one NVLink domain only (XLA's puts, and its barrier), and "
                    f"cp {layout.cp} x tp {layout.tp} is more than the {net.machine.gpus_per_domain} GPUs of a domain; use nccl"
                )
            start_s = puts.start_s(path)
            if layout.carrier is Carrier.NVSHMEM:  # XLA puts a barrier over the domain's team behind every permute
                start_s += puts.barrier_s(min(net.n_gpus, net.machine.gpus_per_domain))
            return Flow(start_s, n_bytes, puts.rate_Bps(path), Link.NVLINK)


def send_recv(law: ChannelLaw, n_bytes: float, n_ranks: int, one_domain: bool, path: Path) -> Flow:
    """What one rank of a ring sends by NCCL's send and receive, in a communicator of n_ranks: one SM a channel."""
    return Flow(
        start_s=float(law.start_s(n_bytes, path)),
        n_bytes=n_bytes,
        rate_Bps=float(law.rate_Bps(n_bytes, n_ranks, one_domain, path)),
        link=Link.NVLINK if path is Path.NVLINK else Link.NIC,
        n_sms=int(law.channels(n_bytes, n_ranks, one_domain, path)),
    )


def collective(net: Network, op: Collective, n_bytes: float, group: Group) -> Flow:
    """A collective as one flow that takes its whole time; n_bytes as Collective counts them. SMs that nobody knows aren't held.
    """
    if group.n_ranks == 1 or n_bytes == 0:
        return NOTHING
    seconds, _ = collective_s(op, round(n_bytes), group, net.machine, net.calibration)
    # What each GPU sends: its link is shared with whatever moves beside it.
    wire = n_bytes * (group.n_ranks - 1) / group.n_ranks
    held = collective_sms(op, round(n_bytes), group, net.machine, net.calibration, shipped_channels(net.machine.name))
    link = Link.NVLINK if group.n_domains == 1 else Link.NIC
    return Flow(0.0, wire, wire / seconds, link, 0 if held is None else held)


def in_turn(first: Flow, second: Flow) -> Flow:
    """Two flows over one link, one after the other, as one."""
    if second.link is Link.NONE:
        return first
    assert first.link is second.link
    n_bytes, start_s = first.n_bytes + second.n_bytes, first.start_s + second.start_s
    n_sms = max(first.n_sms, second.n_sms)
    return Flow(start_s, n_bytes, n_bytes / (first.alone_s + second.alone_s - start_s), first.link, n_sms)


def uncalibrated(net: Network, table: str) -> InputError:
    """The InputError for hops that the calibration says nothing about."""
    return InputError(
        f"the calibration of {net.calibration.machine} ({net.calibration.library}) has no [{table}] table, which the ring's hops "
        "need; give --calibration FILE with one"
    )
