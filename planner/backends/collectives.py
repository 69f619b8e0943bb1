"""What a collective takes: NCCL's tuning model, corrected by what was measured on the machine where a calibration holds curves.

A curve is seconds over bytes of one operation and group. Between curves and sizes the ratio of measured to modelled is
interpolated in the logarithms of bytes and ranks; outside them the nearest ratio holds. So a measured point is met exactly, and
a group that was not measured is scaled as the model says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardroute.planner.backends.channels import ChannelLaw, Path, Traffic, channel_law
from shardroute.planner.backends.tuning import Algorithm, Group, all_reduce_bound, tuned_s
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.collectives import Collective, CollectiveCurve
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine

__all__ = ["Algorithm", "Collective", "Group", "collective_s", "collective_times_s", "steady_points"]

Floats = NDArray[np.float64]

# Where chunks decide (a message for each peer), curves of unlike groups are alike at equal bytes a rank; where all work on the
# whole tensor, at equal bytes. The better of the two when one of XLA's GB200 groups is left out and predicted by the others.
_BY_SHARE: Final = frozenset({Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL})

# A point that took over twice as long as a larger message did was disturbed (first calls, other work) and is left out; NCCL's
# own steps, where a protocol or a channel count changes, stay below 1.8 in XLA's tables.
_DISTURBED: Final = 2.0
# A size at which nothing but bandwidth counts.
_VAST_BYTES: Final = 2.0**44


def collective_s(
    op: Collective,
    n_bytes: int,
    group: Group,
    machine: Machine,
    calibration: Calibration,
    only: Algorithm | None = None,
    traffic: Traffic = Traffic.RING,
) -> tuple[float, str]:
    """Seconds of a collective of n_bytes (see Collective for what they count) over the group, and how that was found.

    `only` forces one of NCCL's algorithms; then curves, which are of NCCL's own choice, correct it only when they ran that one.
    `traffic` matters for a permute. Raises InputError when the calibration has neither [collectives] nor, for all-to-all and
    permute, [p2p].
    """
    times, how = collective_times_s(op, [n_bytes], group, machine, calibration, only, traffic)
    return float(times[0]), how


def collective_times_s(
    op: Collective,
    n_bytes: ArrayLike,
    group: Group,
    machine: Machine,
    calibration: Calibration,
    only: Algorithm | None = None,
    traffic: Traffic = Traffic.RING,
) -> tuple[Floats, str]:
    """collective_s for many sizes at once, float64 of the shape of n_bytes."""
    size = np.asarray(n_bytes, dtype=np.float64)
    if (size < 0).any():
        raise InputError(f"{op}: found {size.min():g} bytes, expected 0 or more")
    if group.n_ranks == 1 or not size.size:
        return np.zeros(size.shape), "one rank alone"
    modelled, how = _modelled_s(op, size, group, machine, calibration, only, traffic)
    curves, apply_to = _curves_for(op, group, machine, calibration)
    forced = only is not None and not how.startswith(_chosen(op, group, machine, calibration))
    if op is Collective.PERMUTE or not curves or forced:
        return modelled, f"model: {how}"
    log_ratio, names = _ratio(op, size, apply_to, curves, machine, calibration)
    if apply_to == group and all(curve.n_domains != group.n_domains for curve in curves):
        # Other links bound it there: what carries over is what pipelines and starts cost, not bytes over bandwidth.
        vast = np.array([_VAST_BYTES])
        per_byte_s = float(_modelled_s(op, vast, group, machine, calibration, only, traffic)[0][0]) / _VAST_BYTES
        log_ratio = log_ratio * np.clip(1 - size * per_byte_s / modelled, 0, 1)
    return modelled * np.exp(log_ratio), f"measured on {names}; model: {how}"


def _modelled_s(
    op: Collective,
    size: Floats,
    group: Group,
    machine: Machine,
    calibration: Calibration,
    only: Algorithm | None = None,
    traffic: Traffic = Traffic.RING,
) -> tuple[Floats, str]:
    match op:
        case Collective.ALL_TO_ALL:
            return _all_to_all_s(size, group, machine, calibration), "NCCL send/recv, channels"
        case Collective.PERMUTE:
            return _permute_s(size, group, machine, calibration, traffic), "NCCL send/recv, channels"
        case _:
            times, how = tuned_s(op, size.ravel(), group, machine, calibration, only)
            return times.reshape(size.shape), f"NCCL {how}"


def _channel_law(machine: Machine, calibration: Calibration) -> ChannelLaw:
    law = channel_law(machine, calibration)
    if law is None:
        raise InputError(f"calibration of {calibration.machine} ({calibration.library}) has no table [p2p]")
    return law


def _permute_s(size: Floats, group: Group, machine: Machine, calibration: Calibration, traffic: Traffic) -> Floats:
    law = _channel_law(machine, calibration)
    near = law.send_recv_s(size, group.n_ranks, group.n_domains == 1, Path.NVLINK, traffic)
    if group.n_domains == 1:
        return near
    # The ring is done when its slowest hop is, and some hops cross domains.
    return np.maximum(near, law.send_recv_s(size, group.n_ranks, False, Path.NIC, traffic))


def _all_to_all_s(size: Floats, group: Group, machine: Machine, calibration: Calibration) -> Floats:
    """One group of a send and a receive a peer: channels take the peers in turn, and links are shared."""
    law = _channel_law(machine, calibration)
    n, near_ranks = group.n_ranks, group.domain_ranks
    part = size / n
    one = group.n_domains == 1
    channels = law.channels(part, n, one)
    per_peer = np.where(part <= law.cost.near_chunk_bytes, law.least_channels(n), channels)
    turns = np.maximum(np.ceil((near_ranks - 1) * per_peer / law.p2p_channels), 1)
    by_channels = turns * part / law.rate_Bps(part, n, one)
    by_links = part * (near_ranks - 1) / law.cost.peak_Bps
    start_s = law.start_s(part) + (n - 2) * calibration.message_s
    time = start_s + np.maximum(by_channels, by_links)
    if one:
        return np.asarray(time, dtype=np.float64)
    by_nics = law.far_start_s + part * (n - near_ranks) / law.far_peak_Bps
    return np.maximum(time, by_nics)


def _curves_for(
    op: Collective, group: Group, machine: Machine, calibration: Calibration
) -> tuple[list[CollectiveCurve], Group]:
    """The curves that say something about the group, and the group at which they are read.

    Over several domains: curves over several, or, where NVLink and not the NICs bounds an all-reduce, those of one domain.
    """
    curves = [curve for curve in calibration.curves if curve.op is op]
    several = [curve for curve in curves if curve.n_domains > 1]
    one = [curve for curve in curves if curve.n_domains == 1]
    if group.n_domains == 1:
        return one, group
    if several:
        return several, group
    if op is Collective.ALL_REDUCE and one and calibration.collectives is not None:
        near, far = all_reduce_bound(group, machine, calibration.collectives)
        if far >= near:
            return one, Group(group.domain_ranks)
    return [], group


def _chosen(op: Collective, group: Group, machine: Machine, calibration: Calibration) -> str:
    """The algorithm that NCCL takes for a large message, as _modelled_s names it."""
    return _modelled_s(op, np.array([_VAST_BYTES]), group, machine, calibration)[1].rsplit(" ", 1)[0]


def _ratio(
    op: Collective, size: Floats, group: Group, curves: Sequence[CollectiveCurve], machine: Machine, calibration: Calibration
) -> tuple[Floats, str]:
    """log(measured / modelled) at these sizes, between the curves of the nearest smaller and larger group; and their names.

    Beyond a curve's smallest and largest size its first and last ratio hold.
    """
    counts = sorted({curve.n_ranks for curve in curves})
    low = max((n for n in counts if n <= group.n_ranks), default=counts[0])
    high = min((n for n in counts if n >= group.n_ranks), default=counts[-1])
    if op in _BY_SHARE:
        size = size / group.n_ranks
    logs = [_log_ratio(op, size, tuple(c for c in curves if c.n_ranks == n), machine, calibration) for n in (low, high)]
    if low == high:
        return logs[0], f"{low} ranks"
    weight = np.log(group.n_ranks / low) / np.log(high / low)
    return np.asarray((1 - weight) * logs[0] + weight * logs[1], dtype=np.float64), f"{low} and {high} ranks"


def _log_ratio(
    op: Collective, size: Floats, curves: tuple[CollectiveCurve, ...], machine: Machine, calibration: Calibration
) -> Floats:
    """The mean over the curves of one group of log(measured / modelled), interpolated in log(bytes)."""
    found = []
    for curve in curves:
        at, log_ratio = _curve_ratio(op, curve, machine, _Same(calibration))
        found.append(np.interp(np.log(np.maximum(size, 1e-9)), at, log_ratio))
    return np.asarray(np.mean(found, axis=0), dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A calibration as a key, equal only to the very same one: to hash all its curves takes longer than to use one of them."""

    calibration: Calibration

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.calibration is self.calibration

    def __hash__(self) -> int:
        return id(self.calibration)


@lru_cache(maxsize=512)
def _curve_ratio(op: Collective, curve: CollectiveCurve, machine: Machine, same: _Same) -> tuple[Floats, Floats]:
    calibration = same.calibration
    steady = steady_points(curve)
    size, time_s = np.asarray(curve.n_bytes, dtype=np.float64)[steady], np.asarray(curve.time_s)[steady]
    modelled, _ = _modelled_s(op, size, Group(curve.n_ranks, curve.n_domains), machine, calibration)
    share = curve.n_ranks if op in _BY_SHARE else 1
    return np.log(size / share), np.log(time_s / modelled)


def steady_points(curve: CollectiveCurve) -> NDArray[np.bool_]:
    """Which points of a curve are used, bool[n]: those that didn't take over twice as long as a larger message."""
    time_s = np.asarray(curve.time_s)
    least_of_larger = np.minimum.accumulate(time_s[::-1])[::-1]
    return np.asarray(time_s <= _DISTURBED * least_of_larger)
