"""A mesh of ranks with named axes, and the fragments that one placement an axis gives every rank."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardroute.planner.layouts.fragments import MAX_DIMS, Fragments, Ints, check_shape, dense_strides
from shardroute.planner.layouts.placements import Partial, Placement, Replicate, Shard, StridedShard
from shardroute.planner.layouts.runs import Runs
from shardroute.topologies.errors import InfeasibleError, InputError

# Runs that strided shards may cut one dim into, over all ranks: a slip is refused before memory is taken for it.
MAX_RUNS: Final = 2**25


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks arranged row-major over named axes: `Mesh(("dp", "tp"), (2, 4), (0, ..., 7))`. Without axes it is a single rank.

    Raises InputError for sizes below 1, repeated axis names or ranks, negative ranks, and a rank count that isn't the product.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        text = self.notation
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise InputError(f"mesh {text}: axis names must be different, one a size")
        if len(self.axes) >= MAX_DIMS:
            raise InputError(f"a mesh of {len(self.axes)} axes; at most {MAX_DIMS - 1} are accepted")
        if any(size < 1 for size in self.sizes):
            raise InputError(f"mesh {text}: every axis needs a size of at least 1")
        if math.prod(self.sizes) != len(self.ranks):
            raise InputError(f"mesh {text} has {math.prod(self.sizes)} places, but {len(self.ranks)} ranks were given")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise InputError(f"mesh {text}: ranks must be different and not negative")

    @property
    def notation(self) -> str:
        """The axes as a user types them, `dp=2,tp=4`."""
        return ",".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=False))

    @property
    def coordinates(self) -> Ints:
        """Place of each rank along each axis, int64[n_ranks, n_axes], in the order of `ranks`."""
        grid = np.indices(self.sizes, dtype=np.int64).reshape(len(self.sizes), len(self.ranks))
        return np.ascontiguousarray(grid.T)

    @classmethod
    def of(cls, sizes: dict[str, int], ranks: Iterable[int] | None = None) -> "Mesh":
        """The mesh with these axes in this order; ranks count from 0 when none are given."""
        order = range(math.prod(sizes.values())) if ranks is None else ranks
        return cls(tuple(sizes), tuple(sizes.values()), tuple(int(r) for r in order))

    def submesh(self, **at: int) -> "Mesh":
        """The ranks at one place of some axes, over the axes that are left: `mesh.submesh(dp=1)` is replica 1.

        Raises InputError for an axis that the mesh lacks and a place that the axis lacks.
        """
        chosen = np.ones(len(self.ranks), dtype=bool)
        for axis, place in at.items():
            if axis not in self.axes:
                raise InputError(f"mesh {self.notation} has no axis {axis}; its axes are {', '.join(self.axes) or 'none'}")
            number = self.axes.index(axis)
            if not 0 <= place < self.sizes[number]:
                raise InputError(f"mesh {self.notation}: axis {axis} has places 0 to {self.sizes[number] - 1}, not {place}")
            chosen &= self.coordinates[:, number] == place
        left = [(axis, size) for axis, size in zip(self.axes, self.sizes, strict=True) if axis not in at]
        ranks = np.array(self.ranks)[chosen]
        return Mesh(tuple(axis for axis, _ in left), tuple(size for _, size in left), tuple(int(r) for r in ranks))


def place(shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], order: Sequence[str] | None = None) -> Fragments:
    """The fragments of a tensor laid out on `mesh`: each rank's boxes in one row-major buffer, which they fill.

    `order` names the axes in the order in which they apply (DTensor's shard order); by default that of the mesh. It matters where
    several axes shard one dim.

    Rows over 2 GPUs: `place((8, 8), Mesh.of({"x": 2}), [Shard(0)])` gives rank 0 [0:4, 0:8] and rank 1 [4:8, 0:8]. Strided
    shards give a rank several boxes; ranks whose shard is empty get none. Raises InputError for a placement count that isn't the
    axis count, for a dim that the tensor lacks and an order that isn't one of the axes; InfeasibleError for a partial placement.
    """
    applied = check_placements(shape, mesh, placements, order)
    where, n_places = mesh.coordinates, len(mesh.ranks)
    dims = [Runs.whole(int(size), n_places) for size in shape]
    for axis in applied:
        match placements[axis]:
            case Shard(dim):
                dims[dim] = dims[dim].split(mesh.sizes[axis], where[:, axis])
            case StridedShard(dim, split_factor):
                n_runs = len(dims[dim].place) * min(split_factor, int(shape[dim]))
                if n_runs > MAX_RUNS:
                    what = f"placement {placements[axis]} on axis {mesh.axes[axis]}"
                    raise InputError(f"{what} cuts dim {dim} in {n_runs} runs; at most {MAX_RUNS}")
                dims[dim] = dims[dim].split(mesh.sizes[axis], where[:, axis], min(split_factor, max(1, int(shape[dim]))))
    return _fragments(tuple(int(n) for n in shape), mesh, dims)


def check_placements(
    shape: Sequence[int], mesh: Mesh, placements: Sequence[Placement], order: Sequence[str] | None = None
) -> tuple[int, ...]:
    """The numbers of the mesh's axes in the order in which they apply; raises what `place` raises."""
    if len(placements) != len(mesh.axes):
        raise InputError(
            f"mesh {mesh.notation} has {len(mesh.axes)} axes, but {len(placements)} placements were given; one an axis"
        )
    check_shape(shape)
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Partial):
            raise InfeasibleError(
                f"axis {axis} is {placement}: its ranks hold partial results, and a plan only moves bytes; reduce over axis "
                f"{axis} first (redistribute it to R or S), then plan from what that gives"
            )
        if not isinstance(placement, Replicate) and not 0 <= placement.dim < len(shape):
            has = f"has dims 0 to {len(shape) - 1}" if shape else "is a scalar, without dims"
            raise InputError(f"placement {placement} on axis {axis}: the tensor of shape {tuple(shape)} {has}")
    if order is None:
        return tuple(range(len(mesh.axes)))
    if sorted(order) != sorted(mesh.axes):
        raise InputError(f"mesh {mesh.notation}: order {', '.join(order)} must name each of its axes once")
    return tuple(mesh.axes.index(axis) for axis in order)


def _fragments(shape: tuple[int, ...], mesh: Mesh, dims: Sequence[Runs]) -> Fragments:
    """Every place's runs of each dim with its runs of every other."""
    length = np.stack([runs.length for runs in dims], axis=1) if dims else np.zeros((len(mesh.ranks), 0), np.int64)
    place = np.arange(len(mesh.ranks), dtype=np.int64)
    columns: list[Ints] = []  # for each dim so far, the row of its Runs
    for runs in dims:
        count = np.bincount(runs.place, minlength=len(mesh.ranks))
        first = np.cumsum(count) - count
        n = count[place]
        owner = np.repeat(np.arange(len(place)), n)
        columns = [column[owner] for column in columns]
        columns.append(first[place][owner] + np.arange(len(owner)) - np.repeat(np.cumsum(n) - n, n))
        place = place[owner]

    def column(values: Sequence[Ints]) -> Ints:
        picked = [value[rows] for value, rows in zip(values, columns, strict=True)]
        return np.stack(picked, axis=1) if picked else np.zeros((len(place), 0), np.int64)

    extent = length[place]
    strides = dense_strides(extent)
    return Fragments(
        shape=shape,
        rank=np.array(mesh.ranks, dtype=np.int32)[place],
        lo=column([runs.lo for runs in dims]),
        hi=column([runs.hi for runs in dims]),
        buffer=np.zeros(len(place), dtype=np.int32),
        offset=(column([runs.at for runs in dims]) * strides).sum(axis=1),
        strides=strides,
        buffer_size=extent.prod(axis=1, dtype=np.int64),
    )
