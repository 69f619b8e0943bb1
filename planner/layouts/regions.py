"""The memory that a fragment occupies in its buffer, and whether two fragments share any of it.

Rule: "apart" is only said when it is shown. Regions are compared as boxes of a lattice of strides, so the cost doesn't grow
with their elements; only regions that no lattice fits are compared element by element, up to a limit.
"""

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from shardroute.planner.layouts.fragments import Fragments, Ints

MAX_COMPARED: Final = 2**20  # elements of each side; some milliseconds and 8 MiB


@dataclass(frozen=True, slots=True)
class Region:
    """Positions offset + i1 * stride1 + i2 * stride2 ..., 0 <= ik < nk, in elements; (n, stride) pairs, largest stride first.

    Canonical: strides are positive, extents above 1, and neighbours that make one run are joined.
    """

    offset: int
    steps: tuple[tuple[int, int], ...]

    @property
    def last(self) -> int:
        """The highest position."""
        return self.offset + sum((n - 1) * stride for n, stride in self.steps)

    @property
    def positions(self) -> Ints:
        """Every position, int64[n_elements], sorted."""
        at = np.array([self.offset], dtype=np.int64)
        for n, stride in self.steps:
            at = np.add.outer(at, np.arange(n, dtype=np.int64) * stride).ravel()
        return np.sort(at)

    @property
    def n_elements(self) -> int:
        """Elements; one position counts as often as it is named."""
        return int(np.prod([n for n, _ in self.steps], dtype=object))

    @property
    def is_injective(self) -> bool:
        """Whether no position is named twice, as far as it can be shown."""
        reach = 0
        for n, stride in reversed(self.steps):
            if stride <= reach:
                return self.n_elements <= MAX_COMPARED and bool((np.diff(self.positions) > 0).all())
            reach += (n - 1) * stride
        return True


def region(fragments: Fragments, row: int) -> Region:
    """The memory of one fragment."""
    offset, steps = int(fragments.offset[row]), []
    for n, stride in zip(fragments.extent[row].tolist(), fragments.strides[row].tolist(), strict=True):
        offset += min(0, (n - 1) * stride)
        if n > 1:
            steps.append((n, abs(stride)))
    joined: list[tuple[int, int]] = []
    for n, stride in sorted(steps, key=lambda step: (-step[1], step[0])):
        if joined and joined[-1][1] == n * stride:
            joined[-1] = (joined[-1][0] * n, stride)
        else:
            joined.append((n, stride))
    return Region(offset, tuple(joined))


def apart(a: Region, b: Region) -> bool:
    """Whether two regions of one buffer share no position; False also when that can't be shown."""
    if a.last < b.offset or b.last < a.offset:
        return True
    base = min(a.offset, b.offset)
    return _apart(Region(a.offset - base, a.steps), Region(b.offset - base, b.steps))


@lru_cache(maxsize=4096)  # the ranks of a layout repeat the same few pairs
def _apart(a: Region, b: Region) -> bool:
    strides = sorted({stride for _, stride in (*a.steps, *b.steps)} | {1}, reverse=True)
    if 0 not in strides and all(outer % inner == 0 for outer, inner in itertools.pairwise(strides)):
        boxes = [_lattice_box(r, strides) for r in (a, b)]
        if boxes[0] is not None and boxes[1] is not None:
            return any(hi1 <= lo2 or hi2 <= lo1 for (lo1, hi1), (lo2, hi2) in zip(boxes[0], boxes[1], strict=True))
    if max(a.n_elements, b.n_elements) > MAX_COMPARED:
        return False
    return len(np.intersect1d(a.positions, b.positions)) == 0


def _lattice_box(found: Region, strides: list[int]) -> list[tuple[int, int]] | None:
    """The region as a box of digits in the number system that `strides` make, or None where it carries into the next digit."""
    size: dict[int, int] = {}
    for n, stride in found.steps:
        if stride in size:
            return None
        size[stride] = n
    box, rest = [], found.offset
    for stride in strides:
        digit, rest = divmod(rest, stride)
        box.append([digit, digit + size.get(stride, 1)])
    for i in range(len(strides) - 1, 0, -1):
        base = strides[i - 1] // strides[i]
        lo, hi = box[i]
        if hi > base:  # whole rows of the next digit can be said in it, if that one isn't in use
            if lo or hi % base or box[i - 1][1] - box[i - 1][0] > 1:
                return None
            box[i], box[i - 1][1] = [0, base], box[i - 1][0] + hi // base
    return [(lo, hi) for lo, hi in box]
