"""What a caller says of the two sides of a transfer, and what all ranks together say.

Rule: a rank describes what it knows; ranks exchange descriptions once, and each ends with all of both sides, or with the error
that all get.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from shardroute.executors.transports.seam import Deadline, World
from shardroute.planner.exchange import Inventory, Sharding, from_dtensor, inventory_of
from shardroute.planner.exchange.dtensors import DTensorLike
from shardroute.planner.layouts.meshes import Mesh
from shardroute.planner.layouts.placements import parse_placement
from shardroute.planner.layouts.tensors import Tensor
from shardroute.topologies.errors import InputError

Side = Mapping[str, DTensorLike | tuple[Tensor, Sharding]] | Inventory


class _Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A tensor and its sharding, as plain data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    ranks: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    placements: tuple[str, ...]
    order: tuple[str, ...] | None


class _Sides(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    src: list[_Described]
    dst: list[_Described]


def agree_on_sides(world: World, src: Side | None, dst: Side | None, deadline: Deadline) -> tuple[Inventory, Inventory]:
    """The inventories of both sides, from what all ranks describe. Inventories are taken as they are, and must be given to all.

    Raises InputError where two ranks describe a tensor differently, or no rank describes a side.
    """
    mine = _Sides(_described(src), _described(dst))
    every = [msgspec.json.decode(text, type=_Sides) for text in world.exchange(msgspec.json.encode(mine), deadline)]
    return (
        src if isinstance(src, Inventory) else _together([sides.src for sides in every], "source"),
        dst if isinstance(dst, Inventory) else _together([sides.dst for sides in every], "destination"),
    )


def _described(side: Side | None) -> list[_Described]:
    if side is None or isinstance(side, Inventory):
        return []
    found = []
    for name, given in side.items():
        tensor, sharding = given if isinstance(given, tuple) else from_dtensor(name, given)
        mesh = sharding.mesh
        placements = tuple(str(placement) for placement in sharding.placements)
        found.append(_Described(name, tensor.shape, tensor.dtype, mesh.axes, mesh.sizes, mesh.ranks, placements, sharding.order))
    return found


def _together(by_rank: list[list[_Described]], side: str) -> Inventory:
    known: dict[str, tuple[_Described, int]] = {}
    for rank, described in enumerate(by_rank):
        for entry in described:
            first, who = known.setdefault(entry.name, (entry, rank))
            if first != entry:
                raise InputError(
                    f"tensor {entry.name} of the {side}: rank {who} says {_text(first)}, rank {rank} says {_text(entry)}"
                )
    if not known:
        raise InputError(f"no rank describes the {side}; give its tensors, with their shardings, to at least one")
    entries = sorted((entry for entry, _ in known.values()), key=lambda entry: entry.name)
    return inventory_of((Tensor(e.name, e.shape, e.dtype), _sharding(e)) for e in entries)


def _sharding(entry: _Described) -> Sharding:
    mesh = Mesh(entry.axes, entry.sizes, entry.ranks)
    return Sharding(mesh, tuple(parse_placement(text) for text in entry.placements), entry.order)


def _text(entry: _Described) -> str:
    return f"{entry.dtype} {entry.shape} as {','.join(entry.placements)} over {entry.sizes} of ranks {entry.ranks}"
