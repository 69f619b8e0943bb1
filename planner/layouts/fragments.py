"""What each rank holds of one tensor, as columns: the only form of a layout that the rest of shardroute sees.

Rule: a fragment is a non-empty box of the tensor and an affine place in one local buffer. Whatever can be said as a set of
fragments (a mesh, a fused QKV, grouped experts, a padded vocabulary) is handled by everything downstream.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardroute.topologies.errors import InputError

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]


def dense_strides(extent: Ints) -> Ints:
    """Row-major strides, in elements, of boxes whose extents are the rows of `extent` (shape [n, n_dims])."""
    strides = np.ones_like(extent)
    if extent.shape[1] > 1:
        strides[:, :-1] = np.cumprod(extent[:, :0:-1], axis=1)[:, ::-1]
    return strides


def volumes(lo: Ints, hi: Ints) -> Ints:
    """Elements in each of the boxes whose corners are the rows of `lo` and `hi`."""
    return np.asarray((hi - lo).prod(axis=1, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Fragments of one tensor shape, one per row. All columns have length n; boxes are half open.

    rank         int32[n]           who holds it
    lo, hi       int64[n, n_dims]   the box in the tensor, lo <= index < hi, never empty
    buffer       int32[n]           which of the tensor's buffers on that rank (most layouts have only buffer 0)
    offset       int64[n]           where element `lo` lies in the buffer, in elements
    strides      int64[n, n_dims]   distance in the buffer between neighbours along each dim, in elements
    buffer_size  int64[n]           the whole buffer's length on that rank, in elements

    Compared by content. Raises InputError when a box is empty, leaves the tensor, or leaves its buffer.
    """

    shape: tuple[int, ...]
    rank: Ranks
    lo: Ints
    hi: Ints
    buffer: Ranks
    offset: Ints
    strides: Ints
    buffer_size: Ints
    _key: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n, n_dims = len(self.rank), len(self.shape)
        for name, dtype, wanted in (
            ("rank", np.int32, (n,)),
            ("lo", np.int64, (n, n_dims)),
            ("hi", np.int64, (n, n_dims)),
            ("buffer", np.int32, (n,)),
            ("offset", np.int64, (n,)),
            ("strides", np.int64, (n, n_dims)),
            ("buffer_size", np.int64, (n,)),
        ):
            column = np.ascontiguousarray(getattr(self, name), dtype=dtype)
            if column.shape != wanted:
                raise InputError(f"fragments of shape {self.shape}: column {name} has shape {column.shape}, expected {wanted}")
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        self._validate()
        columns = (self.rank, self.lo, self.hi, self.buffer, self.offset, self.strides, self.buffer_size)
        object.__setattr__(self, "_key", b"".join([repr(self.shape).encode(), *(c.tobytes() for c in columns)]))

    def _validate(self) -> None:
        shape = np.array(self.shape, dtype=np.int64)
        if (shape < 0).any():
            raise InputError(f"shape {self.shape}: a dim is negative")
        bad = ((self.lo < 0) | (self.hi > shape) | (self.lo >= self.hi)).any(axis=1)
        bad |= (self.rank < 0) | (self.buffer < 0)
        if bad.any():
            i = int(np.argmax(bad))
            raise InputError(
                f"fragment {i} of rank {self.rank[i]}: box {box_text(self.lo[i], self.hi[i])} is empty or leaves the tensor "
                f"of shape {self.shape} (ranks and buffers count from 0)"
            )
        reach = (self.hi - self.lo - 1) * self.strides
        first = self.offset + np.minimum(reach, 0).sum(axis=1)
        last = self.offset + np.maximum(reach, 0).sum(axis=1)
        bad = (first < 0) | (last >= self.buffer_size)
        if bad.any():
            i = int(np.argmax(bad))
            raise InputError(
                f"fragment {i} of rank {self.rank[i]}: box {box_text(self.lo[i], self.hi[i])} reaches elements {first[i]} to "
                f"{last[i]} of a buffer of {self.buffer_size[i]} elements"
            )

    def __len__(self) -> int:
        return len(self.rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fragments) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def extent(self) -> Ints:
        """Box sizes, int64[n, n_dims]."""
        return self.hi - self.lo

    @property
    def n_elements(self) -> Ints:
        """Elements in each box, int64[n]."""
        return volumes(self.lo, self.hi)

    @classmethod
    def dense(cls, shape: Sequence[int], rank: Sequence[int] | Ranks, lo: Ints, hi: Ints) -> Self:
        """Fragments that each fill a row-major buffer of their own; empty boxes are left out."""
        ranks = np.asarray(rank, dtype=np.int32)
        lo, hi = np.asarray(lo, dtype=np.int64), np.asarray(hi, dtype=np.int64)
        keep = (hi > lo).all(axis=1)
        ranks, lo, hi = ranks[keep], lo[keep], hi[keep]
        extent = hi - lo
        zeros = np.zeros(len(ranks), dtype=np.int64)
        return cls(
            tuple(int(n) for n in shape), ranks, lo, hi, zeros.astype(np.int32), zeros, dense_strides(extent),
            extent.prod(axis=1, dtype=np.int64),
        )  # fmt: skip


def box_text(lo: Ints, hi: Ints) -> str:
    """A box as slices, `[0:4, 2:6]`."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(lo.tolist(), hi.tolist(), strict=True)) + "]"
