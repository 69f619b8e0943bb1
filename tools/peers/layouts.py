"""The layouts that contenders are laid side by side on.

The first eleven are those that the published planners were run on, the rest what they refuse or fall back on.
"""

from collections.abc import Mapping

from shardroute.planner.arguments import tensor_problem
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.problems import Problem
from shardroute.planner.refits import refit_problem

EXPERTS = "256,2048,7168"  # one layer's gate or up projections of DeepSeek-V3, bf16: 7.516 GB
SQUARE = "8192,8192"
# Shape, mesh and placements of the source, of the destination.
TENSORS: Mapping[str, tuple[str, str, str, str, str]] = {
    "TP4 -> TP2xDP2": (SQUARE, "tp=4", "S0", "dp=2,tp=2", "R,S0"),
    "EP16 -> DP8xTP32": (EXPERTS, "ep=16", "S0", "dp=8,tp=32", "R,S1"),
    "EP16 -> DP16xTP8": (EXPERTS, "ep=16", "S0", "dp=16,tp=8", "R,S1"),
    "DP8xEP8 -> DP2xEP32": (EXPERTS, "dp=8,ep=8", "R,S0", "dp=2,ep=32", "R,S0"),
    "DP8 -> TP4xDP4": (SQUARE, "dp=8", "R", "dp=4,tp=4", "R,S0"),
    "DP8xTP8 -> TP8": (SQUARE, "dp=8,tp=8", "R,S0", "tp=8", "S0"),
    "DP2xTP8 -> DP2xTP16": ("128,1536,4096", "dp=2,tp=8", "R,S1", "dp=2,tp=16", "R,S1"),
    "EP32 -> DP16xTP16": (EXPERTS, "ep=32", "S0", "dp=16,tp=16", "R,S1"),
    "EP64 -> DP8xTP8": (EXPERTS, "ep=64", "S0", "dp=8,tp=8", "R,S1"),
    "DP4xEP4 -> DP2xTP8": (EXPERTS, "dp=4,ep=4", "R,S0", "dp=2,tp=8", "R,S1"),
    "DP8 -> DP4xTP4": (SQUARE, "dp=8", "R", "dp=4,tp=4", "R,S1"),
    "EP8xETP4 -> DP4xTP8": (EXPERTS, "ep=8,etp=4", "S0,S1", "dp=4,tp=8", "R,S1"),
    "HSDP2x8xTP2 -> DP4xTP4": (SQUARE, "dp=2,fsdp=8,tp=2", "R,SS0:2,S0", "dp=4,tp=4", "R,S0"),
    "TP3 -> DP2xTP8, uneven": ("8191,8192", "tp=3", "S0", "dp=2,tp=8", "R,S0"),
    "EP16 -> DP12xTP4": (EXPERTS, "ep=16", "S0", "dp=12,tp=4", "R,S1"),
    "DP256xTP8 -> same": (SQUARE, "dp=256,tp=8", "R,S0", "dp=256,tp=8", "R,S0"),
    "EP16 -> DP128xTP32": (EXPERTS, "ep=16", "S0", "dp=128,tp=32", "R,S1"),
    "DP1024xTP8 -> same": (SQUARE, "dp=1024,tp=8", "R,S0", "dp=1024,tp=8", "R,S0"),
}
MODELS: Mapping[str, tuple[str, str, str]] = {
    "DeepSeek-V3": ("deepseek-v3", "PP16 x EP16", "TP32 x DP8"),
    "Qwen3-235B": ("qwen3-235b-a22b", "TP4 x PP8 x EP16", "TP8 x DP16"),
}


def problem_of(layout: str) -> Problem:
    """The problem of a layout of the tables."""
    if layout in TENSORS:
        shape, *meshes = TENSORS[layout]
        return tensor_problem(shape, "bf16", *meshes)
    model, source, target = MODELS[layout]
    return refit_problem(load_model(model), parse_spec(source), parse_spec(target))[0]
