"""How Megatron-Core stores a model for training, as NeMo RL and Megatron-Bridge run it.

Ranks: order "tp-cp-ep-dp-pp", so tp is fastest, then cp, dp, and pp slowest. Within a stage experts fold over
the same ranks by their own order: etp fastest, then ep, then replicas (Megatron-Core `parallel_state`, two
RankGenerators). ETP is 1 unless given, as NeMo RL's refit requires; bare Megatron-Core would take TP. DP,
when not given, is the smallest that EP x ETP fits.

Buffers, by their Megatron-Core names with layers numbered over the whole model (Megatron numbers them within
a stage):
- linear_qkv: the rows of the whole matrix are, for each KV head, its query heads, the key head, the value
head; each rank has an equal run of rows. With fewer KV heads than TP a run is part of a group (Megatron
gathers activations, not weights), so a key head may lie on one rank only, or even be cut by a boundary: that
is how it is stored, nothing is replicated.
- linear_fc1: gate rows of this rank, then its up rows, so the whole is gate and up interleaved by TP.
- linear_proj, linear_fc2: columns over TP; their biases, the norms and the router are on every rank.
- experts.linear_fc1 [n_local, 2 * f / etp, h] and linear_fc2 [n_local, h, f / etp]: one buffer for all local
experts of a projection. Transformer Engine keeps weight0, weight1, ... apart; this is their stack, which NeMo
RL forms for a refit.
- word_embeddings, output_layer: rows over TP after padding the vocabulary to a multiple of 128 x TP; padding
rows are in the buffers, and no fragment covers them.
"""

import math
from collections.abc import Sequence
from typing import Final, assert_never

import numpy as np

from shardroute.planner.layouts.conventions.buffers import Cut, even, intervals, keep, padded
from shardroute.planner.layouts.conventions.sides import (
    Side,
    build_layout,
    check_axes,
    check_ranks,
    check_size,
    divisors,
    stage_text,
)
from shardroute.planner.layouts.conventions.stages import strict_stages
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.topologies.errors import InputError

# Megatron-LM's default of --make-vocab-size-divisible-by; the multiple is this times TP.
VOCABULARY_MULTIPLE: Final = 128

_LAYER: Final = "decoder.layers.{layer}."
_NAMES: Final = {
    Role.EMBEDDING: "embedding.word_embeddings.weight",
    Role.LM_HEAD: "output_layer.weight",
    Role.FINAL_NORM: "decoder.final_layernorm.weight",
    Role.INPUT_NORM: _LAYER + "self_attention.linear_qkv.layer_norm_weight",
    Role.POST_ATTENTION_NORM: _LAYER + "mlp.linear_fc1.layer_norm_weight",
    Role.Q_PROJ: _LAYER + "self_attention.linear_qkv.weight",
    Role.K_PROJ: _LAYER + "self_attention.linear_qkv.weight",
    Role.V_PROJ: _LAYER + "self_attention.linear_qkv.weight",
    Role.O_PROJ: _LAYER + "self_attention.linear_proj.weight",
    Role.Q_BIAS: _LAYER + "self_attention.linear_qkv.bias",
    Role.K_BIAS: _LAYER + "self_attention.linear_qkv.bias",
    Role.V_BIAS: _LAYER + "self_attention.linear_qkv.bias",
    Role.O_BIAS: _LAYER + "self_attention.linear_proj.bias",
    Role.Q_NORM: _LAYER + "self_attention.q_layernorm.weight",
    Role.K_NORM: _LAYER + "self_attention.k_layernorm.weight",
    Role.GATE_PROJ: _LAYER + "mlp.linear_fc1.weight",
    Role.UP_PROJ: _LAYER + "mlp.linear_fc1.weight",
    Role.DOWN_PROJ: _LAYER + "mlp.linear_fc2.weight",
    Role.GATE_BIAS: _LAYER + "mlp.linear_fc1.bias",
    Role.UP_BIAS: _LAYER + "mlp.linear_fc1.bias",
    Role.DOWN_BIAS: _LAYER + "mlp.linear_fc2.bias",
    Role.ROUTER: _LAYER + "mlp.router.weight",
    Role.EXPERT_GATE: _LAYER + "mlp.experts.linear_fc1.weight",
    Role.EXPERT_UP: _LAYER + "mlp.experts.linear_fc1.weight",
    Role.EXPERT_DOWN: _LAYER + "mlp.experts.linear_fc2.weight",
}
# A layer with experts has this norm apart, since the router reads its output too.
_NORM_BEFORE_EXPERTS: Final = _LAYER + "pre_mlp_layernorm.weight"


def lay_out_megatron(model: Model, spec: ParallelSpec, first_rank: int = 0) -> Side:
    """The model on ranks first_rank, first_rank + 1, ... as Megatron-Core stores it.

    "TP4 x PP8 x EP16" takes 128 ranks: 8 stages of 16, in each TP4 x DP4 for attention and EP16 for experts.
    Raises InputError for sizes that don't divide what they split, a DP that EP doesn't fit, and layers that
    don't divide by PP.
    """
    check_axes(spec, "megatron", list(Axis))
    _check_tp(model, spec)
    _check_experts(model, spec)
    stages = strict_stages(model, spec)
    tp, ep, etp, pp = (spec.size(axis) for axis in (Axis.TP, Axis.EP, Axis.ETP, Axis.PP))
    dp = _data_parallel(spec)
    per_stage = tp * spec.size(Axis.CP) * dp
    check_ranks(spec, per_stage * pp)
    expert_layers = {p.layer for p in model.parameters if p.role is Role.ROUTER}

    def names(parameter: Parameter) -> tuple[str, ...]:
        apart = parameter.role is Role.POST_ATTENTION_NORM and parameter.layer in expert_layers
        name = (_NORM_BEFORE_EXPERTS if apart else _NAMES[parameter.role]).format(layer=parameter.layer)
        tied_apart = parameter.role is Role.EMBEDDING and model.tied and pp > 1
        return (name, _NAMES[Role.LM_HEAD]) if tied_apart else (name,)

    def cuts(role: Role, shape: tuple[int, ...]) -> Sequence[Cut]:
        return _cuts(model, role, shape, tp, ep, etp)

    stage_ranks = first_rank + np.arange(pp * per_stage).reshape(pp, per_stage)
    vocabulary = model.shapes(Role.EMBEDDING)[0][0]
    inferred = f"inferred, the smallest that fits EP{ep} x ETP{etp}"
    facts = {
        "layout": str(spec),
        "ranks": f"{pp * per_stage}, {pp} stages of TP{tp} x CP{spec.size(Axis.CP)} x DP{dp}",
        "data parallel": f"{dp} ({'as given' if spec.names(Axis.DP) else inferred})",
        "layers per stage": stage_text(stages),
        "vocabulary": f"{vocabulary} rows, padded to {_padded_vocabulary(vocabulary, tp)}",
    }
    if model.n_experts:
        local, copies = model.n_experts // ep, per_stage // (ep * etp)
        facts["experts"] = f"{local} of {model.n_experts} a rank (EP{ep} x ETP{etp} x expert DP{copies})"
    return Side(build_layout(model, stages, stage_ranks, cuts, names), pp * per_stage, facts)


def _cuts(model: Model, role: Role, shape: tuple[int, ...], tp: int, ep: int, etp: int) -> Sequence[Cut]:
    rest = [keep(n) for n in shape[1:]]
    match role:
        case Role.Q_PROJ | Role.Q_BIAS | Role.K_PROJ | Role.K_BIAS | Role.V_PROJ | Role.V_BIAS:
            return [_interleaved(model, role, tp), *rest]
        case Role.GATE_PROJ | Role.GATE_BIAS:
            return [even(shape[0], tp, buffer=2 * shape[0] // tp), *rest]
        case Role.UP_PROJ | Role.UP_BIAS:
            return [even(shape[0], tp, before=shape[0] // tp, buffer=2 * shape[0] // tp), *rest]
        case Role.O_PROJ | Role.DOWN_PROJ:
            return [keep(shape[0]), even(shape[1], tp)]
        case Role.EMBEDDING | Role.LM_HEAD:
            return [padded(shape[0], _padded_vocabulary(shape[0], tp), tp), *rest]
        case Role.EXPERT_GATE:
            return [even(shape[0], ep), even(shape[1], etp, buffer=2 * shape[1] // etp), keep(shape[2])]
        case Role.EXPERT_UP:
            width = shape[1] // etp
            return [even(shape[0], ep), even(shape[1], etp, before=width, buffer=2 * width), keep(shape[2])]
        case Role.EXPERT_DOWN:
            return [even(shape[0], ep), keep(shape[1]), even(shape[2], etp)]
        case (
            Role.FINAL_NORM | Role.INPUT_NORM | Role.POST_ATTENTION_NORM | Role.Q_NORM | Role.K_NORM
            | Role.O_BIAS | Role.DOWN_BIAS | Role.ROUTER
        ):  # fmt: skip
            return [keep(n) for n in shape]
        case _:
            assert_never(role)


def _interleaved(model: Model, role: Role, tp: int) -> Cut:
    """Rows of a query, key or value projection in linear_qkv, whose rows are cut in equal runs over TP.

    Worked example: 4 query and 2 KV heads of 1 row, TP2. The whole is q0 q1 k0 v0 q2 q3 k1 v1, so part 0 has
    q rows 0:2 at 0.
    """
    group = model.n_heads // model.n_kv_heads
    group_rows = (group + 2) * model.head_dim
    n_rows = model.n_kv_heads * group_rows // tp
    match role:
        case Role.Q_PROJ | Role.Q_BIAS:
            width, inside = group * model.head_dim, 0
        case Role.K_PROJ | Role.K_BIAS:
            width, inside = model.head_dim, group * model.head_dim
        case _:
            width, inside = model.head_dim, (group + 1) * model.head_dim
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

    def fault(tp: int) -> str | None:
        if model.n_heads % tp:
            return f"it doesn't divide the {model.n_heads} attention heads"
        if kv % tp and tp % kv:  # Megatron-Core's TransformerConfig: a multiple or divisor
            return f"it is neither a divisor nor a multiple of the {kv} KV heads"
        if rows % tp:
            return f"it doesn't divide the {rows} rows of linear_qkv"
        for n, *_ in model.shapes(Role.GATE_PROJ):
            if n % tp:
                return f"it doesn't divide intermediate_size {n}"
        return None

    check_size(spec, model, Axis.TP, fault, divisors(model.n_heads))


def _check_experts(model: Model, spec: ParallelSpec) -> None:
    for axis in (Axis.EP, Axis.ETP):
        if spec.size(axis) > 1 and not model.n_experts:
            raise InputError(f"{spec}: {model.name} has no experts; leave {axis.upper()}{spec.size(axis)} out")
    if not model.n_experts:
        return
    width = model.shapes(Role.EXPERT_GATE)[0][1]

    def ep_fault(ep: int) -> str | None:
        return f"it doesn't divide the {model.n_experts} experts" if model.n_experts % ep else None

    def etp_fault(etp: int) -> str | None:
        return f"it doesn't divide moe_intermediate_size {width}" if width % etp else None

    check_size(spec, model, Axis.EP, ep_fault, divisors(model.n_experts))
    check_size(spec, model, Axis.ETP, etp_fault, divisors(width))
