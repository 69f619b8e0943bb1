"""How vLLM stores a model for serving, as reinforcement-learning frameworks run it.

Ranks: tp is fastest, then pp, and dp slowest. DP means independent replicas of the whole model. EP is off, or
equals TP ("TP8 x EP8", vLLM's --enable-expert-parallel in one replica): then every rank has whole experts
instead of a slice of each.

Buffers, by vLLM's names (they are those of the checkpoint but for the fused ones):
- qkv_proj: this rank's query heads, then its key heads, then its value heads. With more ranks than KV heads
each KV head is on tp / n_kv_heads neighbouring ranks: rank r has head r * n_kv_heads // tp, never a part of
one.
- gate_up_proj: gate rows of this rank, then its up rows. o_proj, down_proj: columns over TP.
- experts.w13_weight [n_local, 2 * f / tp, h] (gate, then up) and w2_weight [n_local, h, f / tp]; f isn't cut
with EP. Experts go to EP ranks in order, the first ranks having one more when EP doesn't divide them (vLLM
`determine_expert_map`, linear). This is the layout that weights are loaded into, before a kernel rearranges
it.
- embed_tokens, lm_head: rows over TP after padding the vocabulary to a multiple of 64; padding rows are in
the buffers, and no fragment covers them. A tied output layer is embed_tokens itself, on the last stage too.
- norms, the router (mlp.gate) and biases of column-cut layers are on every rank.
"""

from collections.abc import Sequence
from typing import Final, assert_never

import numpy as np

from shardroute.planner.layouts.conventions.buffers import Cut, balanced, even, intervals, keep, padded
from shardroute.planner.layouts.conventions.sides import (
    Side,
    build_layout,
    check_axes,
    check_ranks,
    check_size,
    divisors,
    stage_text,
)
from shardroute.planner.layouts.conventions.stages import vllm_stages
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.topologies.errors import InputError

# vLLM's DEFAULT_VOCAB_PADDING_SIZE (vocab_parallel_embedding.py).
VOCABULARY_MULTIPLE: Final = 64

_LAYER: Final = "model.layers.{layer}."
_NAMES: Final = {
    Role.EMBEDDING: "model.embed_tokens.weight",
    Role.LM_HEAD: "lm_head.weight",
    Role.FINAL_NORM: "model.norm.weight",
    Role.INPUT_NORM: _LAYER + "input_layernorm.weight",
    Role.POST_ATTENTION_NORM: _LAYER + "post_attention_layernorm.weight",
    Role.Q_PROJ: _LAYER + "self_attn.qkv_proj.weight",
    Role.K_PROJ: _LAYER + "self_attn.qkv_proj.weight",
    Role.V_PROJ: _LAYER + "self_attn.qkv_proj.weight",
    Role.O_PROJ: _LAYER + "self_attn.o_proj.weight",
    Role.Q_BIAS: _LAYER + "self_attn.qkv_proj.bias",
    Role.K_BIAS: _LAYER + "self_attn.qkv_proj.bias",
    Role.V_BIAS: _LAYER + "self_attn.qkv_proj.bias",
    Role.O_BIAS: _LAYER + "self_attn.o_proj.bias",
    Role.Q_NORM: _LAYER + "self_attn.q_norm.weight",
    Role.K_NORM: _LAYER + "self_attn.k_norm.weight",
    Role.GATE_PROJ: _LAYER + "mlp.gate_up_proj.weight",
    Role.UP_PROJ: _LAYER + "mlp.gate_up_proj.weight",
    Role.DOWN_PROJ: _LAYER + "mlp.down_proj.weight",
    Role.GATE_BIAS: _LAYER + "mlp.gate_up_proj.bias",
    Role.UP_BIAS: _LAYER + "mlp.gate_up_proj.bias",
    Role.DOWN_BIAS: _LAYER + "mlp.down_proj.bias",
    Role.ROUTER: _LAYER + "mlp.gate.weight",
    Role.EXPERT_GATE: _LAYER + "mlp.experts.w13_weight",
    Role.EXPERT_UP: _LAYER + "mlp.experts.w13_weight",
    Role.EXPERT_DOWN: _LAYER + "mlp.experts.w2_weight",
}


def lay_out_vllm(model: Model, spec: ParallelSpec, first_rank: int = 0) -> Side:
    """The model on ranks first_rank, first_rank + 1, ... as vLLM stores it.

    "TP8 x DP16" takes 128 ranks: 16 replicas, each of 8 ranks.

    Raises InputError for sizes that don't divide what they split, an EP that is neither 1 nor TP, and axes
    vLLM doesn't have.
    """
    check_axes(spec, "vllm", (Axis.TP, Axis.PP, Axis.DP, Axis.EP))
    _check_experts(model, spec)
    _check_tp(model, spec)
    stages = vllm_stages(model, spec)
    tp, pp, dp, ep = (spec.size(axis) for axis in (Axis.TP, Axis.PP, Axis.DP, Axis.EP))
    check_ranks(spec, tp * pp * dp)

    def names(parameter: Parameter) -> tuple[str, ...]:
        return (_NAMES[parameter.role].format(layer=parameter.layer),)

    def cuts(role: Role, shape: tuple[int, ...]) -> Sequence[Cut]:
        return _cuts(model, role, shape, tp, ep)

    order = np.arange(dp * pp * tp).reshape(dp, pp, tp)
    stage_ranks = first_rank + order.transpose(1, 0, 2).reshape(pp, dp * tp)
    vocabulary, kv = model.shapes(Role.EMBEDDING)[0][0], model.n_kv_heads
    facts = {
        "layout": str(spec),
        "ranks": f"{dp * pp * tp}, {dp} replicas of TP{tp} x PP{pp}",
        "layers per stage": stage_text(stages),
        "KV heads": f"each on {tp // kv} ranks of a replica" if tp > kv else f"{kv // tp} of {kv} a rank",
        "vocabulary": f"{vocabulary} rows, padded to {_padded_vocabulary(vocabulary)}",
    }
    if model.n_experts:
        facts["experts"] = f"whole, over EP{ep}" if ep > 1 else f"a slice of each of the {model.n_experts}, over TP{tp}"
    return Side(build_layout(model, stages, stage_ranks, cuts, names), dp * pp * tp, facts)


def _cuts(model: Model, role: Role, shape: tuple[int, ...], tp: int, ep: int) -> Sequence[Cut]:
    rest = [keep(n) for n in shape[1:]]
    experts = balanced(shape[0], ep)
    expert_tp = 1 if ep > 1 else tp
    match role:
        case Role.Q_PROJ | Role.Q_BIAS | Role.K_PROJ | Role.K_BIAS | Role.V_PROJ | Role.V_BIAS:
            return [_fused_heads(model, role, tp), *rest]
        case Role.GATE_PROJ | Role.GATE_BIAS:
            return [even(shape[0], tp, buffer=2 * shape[0] // tp), *rest]
        case Role.UP_PROJ | Role.UP_BIAS:
            return [even(shape[0], tp, before=shape[0] // tp, buffer=2 * shape[0] // tp), *rest]
        case Role.O_PROJ | Role.DOWN_PROJ:
            return [keep(shape[0]), even(shape[1], tp)]
        case Role.EMBEDDING | Role.LM_HEAD:
            return [padded(shape[0], _padded_vocabulary(shape[0]), tp), *rest]
        case Role.EXPERT_GATE:
            return [experts, even(shape[1], expert_tp, buffer=2 * shape[1] // expert_tp), keep(shape[2])]
        case Role.EXPERT_UP:
            width = shape[1] // expert_tp
            return [experts, even(shape[1], expert_tp, before=width, buffer=2 * width), keep(shape[2])]
        case Role.EXPERT_DOWN:
            return [experts, keep(shape[1]), even(shape[2], expert_tp)]
        case (
            Role.FINAL_NORM | Role.INPUT_NORM | Role.POST_ATTENTION_NORM | Role.Q_NORM | Role.K_NORM
            | Role.O_BIAS | Role.DOWN_BIAS | Role.ROUTER
        ):  # fmt: skip
            return [keep(n) for n in shape]
        case _:
            assert_never(role)


def _fused_heads(model: Model, role: Role, tp: int) -> Cut:
    """Rows of a query, key or value projection in qkv_proj; a part has at least one whole KV head."""
    n_q, n_kv, rank = model.n_heads // tp, max(model.n_kv_heads // tp, 1), np.arange(tp)
    kv_head = rank * model.n_kv_heads // tp
    match role:
        case Role.Q_PROJ | Role.Q_BIAS:
            first, n, before = rank * n_q, n_q, 0
        case Role.K_PROJ | Role.K_BIAS:
            first, n, before = kv_head, n_kv, n_q
        case _:
            first, n, before = kv_head, n_kv, n_q + n_kv
    d = model.head_dim
    return intervals(first * d, (first + n) * d, before * d, (n_q + 2 * n_kv) * d)


def _padded_vocabulary(n_rows: int) -> int:
    return -(-n_rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _check_tp(model: Model, spec: ParallelSpec) -> None:
    kv, rows = model.n_kv_heads, _padded_vocabulary(model.shapes(Role.EMBEDDING)[0][0])
    widths = [("intermediate_size", shape[0]) for shape in model.shapes(Role.GATE_PROJ)]
    if spec.size(Axis.EP) == 1:
        widths += [("moe_intermediate_size", shape[1]) for shape in model.shapes(Role.EXPERT_GATE)]

    def fault(tp: int) -> str | None:
        if model.n_heads % tp:
            return f"it doesn't divide the {model.n_heads} attention heads"
        if kv % tp and tp % kv:
            return f"it is neither a divisor nor a multiple of the {kv} KV heads, so a head would be cut"
        for key, width in widths:
            if width % tp:
                return f"it doesn't divide {key} {width}"
        return f"it doesn't divide the {rows} rows of the padded vocabulary" if rows % tp else None

    check_size(spec, model, Axis.TP, fault, divisors(model.n_heads))


def _check_experts(model: Model, spec: ParallelSpec) -> None:
    ep, tp = spec.size(Axis.EP), spec.size(Axis.TP)
    if ep == 1:
        return
    if not model.n_experts:
        raise InputError(f"{spec}: {model.name} has no experts; leave EP{ep} out")
    if ep != tp:
        choices = " or ".join(f"TP{n} x EP{n}" for n in (tp, ep) if n > 1)
        raise InputError(
            f"{spec}: EP{ep} with TP{tp}: vllm spreads experts over a replica's TP ranks, so EP is TP or 1; "
            f"use {choices}, or leave EP out"
        )
    if ep > model.n_experts:
        raise InputError(f"{spec}: EP{ep} is above the experts of {model.name}; at most EP{model.n_experts} fits")
