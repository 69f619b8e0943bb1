"""A refit as a problem: a model under a training layout to the same model under a serving layout elsewhere.

Rule: source ranks come first, 0 to n_src - 1, then destination ranks, group after group where there are several. A destination
that begins on an earlier rank shares GPUs with the source.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardroute.planner.layouts.conventions import Side, lay_out
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.models.parameters import Model
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.planner.layouts.tensors import Layout
from shardroute.planner.problems import Problem
from shardroute.planner.shares import Told, parts
from shardroute.topologies.errors import InputError

# What joining groups and checking the problem takes beside laying out its sides.
_JOINED: Final = 0.3


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
    progress: Told | None = None,
) -> tuple[Problem, RefitSummary]:
    """The problem of moving every parameter of a model from one layout to another, and its summary; progress is told the share
    that is done.

    The training side is fsdp when its specification names FSDP or HSDP, megatron otherwise, unless it is given.
    Raises InputError, from the convention concerned, when a specification doesn't fit the model.
    """
    conventions = [to_convention]
    return groups_problem(
        model, from_spec, [to_spec], from_convention=from_convention, to_conventions=conventions, progress=progress
    )


def groups_problem(
    model: Model,
    from_spec: ParallelSpec,
    to_specs: Sequence[ParallelSpec],
    *,
    from_convention: str | None = None,
    to_conventions: Sequence[str] = ("vllm",),
    to_first_rank: int | None = None,
    progress: Told | None = None,
) -> tuple[Problem, RefitSummary]:
    """The same for several inference groups, each with a layout of its own: one source, one problem, so that one plan serves all.

    One convention holds for all groups, or each has its own. The first group begins on rank `to_first_rank`: after the source's
    where it is None; from 0 the GPUs are the source's own. progress is told the share that is done. Raises InputError as
    refit_problem does.
    """
    if to_first_rank is not None and to_first_rank < 0:
        raise InputError(f"first destination rank: expected 0 or more, found {to_first_rank}")
    if len(to_conventions) not in (1, len(to_specs)):
        raise InputError(f"{len(to_conventions)} destination conventions for {len(to_specs)} groups; give one, or one a group")
    if from_convention is None:
        from_convention = "fsdp" if from_spec.names(Axis.FSDP) else "megatron"
    laid, *told, joined = parts(progress, _weights(from_spec, to_specs))
    source = lay_out(from_convention, model, from_spec, progress=laid)
    laid(1.0)
    groups: list[Side] = []
    facts: dict[str, str] = {}
    first_rank = end = source.n_ranks if to_first_rank is None else to_first_rank
    for i, (spec, done) in enumerate(zip(to_specs, told, strict=True)):
        convention = to_conventions[i % len(to_conventions)]
        groups.append(lay_out(convention, model, spec, first_rank=end, progress=done))
        done(1.0)
        said = {"convention": convention, **groups[-1].facts}
        facts |= said if len(to_specs) == 1 else {f"group {i} {name}": text for name, text in said.items()}
        end += groups[-1].n_ranks
    sides = {"source": {"convention": from_convention, **source.facts}, "destination": facts}
    about = tuple((f"{side} {name}", text) for side, of_side in sides.items() for name, text in of_side.items())
    target = _together([group.layout for group in groups], joined)
    problem = Problem(model.tensors, source.layout, target, max(source.n_ranks, end), about)
    joined(1.0)
    return problem, RefitSummary(
        model=model.name,
        scale=model.scale,
        n_parameters=model.n_parameters,
        n_tensors=len(model.parameters),
        n_src_gpus=source.n_ranks,
        n_dst_gpus=end - first_rank,
        source=sides["source"],
        target=sides["destination"],
    )


def _weights(from_spec: ParallelSpec, to_specs: Sequence[ParallelSpec]) -> list[float]:
    """How long the source takes to lay out, each group, and what comes after them, beside each other."""
    sides = [float(_least_ranks(spec)) for spec in (from_spec, *to_specs)]
    return [*sides, _JOINED * sum(sides)]


def _least_ranks(spec: ParallelSpec) -> int:
    """The ranks that a specification names; conventions may infer more."""
    size = spec.size
    attention = size(Axis.TP) * size(Axis.CP) * size(Axis.DP) * size(Axis.FSDP) * size(Axis.HSDP)
    return size(Axis.PP) * max(attention, size(Axis.EP) * size(Axis.ETP))


def _together(layouts: Sequence[Layout], progress: Told) -> Layout:
    """One layout of several over ranks of their own; like tensors keep sharing their fragments."""
    if len(layouts) == 1:
        return layouts[0]
    known: dict[tuple[int, ...], Fragments] = {}
    fragments: list[Fragments] = []
    buffers = []
    n_tensors = len(layouts[0].fragments)
    for of_groups, names in zip(
        zip(*(layout.fragments for layout in layouts), strict=True),
        zip(*(layout.buffers for layout in layouts), strict=True),
        strict=True,
    ):
        # By the number of buffers too: it says where those of the next group begin.
        key = (*map(id, of_groups), *map(len, names))
        if key not in known:
            first = np.cumsum([0, *map(len, names)])
            known[key] = Fragments(
                of_groups[0].shape,
                np.concatenate([part.rank for part in of_groups]),
                np.concatenate([part.lo for part in of_groups]),
                np.concatenate([part.hi for part in of_groups]),
                np.concatenate([part.buffer + n for part, n in zip(of_groups, first.astype(np.int32), strict=False)]),
                np.concatenate([part.offset for part in of_groups]),
                np.concatenate([part.strides for part in of_groups]),
                np.concatenate([part.buffer_size for part in of_groups]),
            )
        fragments.append(known[key])
        buffers.append(tuple(name for of_group in names for name in of_group))
        progress(len(fragments) / n_tensors)
    return Layout(tuple(fragments), tuple(buffers))
