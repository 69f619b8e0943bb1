"""A refit as a problem: a model under a training layout to the same model under a serving layout elsewhere.

Rule: source ranks come first, 0 to n_src - 1, then destination ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardroute.planner.layouts.conventions import lay_out
from shardroute.planner.layouts.models.parameters import Model
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.planner.problems import Problem


@dataclass(frozen=True, slots=True)
class RefitSummary:
    """What a person should know about a refit: its size, and how each side came to be laid out as it is."""

    model: str
    scale: int
    n_parameters: int
    n_tensors: int
    n_src_gpus: int
    n_dst_gpus: int
    source: Mapping[str, str]
    target: Mapping[str, str]


def refit_problem(
    model: Model,
    from_spec: ParallelSpec,
    to_spec: ParallelSpec,
    *,
    from_convention: str | None = None,
    to_convention: str = "vllm",
) -> tuple[Problem, RefitSummary]:
    """The problem of moving every parameter of a model from one layout to another, and its summary.

    The training side is fsdp when its specification names FSDP or HSDP, megatron otherwise, unless it is given.
    Raises InputError, from the convention concerned, when a specification doesn't fit the model.
    """
    if from_convention is None:
        from_convention = "fsdp" if from_spec.names(Axis.FSDP) else "megatron"
    source = lay_out(from_convention, model, from_spec)
    target = lay_out(to_convention, model, to_spec, first_rank=source.n_ranks)
    sides = {
        "source": {"convention": from_convention, **source.facts},
        "destination": {"convention": to_convention, **target.facts},
    }
    about = tuple((f"{side} {name}", text) for side, facts in sides.items() for name, text in facts.items())
    problem = Problem(model.tensors, source.layout, target.layout, source.n_ranks + target.n_ranks, about)
    return problem, RefitSummary(
        model=model.name,
        scale=model.scale,
        n_parameters=model.n_parameters,
        n_tensors=len(model.parameters),
        n_src_gpus=source.n_ranks,
        n_dst_gpus=target.n_ranks,
        source=sides["source"],
        target=sides["destination"],
    )
