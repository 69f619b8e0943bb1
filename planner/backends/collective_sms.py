"""SMs that NCCL's collectives hold while they run: one for each channel, by NCCL's own rules.

Sources: NCCL 2.28 to 2.30, src/enqueue.cc (topoGetAlgoInfo) and src/graph/tuning.cc (threads and thresholds): a ring or tree
has as many channels as the communicator, and fewer while each of their threads would have less than so many bytes; NVLS has
those that it was set up with. All-to-alls and permutes are sends, by the channel law.
"""

from typing import Final

from shardroute.planner.backends.channels import Path, channel_law
from shardroute.planner.backends.rates import Channels
from shardroute.planner.backends.tuning import Algorithm, Group, Protocol, tuned_choice
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.collectives import Collective
from shardroute.topologies.machines import Machine

# src/include/device.h: the most threads of a channel; src/include/comm.h: bytes that each should have at least. A ring's LL
# should have so many for each rank. NCCL prints the latter at start: "threadThresholds 8/8/64 | 64/8/64" for 8 ranks.
_THREADS: Final = {Protocol.LL: 512, Protocol.LL128: 640, Protocol.SIMPLE: 512}
_THREAD_BYTES: Final = {Protocol.LL: 8, Protocol.LL128: 8, Protocol.SIMPLE: 64}


def collective_sms(
    op: Collective, n_bytes: int, group: Group, machine: Machine, calibration: Calibration, channels: Channels | None
) -> int | None:
    """SMs that each rank's part of a collective of n_bytes holds, None where nobody knows how many.

    For example a ring over 8 H100 has 24 channels from 768 KiB on, and 16 for 512 KiB. Raises InputError where the calibration
    doesn't know NCCL's collectives, or its sends for those that consist of them.
    """
    if group.n_ranks == 1:
        return 0
    one = group.n_domains == 1
    if op in (Collective.ALL_TO_ALL, Collective.PERMUTE):
        law = channel_law(machine, calibration)
        if law is None:
            return None
        path = Path.NVLINK if one else Path.NIC
        if op is Collective.PERMUTE:
            return int(law.channels(n_bytes, group.n_ranks, one, path))
        by_peers = int(law.channels(n_bytes / group.n_ranks, group.n_ranks, one, path)) * (group.n_ranks - 1)
        return min(by_peers, law.p2p_channels)
    algorithm, protocol = tuned_choice(op, n_bytes, group, machine, calibration)
    if channels is None:
        return None
    if algorithm is Algorithm.NVLS:
        return channels.nvls if one else channels.far_nvls
    least = _THREADS[protocol] * _THREAD_BYTES[protocol]
    if algorithm is Algorithm.RING and protocol is Protocol.LL:
        least *= group.n_ranks
    return max(1, min(channels.ring if one else channels.far_ring, n_bytes // least))
