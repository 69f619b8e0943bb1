"""One side of a refit: how a model lies on the ranks of a training or serving job.

Rule: a convention says how each role's dims are cut, what its buffers are called, and which ranks form each
stage; the rest is the same for all. Parameters of one role, shape and stage share one Fragments object, so a
model of any depth expands at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.conventions.buffers import Cut, spread
from shardroute.planner.layouts.conventions.stages import Stages
from shardroute.planner.layouts.fragments import Fragments, Ints
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.notation import MAX_RANKS, Axis, ParallelSpec
from shardroute.planner.layouts.tensors import Layout
from shardroute.topologies.errors import InputError

CutRule = Callable[[Role, tuple[int, ...]], Sequence[Cut]]
NameRule = Callable[[Parameter], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Side:
    """The layout of every parameter, how many ranks it takes, and what a person should know about it."""

    layout: Layout
    n_ranks: int
    facts: Mapping[str, str]


def build_layout(model: Model, stages: Stages, stage_ranks: Ints, cuts: CutRule, names: NameRule) -> Layout:
    """The layout of a model.

    stage_ranks  int[n_stages, n]  the ranks of each stage; with p parts, rank j of a stage holds part j % p
    cuts         how a role's tensor of a shape is cut, dim by dim; parts are numbered row-major over the cuts
    names        the buffers of a parameter: one, or one for each stage that holds it
    """
    shared: dict[tuple[Role, tuple[int, ...], tuple[int, ...], int], Fragments] = {}
    fragments: list[Fragments] = []
    buffers: list[tuple[str, ...]] = []
    for parameter, held in zip(model.parameters, stages.holding(model), strict=True):
        named, shape = names(parameter), parameter.tensor.shape
        key = (parameter.role, shape, held, len(named))
        if key not in shared:
            cut = cuts(parameter.role, shape)
            n_parts = int(np.prod([c.n_parts for c in cut]))
            tables = [stage_ranks[stage].reshape(-1, n_parts).T for stage in held]
            buffer = [np.full(table.shape[1], i if len(named) > 1 else 0) for i, table in enumerate(tables)]
            shared[key] = spread(cut, shape, np.concatenate(tables, axis=1), np.concatenate(buffer))
        fragments.append(shared[key])
        buffers.append(named)
    return Layout(tuple(fragments), tuple(buffers))


def check_axes(spec: ParallelSpec, convention: str, axes: Sequence[Axis]) -> None:
    """Raise InputError when the specification names an axis that the convention lacks."""
    for axis, size in spec.axes:
        if axis not in axes:
            raise InputError(
                f"{spec}: {convention} has no {axis.upper()}; it takes {', '.join(a.upper() for a in axes)}; "
                f"leave {axis.upper()}{size} out"
            )


def check_size(
    spec: ParallelSpec,
    model: Model,
    axis: Axis,
    fault: Callable[[int], str | None],
    candidates: Sequence[int],
) -> None:
    """Raise InputError, naming the valid ones of `candidates`, when `fault` finds one in an axis' size."""
    size = spec.size(axis)
    reason = fault(size)
    if reason is not None:
        valid = [n for n in candidates if fault(n) is None]
        near = sorted(sorted(valid, key=lambda n: (abs(n - size), n))[:8])
        raise InputError(
            f"{spec}: {axis.upper()}{size} doesn't fit {model.name}: {reason}; "
            f"valid {axis.upper()}: {', '.join(str(n) for n in near) or 'none'}"
        )


def check_ranks(spec: ParallelSpec, n_ranks: int) -> None:
    """Raise InputError when a layout takes more ranks than are accepted."""
    if n_ranks > MAX_RANKS:
        raise InputError(f"{spec}: takes {n_ranks} ranks, above {MAX_RANKS}, the most that are accepted")


def divisors(n: int) -> list[int]:
    """Every whole number that divides n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def stage_text(stages: Stages) -> str:
    """Layers of each stage with the reason, `11,12,12,11 (as given)`."""
    return f"{','.join(str(n) for n in stages.layers)} ({stages.reason})"
