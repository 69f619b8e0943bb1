"""NCCL's own model of its kernels on symmetric windows: which kernel it would pick, its time and its blocks.

Source: NCCL, src/symmetric.cc (2.27), src/sym_kernels.cc (2.30.7); constants are those of its source, per architecture.
"""

import math
from dataclasses import dataclass
from typing import Final

from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine

# Bytes a microsecond in the unit in which NCCL states these bandwidths.
_GiB_US: Final = 2.0**30 / 1e6
# ncclSymMaxBlocks; of fewer blocks the least is taken that is within this share of the time of most.
_MOST_BLOCKS: Final = 64
_WITHIN: Final = 1.025
# A kernel must be faster by this share for each block that it holds (smPenalty).
_BLOCK_PENALTY: Final = 0.025
# Low-latency kernels send flags beside the data and are not unrolled.
_LOW_LATENCY_BYTES: Final = 9
_LOW_LATENCY_LIMIT: Final = 2**31


@dataclass(frozen=True, slots=True)
class Symmetric:
    """The kernel by NCCL's name, its seconds, its blocks (one SM each), and what one block carries."""

    name: str
    seconds: float
    n_blocks: int
    block_Bps: float


@dataclass(frozen=True, slots=True)
class _Architecture:
    """Microseconds before the first byte by operation and kind of kernel; GiB/s of a block and of the links."""

    reduce_us: float
    other_us: float
    low_reduce_us: float
    low_scatter_us: float
    low_gather_us: float
    reduce_block: float
    other_block: float
    multicast_reduce_peak: float
    peak: float
    multicast_blocks: int


_HOPPER: Final = _Architecture(7.8, 7.8, 4.5, 4.5, 4.5, 65, 44, 480, 320, 16)
_BLACKWELL: Final = _Architecture(19.5, 13, 11, 11, 8.5, 55, 55, 1000, 600, 32)
# One-way NVLink bandwidth tells the two apart: 450 GB/s is Hopper's NVLink 4, 900 GB/s Blackwell's NVLink 5.
_BY_NVLINK: Final = {450e9: _HOPPER, 900e9: _BLACKWELL}


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    base_us: float
    bus_bytes: float
    multiplier: float
    peak: float
    most_blocks: int


def symmetric_kernel(op: Collective, n_bytes: int, n_ranks: int, machine: Machine) -> Symmetric:
    """The kernel for an all-reduce, all-gather or reduce-scatter of n_bytes over n_ranks in one NVLink domain.

    Raises InputError for a machine whose constants NCCL doesn't have.
    """
    chip = _BY_NVLINK.get(machine.nvlink_Bps)
    if chip is None:
        raise InputError(f"machine {machine.name}: NCCL has constants of its symmetric kernels for NVLink 4 and 5 only")
    block = (chip.reduce_block if op is Collective.ALL_REDUCE else chip.other_block) * _GiB_US
    best: tuple[float, Symmetric] | None = None
    for kind in _kinds(op, n_bytes, n_ranks, chip):
        us, n_blocks = _fewest(kind, block)
        cost = us * (1 + _BLOCK_PENALTY * n_blocks)
        if best is None or cost < best[0]:
            best = cost, Symmetric(kind.name, us * 1e-6, n_blocks, block * 1e6)
    assert best is not None
    return best[1]


def _kinds(op: Collective, n_bytes: int, n: int, chip: _Architecture) -> list[_Kind]:
    multicast = -(-chip.multicast_blocks // n)
    if op is Collective.ALL_REDUCE:
        low_bytes = n * n_bytes * _LOW_LATENCY_BYTES
        low = [
            _Kind("AGxLL_R", chip.low_reduce_us, low_bytes, 1.0, chip.peak, _MOST_BLOCKS),
            _Kind("AGxLLMC_R", chip.low_reduce_us, low_bytes, 1.1, chip.peak, _MOST_BLOCKS),
        ]
        return [
            *(low if n_bytes < _LOW_LATENCY_LIMIT else []),
            _Kind("RSxLD_AGxST", chip.reduce_us, 2 * n_bytes * (n - 1) / n, 1.0, chip.peak, _MOST_BLOCKS),
            _Kind("RSxLDMC_AGxSTMC", chip.reduce_us, n_bytes / n + n_bytes, n, chip.multicast_reduce_peak, multicast),
        ]
    others = n_bytes * (n - 1) / n
    low_bytes = n_bytes * _LOW_LATENCY_BYTES
    gathers = op is Collective.ALL_GATHER
    low_us = chip.low_gather_us if gathers else chip.low_scatter_us
    low = [_Kind("LL", low_us, low_bytes, 1.0, chip.peak, _MOST_BLOCKS)]
    if gathers:
        low.append(_Kind("LLMC", low_us, low_bytes, 1.1, chip.peak, _MOST_BLOCKS))
    return [
        *(low if n_bytes < _LOW_LATENCY_LIMIT else []),
        _Kind("ST" if gathers else "LD", chip.other_us, others, 1.0, chip.peak, _MOST_BLOCKS),
        _Kind("STMC" if gathers else "LDMC", chip.other_us, others, 0.55 * n, chip.peak, multicast),
    ]


def _fewest(kind: _Kind, block: float) -> tuple[float, int]:
    """Microseconds and blocks of a kernel, with the fewest blocks that do nearly as well as most."""
    least = _time_us(kind, kind.most_blocks, block)
    for n in range(1, kind.most_blocks):
        us = _time_us(kind, n, block)
        if us <= _WITHIN * least:
            return us, n
    return least, kind.most_blocks


def _time_us(kind: _Kind, n_blocks: int, block: float) -> float:
    """base + softplus(bytes / bandwidth - 1); the bandwidth is a smooth minimum of blocks and links, as soft as one block."""
    ceiling = kind.peak * _GiB_US
    wanted = n_blocks * block * kind.multiplier
    bandwidth = ceiling - block * math.log1p((math.exp(ceiling / block) - 1) * math.exp(-wanted / block))
    over = kind.bus_bytes / bandwidth - 1
    return kind.base_us + (over if over > 100 else math.log1p(math.exp(over)))
