"""Models: from a Hugging Face `config.json` to logical tensors with roles."""

from shardroute.planner.layouts.models.catalogue import load_model, model_names
from shardroute.planner.layouts.models.families import FAMILIES
from shardroute.planner.layouts.models.parameters import Model, Parameter, PipelineSplit, PublishedCount, Role

__all__ = [
    "FAMILIES",
    "Model",
    "Parameter",
    "PipelineSplit",
    "PublishedCount",
    "Role",
    "load_model",
    "model_names",
]
