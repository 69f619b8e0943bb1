"""Conventions: how frameworks lay a model out over ranks. A convention is one file and one entry here."""

from collections.abc import Callable, Mapping

from shardroute.planner.layouts.conventions.fsdp import lay_out_fsdp
from shardroute.planner.layouts.conventions.huggingface import lay_out_huggingface
from shardroute.planner.layouts.conventions.megatron import lay_out_megatron
from shardroute.planner.layouts.conventions.sglang import lay_out_sglang
from shardroute.planner.layouts.conventions.sides import Side
from shardroute.planner.layouts.conventions.vllm import lay_out_vllm
from shardroute.planner.layouts.models.parameters import Model
from shardroute.planner.layouts.notation import ParallelSpec
from shardroute.planner.shares import Told, heard
from shardroute.topologies.errors import InputError

Convention = Callable[[Model, ParallelSpec, int, Told], Side]

CONVENTIONS: Mapping[str, Convention] = {
    "fsdp": lay_out_fsdp,
    "huggingface": lay_out_huggingface,
    "megatron": lay_out_megatron,
    "sglang": lay_out_sglang,
    "vllm": lay_out_vllm,
}


def lay_out(
    convention: str, model: Model, spec: ParallelSpec, first_rank: int = 0, progress: Told | None = None
) -> Side:
    """The model laid out by the convention of this name, from rank `first_rank` on; progress is told the share that is done.

    Raises InputError for an unknown name, and when the specification doesn't fit the model.
    """
    if convention not in CONVENTIONS:
        raise InputError(f"convention {convention!r} is unknown; expected one of {', '.join(sorted(CONVENTIONS))}")
    return CONVENTIONS[convention](model, spec, first_rank, heard(progress))


__all__ = ["CONVENTIONS", "Convention", "Side", "lay_out"]
