"""Layouts: what every rank holds, as fragments; from meshes, or from a model and a framework's convention."""

from shardroute.planner.layouts.conventions import CONVENTIONS, Side, lay_out
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.models import Model, Parameter, Role, load_model, model_names
from shardroute.planner.layouts.notation import Axis, ParallelSpec, parse_spec
from shardroute.planner.layouts.overlaps import Pieces, overlap, split_large
from shardroute.planner.layouts.placements import Partial, Placement, Replicate, Shard, StridedShard, parse_placement
from shardroute.planner.layouts.tensors import Layout, Tensor

__all__ = [
    "CONVENTIONS",
    "Axis",
    "Fragments",
    "Layout",
    "Mesh",
    "Model",
    "ParallelSpec",
    "Parameter",
    "Partial",
    "Pieces",
    "Placement",
    "Replicate",
    "Role",
    "Shard",
    "Side",
    "StridedShard",
    "Tensor",
    "lay_out",
    "load_model",
    "model_names",
    "overlap",
    "parse_placement",
    "parse_spec",
    "place",
    "split_large",
]
