"""The links of a topology at nominal rates, as routing balances them."""

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.plans import Lane
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


def busiest_of(
    src: NDArray[np.integer], dst: NDArray[np.integer], lane: NDArray[np.uint8], n_bytes: NDArray[np.integer], topology: Topology,
    n_ranks: int,
) -> float:  # fmt: skip
    """Seconds of the link that copies (with their lanes) keep busy longest; a link without bandwidth is busy for ever."""
    rates, most = link_rates(topology), 0.0
    near, far = np.flatnonzero(lane == Lane.HAND_OVER), np.flatnonzero(lane < Lane.HAND_OVER)
    with np.errstate(divide="ignore", invalid="ignore"):
        for rows, out_row in ((near, 2), (far, 0)):
            for row, end in ((out_row, src), (out_row + 1, dst)):
                carried = np.bincount(end[rows], weights=n_bytes[rows], minlength=topology.n_gpus)
                most = max(most, float(np.where(carried > 0, carried / rates[row], 0.0).max(initial=0.0)))
        carried = np.bincount(topology.domain[src[far]], weights=n_bytes[far], minlength=topology.n_domains)
        uplink = uplink_rates(topology, n_ranks)
        return max(most, float(np.where(carried > 0, carried / uplink, 0.0).max(initial=0.0)))
