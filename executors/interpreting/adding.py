"""Adding elements in one place to those in another, as numbers of a plan's dtypes.

Rule: each addition is rounded to the dtype, to the nearest, ties to even. bf16, which NumPy has no type for, is added as float32,
tile by tile, so that what this takes beside both places stays small.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.problems import SUMMED_DTYPES

COPIES: Final = 0  # of a block whose bytes are added to nothing; others have 1 + the place of their dtype in SUMMED_DTYPES
CODES: Final[Mapping[str, int]] = {name: 1 + i for i, name in enumerate(SUMMED_DTYPES)}
_BF16: Final = CODES["bf16"]
# In which NumPy sees elements of each code.
HOST_DTYPES: Final[Mapping[int, str]] = {CODES["f32"]: "<f4", CODES["f64"]: "<f8", _BF16: "<u2", CODES["f16"]: "<f2"}
_TILE: Final = 2**16  # elements that are added at a time: with two float32 each they stay within a level-2 cache


def add_to(into: NDArray[np.generic], part: NDArray[np.generic], code: int) -> None:
    """Add the elements of `part` to those of `into`; both have one shape, and the dtype of the code."""
    if into.size > _TILE:
        along = next(d for d, n in enumerate(into.shape) if n > 1)
        step = max(1, into.shape[along] * _TILE // into.size)
        for first in range(0, into.shape[along], step):
            tile = (*(slice(None),) * along, slice(first, first + step))
            add_to(into[tile], part[tile], code)
    elif code == _BF16:
        into[...] = round_bf16(widen_bf16(into) + widen_bf16(part))
    else:
        np.add(into, part, out=into)


def widen_bf16(bits: NDArray[np.generic]) -> NDArray[np.float32]:
    """The numbers that bf16 bits (uint16) say."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def round_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of the nearest bf16 numbers, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32).reshape(values.shape)
    nearest = bits >> np.uint32(16)
    nearest &= np.uint32(1)
    nearest += np.uint32(0x7FFF)
    nearest += bits
    nearest >>= np.uint32(16)
    nan = np.isnan(values)
    if nan.any():
        nearest[nan] = 0x7FC0
    return nearest.astype(np.uint16)
