"""How vLLM and SGLang store a model for serving: what the two share; each says its own rules and names.

Rule: a replica is `n` ranks of one stage. Attention and dense layers are cut over TP and, where n is more, repeated over
n / TP groups (data-parallel attention); experts are cut over EP and, where n is more, each over n / EP ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardroute.planner.layouts.conventions import roles
from shardroute.planner.layouts.conventions.buffers import Cut, balanced, even, everywhere, intervals, keep, padded, segmented
from shardroute.planner.layouts.conventions.experts import stacked_cuts
from shardroute.planner.layouts.conventions.scales import first_off_grid, shared_blocks
from shardroute.planner.layouts.conventions.sides import (
    Cutting,
    Side,
    build_layout,
    check_ranks,
    check_size,
    divisors,
    holding_text,
    stage_text,
)
from shardroute.planner.layouts.conventions.stages import vllm_stages
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.planner.shares import Told, untold
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_count

# DEFAULT_VOCAB_PADDING_SIZE of both (vocab_parallel_embedding.py).
VOCABULARY_MULTIPLE: Final = 64

_FUSED: Final = {
    **dict.fromkeys(roles.HEADS, "qkv_proj"),
    **dict.fromkeys(roles.GATES | roles.UPS, "gate_up_proj"),
}
_EXPERT_BUFFERS: Final = {
    Role.EXPERT_GATE: "w13_weight",
    Role.EXPERT_UP: "w13_weight",
    Role.EXPERT_UNGATED_UP: "w13_weight",
    Role.EXPERT_DOWN: "w2_weight",
    Role.EXPERT_GATE_UP: "w13_weight",
    Role.EXPERT_GATE_UP_BIAS: "w13_bias",
    Role.EXPERT_DOWN_TRANSPOSED: "w2_weight",
    Role.EXPERT_DOWN_BIAS: "w2_bias",
}

# What a server computes from loaded weights and keeps: a refit must run it again, since no tensor of the checkpoint is it.
_DERIVED: Final = {
    Role.KV_B_PROJ: "absorb kv_b_proj into the attention's own W_UK and W_UV again",
    Role.MAMBA_HEAD: "apply -exp to what arrives in mixer.A",
    Role.EXPERT_DOWN_BIAS: "keep w2_bias zero on all but the first rank of each expert",
}


@dataclass(frozen=True, slots=True)
class Server:
    """A serving framework.

    fused_latent     what it calls the buffer of q_a_proj and kv_a_proj_with_mqa
    renamed          texts in checkpoint names that it replaces, family by family
    stages_in_groups whether the groups of data-parallel attention lie outside of the pipeline in rank order
    balances_experts whether the first EP ranks may have one expert more
    """

    name: str
    fused_latent: str
    renamed: Mapping[str, Mapping[str, str]]
    stages_in_groups: bool
    balances_experts: bool


def lay_out_replicas(
    server: Server, model: Model, spec: ParallelSpec, n: int, first_rank: int, progress: Told = untold
) -> Side:
    """The model on DP replicas of PP stages of `n` ranks. Sizes that don't divide what they split are InputErrors."""
    tp, pp, dp, ep = (spec.size(axis) for axis in (Axis.TP, Axis.PP, Axis.DP, Axis.EP))
    expert_tp = n // ep if model.n_experts else 1
    _check_experts(server, model, spec, expert_tp)
    _check_tp(model, spec)
    stages = vllm_stages(model, spec)
    check_ranks(spec, n * pp * dp)
    q_a, kv_a = model.shapes(Role.Q_A_PROJ), model.shapes(Role.KV_A_PROJ)
    latent = (q_a[0][0], kv_a[0][0]) if q_a else None

    def names(parameter: Parameter) -> tuple[str, ...]:
        return (_name(server, model, parameter, latent is not None),)

    def cuts(parameter: Parameter) -> Cutting:
        if parameter.role in roles.EXPERTS:
            return _expert_cuts(parameter, ep, expert_tp)
        return _cuts(model, parameter, tp, latent)

    def on_grid(scales: Parameter, dim: int, cut: Cut) -> None:
        _check_scales(server, spec, scales, dim, cut)

    every = np.arange(dp * pp * n)
    if server.stages_in_groups:
        stage_ranks = first_rank + every.reshape(dp, n // tp, pp, tp).transpose(2, 0, 1, 3).reshape(pp, dp * n)
    else:
        stage_ranks = first_rank + every.reshape(dp, pp, n).transpose(1, 0, 2).reshape(pp, dp * n)
    layout = build_layout(model, stages, _always(stage_ranks), cuts, names, on_grid, progress)
    vocabulary, kv = model.shapes(Role.EMBEDDING)[0][0], model.n_kv_heads
    facts = {"layout": str(spec), "ranks": f"{dp * pp * n}, {format_count(dp, 'replica')} of TP{tp} x PP{pp}"}
    if n > tp:
        facts["attention"] = f"data parallel over {n // tp} groups of TP{tp} in a replica"
    facts["layers per stage"] = stage_text(stages)
    if latent is None and model.shapes(Role.K_PROJ):
        facts["KV heads"] = f"each on {tp // kv} ranks of a replica" if tp > kv else f"{kv // tp} of {kv} a rank"
    elif latent is not None:
        facts["KV heads"] = f"latent ({kv_a[0][0]} rows), on every rank"
    facts["vocabulary"] = f"{vocabulary} rows, padded to {_padded_vocabulary(vocabulary)}"
    if model.n_experts:
        sliced = f", each over {expert_tp} ranks" if expert_tp > 1 else ""
        facts["experts"] = (
            f"whole, over EP{ep}{sliced}" if ep > 1 else f"a slice of each of the {model.n_experts}, over TP{expert_tp}"
        )
    facts["weights"] = holding_text(model, layout)
    derived = [text for role, text in _DERIVED.items() if model.shapes(role)]
    if derived:
        facts["after loading"] = "; ".join(derived)
    return Side(layout, dp * pp * n, facts)


def _always(ranks: Ints) -> Callable[[Role], Ints]:
    def for_role(role: Role) -> Ints:
        return ranks

    return for_role


def _name(server: Server, model: Model, parameter: Parameter, latent: bool) -> str:
    """The buffer: the checkpoint's name but for what is fused."""
    name, role = parameter.tensor.name, parameter.role
    for old, new in server.renamed.get(model.family, {}).items():
        name = name.replace(old, new)
    if role in _EXPERT_BUFFERS:
        return f"{name.partition('.experts.')[0]}.experts.{_EXPERT_BUFFERS[role]}"
    fused = server.fused_latent if latent and role in (Role.Q_A_PROJ, Role.KV_A_PROJ) else _FUSED.get(role)
    if fused is None:
        return name
    module, _, kind = name.rpartition(".")
    return f"{module.rpartition('.')[0]}.{fused}.{kind}"


def _cuts(model: Model, parameter: Parameter, tp: int, latent: tuple[int, int] | None) -> Cutting:
    role, shape = parameter.role, parameter.tensor.shape
    rest = [keep(n) for n in shape[1:]]
    if role in roles.HEADS:
        return Cutting([_fused_heads(model, role, tp), *rest])
    if role in roles.GATES:
        return Cutting([even(shape[0], tp, buffer=2 * shape[0] // tp), *rest])
    if role in roles.UPS:
        return Cutting([even(shape[0], tp, before=shape[0] // tp, buffer=2 * shape[0] // tp), *rest])
    if role in roles.COLUMNS:
        return Cutting([keep(shape[0]), even(shape[1], tp)])
    if role in roles.VOCABULARY:
        return Cutting([padded(shape[0], _padded_vocabulary(shape[0]), tp), *rest])
    if role in roles.SEGMENTED:
        return Cutting([segmented(parameter.segments, tp), *rest])
    if role in roles.ROWS:
        return Cutting([even(shape[0], tp), *rest])
    assert role in roles.WHOLE, role
    if latent is not None and role in (Role.Q_A_PROJ, Role.KV_A_PROJ):
        before = 0 if role is Role.Q_A_PROJ else latent[0]
        return Cutting([even(shape[0], 1, before=before, buffer=sum(latent)), *rest])
    return Cutting([keep(n) for n in shape])


def _expert_cuts(parameter: Parameter, ep: int, tp: int) -> Cutting:
    role, shape = parameter.role, parameter.tensor.shape
    experts = balanced(shape[0], ep)
    if (alike := stacked_cuts(role, shape, experts, tp)) is not None:
        return alike
    match role:
        case Role.EXPERT_GATE_UP:  # [E, h, f, 2] to [n_local, f / tp, 2, h]: gate and up rows in turn, as in the file
            return Cutting([experts, keep(shape[1]), even(shape[2], tp), keep(2)], (0, 2, 3, 1))
        case Role.EXPERT_GATE_UP_BIAS:
            return Cutting([experts, even(shape[1], tp), keep(2)])
        case _:  # added once: the other ranks keep the zeros that they start with
            assert role is Role.EXPERT_DOWN_BIAS, role
            return Cutting([experts, everywhere(shape[1], tp, only_first=True)])


def _fused_heads(model: Model, role: Role, tp: int) -> Cut:
    """Rows of a query, key or value projection in qkv_proj; a part has at least one whole KV head."""
    n_q, n_kv, rank = model.n_heads // tp, max(model.n_kv_heads // tp, 1), np.arange(tp)
    if role in roles.QUERY:
        first, n, before = rank * n_q, n_q, 0
    else:
        first, n, before = rank * model.n_kv_heads // tp, n_kv, n_q + (n_kv if role in roles.VALUE else 0)
    d = model.head_dim
    return intervals(first * d, (first + n) * d, before * d, (n_q + 2 * n_kv) * d)


def _padded_vocabulary(n_rows: int) -> int:
    return -(-n_rows // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _check_scales(server: Server, spec: ParallelSpec, scales: Parameter, dim: int, cut: Cut) -> None:
    """Raise InputError where a shard's blocks aren't those that counting from its first row gives: both frameworks do that."""
    block, weight = scales.block[dim], scales.weight
    bad = first_off_grid(cut, block)
    if bad is None or weight is None:
        return
    shared = shared_blocks(cut, block)
    cause = f"it starts at {int(cut.at[bad])} of a fused buffer, inside scale block {int(cut.at[bad]) // block} of it"
    if shared:
        number, parts = next(iter(shared.items()))
        cause = (
            f"a cut goes through scale block {number} ({'row' if dim < len(scales.block) - 1 else 'column'}s {number * block} to "
            f"{min((number + 1) * block, weight.tensor.shape[dim]) - 1}), whose scale parts {', '.join(map(str, parts))} of "
            f"{cut.n_parts} need"
        )
    raise InputError(
        f"{spec}: {weight.tensor.name}: {cause}; {server.name} counts blocks of {block} from the start of a rank's shard and "
        f"refuses that too; use a TP that leaves each rank a multiple of {block}, or EP for experts"
    )


def _check_tp(model: Model, spec: ParallelSpec) -> None:
    kv, rows = model.n_kv_heads, _padded_vocabulary(model.shapes(Role.EMBEDDING)[0][0])
    widths, units = list(roles.split_widths(model)), sorted(roles.segment_units(model) - {1})
    if spec.size(Axis.EP) == 1:
        widths += [("moe_intermediate_size", n) for n in roles.expert_widths(model)]

    def fault(tp: int) -> str | None:
        if model.n_heads % tp:
            return f"it doesn't divide the {model.n_heads} attention heads"
        if kv % tp and tp % kv:
            return f"it is neither a divisor nor a multiple of the {kv} KV heads, so a head would be cut"
        for n in units:
            if n % tp:
                return f"it doesn't divide the {n} heads or groups of Mamba"
        for key, width in widths:
            if width % tp:
                return f"it doesn't divide {key} {width}"
        return f"it doesn't divide the {rows} rows of the padded vocabulary" if rows % tp else None

    check_size(spec, model, Axis.TP, fault, divisors(model.n_heads))


def _check_experts(server: Server, model: Model, spec: ParallelSpec, expert_tp: int) -> None:
    ep = spec.size(Axis.EP)
    if ep == 1:
        return
    if not model.n_experts:
        raise InputError(f"{spec}: {model.name} has no experts; leave EP{ep} out")
    if ep > model.n_experts:
        raise InputError(f"{spec}: EP{ep} is above the experts of {model.name}; at most EP{model.n_experts} fits")
    if not server.balances_experts and model.n_experts % ep:
        raise InputError(f"{spec}: EP{ep} doesn't divide the {model.n_experts} experts of {model.name}, as {server.name} needs")
    for width in roles.expert_widths(model):
        if width % expert_tp:
            raise InputError(
                f"{spec}: each expert is cut over {expert_tp} ranks, which doesn't divide moe_intermediate_size {width}"
            )
