"""What one message costs by NCCL's send and receive (channels) and by one-sided put (copy engines, RDMA).

NCCL splits a message over channels, each a block of threads with a fixed rate; how many depends on the size of the
communicator and of the message. From NCCL's src/enqueue.cc (addP2pToPlan, scheduleP2pTasksToPlan; the same in 2.25 to 2.30)
and src/graph/paths.cc. The rates are those of a calibration.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardroute.planner.backends.links import path_costs
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.costs import P2pCost, PutCost
from shardroute.topologies.machines import Machine

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# graph/paths.cc: a NIC gets one channel a peer for each 14 GB/s of its bandwidth.
_NIC_GBps_PER_CHANNEL: Final = 14
# enqueue.cc: one NVLink domain: a channel's part is chunk / 8 to chunk * 32; several: chunk / 2 to chunk.
_PART_OF_ONE: Final = (1 / 8, 32.0)
_PART_OF_SEVERAL: Final = (1 / 2, 1.0)


class Path(StrEnum):
    """Where a message travels: over NVLink inside a domain, or over NICs between domains."""

    NVLINK = "nvlink"
    NIC = "nic"


class Traffic(StrEnum):
    """What a rank does at once in one NCCL group.

    RING: sends to one peer and receives from another: both use the same channels. PAIRS: exchanges with one peer: the two
    directions use channels of their own until the message is so large that they overlap. ONE_WAY: only sends, or only receives.
    """

    RING = "ring"
    PAIRS = "pairs"
    ONE_WAY = "one-way"


@dataclass(frozen=True, slots=True)
class ChannelLaw:
    """NCCL send/recv on one machine: channels of a message, each of which holds one SM (both directions share it), and its time.

    Fields but `cost` follow from the machine: far_peak_Bps is what a GPU's NICs reach, far_start_s the start over them, and
    near_per_peer and far_per_peer the most channels that a peer can get. All methods take arrays and broadcast.
    """

    cost: P2pCost
    near_per_peer: int
    far_per_peer: int
    far_peak_Bps: float
    far_start_s: float

    @property
    def p2p_channels(self) -> int:
        """Channels of the communicator for point-to-point."""
        return int(self.cost.channels)

    def least_channels(self, n_ranks: ArrayLike, path: Path = Path.NVLINK) -> Ints:
        """Channels that a large enough message has before it is split further: fewer in larger communicators."""
        per_peer = self._per_peer(path)
        n = np.maximum(np.asarray(n_ranks, dtype=np.int64), 1)
        # while per_peer * n_ranks > p2p_channels and per_peer > 1: per_peer /= 2
        halvings = np.ceil(np.log2(np.maximum(per_peer * n / self.p2p_channels, 1.0)))
        return np.asarray(np.maximum(per_peer // 2**halvings, 1), dtype=np.int64)

    def channels(
        self, n_bytes: ArrayLike, n_ranks: ArrayLike, one_domain: ArrayLike = True, path: Path = Path.NVLINK
    ) -> Ints:
        """Channels that each message of n_bytes takes in a communicator of n_ranks, int64.

        one_domain says whether the whole communicator lies in one NVLink domain. For example on GB200 in 64 ranks 16 MiB go
        by 1 channel and 512 MiB by 32; with a second domain in the communicator 16 MiB go by 32.
        """
        size, one = np.asarray(n_bytes, dtype=np.float64), np.asarray(one_domain, dtype=bool)
        chunk = self.cost.near_chunk_bytes if path is Path.NVLINK else self.cost.far_chunk_bytes
        per_peer = self._per_peer(path)
        least, most = (np.where(one, a, b) * chunk for a, b in zip(_PART_OF_ONE, _PART_OF_SEVERAL, strict=True))
        channels = np.maximum(np.minimum(self.least_channels(n_ranks, path), np.ceil(size / least)), 1.0)
        # while n_bytes / channels > most and channels <= per_peer / 2: channels *= 2
        wanted = np.ceil(np.log2(np.maximum(size / (channels * most), 1.0)))
        allowed = np.floor(np.log2(np.maximum(per_peer / channels, 1.0)))
        return np.asarray(channels * 2 ** np.minimum(wanted, allowed), dtype=np.int64)

    def rate_Bps(
        self,
        n_bytes: ArrayLike,
        n_ranks: ArrayLike,
        one_domain: ArrayLike = True,
        path: Path = Path.NVLINK,
        traffic: Traffic = Traffic.RING,
    ) -> Floats:
        """Bytes per second that a message's channels let through, at most the peak of NVLink or NICs."""
        size = np.asarray(n_bytes, dtype=np.float64)
        channels = self.channels(size, n_ranks, one_domain, path)
        least = self.least_channels(n_ranks, path)
        apart = directions_apart(channels, least, traffic)
        shared, alone = self.cost.channel_Bps, self.cost.one_way_channel_Bps
        if path is Path.NIC:
            return np.asarray(np.minimum(channels * np.where(apart, alone, shared), self.far_peak_Bps), dtype=np.float64)
        large = np.minimum(channels * np.where(apart, alone, shared), self.cost.peak_Bps)
        small = least * self.cost.small_channel_Bps * np.where(apart, alone / shared, 1.0)
        return np.asarray(np.where(self._small(size), np.minimum(small, self.cost.peak_Bps), large), dtype=np.float64)

    def start_s(self, n_bytes: ArrayLike, path: Path = Path.NVLINK) -> Floats:
        """Seconds from the call to the first byte, launch included."""
        size = np.asarray(n_bytes, dtype=np.float64)
        if path is Path.NIC:
            return np.full(size.shape, self.far_start_s)
        return np.where(self._small(size), self.cost.small_start_s, self.cost.start_s)

    def send_recv_s(
        self,
        n_bytes: ArrayLike,
        n_ranks: ArrayLike,
        one_domain: ArrayLike = True,
        path: Path = Path.NVLINK,
        traffic: Traffic = Traffic.RING,
    ) -> Floats:
        """Seconds of one send and receive of n_bytes, when nothing else uses the links: start + n_bytes / rate."""
        rate = self.rate_Bps(n_bytes, n_ranks, one_domain, path, traffic)
        return np.asarray(self.start_s(n_bytes, path) + np.asarray(n_bytes, dtype=np.float64) / rate, dtype=np.float64)

    def _per_peer(self, path: Path) -> int:
        return self.near_per_peer if path is Path.NVLINK else self.far_per_peer

    def _small(self, size: Floats) -> NDArray[np.bool_]:
        return np.asarray(size <= self.cost.near_chunk_bytes)


def directions_apart(channels: Ints, least: Ints, traffic: Traffic) -> NDArray[np.bool_]:
    """Whether sending and receiving use channels of their own; XLA's tables of H100 and B200 show when."""
    match traffic:
        case Traffic.RING:
            return np.zeros(np.broadcast(channels, least).shape, dtype=bool)
        case Traffic.PAIRS:
            return np.asarray(channels <= least)
        case Traffic.ONE_WAY:
            return np.ones(np.broadcast(channels, least).shape, dtype=bool)


@dataclass(frozen=True, slots=True)
class PutLaw:
    """One-sided put with a signal on one machine. Copy engines take no SM; one GPU's NVLink puts run one at a time."""

    cost: PutCost
    far_peak_Bps: float

    def put_s(self, n_bytes: ArrayLike, path: Path = Path.NVLINK) -> Floats:
        """Seconds of one put of n_bytes and its signal, when nothing else uses the links."""
        size = np.asarray(n_bytes, dtype=np.float64)
        return np.asarray(self.start_s(path) + size / self.rate_Bps(path), dtype=np.float64)

    def rate_Bps(self, path: Path = Path.NVLINK) -> float:
        """Bytes per second of one put."""
        return self.cost.bandwidth_Bps if path is Path.NVLINK else self.far_peak_Bps

    def start_s(self, path: Path = Path.NVLINK) -> float:
        """Seconds from the call to the first byte, the signal's included."""
        return self.cost.start_s if path is Path.NVLINK else self.cost.far_start_s

    def barrier_s(self, n_ranks: int) -> float:
        """Seconds of a barrier over a team: ceil(log2 n) rounds (NVSHMEM's dissemination barrier)."""
        return math.ceil(math.log2(max(n_ranks, 1))) * self.cost.barrier_s


def channel_law(machine: Machine, calibration: Calibration, most_channels: int | None = None) -> ChannelLaw | None:
    """The law of NCCL's send and receive on the machine; None where the calibration has no [p2p] table. most_channels: what the
    communicator is limited to, a power of 2.
    """
    cost = calibration.p2p
    if cost is None:
        return None
    if most_channels is not None:
        cost = replace(cost, channels=min(cost.channels, most_channels))
    _, nic = path_costs(calibration)
    # A switch gives a peer all links, which is over the cap on every NVSwitch machine: 2 * 18 links.
    far = _up_to_power_of_2(max(machine.nics_per_gpu, int(machine.gpu_nic_Bps / 1e9) // _NIC_GBps_PER_CHANNEL))
    return ChannelLaw(
        cost=cost,
        near_per_peer=int(cost.channels),
        far_per_peer=min(far, int(cost.channels)),
        far_peak_Bps=machine.gpu_nic_Bps * nic.efficiency,
        far_start_s=calibration.launch_s + nic.latency_s,
    )


def put_law(machine: Machine, calibration: Calibration) -> PutLaw | None:
    """The law of one-sided puts on the machine; None where the calibration has no [put] table."""
    if calibration.put is None:
        return None
    _, nic = path_costs(calibration)
    return PutLaw(calibration.put, machine.gpu_nic_Bps * nic.efficiency)


def _up_to_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
