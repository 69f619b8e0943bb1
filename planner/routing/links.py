"""The links of a topology at nominal rates, as routing balances them."""

import numpy as np
from numpy.typing import NDArray

from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology


def link_rates(topology: Topology) -> NDArray[np.float64]:
    """Bytes a second of NIC out, NIC in, NVLink out and NVLink in of every GPU, float64[4, n_gpus]; processes count as equal."""
    if topology.machine.kind is MachineKind.CPU:
        return np.ones((4, topology.n_gpus))
    return np.stack([topology.nic_Bps, topology.nic_Bps, topology.nvlink_Bps, topology.nvlink_Bps])


def uplink_rates(topology: Topology, n_ranks: int) -> NDArray[np.float64]:
    """Bytes a second that each domain's ranks get up into the fabric, float64[n_domains]; infinite where their NICs bind first.
    """
    if topology.machine.oversubscription <= 1:
        return np.full(topology.n_domains, np.inf)
    nic = np.bincount(topology.domain, weights=topology.nic_Bps, minlength=topology.n_domains)
    return np.asarray(nic / topology.machine.oversubscription)
