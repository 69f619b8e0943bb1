"""Known contents: what a run puts into source weights, and the proof that exactly these arrived in the destination weights.

Rule: an element's value follows from its tensor and its index in the whole tensor, so replicas agree, neighbours differ, and
whoever holds an element can say what it must be. Its lowest bit is always 1 and the sentinel's is 0: an element that was never
written can't pass for one that was.

The value is a hash of the tensor and of the row (all of the index but its last dim), plus a hash of the last dim's index: one addition
an element, so that gigabytes are filled and verified in seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.memories import Holdings
from shardroute.planner.layouts.fragments import Ints

Words: TypeAlias = NDArray[np.unsignedinteger]

SENTINEL = 0xA4  # even, see the rule above; otherwise arbitrary
_TILE_BYTES = 2**18  # worked on at a time, so that it stays within a level-2 cache
_COLUMN = np.uint64(1 << 63)  # added to last-dim indices before hashing: no row has such an index


@dataclass(frozen=True, slots=True)
class Finding:
    """What verifying one rank's arena found; counts are of bytes, and tensor, index and stray are -1 where nothing is wrong.

    n_bytes   compared in destination fragments        n_wrong   of them, bytes that differ
    tensor, index    the first wrong element in memory order: its tensor and its row-major index in the whole tensor
    n_stray   bytes of target buffers outside of all fragments that changed        stray   address of the first
    """

    n_bytes: int
    n_wrong: int
    tensor: int
    index: int
    n_stray: int
    stray: int


def fill_sources(arena: NDArray[np.uint8], holdings: Holdings, rank: int) -> None:
    """Write the pattern into every source fragment of the rank."""
    for row in _rows(holdings, rank, target=False):
        for part, rows, columns, _ in _tiles(arena, holdings, row):
            np.add(rows, columns, out=part)


def arm(arena: NDArray[np.uint8], target_at: int) -> None:
    """Write the sentinel over all that a run may write: the target buffers, the slots, and the gaps between them."""
    arena[target_at:] = SENTINEL


def verify(arena: NDArray[np.uint8], holdings: Holdings, rank: int, target_at: int, slots_at: int) -> Finding:
    """Compare every byte of the rank's target part with what it must be; leaves the sentinel in all fragments.

    First all fragments with the pattern; then, with the sentinel put back into these, everything with the sentinel.
    """
    n_bytes = n_wrong = n_stray = 0
    tensor = index = stray = -1
    for row in _rows(holdings, rank, target=True):
        for part, rows, columns, lo in _tiles(arena, holdings, row):
            values = rows + columns
            n_bytes += part.nbytes
            wrong = part != values
            if not wrong.any():
                continue
            if tensor < 0:
                at = lo + np.array(np.unravel_index(int(np.argmax(wrong)), wrong.shape))
                tensor, index = int(holdings.tensor[row]), int(at @ holdings.index_stride[holdings.box[row]])
            n_wrong += int(np.count_nonzero((part[wrong] ^ values[wrong]).view(np.uint8)))
    for row in _rows(holdings, rank, target=True):
        view = _view(arena, holdings, row)
        view[...] = np.frombuffer(bytes([SENTINEL]) * view.dtype.itemsize, dtype=view.dtype)[0]
    rest = arena[target_at:slots_at]  # whole cache lines, so whole words
    if (rest.view(np.uint64) != np.frombuffer(bytes([SENTINEL]) * 8, np.uint64)[0]).any():
        changed = np.flatnonzero(rest != SENTINEL)
        n_stray, stray = len(changed), target_at + int(changed[0])
    return Finding(n_bytes, n_wrong, tensor, index, n_stray, stray)


def scatter(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A well mixed 64-bit hash of each number (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    mixed = number + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _rows(holdings: Holdings, rank: int, *, target: bool) -> list[int]:
    first, last = int(holdings.ptr[rank]), int(holdings.ptr[rank + 1])
    rows: list[int] = (np.flatnonzero(holdings.target[first:last] == target) + first).tolist()
    return rows


def _view(arena: NDArray[np.uint8], holdings: Holdings, row: int) -> Words:
    """The fragment as an array of unsigned integers over its arena."""
    box = holdings.box[row]
    shape, strides = tuple(holdings.extent[box].tolist()), tuple(holdings.stride[box].tolist())
    return np.ndarray(shape, f"u{holdings.itemsize[box]}", arena.data, int(holdings.address[row]), strides)


def _tiles(arena: NDArray[np.uint8], holdings: Holdings, row: int) -> Iterator[tuple[Words, Words, Words, Ints]]:
    """The fragment in tiles: memory, the row hashes and column hashes whose sum belongs there, and the tile's lower corner."""
    view, box = _view(arena, holdings, row), int(holdings.box[row])
    lo, index_stride = holdings.lo[box], holdings.index_stride[box]
    seed = scatter(holdings.tensor[row : row + 1].astype(np.uint64))
    last = np.arange(lo[-1], lo[-1] + view.shape[-1]).astype(np.uint64)
    columns = scatter(last + _COLUMN).astype(view.dtype) | view.dtype.type(1)
    for starts, shape in _cut(view.shape, _TILE_BYTES // view.dtype.itemsize):
        part = view[tuple(slice(a, a + n) for a, n in zip(starts, shape, strict=True))]
        number = np.zeros((1,) * view.ndim, dtype=np.uint64)
        for dim in range(view.ndim - 1):
            along = (np.arange(shape[dim]) + (starts[dim] + lo[dim])) * (index_stride[dim] // index_stride[-2])
            number = number + along.astype(np.uint64).reshape(-1, *(1,) * (view.ndim - dim - 1))
        rows = scatter(number + seed).astype(view.dtype) & ~view.dtype.type(1)
        yield part, rows, columns[starts[-1] : starts[-1] + shape[-1]], lo + starts


def _cut(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Starts and shapes of the parts, of at most `most` elements, that a shape is cut into along its leading dims."""
    n = int(np.prod(shape[1:], dtype=np.int64)) if shape else 1
    if not shape or n * shape[0] <= most:
        yield (0,) * len(shape), shape
    elif n <= most:
        step = most // n
        for start in range(0, shape[0], step):
            yield (start, *(0,) * (len(shape) - 1)), (min(step, shape[0] - start), *shape[1:])
    else:
        for start in range(shape[0]):
            for starts, part in _cut(shape[1:], most):
                yield (start, *starts), (1, *part)
