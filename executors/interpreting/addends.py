"""Known addends: what a run that adds up puts into source weights, and the proof that their sums arrived.

Rule: an addend is a whole number, 1 or more, that follows from its tensor, its rank and its index. They are so small that every
partial sum is exact in the tensor's dtype, so sums don't depend on their order and every byte can be compared; an addend that is
left out, or counted twice, shows. The sentinel of `patterns` is no such sum.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.adding import CODES, HOST_DTYPES, round_bf16
from shardroute.executors.interpreting.memories import Holdings
from shardroute.executors.interpreting.patterns import COMPARING, Finding, cut, find_strays, scatter
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.shares import Told, part, untold
from shardroute.topologies.errors import InputError

# Up to which whole numbers are exact: 2 to the bits of the significand (IEEE 754; bfloat16 has 8).
EXACT: Final = {CODES["f32"]: 2**24, CODES["f64"]: 2**53, CODES["bf16"]: 2**8, CODES["f16"]: 2**11}
_TILE: Final = 2**16  # elements that are worked on at a time


def fill_addends(arena: NDArray[np.uint8], holdings: Holdings, rank: int, told: Told = untold) -> None:
    """Write the rank's addends into its source fragments. Raises InputError for more ranks than their sums stay exact for."""
    for row in holdings.each(rank, told, target=False):
        code, view = _view(arena, holdings, row)
        largest = _largest(holdings, row, code)
        for starts, extent in cut(view.shape, _TILE):
            tile = tuple(slice(a, a + n) for a, n in zip(starts, extent, strict=True))
            view[tile] = _encoded(_addends(holdings, row, tile, rank, largest), code)


def verify_sums(
    arena: NDArray[np.uint8], holdings: Holdings, rank: int, target_at: int, slots_at: int, told: Told = untold
) -> Finding:
    """Compare every byte of the rank's target part with the sums of all ranks' addends; leaves the sentinel in all fragments."""
    n_bytes = n_wrong = 0
    tensor = index = -1
    for row in holdings.each(rank, part(told, 0.0, COMPARING), target=True):
        code, view = _view(arena, holdings, row)
        n_bytes += view.nbytes
        box, holders, largest = int(holdings.box[row]), _holders(holdings, row), _largest(holdings, row, code)
        for starts, extent in cut(view.shape, _TILE):
            expected, lo = np.zeros(extent), holdings.lo[box] + starts
            for other in holders:
                inside = _common(holdings, lo, lo + extent, other)
                if inside is not None:
                    mine, theirs = inside
                    expected[mine] += _addends(holdings, other, theirs, _rank_of(holdings, other), largest)
            wrong = view[tuple(slice(a, a + n) for a, n in zip(starts, extent, strict=True))] != _encoded(expected, code)
            if wrong.any():
                n_wrong += int(np.count_nonzero(wrong)) * view.itemsize
                if tensor < 0:
                    first = lo + np.array(np.unravel_index(int(np.argmax(wrong)), wrong.shape))
                    tensor, index = int(holdings.tensor[row]), int(first @ holdings.index_stride[box])
    n_stray, stray = find_strays(arena, holdings, rank, target_at, slots_at)
    return Finding(n_bytes, n_wrong, tensor, index, n_stray, stray)


def _addends(holdings: Holdings, row: int, part: tuple[slice, ...], rank: int, largest: int) -> NDArray[np.float64]:
    """The addends of a rank in a part of one of its source fragments."""
    box = int(holdings.box[row])
    index = np.zeros((1,) * len(part), dtype=np.int64)
    for dim, (along, lo, stride) in enumerate(
        zip(part, holdings.lo[box].tolist(), holdings.index_stride[box].tolist(), strict=True)
    ):
        places = (np.arange(along.start, along.stop) + lo) * stride
        index = index + places.reshape(-1, *(1,) * (len(part) - dim - 1))
    seed = scatter(np.array([(int(holdings.tensor[row]) << 32) + rank], dtype=np.uint64))
    return (1 + scatter(index.astype(np.uint64) + seed) % np.uint64(largest)).astype(np.float64)


def _largest(holdings: Holdings, row: int, code: int) -> int:
    """The largest addend that keeps all sums of the tensor exact, however many ranks hold a part of it."""
    side = np.flatnonzero((holdings.tensor == holdings.tensor[row]) & ~holdings.target)
    n_ranks = len(np.unique(np.searchsorted(holdings.ptr, side, side="right")))
    if n_ranks > EXACT[code]:
        raise InputError(f"{n_ranks} ranks hold addends; a run compares sums of up to {EXACT[code]} in this dtype exactly")
    return EXACT[code] // n_ranks


def _encoded(values: NDArray[np.float64], code: int) -> NDArray[np.generic]:
    return round_bf16(values.astype(np.float32)) if code == CODES["bf16"] else values.astype(HOST_DTYPES[code])


def _holders(holdings: Holdings, row: int) -> list[int]:
    """The source fragments of a fragment's tensor, one a rank and box."""
    rows = np.flatnonzero((holdings.tensor == holdings.tensor[row]) & ~holdings.target)
    rank = np.searchsorted(holdings.ptr, rows, side="right")
    corner = np.concatenate([rank[:, None], holdings.lo[holdings.box[rows]], holdings.extent[holdings.box[rows]]], axis=1)
    _, first = np.unique(corner, axis=0, return_index=True)
    found: list[int] = rows[np.sort(first)].tolist()
    return found


def _rank_of(holdings: Holdings, row: int) -> int:
    return int(np.searchsorted(holdings.ptr, row, side="right")) - 1


def _common(holdings: Holdings, lo: Ints, hi: Ints, other: int) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a box and a fragment overlap, as parts of each; None where they don't."""
    box = int(holdings.box[other])
    first: Ints = np.maximum(lo, holdings.lo[box])
    end: Ints = np.minimum(hi, holdings.lo[box] + holdings.extent[box])
    if (first >= end).any():
        return None
    mine, theirs = (
        tuple(slice(int(a), int(b)) for a, b in zip(first - start, end - start, strict=True)) for start in (lo, holdings.lo[box])
    )
    return mine, theirs


def _view(arena: NDArray[np.uint8], holdings: Holdings, row: int) -> tuple[int, NDArray[np.generic]]:
    box = int(holdings.box[row])
    code = int(holdings.adds[box])
    shape, strides = tuple(holdings.extent[box].tolist()), tuple(holdings.stride[box].tolist())
    return code, np.ndarray(shape, HOST_DTYPES[code], arena.data, int(holdings.address[row]), strides)
