"""What each rank holds of one tensor, as columns: the only form of a layout that the rest of shardroute sees.

Rule: a fragment is a non-empty box of the tensor and an affine place in one local buffer. Whatever can be said as a set of
fragments (a mesh, a fused QKV, grouped experts, a padded vocabulary) is handled by everything downstream.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.notation import MAX_RANKS
from shardroute.topologies.errors import InputError

# Counts of elements stay below this: with the widest dtype (8 bytes) bytes stay below 2^62, and the sum of two fits int64.
MAX_ELEMENTS: Final = 2**59
# NumPy 1.26 makes no array of more dims.
MAX_DIMS: Final = 32

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

    Compared by content. Raises InputError when a box is empty, leaves the tensor, or leaves its buffer, and for numbers that
    64-bit arithmetic on them couldn't hold (MAX_ELEMENTS, MAX_DIMS, MAX_RANKS).
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
        check_shape(self.shape)
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
            column = _cast(name, getattr(self, name), dtype)
            if column.shape != wanted:
                raise InputError(f"fragments of shape {self.shape}: column {name} has shape {column.shape}, expected {wanted}")
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        self._validate()
        columns = (self.rank, self.lo, self.hi, self.buffer, self.offset, self.strides, self.buffer_size)
        digest = hashlib.blake2b(repr(self.shape).encode(), digest_size=32)
        for column in columns:
            digest.update(column.data)
        object.__setattr__(self, "_key", digest.digest())

    def _validate(self) -> None:
        shape = np.array(self.shape, dtype=np.int64)
        bad = ((self.lo < 0) | (self.hi > shape) | (self.lo >= self.hi)).any(axis=1)
        bad |= (self.rank < 0) | (self.buffer < 0)
        if bad.any():
            i = int(np.argmax(bad))
            raise InputError(
                f"fragment {i} of rank {self.rank[i]}: box {box_text(self.lo[i], self.hi[i])} is empty or leaves the tensor "
                f"of shape {self.shape} (ranks and buffers count from 0)"
            )
        if len(self) and int(self.rank.max()) >= MAX_RANKS:
            raise InputError(f"rank {int(self.rank.max())} is above {MAX_RANKS - 1}, the highest that is accepted")
        # In floats first, which lose digits but never wrap.
        far = ((self.hi - self.lo - 1) * np.abs(self.strides.astype(np.float64))).sum(axis=1) > MAX_ELEMENTS
        far |= (np.abs(self.strides.astype(np.float64)) >= MAX_ELEMENTS).any(axis=1)
        far |= (np.abs(self.offset.astype(np.float64)) >= MAX_ELEMENTS) | (self.buffer_size > MAX_ELEMENTS)
        if far.any():
            i = int(np.argmax(far))
            raise InputError(
                f"fragment {i} of rank {self.rank[i]}: offset {self.offset[i]} and strides {self.strides[i].tolist()} in a "
                f"buffer of {self.buffer_size[i]} elements reach over 2^59 elements or more; bytes are counted in 64 bits"
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


def check_shape(shape: Sequence[int]) -> None:
    """Raise InputError for a shape that has negative dims, more dims than MAX_DIMS, or too many elements to count.

    A dim of 0 doesn't excuse the others: arithmetic on them would still wrap.
    """
    if len(shape) > MAX_DIMS:
        raise InputError(f"a shape of {len(shape)} dims; at most {MAX_DIMS} are accepted")
    if any(n < 0 for n in shape):
        raise InputError(f"shape {tuple(shape)}: a dim is negative")
    if math.prod(max(n, 1) for n in shape) >= MAX_ELEMENTS:
        raise InputError(f"a tensor of shape {tuple(shape)} has 2^59 elements or more; bytes are counted in 64 bits")


def _cast(name: str, values: object, dtype: type[np.integer]) -> NDArray[np.generic]:
    """The values as a column of this dtype, none of them changed by it."""
    try:
        given = np.asarray(values)
        column: NDArray[np.generic] = np.ascontiguousarray(given, dtype=dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise InputError(f"fragments: column {name}: expected {np.dtype(dtype).name} values ({error})") from None
    if given.dtype != column.dtype and (given != column).any():
        raise InputError(f"fragments: column {name}: expected {np.dtype(dtype).name} values")
    return column


def box_text(lo: Ints, hi: Ints) -> str:
    """A box as slices, `[0:4, 2:6]`."""
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(lo.tolist(), hi.tolist(), strict=True)) + "]"
