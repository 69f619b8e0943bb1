"""A rank's memory by address: one block of bytes, or buffers that the caller owns, laid end to end in an address space.

Rule: only views are handed out; nothing is ever copied or allocated here.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.adding import HOST_DTYPES
from shardroute.executors.interpreting.blocks import Forms

# Where NumPy copies elements as fast as inner loops: 12-byte runs go at 2.7 GB/s against 1.9, 64-byte runs at 2.9 against 2.9
# (measured on one core of a 2-core Xeon, NumPy 2.4.6).
_ELEMENT_BYTES = 64

Strided = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Lent:
    """A buffer of the caller's on a device. `owner` keeps it alive."""

    start: int  # address in the rank's arena
    n_bytes: int
    pointer: int
    owner: object
    is_target: bool


class Arena:
    """Bytes by address. `starts` are the addresses at which the buffers begin, ascending; no view may leave its buffer."""

    def __init__(self, starts: Sequence[int], buffers: Sequence[NDArray[np.uint8]]) -> None:
        self._starts, self._buffers = list(starts), list(buffers)

    @classmethod
    def whole(cls, memory: NDArray[np.uint8]) -> "Arena":
        """One block of bytes, from address 0."""
        return cls([0], [memory])

    def bind(self, buffers: Sequence[NDArray[np.uint8]]) -> None:
        """Put other buffers of the same lengths at the same addresses."""
        self._buffers = list(buffers)

    def spans(self) -> list[tuple[int, int]]:
        """Address and length of each buffer."""
        return [(start, len(buffer)) for start, buffer in zip(self._starts, self._buffers, strict=True)]

    def bytes(self, address: int, n_bytes: int) -> NDArray[np.uint8]:
        """So many bytes from an address."""
        memory, at = self._find(address)
        assert at + n_bytes <= len(memory)
        return memory[at : at + n_bytes]

    def strided(self, address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[np.generic]:
        """Elements whose first lies at an address; strides are in bytes, and may be negative."""
        memory, at = self._find(address)
        return np.ndarray(shape, dtype, memory.data, at, strides)

    def _find(self, address: int) -> tuple[NDArray[np.uint8], int]:
        number = bisect_right(self._starts, address) - 1
        return self._buffers[number], address - self._starts[number]


def strided_form(forms: Forms, form: int) -> Strided:
    """dtype, shape, source strides and destination strides of a strided block.

    Short runs become elements: NumPy copies these in one loop, not one a run.
    """
    run, count, src_stride, dst_stride = (x[form].tolist() for x in (forms.run, forms.count, forms.src_stride, forms.dst_stride))
    dims = [d for d, n in enumerate(count) if n > 1]
    shape, a, b = (tuple(x[d] for d in dims) for x in (count, src_stride, dst_stride))
    if run <= _ELEMENT_BYTES:
        return f"V{run}", shape, a, b
    return "u1", (*shape, run), (*a, 1), (*b, 1)


def number_form(forms: Forms, form: int, code: int) -> Strided:
    """The same by elements of the dtype of a code of `adding`."""
    dtype = HOST_DTYPES[code]
    itemsize = np.dtype(dtype).itemsize
    run, count, src_stride, dst_stride = (x[form].tolist() for x in (forms.run, forms.count, forms.src_stride, forms.dst_stride))
    return dtype, (*count, run // itemsize), (*src_stride, itemsize), (*dst_stride, itemsize)


def is_dense(forms: Forms, stride: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of each form, whether its elements lie without gaps and in order on the side whose strides are given."""
    inner = forms.run.copy()
    dense = np.ones(len(forms.run), dtype=bool)
    for dim in reversed(range(forms.count.shape[1])):
        many = forms.count[:, dim] > 1
        dense &= ~many | (stride[:, dim] == inner)
        inner = inner * forms.count[:, dim]
    return dense
