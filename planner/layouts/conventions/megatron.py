"""How Megatron-Core stores a model for training, as NeMo RL and Megatron-Bridge run it.

Ranks: order "tp-cp-ep-dp-pp" unless the specification has another, so tp is fastest, then cp, dp, and pp slowest. Within
a stage experts fold over the same ranks by the same order with ETP for TP (Megatron-Core `parallel_state`, two
RankGenerators). ETP is 1 unless given, as NeMo RL's refit requires; bare Megatron-Core would take TP. DP, when not given,
is the smallest that EP x ETP fits. With VPP each rank has several runs of layers: virtual stage i is on stage i % PP.

Buffers, by their Megatron-Core names with layers numbered over the whole model (Megatron numbers them within
a stage):
- linear_qkv: the rows of the whole matrix are, for each KV head, its query heads, the key head, the value
head; each rank has an equal run of rows. With fewer KV heads than TP a run is part of a group (Megatron
gathers activations, not weights), so a key head may lie on one rank only, or even be cut by a boundary: that
is how it is stored, nothing is replicated.
- linear_q_down_proj, linear_kv_down_proj (MLA): whole on every rank; linear_q_up_proj, linear_kv_up_proj: rows over TP.
- linear_fc1: gate rows of this rank, then its up rows, so the whole is gate and up interleaved by TP; shared experts too.
- linear_proj, linear_fc2: columns over TP; their biases, the norms and the router are on every rank.
- experts.linear_fc1 [n_local, 2 * f / etp, h] and linear_fc2 [n_local, h, f / etp]: one buffer for all local
experts of a projection. Transformer Engine keeps weight0, weight1, ... apart; this is their stack, which NeMo
RL forms for a refit. GPT-OSS's interleaved and transposed experts are put in this form too (Megatron-Bridge).
- mixer.in_proj (Mamba-2): this rank's z, x, B, C and dt rows, in whole heads and groups.
- word_embeddings, output_layer: rows over TP after padding the vocabulary to a multiple of 128 x TP; padding
rows are in the buffers, and no fragment covers them.
- scales: `<weight>_scale_inv` and the like beside the weight. Transformer Engine keeps them inside its quantised tensor;
every rank has those of all blocks that it touches.
"""

import math
from typing import Final

import numpy as np

from shardroute.planner.layouts.conventions import roles
from shardroute.planner.layouts.conventions.buffers import Cut, even, everywhere, intervals, keep, padded, segmented
from shardroute.planner.layouts.conventions.experts import stacked_cuts
from shardroute.planner.layouts.conventions.megatron_names import OUTPUT_LAYER, MegatronNames
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
    stage_text,
)
from shardroute.planner.layouts.conventions.stages import strict_stages
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.planner.shares import Told, untold
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_count

# Megatron-LM's default of --make-vocab-size-divisible-by; the multiple is this times TP.
VOCABULARY_MULTIPLE: Final = 128

# Megatron-LM's default order of axes, the fastest first (parallel_state.initialize_model_parallel).
RANK_ORDER: Final = (Axis.TP, Axis.CP, Axis.EP, Axis.DP, Axis.PP)


def lay_out_megatron(model: Model, spec: ParallelSpec, first_rank: int = 0, progress: Told = untold) -> Side:
    """The model on ranks first_rank, first_rank + 1, ... as Megatron-Core stores it.

    "TP4 x PP8 x EP16" takes 128 ranks: 8 stages of 16, in each TP4 x DP4 for attention and EP16 for experts.
    Raises InputError for sizes that don't divide what they split, a DP that EP doesn't fit, layers that don't divide by PP,
    and a rank order that leaves an axis out or gives experts and the rest different stages.
    """
    check_axes(spec, "megatron", (*RANK_ORDER, Axis.ETP, Axis.VPP), any_order=True)
    _check_tp(model, spec)
    _check_experts(model, spec)
    if spec.size(Axis.VPP) > 1 and spec.size(Axis.PP) == 1:
        raise InputError(f"{spec}: VPP{spec.size(Axis.VPP)} splits the layers of a pipeline rank, but PP is 1; leave VPP out")
    stages = strict_stages(model, spec)
    tp, ep, etp, pp = (spec.size(axis) for axis in (Axis.TP, Axis.EP, Axis.ETP, Axis.PP))
    dp = _data_parallel(spec)
    per_stage = tp * spec.size(Axis.CP) * dp
    check_ranks(spec, per_stage * pp)
    dense, expert = _rank_tables(spec, dp, has_experts=model.n_experts > 0)

    def names(parameter: Parameter) -> tuple[str, ...]:
        name = namer(parameter)
        apart = parameter.role is Role.EMBEDDING and model.tied and pp > 1
        return (name, OUTPUT_LAYER) if apart else (name,)

    def cuts(parameter: Parameter) -> Cutting:
        return _cuts(model, parameter, tp, ep, etp)

    def ranks(role: Role) -> Ints:
        return first_rank + (expert if role in roles.EXPERTS else dense)

    namer = MegatronNames(model)
    vocabulary = model.shapes(Role.EMBEDDING)[0][0]
    inferred = f"inferred, the smallest that fits EP{ep} x ETP{etp}"
    facts = {
        "layout": str(spec),
        "ranks": f"{pp * per_stage}, {format_count(pp, 'stage')} of TP{tp} x CP{spec.size(Axis.CP)} x DP{dp}",
        "data parallel": f"{dp} ({'as given' if spec.names(Axis.DP) else inferred})",
        "layers per stage": stage_text(stages),
        "vocabulary": f"{vocabulary} rows, padded to {_padded_vocabulary(vocabulary, tp)}",
    }
    if model.n_experts:
        local, copies = model.n_experts // ep, per_stage // (ep * etp)
        facts["experts"] = f"{local} of {model.n_experts} a rank (EP{ep} x ETP{etp} x expert DP{copies})"
    layout = build_layout(model, stages, ranks, cuts, names, progress=progress)
    if model.precision is not None:
        facts["scales"] = scale_text(model, cuts)
    facts["weights"] = holding_text(model, layout)
    return Side(layout, pp * per_stage, facts)


def _cuts(model: Model, parameter: Parameter, tp: int, ep: int, etp: int) -> Cutting:
    role, shape = parameter.role, parameter.tensor.shape
    rest = [keep(n) for n in shape[1:]]
    if role in roles.EXPERTS:
        return _expert_cuts(role, shape, ep, etp)
    if role in roles.HEADS:
        return Cutting([_interleaved(model, role, tp), *rest])
    if role in roles.GATES:
        return Cutting([even(shape[0], tp, buffer=2 * shape[0] // tp), *rest])
    if role in roles.UPS:
        return Cutting([even(shape[0], tp, before=shape[0] // tp, buffer=2 * shape[0] // tp), *rest])
    if role in roles.COLUMNS:
        return Cutting([keep(shape[0]), even(shape[1], tp)])
    if role in roles.VOCABULARY:
        return Cutting([padded(shape[0], _padded_vocabulary(shape[0], tp), tp), *rest])
    if role in roles.SEGMENTED:
        return Cutting([segmented(parameter.segments, tp), *rest])
    if role in roles.ROWS:
        return Cutting([even(shape[0], tp), *rest])
    assert role in roles.WHOLE, role
    return Cutting([keep(n) for n in shape])


def _expert_cuts(role: Role, shape: tuple[int, ...], ep: int, etp: int) -> Cutting:
    experts = even(shape[0], ep)
    if (alike := stacked_cuts(role, shape, experts, etp)) is not None:
        return alike
    match role:
        case Role.EXPERT_GATE_UP:  # [E, h, f, 2] to [n_local, 2, f / etp, h]
            return Cutting([experts, keep(shape[1]), even(shape[2], etp), keep(2)], (0, 3, 2, 1))
        case Role.EXPERT_GATE_UP_BIAS:
            return Cutting([experts, even(shape[1], etp), keep(2)], (0, 2, 1))
        case _:
            assert role is Role.EXPERT_DOWN_BIAS, role
            return Cutting([experts, everywhere(shape[1], etp)])


def _interleaved(model: Model, role: Role, tp: int) -> Cut:
    """Rows of a query, key or value projection in linear_qkv, whose rows are cut in equal runs over TP.

    Worked example: 4 query and 2 KV heads of 1 row, TP2. The whole is q0 q1 k0 v0 q2 q3 k1 v1, so part 0 has
    q rows 0:2 at 0.
    """
    group = model.n_heads // model.n_kv_heads
    group_rows = (group + 2) * model.head_dim
    n_rows = model.n_kv_heads * group_rows // tp
    if role in roles.QUERY:
        width, inside = group * model.head_dim, 0
    else:
        width, inside = model.head_dim, (group + (role in roles.VALUE)) * model.head_dim
    part, head = np.indices((tp, model.n_kv_heads)).reshape(2, -1)
    block = head * group_rows + inside
    lo, hi = np.maximum(block, part * n_rows), np.minimum(block + width, (part + 1) * n_rows)
    meet = lo < hi
    part, head, block, lo, hi = part[meet], head[meet], block[meet], lo[meet], hi[meet]
    to_tensor = head * width - block
    return intervals(lo + to_tensor, hi + to_tensor, lo - part * n_rows, n_rows, part, tp)


def _padded_vocabulary(n_rows: int, tp: int) -> int:
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-n_rows // multiple) * multiple


def _rank_tables(spec: ParallelSpec, dp: int, *, has_experts: bool) -> tuple[Ints, Ints]:
    """Ranks of each stage for attention and for experts, int64[pp, n]: tp fastest in the first; etp, then ep in the second."""
    order = spec.rank_order or RANK_ORDER
    left_out = [axis for axis in RANK_ORDER if axis not in order and (spec.size(axis) > 1 or (axis is Axis.DP and dp > 1))]
    unknown = [axis for axis in order if axis not in RANK_ORDER]
    if left_out or unknown:
        fault = f"{left_out[0].upper()} isn't in the rank order" if left_out else f"{unknown[0].upper()} has no place in it"
        raise InputError(f"{spec}: {fault}; list tp, cp, ep, dp and pp, the fastest first, as in order={'-'.join(RANK_ORDER)}")
    order = (*order, *(axis for axis in RANK_ORDER if axis not in order))
    tp, cp, ep, etp, pp = (spec.size(axis) for axis in (Axis.TP, Axis.CP, Axis.EP, Axis.ETP, Axis.PP))
    dense = {Axis.TP: tp, Axis.CP: cp, Axis.EP: 1, Axis.DP: dp, Axis.PP: pp}
    expert = {Axis.TP: etp, Axis.CP: 1, Axis.EP: ep, Axis.DP: tp * cp * dp // (ep * etp), Axis.PP: pp}
    tables = _table(dense, order, (Axis.TP,)), _table(expert, order, (Axis.EP, Axis.TP))
    # Megatron-Core asserts it too: both orders must give the same pipeline groups.
    if has_experts and not (np.sort(tables[0], axis=1) == np.sort(tables[1], axis=1)).all():
        raise InputError(
            f"{spec}: this rank order gives experts and attention different stages; put pp last, or make EP x ETP equal TP x CP"
        )
    return tables


def _table(sizes: dict[Axis, int], order: tuple[Axis, ...], last: tuple[Axis, ...]) -> Ints:
    """Ranks int64[pp, n] of a grid whose axes are the fastest first in `order`, with `last` as the fastest columns."""
    slowest_first = order[::-1]
    grid = np.arange(math.prod(sizes.values())).reshape([sizes[axis] for axis in slowest_first])
    wanted = [Axis.PP, *(axis for axis in slowest_first if axis is not Axis.PP and axis not in last), *last]
    return grid.transpose([slowest_first.index(axis) for axis in wanted]).reshape(sizes[Axis.PP], -1)


def _data_parallel(spec: ParallelSpec) -> int:
    """DP as given, else the smallest with which EP x ETP divides the ranks of a stage."""
    dense, expert = spec.size(Axis.TP) * spec.size(Axis.CP), spec.size(Axis.EP) * spec.size(Axis.ETP)
    smallest = math.lcm(dense, expert) // dense
    if not spec.names(Axis.DP):
        return smallest
    dp = spec.size(Axis.DP)
    if dp % smallest:
        below = dp - dp % smallest
        near = " or ".join(f"DP{n}" for n in (below, below + smallest) if n)
        experts = f"EP{spec.size(Axis.EP)} x ETP{spec.size(Axis.ETP)} = {expert}"
        raise InputError(
            f"{spec}: {experts} doesn't divide the {dense * dp} ranks of a stage "
            f"(TP x CP x DP = {dense} x {dp}); use {near}, or leave DP out"
        )
    return dp


def _check_tp(model: Model, spec: ParallelSpec) -> None:
    kv, rows = model.n_kv_heads, (model.n_heads + 2 * model.n_kv_heads) * model.head_dim
    widths, units = list(roles.split_widths(model)), sorted(roles.segment_units(model))

    def fault(tp: int) -> str | None:
        if model.n_heads % tp:
            return f"it doesn't divide the {model.n_heads} attention heads"
        if kv % tp and tp % kv:  # Megatron-Core's TransformerConfig: a multiple or divisor
            return f"it is neither a divisor nor a multiple of the {kv} KV heads"
        if rows % tp and model.shapes(Role.Q_PROJ):
            return f"it doesn't divide the {rows} rows of linear_qkv"
        for n in units:
            if n % tp:
                return f"it doesn't divide the {n} heads or groups of Mamba"
        for key, n in widths:
            if n % tp:
                return f"it doesn't divide {key} {n}"
        return None

    check_size(spec, model, Axis.TP, fault, divisors(model.n_heads))


def _check_experts(model: Model, spec: ParallelSpec) -> None:
    for axis in (Axis.EP, Axis.ETP):
        if spec.size(axis) > 1 and not model.n_experts:
            raise InputError(f"{spec}: {model.name} has no experts; leave {axis.upper()}{spec.size(axis)} out")
    if not model.n_experts:
        return
    width = next(roles.expert_widths(model))

    def ep_fault(ep: int) -> str | None:
        return f"it doesn't divide the {model.n_experts} experts" if model.n_experts % ep else None

    def etp_fault(etp: int) -> str | None:
        return f"it doesn't divide moe_intermediate_size {width}" if width % etp else None

    check_size(spec, model, Axis.EP, ep_fault, divisors(model.n_experts))
    check_size(spec, model, Axis.ETP, etp_fault, divisors(width))
