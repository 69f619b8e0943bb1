"""The links of a topology as numbered capacities: what the simulator shares out and reports by name.

Per GPU: NVLink out and in, NIC out and in, and memory (local copies). Per NVLink domain: its uplink and downlink, which bind
only where the fabric is oversubscribed. Per GPU beside these: its SMs, all together 1. On a CPU machine: the cores, in
core-seconds per second.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.topologies.calibrations import Calibration, PathCost, check_calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

Ids = NDArray[np.int32]

_GPU_BLOCKS = ("NVLink out of GPU", "NVLink into GPU", "NIC out of GPU", "NIC into GPU", "memory of GPU")
_DOMAIN_BLOCKS = ("uplink of domain", "downlink of domain")


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Capacities under a calibration, in bytes per second (core-seconds per second for cores); ids index `capacity`.

    The first n_carrying carry bytes (or are cores), the others are SMs.
    """

    topology: Topology
    capacity: NDArray[np.float64]

    def nvlink_out(self, gpu: Ids) -> Ids:
        """NVLink from these GPUs into their domain's switch."""
        return gpu

    def nvlink_in(self, gpu: Ids) -> Ids:
        """NVLink from the switch into these GPUs."""
        return gpu + np.int32(self.topology.n_gpus)

    def nic_out(self, gpu: Ids) -> Ids:
        """All NICs of these GPUs, sending."""
        return gpu + np.int32(2 * self.topology.n_gpus)

    def nic_in(self, gpu: Ids) -> Ids:
        """All NICs of these GPUs, receiving."""
        return gpu + np.int32(3 * self.topology.n_gpus)

    def memory(self, gpu: Ids) -> Ids:
        """The memory of these GPUs, in bytes copied."""
        return gpu + np.int32(4 * self.topology.n_gpus)

    def uplink(self, gpu: Ids) -> Ids:
        """From the domain of these GPUs up into the fabric."""
        return self.topology.domain[gpu] + np.int32(5 * self.topology.n_gpus)

    def downlink(self, gpu: Ids) -> Ids:
        """From the fabric down to the domain of these GPUs."""
        return self.topology.domain[gpu] + np.int32(5 * self.topology.n_gpus + self.topology.n_domains)

    def sms(self, gpu: Ids) -> Ids:
        """The SMs of these GPUs, all together 1."""
        return gpu + np.int32(self.n_carrying)

    @property
    def n_carrying(self) -> int:
        """Links that carry bytes, or are the cores of a CPU machine."""
        if self.topology.machine.kind is MachineKind.CPU:
            return len(self.capacity)
        return len(_GPU_BLOCKS) * self.topology.n_gpus + len(_DOMAIN_BLOCKS) * self.topology.n_domains

    def name(self, link: int) -> str:
        """The link for people, `NIC into GPU 17`."""
        if self.topology.machine.kind is MachineKind.CPU:
            return "cores of the host"
        block, index = divmod(link, self.topology.n_gpus)
        if block < len(_GPU_BLOCKS):
            return f"{_GPU_BLOCKS[block]} {index}"
        if link >= self.n_carrying:
            return f"SMs of GPU {link - self.n_carrying}"
        block, index = divmod(link - len(_GPU_BLOCKS) * self.topology.n_gpus, self.topology.n_domains)
        return f"{_DOMAIN_BLOCKS[block]} {index}"


def path_costs(calibration: Calibration) -> tuple[PathCost, PathCost]:
    """The costs of NVLink and of the NICs; InputError when the calibration has none."""
    if calibration.nvlink is None or calibration.nic is None:
        raise InputError(f"calibration of {calibration.machine}: GPU machines need the tables nvlink and nic")
    return calibration.nvlink, calibration.nic


def links_of(topology: Topology, calibration: Calibration) -> Links:
    """The links of the topology with the rates that the calibration says are reached."""
    check_calibration(calibration, topology.machine)
    if topology.machine.kind is MachineKind.CPU:
        return Links(topology, np.array([calibration.cores], dtype=np.float64))
    nvlink_cost, nic_cost = path_costs(calibration)
    nvlink = topology.nvlink_Bps * nvlink_cost.efficiency
    nic = topology.nic_Bps * nic_cost.efficiency
    # A copy within a GPU reads and writes its memory once each.
    reached = 1.0 if calibration.memory is None else calibration.memory.efficiency
    memory = topology.hbm_Bps * reached / 2
    fabric = np.bincount(topology.domain, weights=nic, minlength=topology.n_domains) / topology.machine.oversubscription
    sms = np.ones(topology.n_gpus)
    return Links(topology, np.concatenate([nvlink, nvlink, nic, nic, memory, fabric, fabric, sms]))
