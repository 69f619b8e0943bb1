"""JAX: a mesh of named axes and a PartitionSpec, as plain data or as the NamedSharding itself.

Rule: JAX is never imported. A dim may be split over several axes, the first of them outermost; what doesn't divide evenly is
refused, as JAX refuses it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from shardroute.planner.exchange.shardings import Sharding
from shardroute.planner.layouts.meshes import Mesh
from shardroute.planner.layouts.placements import Placement, Replicate, Shard
from shardroute.topologies.errors import InputError

Entry = None | str | Sequence[str]


class _Device(Protocol):
    @property
    def id(self) -> int: ...


class _Devices(Protocol):
    @property
    def flat(self) -> Iterable[_Device]: ...


class _JaxMesh(Protocol):
    @property
    def shape(self) -> Mapping[str, int]: ...
    @property
    def devices(self) -> _Devices: ...


class NamedShardingLike(Protocol):
    """What is read of a jax.sharding.NamedSharding."""

    @property
    def mesh(self) -> _JaxMesh:
        """A mesh: sizes by axis name, and its devices."""

    @property
    def spec(self) -> Iterable[Entry]:
        """The PartitionSpec."""


def from_named_sharding(shape: Sequence[int], sharding: NamedShardingLike) -> Sharding:
    """The sharding of an array of this shape under a NamedSharding; ranks are the ids of its devices."""
    devices = [int(device.id) for device in sharding.mesh.devices.flat]
    return from_partition_spec(shape, dict(sharding.mesh.shape), tuple(sharding.spec), devices)


def from_partition_spec(
    shape: Sequence[int], axis_sizes: Mapping[str, int], spec: Sequence[Entry], device_ids: Sequence[int] | None = None
) -> Sharding:
    """The sharding that `PartitionSpec(*spec)` gives an array of this shape on a mesh with these axes.

    `from_partition_spec((8, 4), {"x": 2, "y": 4}, [("y", "x"), None])` splits dim 0 by y, and what is left by x. Devices count
    from 0 when no ids are given. Raises InputError for what JAX refuses: an unknown or repeated axis, more entries than dims, a
    dim that its axes don't divide.
    """
    text = f"PartitionSpec({', '.join(repr(entry) for entry in spec)})"
    mesh = Mesh.of(dict(axis_sizes), device_ids)
    if len(spec) > len(shape):
        raise InputError(f"{text} has {len(spec)} entries, but shape {tuple(shape)} has {len(shape)} dims")
    placements: dict[str, Placement] = {}
    for dim, entry in enumerate(spec):
        if not (entry is None or isinstance(entry, str | tuple | list)):
            raise InputError(f"{text}: {entry!r} for dim {dim} says nothing about where it lies; expected None, an axis, or axes")
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in axis_sizes:
                raise InputError(f"{text}: axis {axis!r} isn't in mesh {mesh.notation}")
            if axis in placements:
                raise InputError(f"{text}: axis {axis!r} is used twice")
            placements[axis] = Shard(dim)
        n_parts = math.prod(axis_sizes[axis] for axis in axes)
        if shape[dim] % n_parts:
            raise InputError(f"{text}: JAX needs dim {dim} of shape {tuple(shape)} to divide by {n_parts}; pad it first")
    order = (*placements, *(axis for axis in mesh.axes if axis not in placements))
    every = tuple(placements.get(axis, Replicate()) for axis in mesh.axes)
    return Sharding(mesh, every, None if order == mesh.axes else order)
