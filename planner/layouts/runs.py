"""One dim of a tensor, as each of many places holds it: an ordered list of runs, split further one mesh axis at a time.

Rule: a split sees what a place holds as one list in its own order, as if the runs were glued together; that is what DTensor's
placements split, from the first axis to the last.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from shardroute.planner.layouts.fragments import Ints


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of one dim held by places 0 to n_places - 1, sorted by place, then by where they lie in it. None is empty.

    place   int64[n]         who holds the run
    lo, hi  int64[n]         the run in the tensor
    at      int64[n]         where it starts in the place's own list
    length  int64[n_places]  how long each place's list is
    """

    place: Ints
    lo: Ints
    hi: Ints
    at: Ints
    length: Ints

    @classmethod
    def whole(cls, size: int, n_places: int) -> Self:
        """The whole dim at every place."""
        n = n_places if size else 0
        zeros = np.zeros(n, dtype=np.int64)
        return cls(np.arange(n, dtype=np.int64), zeros, np.full(n, size), zeros, np.full(n_places, size, dtype=np.int64))

    def split(self, n_parts: int, part: Ints, split_factor: int = 1) -> Self:
        """Each place keeps one part of its list: it is cut in `split_factor`, each of these in `n_parts`, and place p keeps
        part[p] of each. Both cuts follow torch.chunk, so the last parts may be short or empty.

        Eight elements in 2 parts with split factor 4 give 0, 2, 4, 6 to part 0 and 1, 3, 5, 7 to part 1.
        """
        nothing, everything = np.zeros_like(self.length)[:, None], self.length[:, None]
        outer_lo, outer_hi = chunk(nothing, everything, split_factor, np.arange(split_factor))
        kept_lo, kept_hi = chunk(outer_lo, outer_hi, n_parts, part[:, None])  # int64[n_places, split_factor]
        kept = kept_hi - kept_lo
        kept_at = np.cumsum(kept, axis=1) - kept
        where = np.repeat(self.place, split_factor)
        which = np.tile(np.arange(split_factor), len(self.place))
        run_lo, run_at = np.repeat(self.lo, split_factor), np.repeat(self.at, split_factor)
        run_end = run_at + np.repeat(self.hi - self.lo, split_factor)
        first = np.maximum(run_at, kept_lo[where, which])
        last = np.minimum(run_end, kept_hi[where, which])
        held = last > first
        where, first, last = where[held], first[held], last[held]
        lo = run_lo[held] + first - run_at[held]
        at = kept_at[where, which[held]] + first - kept_lo[where, which[held]]
        order = np.lexsort((at, where))
        return type(self)(where[order], lo[order], (lo + last - first)[order], at[order], kept.sum(axis=1))._joined()

    def _joined(self) -> Self:
        """The same with runs that follow one another in the tensor and at the place made one."""
        if len(self.place) < 2:
            return self
        starts = np.concatenate([[True], (np.diff(self.place) != 0) | (self.lo[1:] != self.hi[:-1])])
        first = np.flatnonzero(starts)
        last = np.concatenate([first[1:], [len(starts)]]) - 1
        return type(self)(self.place[first], self.lo[first], self.hi[last], self.at[first], self.length)


def chunk(lo: Ints, hi: Ints, n_parts: int, index: Ints) -> tuple[Ints, Ints]:
    """Part `index` of the intervals [lo, hi) cut in `n_parts` by torch.chunk's rule; the last parts may be short or empty."""
    step = -(-(hi - lo) // n_parts)
    return np.minimum(lo + index * step, hi), np.minimum(lo + (index + 1) * step, hi)
