"""One side of a refit: how a model lies on the ranks of a training or serving job.

Rule: a convention says how each role's dims are cut, what its buffers are called, and which ranks form each
stage; the rest is the same for all. Parameters of one role, shape and stage share one Fragments object, so a
model of any depth expands at once.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardroute.planner.layouts.conventions.buffers import Cut, spread
from shardroute.planner.layouts.conventions.scales import ScaleRule, scale_cuts, shared_blocks
from shardroute.planner.layouts.conventions.stages import Stages
from shardroute.planner.layouts.fragments import Fragments, Ints
from shardroute.planner.layouts.holdings import totals
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.notation import MAX_RANKS, Axis, ParallelSpec
from shardroute.planner.layouts.tensors import Layout
from shardroute.planner.shares import Told, parts, untold
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_bytes, format_count

NameRule = Callable[[Parameter], tuple[str, ...]]
RankRule = Callable[[Role], Ints]


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a tensor is cut, dim by dim, and the order of its dims in the buffer, when it isn't the tensor's own."""

    cuts: Sequence[Cut]
    order: tuple[int, ...] | None = None


CutRule = Callable[[Parameter], Cutting]


@dataclass(frozen=True, slots=True)
class Side:
    """The layout of every parameter, how many ranks it takes, and what a person should know about it."""

    layout: Layout
    n_ranks: int
    facts: Mapping[str, str]


def build_layout(
    model: Model,
    stages: Stages,
    ranks: RankRule,
    cuts: CutRule,
    names: NameRule,
    scales: ScaleRule | None = None,
    progress: Told = untold,
) -> Layout:
    """The layout of a model; progress is told the share of the fragments that is laid out.

    ranks   int[n_stages, n] for a role: the ranks of each stage; with p parts, the j-th of a stage holds part j % p
    cuts    how a parameter is cut; parts are numbered row-major over the cuts
    names   the buffers of a parameter: one, or one for each stage that holds it
    scales  what the framework says to scale blocks that a cut goes through; None lets every rank have those it touches
    """
    shared: dict[tuple[Parameter, tuple[int, ...], int], Fragments] = {}
    fused = _fused(model, names) if model.precision is not None else {}
    buffers = [_buffers(parameter, names) for parameter in model.parameters]
    keys = [
        (_alike(parameter), held, len(named))
        for parameter, held, named in zip(model.parameters, stages.holding(model), buffers, strict=True)
    ]
    # Stages have equally many ranks, so parameters have as many fragments as stages that hold them.
    told = parts(progress, [len(held) for _, held, _ in dict.fromkeys(keys)])
    for parameter, key, named in zip(model.parameters, keys, buffers, strict=True):
        if key in shared:
            continue
        _, held, _ = key
        weight = parameter.weight or parameter
        cutting = cuts(weight)
        if parameter.weight is not None:
            together = [cuts(other).cuts for other in fused[names(weight)[0]]]
            cutting = Cutting(scale_cuts(parameter, cutting.cuts, together, scales))
        n_parts = int(np.prod([c.n_parts for c in cutting.cuts]))
        tables = [ranks(parameter.role)[stage].reshape(-1, n_parts).T for stage in held]
        buffer = [np.full(table.shape[1], i if len(named) > 1 else 0) for i, table in enumerate(tables)]
        table = np.concatenate(tables, axis=1)
        shared[key] = spread(cutting.cuts, parameter.tensor.shape, table, np.concatenate(buffer), cutting.order)
        told[len(shared) - 1](1.0)
    return Layout(tuple(shared[key] for key in keys), tuple(buffers))


def _buffers(parameter: Parameter, names: NameRule) -> tuple[str, ...]:
    """The names of a parameter's buffers; scales are called as their weight's are, with an ending of their own."""
    if parameter.weight is None:
        return names(parameter)
    suffix = parameter.tensor.name.removeprefix(parameter.weight.tensor.name)
    return tuple(name + suffix for name in names(parameter.weight))


def _alike(parameter: Parameter) -> Parameter:
    """What two parameters must have in common to be laid out alike: all but their names and layers."""
    weight = None if parameter.weight is None else _alike(parameter.weight)
    return replace(parameter, tensor=replace(parameter.tensor, name=""), layer=None, weight=weight)


def _fused(model: Model, names: NameRule) -> dict[str, list[Parameter]]:
    """The weights that lie in each buffer, by its name."""
    found: dict[str, list[Parameter]] = {}
    for parameter in model.parameters:
        if parameter.weight is None:
            found.setdefault(names(parameter)[0], []).append(parameter)
    return found


def holding_text(model: Model, layout: Layout) -> str:
    """What the fullest and the emptiest rank hold, `12.3 GB to 14.5 GB a rank, most on rank 7`; no average over stages."""
    held = totals(model.tensors, layout)
    most, least = int(held.n_bytes.max()), int(held.n_bytes.min())
    if format_bytes(least) == format_bytes(most):
        return f"{format_bytes(most)} a rank"
    return f"{format_bytes(least)} to {format_bytes(most)} a rank, most on rank {int(held.rank[held.n_bytes.argmax()])}"


def scale_text(model: Model, cuts: CutRule) -> str:
    """How many scale blocks lie on several ranks because a cut goes through them, with an example."""
    seen: set[Parameter] = set()
    n_shared, example = 0, ""
    for weight, block in ((p.weight, p.block) for p in model.parameters if p.weight is not None):
        if _alike(weight) in seen:
            continue
        seen.add(_alike(weight))
        for dim, cut in enumerate(cuts(weight).cuts):
            shared = shared_blocks(cut, block[dim]) if block[dim] > 1 else {}
            n_shared += len(shared)
            if shared and not example:
                number, parts = next(iter(shared.items()))
                parts_text = ", ".join(str(part) for part in parts)
                name = weight.tensor.name
                example = f": block {number} of dim {dim} of {name} is needed by parts {parts_text} of {cut.n_parts}"
    if not n_shared:
        return "every block lies on the ranks of one part"
    lines = format_count(n_shared, "row or column", "rows or columns")
    return f"cuts go through {lines} of blocks, whose scales every rank that touches them has{example}"


def check_axes(spec: ParallelSpec, convention: str, axes: Sequence[Axis], *, any_order: bool = False) -> None:
    """Raise InputError when the specification names an axis, or a rank order, that the convention lacks."""
    if spec.rank_order is not None and not any_order:
        raise InputError(f"{spec}: {convention} has one order of ranks; leave order={'-'.join(spec.rank_order)} out")
    for axis, size in spec.axes:
        if axis not in axes:
            raise InputError(
                f"{spec}: {convention} has no {axis.upper()}; it takes {', '.join(a.upper() for a in axes)}; "
                f"leave {axis.upper()}{size} out"
                + ("" if axis not in (Axis.FSDP, Axis.HSDP) else " or use the convention fsdp")
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
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def stage_text(stages: Stages) -> str:
    """Layers of each stage with the reason, `11,12,12,11 (as given)`; of each virtual stage where there are any."""
    return f"{','.join(str(n) for n in stages.layers)} ({stages.reason})"
