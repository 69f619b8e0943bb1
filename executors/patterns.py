"""Known contents: what a run puts into source weights, and the proof that exactly these arrived in the destination weights.

Rule: an element's value follows from its tensor and its index in the whole tensor, so replicas agree, neighbours differ, and
whoever holds an element can say what it must be. Its lowest bit is always 1 and the sentinel's is 0: an element that was never
written can't pass for one that was.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.blocks import coalesce
from shardroute.executors.memories import Holdings
from shardroute.planner.layouts.fragments import Ints

SENTINEL = 0xA4  # even, see the rule above; otherwise arbitrary
# Elements worked on at a time: their 4-byte words and one scratch array stay within a 1 MiB level-2 cache.
_TILE = 2**16
# Odd multipliers that spread neighbours over all bits: 2^32 and 2^64 over the golden ratio (Knuth, TAOCP 6.4), and the second
# steps of MurmurHash3's 32-bit and SplitMix64's finalisers.
_MIX = {4: (0x9E3779B1, 16, 0x85EBCA6B), 8: (0x9E3779B97F4A7C15, 31, 0x94D049BB133111EB)}


@dataclass(frozen=True, slots=True)
class Finding:
    """What verifying one rank's arena found; counts are of bytes, -1 where there is no first one.

    n_bytes   compared in destination fragments        n_wrong   of them, bytes that differ
    tensor, index    the first wrong element: its tensor and its row-major index in the whole tensor
    n_stray   bytes outside of all fragments that changed        stray   address of the first
    """

    n_bytes: int
    n_wrong: int
    tensor: int
    index: int
    n_stray: int
    stray: int


def fill_sources(arena: NDArray[np.uint8], holdings: Holdings, rank: int) -> None:
    """Write the pattern into every source fragment of the rank."""
    for row in range(int(holdings.ptr[rank]), int(holdings.ptr[rank + 1])):
        if not holdings.target[row]:
            for view, _, values in _tiles(arena, holdings, row):
                view[...] = values


def arm(arena: NDArray[np.uint8], target_at: int) -> None:
    """Write the sentinel over all that a run may write: the target buffers, the slots, and the gaps between them."""
    arena[target_at:] = SENTINEL


def verify(arena: NDArray[np.uint8], holdings: Holdings, rank: int, target_at: int, slots_at: int) -> Finding:
    """Compare every byte of the rank's target part with what it must be, and arm the arena again.

    First all fragments with the pattern; then, with the sentinel put back into these, everything with the sentinel.
    """
    rows = [r for r in range(int(holdings.ptr[rank]), int(holdings.ptr[rank + 1])) if holdings.target[r]]
    n_bytes = n_wrong = 0
    tensor = index = stray = -1
    for row in rows:
        for view, indices, values in _tiles(arena, holdings, row):
            n_bytes += view.nbytes
            wrong = view != values
            if not wrong.any():
                continue
            if tensor < 0:
                tensor, index = int(holdings.tensor[row]), int(indices()[np.unravel_index(int(np.argmax(wrong)), wrong.shape)])
            difference = view[wrong] ^ values[wrong].astype(view.dtype)
            n_wrong += int(np.count_nonzero(difference.view(np.uint8)))
    for row in rows:
        _view(arena, holdings, row)[0][...] = np.frombuffer(bytes([SENTINEL]) * 8, dtype=f"u{holdings.itemsize[holdings.tensor[row]]}")[0]
    changed = np.flatnonzero(arena[target_at:slots_at] != SENTINEL)
    if len(changed):
        stray = target_at + int(changed[0])
    arm(arena, target_at)
    return Finding(n_bytes, n_wrong, tensor, index, len(changed), stray)


def _view(arena: NDArray[np.uint8], holdings: Holdings, row: int) -> tuple[NDArray[np.unsignedinteger], list[int], int]:
    """A fragment as an array over its arena, the row-major index strides of its dims in the whole tensor, and its first index."""
    box, tensor = int(holdings.box[row]), int(holdings.tensor[row])
    itemsize = int(holdings.itemsize[tensor])
    first = int(holdings.lo[box] @ holdings.index_strides[tensor])
    extent, index_strides, strides = (x[0] for x in coalesce(
        holdings.extent[box : box + 1], holdings.index_strides[tensor : tensor + 1], holdings.strides[box : box + 1]
    ))  # fmt: skip
    view: NDArray[np.unsignedinteger] = np.ndarray(
        tuple(extent.tolist()), f"u{itemsize}", arena, int(holdings.address[row]), tuple((strides * itemsize).tolist())
    )
    return view, index_strides.tolist(), first


def _tiles(arena: NDArray[np.uint8], holdings: Holdings, row: int) -> Iterator[tuple[NDArray[np.unsignedinteger], "_Indices", NDArray[np.unsignedinteger]]]:
    """A fragment in tiles: the memory, a function that gives its elements' indices, and the values that belong there."""
    view, index_strides, first = _view(arena, holdings, row)
    tensor = int(holdings.tensor[row])
    n_elements = int(holdings.index_strides[tensor, 0]) * 2**32 if view.ndim else 1
    for starts, shape in cut(view.shape, _TILE):
        part = view[tuple(slice(a, a + n) for a, n in zip(starts, shape, strict=True))]
        base = first + sum(a * s for a, s in zip(starts, index_strides, strict=True))
        indices = _Indices(base, shape, index_strides)
        yield part, indices, pattern(indices, tensor, part.dtype.itemsize)
    del n_elements


@dataclass(frozen=True, slots=True)
class _Indices:
    base: int
    shape: tuple[int, ...]
    strides: list[int]

    def __call__(self, dtype: type = np.uint64) -> Ints:
        mask = 2 ** (8 * np.dtype(dtype).itemsize) - 1
        total = np.full((1,) * len(self.shape), self.base & mask, dtype=dtype)
        for dim, (n, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            along = (np.arange(n, dtype=np.uint64) * np.uint64(stride)).astype(dtype)
            total = total + along.reshape(-1, *(1,) * (len(self.shape) - dim - 1))
        return total
