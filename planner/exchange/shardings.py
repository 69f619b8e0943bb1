"""A mesh with placements for tensors of any shape: what a framework says of a tensor, as plain data."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Placement


@dataclass(frozen=True, slots=True)
class Sharding:
    """One placement for each axis of a mesh, and the order in which they apply (None: the mesh's own)."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    order: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return f"{self.mesh.notation} {','.join(str(placement) for placement in self.placements)}"

    def fragments(self, shape: Sequence[int]) -> Fragments:
        """What each rank holds of a tensor of this shape; raises what `place` raises."""
        return place(shape, self.mesh, self.placements, self.order)
