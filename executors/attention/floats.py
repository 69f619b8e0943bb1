"""Numbers of a plan's dtypes in host memory, where NumPy knows some of them only as bits."""

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting import adding

# In which NumPy sees elements of each dtype. bf16 is the upper half of a float32, which it has no type for.
HOST_DTYPES: Final[Mapping[str, str]] = {name: adding.HOST_DTYPES[code] for name, code in adding.CODES.items()}


def encode(values: NDArray[np.float64], dtype: str) -> NDArray[np.generic]:
    """The values as host memory has them, rounded to the nearest, ties to even."""
    return adding.round_bf16(values.astype(np.float32)) if dtype == "bf16" else values.astype(HOST_DTYPES[dtype])


def decode(found: NDArray[np.generic], dtype: str) -> NDArray[np.float64]:
    """What host memory has, as numbers."""
    return (adding.widen_bf16(found) if dtype == "bf16" else found).astype(np.float64)
