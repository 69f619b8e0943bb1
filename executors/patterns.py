"""Known contents: what a run puts into source weights, and the proof that exactly these arrived in the destination weights.

Rule: an element's value follows from its tensor and its index in the whole tensor, so replicas agree, neighbours differ, and
whoever holds an element can say what it must be. Its lowest bit is always 1 and the sentinel's is 0: an element that was never
written can't pass for one that was.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.memories import Holdings

Words: TypeAlias = NDArray[np.unsignedinteger]

SENTINEL = 0xA4  # even, see the rule above; otherwise arbitrary
# Elements worked on at a time: their 4-byte words and one scratch array stay within a 1 MiB level-2 cache.
_TILE = 2**16
# Word bytes: (odd multiplier, shift, second odd multiplier). The first is 2^32 or 2^64 over the golden ratio (Knuth, TAOCP 6.4), the
# others are steps of the finalisers of MurmurHash3 (32 bits) and SplitMix64.
_MIX = {4: (0x9E3779B1, 16, 0x85EBCA6B), 8: (0x9E3779B97F4A7C15, 31, 0x94D049BB133111EB)}


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


def pattern(index: Words, tensor: int, itemsize: int) -> Words:
    """The elements of `tensor` at these row-major indices (4-byte words, or 8-byte ones), as unsigned integers; overwrites `index`."""
    size = index.dtype.itemsize
    first, shift, second = _MIX[size]
    word = index.dtype.type
    # Tensors differ by an offset that is far, on the circle of words, from any index; 2^(bits) over pi scatters it.
    index += word(tensor * (int(2 ** (8 * size) / np.pi) | 1) % 2 ** (8 * size))
    index *= word(first)
    index ^= index >> word(shift)
    index *= word(second)
    index >>= word(8 * (size - itemsize))
    index |= word(1)
    return index.astype(f"u{itemsize}")


def fill_sources(arena: NDArray[np.uint8], holdings: Holdings, rank: int) -> None:
    """Write the pattern into every source fragment of the rank."""
    for row in _rows(holdings, rank, target=False):
        view = _view(arena, holdings, row)
        for part, base, strides in _tiles(view, holdings, row):
            part[...] = _values(holdings, row, part.shape, base, strides)


def arm(arena: NDArray[np.uint8], target_at: int) -> None:
    """Write the sentinel over all that a run may write: the target buffers, the slots, and the gaps between them."""
    arena[target_at:] = SENTINEL


def verify(arena: NDArray[np.uint8], holdings: Holdings, rank: int, target_at: int, slots_at: int) -> Finding:
    """Compare every byte of the rank's target part with what it must be, and arm the arena again.

    First all fragments with the pattern; then, with the sentinel put back into these, everything with the sentinel.
    """
    n_bytes = n_wrong = 0
    tensor = index = stray = -1
    for row in _rows(holdings, rank, target=True):
        for part, base, strides in _tiles(_view(arena, holdings, row), holdings, row):
            values = _values(holdings, row, part.shape, base, strides)
            n_bytes += part.nbytes
            wrong = part != values
            if not wrong.any():
                continue
            if tensor < 0:
                at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
                tensor, index = int(holdings.tensor[row]), base + int(np.dot(np.array(at, dtype=np.int64), strides))
            n_wrong += int(np.count_nonzero((part[wrong] ^ values[wrong]).view(np.uint8)))
    for row in _rows(holdings, rank, target=True):
        view = _view(arena, holdings, row)
        view[...] = np.frombuffer(bytes([SENTINEL]) * view.dtype.itemsize, dtype=view.dtype)[0]
    changed = np.flatnonzero(arena[target_at:slots_at] != SENTINEL)
    if len(changed):
        stray = target_at + int(changed[0])
    arm(arena, target_at)
    return Finding(n_bytes, n_wrong, tensor, index, len(changed), stray)


def _rows(holdings: Holdings, rank: int, *, target: bool) -> list[int]:
    first, last = int(holdings.ptr[rank]), int(holdings.ptr[rank + 1])
    rows: list[int] = (np.flatnonzero(holdings.target[first:last] == target) + first).tolist()
    return rows


def _view(arena: NDArray[np.uint8], holdings: Holdings, row: int) -> Words:
    """The fragment as an array of unsigned integers over its arena."""
    box = holdings.box[row]
    dtype = f"u{holdings.itemsize[holdings.tensor[row]]}"
    shape, strides = tuple(holdings.count[box].tolist()), tuple(holdings.stride[box].tolist())
    return np.ndarray(shape, dtype, arena.data, int(holdings.address[row]), strides)


def _tiles(view: Words, holdings: Holdings, row: int) -> Iterator[tuple[Words, int, list[int]]]:
    """The fragment in parts of at most _TILE elements: the part, its first element's index, index strides along its dims."""
    box = holdings.box[row]
    yield from _cut(view, int(holdings.first[box]), holdings.index_stride[box].tolist())


def _cut(view: Words, base: int, strides: list[int]) -> Iterator[tuple[Words, int, list[int]]]:
    if view.size <= _TILE:
        yield view, base, strides
        return
    inner = view.size // view.shape[0]
    step = max(1, _TILE // inner)
    for start in range(0, view.shape[0], step):
        part, at = view[start : start + step], base + start * strides[0]
        if inner > _TILE:
            yield from _cut(part[0], at, strides[1:])
        else:
            yield part, at, strides


def _values(holdings: Holdings, row: int, shape: tuple[int, ...], base: int, strides: list[int]) -> Words:
    tensor = int(holdings.tensor[row])
    itemsize = int(holdings.itemsize[tensor])
    word: type[np.uint32 | np.uint64] = np.uint32 if itemsize <= 4 and holdings.n_elements[tensor] <= 2**32 else np.uint64
    bits = 8 * np.dtype(word).itemsize
    index: Words = np.full((1,) * len(shape), base % 2**bits, dtype=word)
    for dim, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        along = np.arange(n, dtype=np.uint64) * np.uint64(stride % 2**64)
        index = index + along.astype(word).reshape(-1, *(1,) * (len(shape) - dim - 1))
    return pattern(index, tensor, itemsize)
