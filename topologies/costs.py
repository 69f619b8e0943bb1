"""Costs: the measured constants of one way to move bytes, as a calibration's tables hold them.

Each table of a calibration file is one frozen value here; `COST_TABLES` says how its keys are written.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import Quantity

__all__ = [
    "COST_TABLES",
    "CollectiveCost",
    "ControlCost",
    "Cost",
    "MemoryCost",
    "P2pCost",
    "PathCost",
    "PutCost",
    "SumCost",
    "TileCost",
    "cost_from_values",
    "cost_values",
]


@dataclass(frozen=True, slots=True)
class PathCost:
    """Cost of a copy over a path: latency_s, then bytes at efficiency x nominal bandwidth (0 < it <= 1)."""

    latency_s: float
    efficiency: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise InputError(f"latency: expected seconds from 0, found {self.latency_s!r}")
        if not 0 < self.efficiency <= 1:
            raise InputError(f"efficiency: expected a number above 0 and up to 1, found {self.efficiency!r}")


@dataclass(frozen=True, slots=True)
class P2pCost:
    """NCCL send and receive over NVLink: how a message is spread over channels, and what a channel carries.

    channels            of the communicator for point-to-point (NCCL's p2pnChannels), a power of 2
    channel_Bps         of one channel that sends and receives at once, as in a ring
    one_way_channel_Bps of one channel that only sends or only receives
    peak_Bps            of one GPU's NVLink under all channels
    start_s             from the call to the first byte, launch included
    small_channel_Bps, small_start_s   the same for messages up to near_chunk_bytes, which go by another protocol
    near_chunk_bytes, far_chunk_bytes  what a channel takes at a time: over NVLink, over NICs
    """

    channels: float
    channel_Bps: float
    one_way_channel_Bps: float
    peak_Bps: float
    start_s: float
    small_channel_Bps: float
    small_start_s: float
    near_chunk_bytes: float
    far_chunk_bytes: float

    def __post_init__(self) -> None:
        _check_costs(self, at_least_0=("start_s", "small_start_s"))


@dataclass(frozen=True, slots=True)
class PutCost:
    """One-sided puts with a signal (NCCL put/signal, NVSHMEM): copy engines on NVLink, RDMA writes over NICs.

    start_s, bandwidth_Bps  of one put over NVLink by a copy engine; puts of one GPU to NVLink peers run one at a time
    far_start_s             of a put over a NIC (proxy or IBGDA); its bytes share the NIC
    barrier_s               of one round of a barrier over a team, which takes ceil(log2 n) of them
    """

    start_s: float
    bandwidth_Bps: float
    far_start_s: float
    barrier_s: float

    def __post_init__(self) -> None:
        _check_costs(self, at_least_0=("start_s", "far_start_s", "barrier_s"))


@dataclass(frozen=True, slots=True)
class MemoryCost:
    """What copies within a GPU reach: efficiency x the memory's bandwidth, reads and writes counted each (0 < it <= 1)."""

    efficiency: float

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise InputError(f"efficiency: expected a number above 0 and up to 1, found {self.efficiency!r}")


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """What NCCL's collectives reach on large messages, and its own tuning constants that differ by GPU generation.

    ring_Bps        bus bandwidth of a ring over NVLink: nccl-tests' busbw
    nvls_Bps        bytes per second that an all-reduce by NVLink SHARP (NVLS) reduces: nccl-tests' algbw
    nvls_start_s    least time of an all-reduce by NVLS
    ll_Bps          most that protocol LL carries in one domain
    nic_efficiency  what a ring or tree over NICs reaches, of their nominal bandwidth (0 < it <= 1)
    call_s          what a framework adds that calls collectives one at a time and waits for each
    """

    ring_Bps: float
    nvls_Bps: float
    nvls_start_s: float
    ll_Bps: float
    nic_efficiency: float
    call_s: float

    def __post_init__(self) -> None:
        _check_costs(self, at_least_0=("nvls_start_s", "call_s"))
        if self.nic_efficiency > 1:
            raise InputError(f"nic_efficiency: expected a number above 0 and up to 1, found {self.nic_efficiency!r}")


@dataclass(frozen=True, slots=True)
class TileCost:
    """CPU time of attention on blocks of keys (executors.attention.kernels), by what its tiles are made of.

    score_s     of each score; product_s of each score and unit of a head's width, for the matrix products
    mask_s      of each score more in a tile that is masked in part
    edge_s      of each row and each key of a tile and unit of width; tile_s of each tile
    """

    score_s: float
    product_s: float
    mask_s: float
    edge_s: float
    tile_s: float

    def __post_init__(self) -> None:
        _check_costs(self, at_least_0=("score_s", "product_s", "mask_s", "edge_s", "tile_s"))


@dataclass(frozen=True, slots=True)
class SumCost:
    """Bytes per second at which a CPU adds one gradient to another, and merges one partial output into another."""

    add_Bps: float
    merge_Bps: float

    def __post_init__(self) -> None:
        _check_costs(self, at_least_0=())


@dataclass(frozen=True, slots=True)
class ControlCost:
    """What the host of a training framework spends beside moving: tensor_s for each weight that a training rank exports.

    Weights are counted as in the checkpoint, each expert's by itself: frameworks name, stack and call one by one.
    """

    tensor_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.tensor_s) and self.tensor_s >= 0):
            raise InputError(f"tensor: expected seconds from 0, found {self.tensor_s!r}")


Cost = PathCost | P2pCost | PutCost | MemoryCost | CollectiveCost | ControlCost | TileCost | SumCost

_TILE: Final = {
    "score": ("score_s", Quantity.SECONDS),
    "product": ("product_s", Quantity.SECONDS),
    "mask": ("mask_s", Quantity.SECONDS),
    "edge": ("edge_s", Quantity.SECONDS),
    "tile": ("tile_s", Quantity.SECONDS),
}
_PATH: Final = {"latency": ("latency_s", Quantity.SECONDS), "efficiency": ("efficiency", Quantity.EFFICIENCY)}

# Table -> (its value's class, key -> (field, quantity)); the order is that of a written file.
COST_TABLES: Final[Mapping[str, tuple[type[Cost], Mapping[str, tuple[str, Quantity]]]]] = {
    "nvlink": (PathCost, _PATH),
    "nic": (PathCost, _PATH),
    "p2p": (
        P2pCost,
        {
            "channels": ("channels", Quantity.COUNT),
            "channel_bandwidth": ("channel_Bps", Quantity.BANDWIDTH),
            "one_way_channel_bandwidth": ("one_way_channel_Bps", Quantity.BANDWIDTH),
            "peak_bandwidth": ("peak_Bps", Quantity.BANDWIDTH),
            "start": ("start_s", Quantity.SECONDS),
            "small_channel_bandwidth": ("small_channel_Bps", Quantity.BANDWIDTH),
            "small_start": ("small_start_s", Quantity.SECONDS),
            "near_chunk": ("near_chunk_bytes", Quantity.BYTES),
            "far_chunk": ("far_chunk_bytes", Quantity.BYTES),
        },
    ),
    "put": (
        PutCost,
        {
            "start": ("start_s", Quantity.SECONDS),
            "bandwidth": ("bandwidth_Bps", Quantity.BANDWIDTH),
            "far_start": ("far_start_s", Quantity.SECONDS),
            "barrier": ("barrier_s", Quantity.SECONDS),
        },
    ),
    "memory": (MemoryCost, {"efficiency": ("efficiency", Quantity.EFFICIENCY)}),
    "collectives": (
        CollectiveCost,
        {
            "ring_bandwidth": ("ring_Bps", Quantity.BANDWIDTH),
            "nvls_bandwidth": ("nvls_Bps", Quantity.BANDWIDTH),
            "nvls_start": ("nvls_start_s", Quantity.SECONDS),
            "ll_bandwidth": ("ll_Bps", Quantity.BANDWIDTH),
            "nic_efficiency": ("nic_efficiency", Quantity.EFFICIENCY),
            "call": ("call_s", Quantity.SECONDS),
        },
    ),
    "control": (ControlCost, {"tensor": ("tensor_s", Quantity.SECONDS)}),
    "attend_f32": (TileCost, _TILE),
    "grad_f32": (TileCost, _TILE),
    "attend_f64": (TileCost, _TILE),
    "grad_f64": (TileCost, _TILE),
    "sums": (SumCost, {"add_bandwidth": ("add_Bps", Quantity.BANDWIDTH), "merge_bandwidth": ("merge_Bps", Quantity.BANDWIDTH)}),
}


def cost_from_values(table: str, values: Mapping[str, float]) -> Cost | None:
    """Return the table's value from figures by key ("p2p.start": 1.2e-5), or None where no key of the table is given.

    Raises InputError when only some are given, naming the first that is missing.
    """
    kind, keys = COST_TABLES[table]
    given = [key for key in keys if f"{table}.{key}" in values]
    if not given:
        return None
    if missing := [key for key in keys if key not in given]:
        raise InputError(f"{table}.{missing[0]}: missing, though {table}.{given[0]} is given; both are needed")
    try:
        return kind(**{field: values[f"{table}.{key}"] for key, (field, _) in keys.items()})
    except InputError as error:
        raise InputError(f"{table}.{error}") from None


def cost_values(table: str, cost: Cost) -> dict[str, float]:
    """Return the figures of a table's value by key; the inverse of cost_from_values."""
    return {f"{table}.{key}": float(getattr(cost, field)) for key, (field, _) in COST_TABLES[table][1].items()}


def _check_costs(cost: P2pCost | PutCost | CollectiveCost | TileCost | SumCost, at_least_0: tuple[str, ...]) -> None:
    for field in fields(cost):
        value = getattr(cost, field.name)
        least = 0 if field.name in at_least_0 else math.nextafter(0, 1)
        if not (math.isfinite(value) and value >= least):
            expected = "from" if field.name in at_least_0 else "above"
            raise InputError(f"{field.name}: expected a number {expected} 0, found {value!r}")
