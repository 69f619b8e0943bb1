"""A mesh of ranks with named axes and one placement an axis, and the boxes that they give every rank.

Rule: the meaning is DTensor's. Placements apply in axis order, so a later axis splits what an earlier one left; a split of
`length` by `n` gives ceil(length / n) to each rank until nothing is left (torch.chunk), so the last ones may be short or empty.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.fragments import Fragments, Ints, Ranks
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class Shard:
    """This axis splits tensor dim `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along this axis holds the same."""

    def __str__(self) -> str:
        return "R"


Placement = Shard | Replicate


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks arranged row-major over named axes: `Mesh(("dp", "tp"), (2, 4), (0, ..., 7))`.

    Raises InputError for sizes below 1, repeated axis names or ranks, negative ranks, and a rank count that isn't the product.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        text = self.notation
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise InputError(f"mesh {text}: axis names must be different, one a size")
        if any(size < 1 for size in self.sizes):
            raise InputError(f"mesh {text}: every axis needs a size of at least 1")
        if math.prod(self.sizes) != len(self.ranks):
            raise InputError(
                f"mesh {text} has {math.prod(self.sizes)} places, but {len(self.ranks)} ranks were given"
            )
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise InputError(f"mesh {text}: ranks must be different and not negative")

    @property
    def notation(self) -> str:
        """The axes as a user types them, `dp=2,tp=4`."""
        return ",".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=False))

    @property
    def coordinates(self) -> Ints:
        """Place of each rank along each axis, int64[n_ranks, n_axes], in the order of `ranks`."""
        grid = np.indices(self.sizes, dtype=np.int64).reshape(len(self.sizes), -1)
        return np.ascontiguousarray(grid.T)

    @classmethod
    def of(cls, sizes: dict[str, int], ranks: Iterable[int] | None = None) -> "Mesh":
        """The mesh with these axes in this order; ranks count from 0 when none are given."""
        order = range(math.prod(sizes.values())) if ranks is None else ranks
        return cls(tuple(sizes), tuple(sizes.values()), tuple(int(r) for r in order))


def chunk(lo: Ints, hi: Ints, n_parts: int, index: Ints) -> tuple[Ints, Ints]:
    """Part `index` of the intervals [lo, hi) cut in `n_parts` by torch.chunk's rule; the last parts may be short or empty."""
    step = -(-(hi - lo) // n_parts)
    return np.minimum(lo + index * step, hi), np.minimum(lo + (index + 1) * step, hi)


def place(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> Fragments:
    """The fragments of a tensor laid out on `mesh`: each rank's box, dense in a buffer of its own; empty shards hold nothing.

    Rows over 2 GPUs: `place((8, 8), Mesh.of({"x": 2}), [Shard(0)])` gives rank 0 [0:4, 0:8] and rank 1 [4:8, 0:8].
    Raises InputError for a placement count that isn't the axis count and for a dim that the tensor lacks.
    """
    if len(placements) != len(mesh.axes):
        raise InputError(
            f"mesh {mesh.notation} has {len(mesh.axes)} axes, but {len(placements)} placements were given; one an axis"
        )
    where = mesh.coordinates
    lo = np.zeros((len(mesh.ranks), len(shape)), dtype=np.int64)
    hi = np.tile(np.array(shape, dtype=np.int64), (len(mesh.ranks), 1))
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim
        if not 0 <= dim < len(shape):
            raise InputError(
                f"placement {placement} on axis {mesh.axes[axis]}: the tensor of shape {tuple(shape)} has dims 0 to {len(shape) - 1}"
            )
        lo[:, dim], hi[:, dim] = chunk(lo[:, dim], hi[:, dim], mesh.sizes[axis], where[:, axis])
    ranks: Ranks = np.array(mesh.ranks, dtype=np.int32)
    return Fragments.dense(shape, ranks, lo, hi)
