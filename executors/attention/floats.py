"""Numbers of a plan's dtypes in host memory, where NumPy knows some of them only as bits."""

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

# In which NumPy sees elements of each dtype of attention. bf16 is the upper half of a float32, which it has no type for.
HOST_DTYPES: Final[Mapping[str, str]] = {"bf16": "<u2", "f16": "<f2", "f32": "<f4", "f64": "<f8"}


def encode(values: NDArray[np.float64], dtype: str) -> NDArray[np.generic]:
    """The values as host memory has them, rounded to the nearest, ties to even."""
    if dtype != "bf16":
        return values.astype(HOST_DTYPES[dtype])
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    upper = np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), bits | np.uint32(0x400000), rounded)  # NaN stays
    return (upper >> np.uint32(16)).astype(np.uint16)


def decode(found: NDArray[np.generic], dtype: str) -> NDArray[np.float64]:
    """What host memory has, as numbers."""
    if dtype != "bf16":
        return found.astype(np.float64)
    return (found.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
