"""torch.distributed.tensor: DTensors, their specs and device meshes, from torch and back to what rebuilds them there.

Rule: torch is never imported. What the caller hands in is read by its public attributes, and what is handed back is plain data:

    described = to_torch(sharding)
    mesh = DeviceMesh("cuda", torch.tensor(described.mesh), mesh_dim_names=described.mesh_dim_names)
    kinds = {"R": Replicate, "S": Shard, "P": Partial, "_S": lambda dim, n: _StridedShard(dim, split_factor=n)}
    placements = [kinds[kind](*arguments) for kind, *arguments in described.placements]
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import numpy as np

from shardroute.planner.exchange.shardings import Sharding
from shardroute.planner.layouts.meshes import Mesh
from shardroute.planner.layouts.placements import Partial, Placement, Replicate, Shard, StridedShard, parse_placement
from shardroute.planner.layouts.tensors import Tensor
from shardroute.topologies.errors import InputError

Nested = int | list["Nested"]


class _Array(Protocol):
    def tolist(self) -> object: ...


class DeviceMeshLike(Protocol):
    """What is read of a torch DeviceMesh."""

    @property
    def mesh(self) -> _Array:
        """The ranks, as a tensor with one dim an axis."""

    @property
    def mesh_dim_names(self) -> Sequence[str] | None:
        """The names of the axes."""


class _ShardOrderEntry(Protocol):
    @property
    def tensor_dim(self) -> int: ...
    @property
    def mesh_dims(self) -> Sequence[int]: ...


class DTensorSpecLike(Protocol):
    """What is read of a torch DTensorSpec (and of its `shard_order`, where this torch has one)."""

    @property
    def mesh(self) -> DeviceMeshLike:
        """The device mesh."""

    @property
    def placements(self) -> Sequence[object]:
        """One placement an axis."""


class DTensorLike(Protocol):
    """What is read of a torch DTensor."""

    @property
    def shape(self) -> Sequence[int]:
        """The whole tensor's shape."""

    @property
    def dtype(self) -> object:
        """Its dtype; its text names it."""

    @property
    def _spec(self) -> DTensorSpecLike: ...


@dataclass(frozen=True, slots=True)
class TorchSharding:
    """A sharding as arguments for torch: nested ranks, axis names, ("R",) | ("S", dim) | ("_S", dim, factor) | ("P", op).

    `shard_order` is what DTensorSpec takes when the axes of a dim apply in another order than the mesh's, else None.
    """

    mesh: Nested
    mesh_dim_names: tuple[str, ...]
    placements: tuple[tuple[str | int, ...], ...]
    shard_order: tuple[tuple[int, tuple[int, ...]], ...] | None


def from_device_mesh(device_mesh: DeviceMeshLike) -> Mesh:
    """The mesh of a torch DeviceMesh; axes without a name are called dim0, dim1, ... as they count."""
    ranks = np.array(device_mesh.mesh.tolist(), dtype=np.int64)
    names = device_mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(ranks.ndim))
    return Mesh(tuple(names), ranks.shape, tuple(ranks.ravel().tolist()))


def from_torch_placements(placements: Iterable[object], n_dims: int) -> tuple[Placement, ...]:
    """The placements that torch's placements say by their text, such as `S(0)`; negative dims count from the last of `n_dims`."""
    texts = [re.sub(r"-\d+", lambda dim: str(n_dims + int(dim[0])), str(placement)) for placement in placements]
    return tuple(parse_placement(text) for text in texts)


def from_dtensor_spec(spec: DTensorSpecLike, n_dims: int) -> Sharding:
    """The sharding of a DTensorSpec of a tensor with `n_dims` dims, its shard order included."""
    mesh = from_device_mesh(spec.mesh)
    entries: Sequence[_ShardOrderEntry] = getattr(spec, "shard_order", None) or ()
    first = [number for entry in entries for number in entry.mesh_dims]
    default = all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in entries)
    numbers = first + [number for number in range(len(mesh.axes)) if number not in first]
    order = None if default else tuple(mesh.axes[number] for number in numbers)
    return Sharding(mesh, from_torch_placements(spec.placements, n_dims), order)


def from_dtensor(name: str, dtensor: DTensorLike) -> tuple[Tensor, Sharding]:
    """A DTensor as a named tensor and its sharding. Raises InputError for a dtype or placement that isn't known."""
    shape = tuple(int(n) for n in dtensor.shape)
    return Tensor(name, shape, str(dtensor.dtype)), from_dtensor_spec(dtensor._spec, len(shape))


def to_torch(sharding: Sharding) -> TorchSharding:
    """A sharding as plain data from which torch objects are made (see the module). Raises InputError where torch has no words.

    torch takes no shard order beside strided shards.
    """
    mesh = sharding.mesh
    nested: Nested = np.array(mesh.ranks, dtype=np.int64).reshape(mesh.sizes).tolist()
    placements = tuple(_arguments(placement) for placement in sharding.placements)
    order = None if sharding.order is None else _shard_order(sharding, sharding.order)
    return TorchSharding(nested, mesh.axes, placements, order)


def _arguments(placement: Placement) -> tuple[str | int, ...]:
    match placement:
        case Replicate():
            return ("R",)
        case Shard(dim):
            return ("S", dim)
        case StridedShard(dim, split_factor):
            return ("_S", dim, split_factor)
        case Partial(reduce_op):
            return ("P", reduce_op)
    assert_never(placement)


def _shard_order(sharding: Sharding, order: Sequence[str]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    axes_of: dict[int, list[int]] = {}
    for number in (sharding.mesh.axes.index(axis) for axis in order):
        placement = sharding.placements[number]
        if isinstance(placement, StridedShard):
            raise InputError(f"{sharding}: torch takes no shard order ({', '.join(order)}) beside strided shards; leave one out")
        if isinstance(placement, Shard):
            axes_of.setdefault(placement.dim, []).append(number)
    return tuple((dim, tuple(numbers)) for dim, numbers in sorted(axes_of.items()))
