"""Layouts: what every rank holds, as fragments; from meshes, or from a model and a framework's convention."""

from typing import TYPE_CHECKING

from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, Placement, Replicate, Shard, place
from shardroute.planner.layouts.notation import Axis, ParallelSpec, parse_spec
from shardroute.planner.layouts.overlaps import Pieces, overlap, split_large

if TYPE_CHECKING:
    from shardroute.planner.layouts.conventions import CONVENTIONS, Side, lay_out
    from shardroute.planner.layouts.models import Model, Parameter, Role, load_model, model_names
    from shardroute.planner.layouts.refits import RefitSummary, refit_problem

# These build on `planner.problems`, which imports fragments from this package: loaded at first use, or the
# two would be a cycle.
_LATER = {
    "CONVENTIONS": "conventions",
    "Model": "models",
    "Parameter": "models",
    "RefitSummary": "refits",
    "Role": "models",
    "Side": "conventions",
    "lay_out": "conventions",
    "load_model": "models",
    "model_names": "models",
    "refit_problem": "refits",
}

__all__ = [
    "CONVENTIONS",
    "Axis",
    "Fragments",
    "Mesh",
    "Model",
    "ParallelSpec",
    "Parameter",
    "Pieces",
    "Placement",
    "RefitSummary",
    "Replicate",
    "Role",
    "Shard",
    "Side",
    "lay_out",
    "load_model",
    "model_names",
    "overlap",
    "parse_spec",
    "place",
    "refit_problem",
    "split_large",
]


def __getattr__(name: str) -> object:
    """A public name that is loaded at first use (PEP 562)."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
