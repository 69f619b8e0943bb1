"""How a checkpoint of Hugging Face lies on the ranks that read it: every parameter whole, in a buffer of its own name.

Ranks: "TP1" is one rank with everything. "PP4" is four readers, each with a run of whole layers, nearly even (a file or some
files each); DP repeats that. The experts of a layer are a buffer each, as they are in the file.
"""

import numpy as np

from shardroute.planner.layouts.conventions.buffers import balanced, keep
from shardroute.planner.layouts.conventions.sides import (
    Cutting,
    Side,
    build_layout,
    check_axes,
    check_ranks,
    holding_text,
    stage_text,
)
from shardroute.planner.layouts.conventions.stages import Stages, given_stages
from shardroute.planner.layouts.fragments import Fragments, Ints
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.planner.layouts.tensors import Layout
from shardroute.planner.shares import Told, parts, untold
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_count

# The share of laying out experts together; they are then split into one each.
_HELD = 0.1


def lay_out_huggingface(model: Model, spec: ParallelSpec, first_rank: int = 0, progress: Told = untold) -> Side:
    """The model on ranks first_rank, first_rank + 1, ... as its files hold it.

    Raises InputError for axes other than PP and DP (and TP1), and for more readers than layers.
    """
    check_axes(spec, "huggingface", (Axis.TP, Axis.PP, Axis.DP))
    if spec.size(Axis.TP) > 1:
        raise InputError(f"{spec}: a checkpoint holds tensors whole; leave TP{spec.size(Axis.TP)} out")
    pp, dp = spec.size(Axis.PP), spec.size(Axis.DP)
    if pp > model.n_layers:
        raise InputError(f"{spec}: PP{pp} is above the {model.n_layers} layers of {model.name}; at most PP{model.n_layers} fits")
    check_ranks(spec, pp * dp)
    shares = balanced(model.n_layers, pp)
    stages = given_stages(model, spec) or Stages(tuple((shares.hi - shares.lo).tolist()), "nearly even")
    stage_ranks = first_rank + np.arange(pp * dp).reshape(dp, pp).T

    def names(parameter: Parameter) -> tuple[str, ...]:
        return (parameter.tensor.name,)

    def cuts(parameter: Parameter) -> Cutting:
        return Cutting([keep(n) for n in parameter.tensor.shape])

    def ranks(role: Role) -> Ints:
        return stage_ranks

    held, split = parts(progress, (_HELD, 1.0 - _HELD))
    layout = _apart(model, build_layout(model, stages, ranks, cuts, names, progress=held), split)
    facts = {
        "layout": str(spec),
        "ranks": f"{pp * dp}, {format_count(dp, 'copy', 'copies')} over {format_count(pp, 'reader')}",
        "layers per rank": stage_text(stages),
        "weights": holding_text(model, layout),
    }
    return Side(layout, pp * dp, facts)


def _apart(model: Model, layout: Layout, progress: Told) -> Layout:
    """The layout with each expert in a buffer of its own; progress is told the share of the experts' fragments that is split."""
    wholes = {id(f): f for t, f in zip(model.tensors, layout.fragments, strict=True) if "*" in t.name}
    told = parts(progress, [len(whole) * whole.shape[0] for whole in wholes.values()])
    split: dict[int, Fragments] = {}
    fragments, buffers = list(layout.fragments), list(layout.buffers)
    for i, (tensor, whole) in enumerate(zip(model.tensors, layout.fragments, strict=True)):
        if "*" not in tensor.name:
            continue
        if id(whole) not in split:
            split[id(whole)] = _by_expert(whole)
            told[len(split) - 1](1.0)
        fragments[i] = split[id(whole)]
        buffers[i] = tuple(tensor.name.replace("*", str(expert)) for expert in range(tensor.shape[0]))
    return Layout(tuple(fragments), tuple(buffers))


def _by_expert(whole: Fragments) -> Fragments:
    n_experts, n = whole.shape[0], len(whole)
    expert = np.tile(np.arange(n_experts), n)
    lo, hi = np.repeat(whole.lo, n_experts, axis=0), np.repeat(whole.hi, n_experts, axis=0)
    lo[:, 0], hi[:, 0] = expert, expert + 1
    return Fragments(
        shape=whole.shape,
        rank=np.repeat(whole.rank, n_experts),
        lo=lo,
        hi=hi,
        buffer=expert.astype(np.int32),
        offset=np.zeros(len(expert), np.int64),
        strides=np.repeat(whole.strides, n_experts, axis=0),
        buffer_size=(hi - lo).prod(axis=1),
    )
