"""What has to move: tensors, how they lie on the source ranks and how they must lie on the destination ranks.

Rule: a problem says nothing about how or when. Tensors of one shape, dtype and pair of layouts form a class, so whatever is
worked out for a class holds for each of its members.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.notation import MAX_RANKS
from shardroute.planner.layouts.tensors import DTYPES, Layout, Tensor
from shardroute.topologies.errors import InputError

# What is added up, by the libraries that do so and by ranks themselves.
SUMMED_DTYPES: Final = ("f32", "f64", "bf16", "f16")

# Bytes that one side may hold over all ranks, so that sums of bytes fit int64 with room for a few hops. The memory of a million
# GPUs of 288 GB is an eighth of it.
MAX_SIDE_BYTES: Final = 2**61


@dataclass(frozen=True, slots=True)
class TensorClass:
    """Tensors that are alike but for their name and buffers. `members` are indices into the problem's tensors, ascending."""

    shape: tuple[int, ...]
    dtype: str
    source: Fragments
    target: Fragments
    members: NDArray[np.int64]

    @property
    def itemsize(self) -> int:
        """Bytes an element takes."""
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Problem:
    """Tensors with a source and a destination layout over ranks 0 to n_ranks - 1; rank i sits on GPU i of the topology.

    `about` has (name, text) pairs for whoever uses the weights: how each side came to be laid out, and what must be recomputed
    after they have arrived. They travel with a plan.

    `summed` says that source ranks hold addends: what a destination rank needs of an element is the sum over all ranks that hold
    it at the source.

    Raises InputError when a layout doesn't match the tensors, when a rank is out of range, and when a side holds more than
    MAX_SIDE_BYTES.
    """

    tensors: tuple[Tensor, ...]
    source: Layout
    target: Layout
    n_ranks: int
    about: tuple[tuple[str, str], ...] = ()
    summed: bool = False

    def __post_init__(self) -> None:
        twice = [name for name, n in Counter(t.name for t in self.tensors).items() if n > 1]
        if twice:
            raise InputError(f"tensor {twice[0]} is given twice; every tensor needs a name of its own")
        if not 0 <= self.n_ranks <= MAX_RANKS:
            raise InputError(f"a problem of {self.n_ranks} ranks; expected 0 to {MAX_RANKS}")
        for side, layout in (("source", self.source), ("destination", self.target)):
            if len(layout.fragments) != len(self.tensors):
                raise InputError(
                    f"the {side} layout describes {len(layout.fragments)} tensors, the problem has {len(self.tensors)}"
                )
            for tensor, fragments in zip(self.tensors, layout.fragments, strict=True):
                if fragments.shape != tensor.shape:
                    raise InputError(
                        f"{side} layout of {tensor.name}: fragments of shape {fragments.shape}, the tensor has {tensor.shape}"
                    )
            _check_bytes(side, self.tensors, layout)
            ranks = layout.ranks
            if len(ranks) and int(ranks[-1]) >= self.n_ranks:
                raise InputError(
                    f"{side} layout: rank {int(ranks[-1])} is used, but there are {self.n_ranks} ranks "
                    f"(0 to {self.n_ranks - 1})"
                )

    @cached_property
    def classes(self) -> tuple[TensorClass, ...]:
        """The classes, in order of their first member."""
        groups: dict[tuple[str, Fragments, Fragments], list[int]] = {}
        for i, (tensor, source, target) in enumerate(
            zip(self.tensors, self.source.fragments, self.target.fragments, strict=True)
        ):
            groups.setdefault((tensor.dtype, source, target), []).append(i)
        return tuple(
            TensorClass(source.shape, dtype, source, target, np.array(members, dtype=np.int64))
            for (dtype, source, target), members in groups.items()
        )

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors, each counted once."""
        return sum(t.n_bytes for t in self.tensors)


def _check_bytes(side: str, tensors: Sequence[Tensor], layout: Layout) -> None:
    held: dict[int, float] = {}  # elements of each distinct Fragments, in floats, which don't wrap
    total = 0.0
    for tensor, fragments in zip(tensors, layout.fragments, strict=True):
        if id(fragments) not in held:
            held[id(fragments)] = float(fragments.n_elements.sum(dtype=np.float64))
        total += held[id(fragments)] * tensor.itemsize
        if total > MAX_SIDE_BYTES:
            raise InputError(f"{side} layout: its ranks hold more than 2^61 bytes up to tensor {tensor.name}")


def one_tensor(
    shape: Sequence[int], dtype: str, source: Fragments, target: Fragments, name: str = "tensor", n_ranks: int = 1
) -> Problem:
    """The problem of moving a single tensor over `n_ranks` ranks, or as many as its fragments name if that is more."""
    ranks = np.concatenate([[n_ranks - 1], source.rank, target.rank])
    tensor = Tensor(name, tuple(shape), dtype)
    return Problem((tensor,), Layout((source,), ((name,),)), Layout((target,), ((name,),)), int(ranks.max()) + 1)
