"""Models: from a Hugging Face `config.json` to logical tensors with roles."""

from shardroute.planner.layouts.models.catalogue import load_model, model_names
from shardroute.planner.layouts.models.families import FAMILIES
from shardroute.planner.layouts.models.parameters import Model, Parameter, PipelineSplit, PublishedCount, Role
from shardroute.planner.layouts.models.precisions import PRECISIONS

__all__ = [
    "FAMILIES",
    "PRECISIONS",
    "Model",
    "Parameter",
    "PipelineSplit",
    "PublishedCount",
    "Role",
    "load_model",
    "model_names",
]
