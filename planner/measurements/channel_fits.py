"""Fits NCCL's channel law to measured sends and receives.

For given channel counts the law is a line in bytes a channel: start + (bytes / channels) / channel_Bps below the peak, and
start + bytes / peak_Bps at it. So the rows are sorted into small ones, ones that channels bind and ones that the peak binds, each
line is fitted by least squares of relative errors, and the sorting is done again with the result until it stays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.channels import ChannelLaw, Path, Traffic, directions_apart
from shardroute.topologies.costs import P2pCost
from shardroute.topologies.errors import InputError

Floats = NDArray[np.float64]

# NCCL's defaults: p2p channels behind NVSwitch, NCCL_P2P_NVL_CHUNKSIZE, NCCL_P2P_NET_CHUNKSIZE (src/init.cc).
CHANNELS: Final = 32
NEAR_CHUNK_BYTES: Final = 512 * 1024
FAR_CHUNK_BYTES: Final = 128 * 1024
# Where nothing was measured one way: twice the rows of 8 H100 and 8 B200 in XLA's table had 1.5 and 1.7.
ONE_WAY_SHARE: Final = 1.6
_ROUNDS: Final = 20
# The peak is told by rows within this factor of the largest: nearer to where channels bind, both do.
_LARGEST: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class SendRecvRows:
    """Measured sends and receives of one communicator in one NVLink domain: seconds by bytes."""

    n_ranks: int
    traffic: Traffic
    n_bytes: Floats
    time_s: Floats


def fit_channel_law(rows: Sequence[SendRecvRows]) -> P2pCost:
    """The costs of the law that fits these rows best.

    Raises InputError when they can't say: fewer than two sizes up to 512 KiB, fewer than two above, or times that fall.
    """
    shape = _law(P2pCost(CHANNELS, 1e9, 1e9, 1e12, 0.0, 1e9, 0.0, NEAR_CHUNK_BYTES, FAR_CHUNK_BYTES))
    size = np.concatenate([r.n_bytes for r in rows])
    time_s = np.concatenate([r.time_s for r in rows])
    by_row = [(shape.channels(r.n_bytes, r.n_ranks), shape.least_channels(r.n_ranks), r.traffic) for r in rows]
    channels = np.concatenate([of_size for of_size, _, _ in by_row]).astype(np.float64)
    least = np.concatenate([np.full(len(of_size), fewest) for of_size, fewest, _ in by_row]).astype(np.float64)
    alone = np.concatenate([directions_apart(of_size, fewest, traffic) for of_size, fewest, traffic in by_row])
    small = size <= NEAR_CHUNK_BYTES
    if min(small.sum(), (~small).sum()) < 2:
        raise InputError("send/recv: found fewer than 2 sizes up to 512 KiB or above, expected a sweep from some KiB to 1 GiB")
    ratio = ONE_WAY_SHARE if alone.any() else 1.0
    has_both = bool(alone.any() and (~alone).any())
    peak = float((size / time_s).max()) * 1.02
    start, channel, small_start, small_channel = 0.0, 0.0, 0.0, 0.0
    for _ in range(_ROUNDS):
        rate = np.where(alone, ratio, 1.0)
        small_start, small_channel = fit_line(size[small] / (least * rate)[small], time_s[small], "of send/recv up to 512 KiB")
        bound = ~small & (channels * rate * max(channel, 1.0) >= peak) if channel else ~small & (size >= 2**30)
        flows = ~small & ~bound
        x = np.where(bound, size / peak, 0.0)[~small]
        y = np.where(flows, size / (channels * rate), 0.0)[~small]
        start, channel = fit_line(y, time_s[~small], "of send/recv above 512 KiB", x)
        if bound.any():
            largest = bound & (size >= size.max() / _LARGEST)
            peak = float(np.median(size[largest] / np.maximum(time_s[largest] - start, 1e-9)))
        if has_both:
            start_s = np.where(small, small_start, start)
            flow_s = np.where(small, size / (least * small_channel), size / (channels * channel))
            ratio = _speedup(time_s - start_s, flow_s, alone & ~bound & (flow_s > start_s))
    one_way = channel * (ratio if alone.any() else ONE_WAY_SHARE)
    return P2pCost(CHANNELS, channel, one_way, peak, start, small_channel, small_start, NEAR_CHUNK_BYTES, FAR_CHUNK_BYTES)


def fitted_errors(rows: Sequence[SendRecvRows], cost: P2pCost) -> Floats:
    """Predicted over measured, less 1, of every row."""
    law = _law(cost)
    return np.concatenate(
        [law.send_recv_s(r.n_bytes, r.n_ranks, True, Path.NVLINK, r.traffic) / r.time_s - 1 for r in rows]
    )


def _law(cost: P2pCost) -> ChannelLaw:
    # Rows of one NVLink domain ask nothing of the NICs.
    return ChannelLaw(cost, CHANNELS, 1, 1.0, 0.0)


def fit_line(x: Floats, time_s: Floats, what: str, known_s: Floats | float = 0.0) -> tuple[float, float]:
    """Start and rate of time = start + known + x / rate, by least squares of relative errors, the worst fifth left out.

    Raises InputError, with what the times are of, when x has fewer than two values, and when they don't rise with it.
    """
    if len(np.unique(x)) < 2:
        raise InputError(f"times {what} are of one size; expected a sweep of sizes")
    keep = np.ones(len(x), dtype=bool)
    start = per = 0.0
    for _ in range(3):
        columns = np.stack([np.ones(keep.sum()), x[keep]], axis=1) / time_s[keep, None]
        (start, per), *_ = np.linalg.lstsq(columns, ((time_s - known_s) / time_s)[keep], rcond=None)
        error = np.abs((start + known_s + x * per) / time_s - 1)
        keep = error <= max(float(np.quantile(error, 0.8)), 1e-12)
    if not per > 0:
        raise InputError(f"times {what} don't rise with bytes; expected a sweep of sizes on an idle machine")
    return max(float(start), 0.0), 1 / float(per)


def _speedup(measured_s: Floats, shared_s: Floats, rows: NDArray[np.bool_]) -> float:
    """How much faster than a shared channel one is that only sends or receives: the median over the rows that tell."""
    return float(np.median((shared_s / np.maximum(measured_s, 1e-9))[rows])) if rows.any() else ONE_WAY_SHARE
