"""Known contents: what a run puts into source weights, and the proof that exactly these arrived in the destination weights.

Rule: an element's value follows from its tensor and its index in the whole tensor, so replicas agree, neighbours differ,
and whoever holds an element can say what it must be. Its lowest bit is always 1 and the sentinel's is 0: an element that
was never written can't pass for one that was.

The value is a hash of the tensor and of the row (all of the index but its last dim), plus a hash of the last dim's index:
one addition an element, so that gigabytes are filled and verified in seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.memories import Holdings
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.shares import Told, part, untold

Words: TypeAlias = NDArray[np.unsignedinteger]

SENTINEL = 0xA4  # even, see the rule above; otherwise arbitrary
_TILE_BYTES = 2**18  # worked on at a time, so that it stays within a level-2 cache
# The share of verifying that comparing takes; looking for what changed outside of fragments takes the rest: from half of the time
# with fragments of megabytes to a tenth with those of kilobytes (2026-12-01).
COMPARING: Final = 0.7
_ARMED_BYTES: Final = 2**26  # between two shares: tens of milliseconds where pages must be made first
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


def fill_sources(arena: NDArray[np.uint8], holdings: Holdings, rank: int, told: Told = untold) -> None:
    """Write the pattern into every source fragment of the rank."""
    boxes = _Boxes(holdings)
    for row in holdings.each(rank, told, target=False):
        box, view = boxes.view(arena, row)
        for tile in box.tiles:
            np.add(tile.rows(int(holdings.tensor[row])), tile.columns, out=view[tile.part])


def arm(arena: NDArray[np.uint8], target_at: int, told: Told = untold) -> None:
    """Write the sentinel over all that a run may write: the target buffers, the slots, and the gaps between them."""
    for first in range(target_at, len(arena), _ARMED_BYTES):
        arena[first : first + _ARMED_BYTES] = SENTINEL
        told(min((first + _ARMED_BYTES - target_at) / (len(arena) - target_at), 1.0))


def verify(
    arena: NDArray[np.uint8], holdings: Holdings, rank: int, target_at: int, slots_at: int, told: Told = untold
) -> Finding:
    """Compare every byte of the rank's target part with what it must be; leaves the sentinel in all fragments.

    First all fragments with the pattern; then, with the sentinel put back into these, everything with the sentinel.
    """
    n_bytes = n_wrong = 0
    tensor = index = -1
    boxes = _Boxes(holdings)
    for row in holdings.each(rank, part(told, 0.0, COMPARING), target=True):
        box, view = boxes.view(arena, row)
        n_bytes += view.nbytes
        for tile in box.tiles:
            found, values = view[tile.part], tile.rows(int(holdings.tensor[row])) + tile.columns
            wrong = found != values
            if not wrong.any():
                continue
            if tensor < 0:
                at = tile.lo + np.array(np.unravel_index(int(np.argmax(wrong)), wrong.shape))
                tensor, index = int(holdings.tensor[row]), int(at @ holdings.index_stride[holdings.box[row]])
            n_wrong += int(np.count_nonzero((found[wrong] ^ values[wrong]).view(np.uint8)))
    n_stray, stray = find_strays(arena, holdings, rank, target_at, slots_at)
    return Finding(n_bytes, n_wrong, tensor, index, n_stray, stray)


def find_strays(arena: NDArray[np.uint8], holdings: Holdings, rank: int, target_at: int, slots_at: int) -> tuple[int, int]:
    """How many bytes of the rank's target buffers changed outside of all fragments, and the first (-1); leaves the sentinel."""
    boxes = _Boxes(holdings)
    for row in holdings.rows(rank, target=True):
        box, view = boxes.view(arena, row)
        view[...] = box.sentinel
    rest = arena[target_at:slots_at]  # whole cache lines, so whole words
    if (rest.view(np.uint64) != np.frombuffer(bytes([SENTINEL]) * 8, np.uint64)[0]).any():
        changed = np.flatnonzero(rest != SENTINEL)
        if len(changed):  # else something has put it back since
            return len(changed), target_at + int(changed[0])
    return 0, -1


def scatter(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A well mixed 64-bit hash of each number (the finaliser of SplitMix64; Steele, Lea and Flood 2014)."""
    mixed = number + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """A part of a box that is worked on at a time. `numbers` are its rows' in the whole tensor, `lo` its lower corner there."""

    part: tuple[slice, ...]
    numbers: NDArray[np.uint64]
    columns: Words
    lo: Ints

    def rows(self, tensor: int) -> Words:
        """The even hashes of its rows; with the odd ones of `columns` added, the values that belong there."""
        seed = scatter(np.array([tensor], dtype=np.uint64))
        dtype = self.columns.dtype
        return scatter(self.numbers + seed).astype(dtype) & ~dtype.type(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Box:
    """What all fragments of one box share."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[np.unsignedinteger]
    sentinel: np.unsignedinteger
    tiles: tuple[_Tile, ...]


class _Boxes:
    """The boxes met so far: hundreds of tensors share one, and working it out costs more than filling a small fragment."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._known: dict[int, _Box] = {}

    def view(self, arena: NDArray[np.uint8], row: int) -> tuple[_Box, Words]:
        """The box of a holding, and the fragment as an array of unsigned integers over its arena."""
        number = int(self._holdings.box[row])
        if number not in self._known:
            self._known[number] = _box(self._holdings, number)
        box = self._known[number]
        return box, np.ndarray(box.shape, box.dtype, arena.data, int(self._holdings.address[row]), box.strides)


def _box(holdings: Holdings, number: int) -> _Box:
    lo, index_stride = holdings.lo[number], holdings.index_stride[number]
    shape: tuple[int, ...] = tuple(holdings.extent[number].tolist())
    dtype = np.dtype(f"u{holdings.itemsize[number]}")
    last = np.arange(lo[-1], lo[-1] + shape[-1]).astype(np.uint64)
    columns = scatter(last + _COLUMN).astype(dtype) | dtype.type(1)
    tiles = []
    for starts, extent in cut(shape, _TILE_BYTES // dtype.itemsize):
        numbers = np.zeros((1,) * len(shape), dtype=np.uint64)
        for dim in range(len(shape) - 1):
            along = (np.arange(extent[dim]) + (starts[dim] + lo[dim])) * (index_stride[dim] // index_stride[-2])
            numbers = numbers + along.astype(np.uint64).reshape(-1, *(1,) * (len(shape) - dim - 1))
        part = tuple(slice(a, a + n) for a, n in zip(starts, extent, strict=True))
        tiles.append(_Tile(part, numbers, columns[part[-1]], lo + starts))
    sentinel = np.frombuffer(bytes([SENTINEL]) * dtype.itemsize, dtype=dtype)[0]
    return _Box(shape, tuple(holdings.stride[number].tolist()), dtype, sentinel, tuple(tiles))


def cut(shape: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Starts and shapes of the parts that a shape is cut into along its leading dims: at most `most` elements, or 1 x `most`."""
    n = int(np.prod(shape[1:], dtype=np.int64))
    if n * shape[0] <= most:
        yield (0,) * len(shape), shape
    elif n <= most:
        step = most // n
        for start in range(0, shape[0], step):
            yield (start, *(0,) * (len(shape) - 1)), (min(step, shape[0] - start), *shape[1:])
    else:
        for start in range(shape[0]):
            for starts, part in cut(shape[1:], most):
                yield (start, *starts), (1, *part)
