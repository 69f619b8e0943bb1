"""Layouts as users already write them: flags of Megatron, FSDP, vLLM and SGLang, and files of NeMo RL and verl."""

from shardroute.planner.importers.commands import layout_of_command
from shardroute.planner.importers.imported import ImportedLayout, ImportedRefit, known_model
from shardroute.planner.importers.recipes import refit_of_settings
from shardroute.planner.importers.settings import Settings, read_settings

__all__ = [
    "ImportedLayout",
    "ImportedRefit",
    "Settings",
    "known_model",
    "layout_of_command",
    "read_settings",
    "refit_of_settings",
]
