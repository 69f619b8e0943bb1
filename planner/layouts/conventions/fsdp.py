"""How FSDP2 and HSDP store a model, alone or over tensor parallelism: torch's fully_shard on Hugging Face modules.

Ranks: tp is fastest, then the shards, and the replicas of HSDP slowest, so "HSDP8x4 x TP2" is a mesh (8, 4, 2).

Buffers are the checkpoint's parameters, nothing fused. TP cuts query, key, value, gate and up by rows, o and down by columns,
embedding and output layer by rows (parallelize_module's Colwise and Rowwise); FSDP then cuts dim 0 of what TP left by
torch.chunk. On a dim that TP cut too that is DTensor's _StridedShard: the shards of a rank's TP part follow one another,
whatever the mesh order; for uneven sizes too, since fully_shard chunks the local tensor (_fsdp_param.py). The `*` of experts
stands for one parameter an expert, each cut on its own; here they are stacked.
"""

import numpy as np

from shardroute.planner.layouts.conventions import roles
from shardroute.planner.layouts.conventions.buffers import Cut, chunked, intervals, keep
from shardroute.planner.layouts.conventions.sides import (
    Cutting,
    Side,
    build_layout,
    check_axes,
    check_ranks,
    check_size,
    divisors,
    holding_text,
    scale_text,
)
from shardroute.planner.layouts.conventions.stages import Stages
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.planner.shares import Told, untold
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_count

_COLWISE = roles.HEADS | roles.GATES | roles.UPS | roles.ROWS | roles.VOCABULARY


def lay_out_fsdp(model: Model, spec: ParallelSpec, first_rank: int = 0, progress: Told = untold) -> Side:
    """The model on ranks first_rank, first_rank + 1, ... as FSDP2 or HSDP stores it. "FSDP64" takes 64 ranks.

    Raises InputError for axes that it doesn't have, a TP that would cut a head, and TP for parts that have no plan for it
    (Mamba layers, stacked experts).
    """
    check_axes(spec, "fsdp", (Axis.FSDP, Axis.HSDP, Axis.TP))
    if not spec.names(Axis.FSDP):
        raise InputError(f"{spec}: fsdp needs the number of shards; write FSDP8, or HSDP4x8 for 4 replicas of 8 shards")
    _check_tp(model, spec)
    n_shards, tp, replicas = spec.size(Axis.FSDP), spec.size(Axis.TP), spec.size(Axis.HSDP)
    n_ranks = n_shards * tp * replicas
    check_ranks(spec, n_ranks)
    stages = Stages((model.n_layers,), "all")

    def names(parameter: Parameter) -> tuple[str, ...]:
        return (parameter.tensor.name,)

    def cuts(parameter: Parameter) -> Cutting:
        return Cutting(_cuts(parameter, n_shards, tp))

    def ranks(role: Role) -> Ints:
        return first_rank + np.arange(n_ranks).reshape(1, -1)

    layout = build_layout(model, stages, ranks, cuts, names, progress=progress)
    facts = {
        "layout": str(spec),
        "ranks": f"{n_ranks}, {format_count(replicas, 'replica')} of {format_count(n_shards, 'shard')} x TP{tp}",
        "weights": holding_text(model, layout),
    }
    q_rows = [shape[0] // tp for shape in model.shapes(Role.Q_PROJ)]
    if any(-(-rows // n_shards) % model.head_dim for rows in q_rows):
        facts["heads"] = f"shards end inside heads of {model.head_dim} rows; gather rows before anything that permutes them"
    if model.precision is not None:
        facts["scales"] = scale_text(model, cuts)
    return Side(layout, n_ranks, facts)


def _cuts(parameter: Parameter, n_shards: int, tp: int) -> list[Cut]:
    """TP first, then FSDP on dim 0 (dim 1 of stacked experts, dim 0 of each); part = shard * tp + TP rank."""
    role, shape = parameter.role, parameter.tensor.shape
    stack = 1 if "*" in parameter.tensor.name else 0
    cut_rows = role in _COLWISE or role in (Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_UNGATED_UP)
    cut_columns = role in roles.COLUMNS or role is Role.EXPERT_DOWN
    dims = [keep(n) for n in shape]
    if cut_columns and len(shape) > stack + 1:
        dims[stack], dims[stack + 1] = chunked(shape[stack], n_shards), chunked(shape[stack + 1], tp)
    else:
        dims[stack] = _strided(shape[stack], n_shards, tp, cut_rows)
    return dims


def _strided(size: int, n_shards: int, tp: int, cut_rows: bool) -> Cut:
    """Rows by TP, if it cuts them, and each part by torch.chunk over the shards; part = shard * tp + TP rank."""
    shard, rank = np.indices((n_shards, tp)).reshape(2, -1)
    step = -(-size // tp) if cut_rows else size
    lo = np.minimum(rank * step, size) if cut_rows else np.zeros(len(rank), np.int64)
    hi = np.minimum(lo + step, size)
    inner = -(-(hi - lo) // n_shards)
    first, last = np.minimum(lo + shard * inner, hi), np.minimum(lo + (shard + 1) * inner, hi)
    return intervals(first, last, 0, last - first)


def _check_tp(model: Model, spec: ParallelSpec) -> None:
    if spec.size(Axis.TP) == 1:
        return
    for role, what in ((Role.MAMBA_IN, "Mamba layers"), (Role.EXPERT_GATE_UP, "stacked experts")):
        if model.shapes(role):
            raise InputError(f"{spec}: fsdp has no tensor-parallel plan for the {what} of {model.name}; leave TP out")

    def fault(tp: int) -> str | None:
        for n, what in ((model.n_heads, "attention heads"), (model.n_kv_heads, "KV heads")):
            if n % tp:
                return f"it doesn't divide the {n} {what}, so a head would be cut"
        return None

    check_size(spec, model, Axis.TP, fault, divisors(model.n_kv_heads))
