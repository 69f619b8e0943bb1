"""Logical tensors, and how they lie on one side of a problem.

Rule: a tensor is named and shaped as a whole; what a rank holds of it is said by fragments alone.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Fragments, check_shape
from shardroute.topologies.errors import InputError

# Bytes an element takes, by the names that safetensors headers and config.json use (lower case) and their usual short forms.
DTYPES: dict[str, int] = {
    "bool": 1, "u8": 1, "i8": 1, "f8_e4m3": 1, "f8_e5m2": 1, "f8_e8m0": 1,
    "u16": 2, "i16": 2, "f16": 2, "bf16": 2,
    "u32": 4, "i32": 4, "f32": 4,
    "u64": 8, "i64": 8, "f64": 8,
}  # fmt: skip
_DTYPE_NAMES = {
    "bfloat16": "bf16", "float16": "f16", "half": "f16", "fp16": "f16",
    "float32": "f32", "float": "f32", "fp32": "f32", "float64": "f64", "fp64": "f64",
    "int8": "i8", "uint8": "u8", "int16": "i16", "uint16": "u16",
    "int32": "i32", "uint32": "u32", "int64": "i64", "uint64": "u64",
    "float8_e4m3fn": "f8_e4m3", "fp8": "f8_e4m3", "float8_e5m2": "f8_e5m2", "float8_e8m0fnu": "f8_e8m0",
}  # fmt: skip


def dtype_name(text: str) -> str:
    """The canonical dtype name for any usual spelling: `bfloat16`, `torch.bfloat16` and `BF16` are `bf16`."""
    name = text.lower().removeprefix("torch.")
    name = _DTYPE_NAMES.get(name, name)
    if name not in DTYPES:
        raise InputError(f"dtype {text!r} is not known; expected one of {', '.join(sorted(DTYPES))}")
    return name


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor: its (Hugging Face) name, its whole shape and its dtype. A `*` in the name stands for the index of
    dim 0.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        try:
            check_shape(self.shape)
        except InputError as error:
            raise InputError(f"tensor {self.name}: {error}") from None
        object.__setattr__(self, "dtype", dtype_name(self.dtype))

    @property
    def n_elements(self) -> int:
        """Elements, 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes an element takes."""
        return DTYPES[self.dtype]

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.n_elements * self.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """How every tensor of a problem lies on one side.

    fragments  one a tensor; equal ones should be the same object, so that thousands of tensors share a few
    buffers    one a tensor: the names of the local buffers that its fragments' `buffer` column counts. Tensors that name the
               same buffer share it (a fused QKV); they must agree on dtype and, rank by rank, on its size.
    """

    fragments: tuple[Fragments, ...]
    buffers: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if len(self.fragments) != len(self.buffers):
            raise InputError(
                f"a layout needs as many buffer lists as fragments, got {len(self.buffers)} and {len(self.fragments)}"
            )
        for fragments, names in zip(self.fragments, self.buffers, strict=True):
            if len(fragments) and int(fragments.buffer.max()) >= len(names):
                raise InputError(f"a fragment uses buffer {int(fragments.buffer.max())}, but the tensor names only {names}")

    @property
    def ranks(self) -> NDArray[np.int32]:
        """Every rank that holds something, ascending."""
        distinct = {id(f): f for f in self.fragments}.values()
        holds = np.zeros(max((int(f.rank.max(initial=-1)) for f in distinct), default=-1) + 1, dtype=bool)
        for fragments in distinct:
            holds[fragments.rank] = True
        return np.flatnonzero(holds).astype(np.int32)
