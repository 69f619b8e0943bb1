"""The costs by which ways to route are compared: what one message takes on a path by a backend, and how many it takes to fill it.

A message of n bytes takes start + n / rate. The rate of NCCL's send and receive follows from its channels, which depend on the
size; where that is less than the link carries, several messages must be under way at once. One-sided puts go at the link's rate.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.channels import ChannelLaw, Path, PutLaw, channel_law, put_law
from shardroute.planner.plans import Backend
from shardroute.planner.routing.options import N_QUEUES, Options
from shardroute.topologies.calibrations import Calibration, calibration_names, load_calibration, nominal_calibration
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

# Queues that a lane has at most: the column of a plan's steps has room for no more.
MOST_QUEUES = 32
PUTS = (Backend.NCCL_PUT, Backend.NVSHMEM)


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Costs of messages between `n_ranks` ranks of a topology.

    near_Bps, far_Bps   what the NVLink and the NICs of a GPU reach (median over the ranks)
    """

    calibration: Calibration
    law: ChannelLaw | None
    put: PutLaw | None
    near_Bps: float
    far_Bps: float
    n_ranks: int
    one_domain: bool

    def backends(self) -> tuple[Backend, ...]:
        """Backends whose costs are known."""
        return (Backend.NCCL, *(PUTS if self.put is not None else ()))

    def start_s(self, n_bytes: float, path: Path, backend: Backend = Backend.NCCL) -> float:
        """Seconds from the call until the bytes flow."""
        if backend in PUTS and self.put is not None:
            return self.put.start_s(path)
        if self.law is not None:
            return float(self.law.start_s(n_bytes, path))
        known = self.calibration.nvlink if path is Path.NVLINK else self.calibration.nic
        return self.calibration.launch_s + (0.0 if known is None else known.latency_s)

    def rate_Bps(self, n_bytes: float, path: Path, backend: Backend = Backend.NCCL) -> float:
        """The most that one message gets."""
        link = self.link_Bps(path)
        if backend in PUTS and self.put is not None:
            return min(self.put.rate_Bps(path), link)
        if self.law is not None:
            return min(float(self.law.rate_Bps(n_bytes, self.n_ranks, self.one_domain, path)), link)
        return link

    def link_Bps(self, path: Path) -> float:
        """What the NVLink or the NICs of a GPU reach."""
        return self.near_Bps if path is Path.NVLINK else self.far_Bps

    def starts_at_once(self, n_queues: int, path: Path, backend: Backend) -> int:
        """How many messages' starts overlap: a GPU's puts over NVLink run one at a time, on a copy engine."""
        return 1 if backend in PUTS and path is Path.NVLINK else n_queues

    def queues(self, n_bytes: float, path: Path, backend: Backend = Backend.NCCL) -> int:
        """Messages of this size that fill a link together, N_QUEUES at least: a receiver may be shared at any moment."""
        link = self.link_Bps(path)
        return int(min(max(N_QUEUES, np.ceil(link / self.rate_Bps(n_bytes, path, backend))), MOST_QUEUES))


def costs_of(topology: Topology, n_ranks: int, options: Options) -> Costs | None:
    """Costs by the calibration of the options, else by the machine's own, else at nominal rates; None on CPUs."""
    machine = topology.machine
    if machine.kind is not MachineKind.GPU or not n_ranks:
        return None
    calibration = calibration_for(topology, options)
    assert calibration is not None
    assert calibration.nvlink is not None
    assert calibration.nic is not None
    ranks: slice = slice(0, n_ranks)

    def reached(rates: NDArray[np.float64], efficiency: float) -> float:
        return max(float(np.median(rates[ranks])) * efficiency, 1.0)

    return Costs(
        calibration, channel_law(machine, calibration), put_law(machine, calibration),
        reached(topology.nvlink_Bps, calibration.nvlink.efficiency), reached(topology.nic_Bps, calibration.nic.efficiency),
        n_ranks, len(np.unique(topology.domain[ranks])) == 1,
    )  # fmt: skip


def calibration_for(topology: Topology, options: Options) -> Calibration | None:
    """What a plan for the topology is predicted with: the options' calibration, the machine's, nominal rates; None: unknown."""
    if options.calibration is not None:
        return options.calibration
    machine = topology.machine
    if machine.name in calibration_names():
        return _shipped(machine.name)
    return nominal_calibration(machine) if machine.kind is MachineKind.GPU else None


@cache
def _shipped(name: str) -> Calibration:
    return load_calibration(name)
