"""What one rank holds, fragment by fragment, and what every rank holds in sum."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Fragments, Ints, Ranks
from shardroute.planner.layouts.tensors import Layout, Tensor


@dataclass(frozen=True, slots=True)
class Holding:
    """A fragment on a rank: the box [lo, hi) of a tensor, `offset` and `strides` elements into a buffer of `buffer_size`."""

    buffer: str
    buffer_size: int
    tensor: Tensor
    lo: tuple[int, ...]
    hi: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the box."""
        return int(np.prod(np.subtract(self.hi, self.lo), dtype=object)) * self.tensor.itemsize


def holdings(tensors: Sequence[Tensor], layout: Layout, rank: int) -> list[Holding]:
    """The fragments of a rank, in the order of the tensors."""
    rows_of: dict[int, list[int]] = {}
    found = []
    for tensor, fragments, buffers in zip(tensors, layout.fragments, layout.buffers, strict=True):
        if id(fragments) not in rows_of:
            rows_of[id(fragments)] = np.flatnonzero(fragments.rank == rank).tolist()
        found += [
            Holding(
                buffers[fragments.buffer[i]],
                int(fragments.buffer_size[i]),
                tensor,
                tuple(fragments.lo[i].tolist()),
                tuple(fragments.hi[i].tolist()),
                int(fragments.offset[i]),
                tuple(fragments.strides[i].tolist()),
            )
            for i in rows_of[id(fragments)]
        ]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """Sums for each rank that holds something: rank int32[n], ascending; tensors, and bytes of their boxes, int64[n].

    Memory may be more (padding) or less (tensors that share it).
    """

    rank: Ranks
    n_tensors: Ints
    n_bytes: Ints


def totals(tensors: Sequence[Tensor], layout: Layout) -> Totals:
    """The sums over all tensors."""
    ranks: NDArray[np.int32] = layout.ranks
    n_tensors, n_bytes = np.zeros(len(ranks), dtype=np.int64), np.zeros(len(ranks), dtype=np.int64)
    # Each distinct layout once, with how many tensors lie by it and how many bytes an element of all of these takes.
    alike: dict[int, tuple[Fragments, int, int]] = {}
    for tensor, fragments in zip(tensors, layout.fragments, strict=True):
        _, n, itemsize = alike.get(id(fragments), (fragments, 0, 0))
        alike[id(fragments)] = (fragments, n + 1, itemsize + tensor.itemsize)
    for fragments, n, itemsize in alike.values():
        place = np.searchsorted(ranks, fragments.rank)
        n_tensors += n * (np.bincount(place, minlength=len(ranks)) > 0)
        np.add.at(n_bytes, place, fragments.n_elements * itemsize)
    return Totals(ranks, n_tensors, n_bytes)
