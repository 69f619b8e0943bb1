"""What Megatron-Core and vLLM put into every rank's buffers, built the slow way from whole tensors, as their code does.

Shares nothing with the conventions under test but the names of buffers: loops over ranks, concatenates and
splits NumPy arrays. Values are positions, so two elements are equal only when they are the same element.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts import overlap
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.models import FAMILIES, Model
from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.tensors import Layout
from shardroute.planner.problems import Problem

Array = NDArray[np.int64]
Buffers = dict[tuple[int, str], Array]
PADDING = -1


def config_of(**values: object) -> dict[str, object]:
    """A small Qwen3-MoE config with the given values in place of its own."""
    return {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "hidden_size": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "intermediate_size": 8,
        "moe_intermediate_size": 4,
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "vocab_size": 70,
        "tie_word_embeddings": False,
        **values,
    }


def model_of(**values: object) -> Model:
    """The model of `config_of`."""
    config = config_of(**values)
    return FAMILIES[str(config["model_type"])]("tiny", Config(config, "tiny/config.json"))


def whole_tensors(model: Model) -> dict[str, Array]:
    """Every tensor of the model, its elements numbered on from those of the one before."""
    tensors, first = {}, 0
    for tensor in model.tensors:
        tensors[tensor.name] = first + np.arange(tensor.n_elements).reshape(tensor.shape)
        first += tensor.n_elements
    return tensors


@dataclass(frozen=True)
class Job:
    """Sizes of a training or serving job; `stages` are the layers of each pipeline stage."""

    stages: tuple[int, ...]
    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def spec(self) -> str:
        """The job in shardroute's notation."""
        stages = ",".join(str(n) for n in self.stages)
        axes = f"TP{self.tp} x PP{len(self.stages)}[{stages}] x DP{self.dp}"
        for name, size in (("CP", self.cp), ("EP", self.ep), ("ETP", self.etp)):
            axes += f" x {name}{size}" if size > 1 else ""
        return axes

    @property
    def n_ranks(self) -> int:
        """Ranks of the whole job."""
        return self.tp * self.cp * self.dp * len(self.stages)


def megatron_buffers(model: Model, job: Job) -> Buffers:
    """Rank and name to content of every buffer of a Megatron-Core job; PADDING where no element is."""
    w = whole_tensors(model)
    out: Buffers = {}
    per_stage = job.tp * job.cp * job.dp
    first_layer = 0
    for stage, n_layers in enumerate(job.stages):
        first, last = stage == 0, stage == len(job.stages) - 1
        for in_stage in range(per_stage):
            t, etp = in_stage % job.tp, in_stage % job.etp
            ep = in_stage // job.etp % job.ep
            held: dict[str, Array] = {}
            if first:
                held["embedding.word_embeddings.weight"] = _rows(w["model.embed_tokens.weight"], t, job.tp, 128 * job.tp)
            if last:
                held["decoder.final_layernorm.weight"] = w["model.norm.weight"]
                if "lm_head.weight" in w or not first:
                    whole = w.get("lm_head.weight", w["model.embed_tokens.weight"])
                    held["output_layer.weight"] = _rows(whole, t, job.tp, 128 * job.tp)
            for layer in range(first_layer, first_layer + n_layers):
                held |= _megatron_layer(model, w, layer, t, job.tp, ep, job.ep, etp, job.etp)
            rank = stage * per_stage + in_stage
            out |= {(rank, name): content for name, content in held.items()}
        first_layer += n_layers
    return out


def _megatron_layer(
    model: Model, w: dict[str, Array], layer: int, t: int, tp: int, ep: int, n_ep: int, etp: int, n_etp: int
) -> dict[str, Array]:
    old, new = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    attention = new + "self_attention."
    held = {attention + "linear_qkv.layer_norm_weight": w[old + "input_layernorm.weight"]}
    for kind in ("weight", "bias"):
        if old + f"self_attn.q_proj.{kind}" not in w:
            continue
        q, k, v = (w[old + f"self_attn.{p}_proj.{kind}"] for p in "qkv")
        blocks = []
        for q_group, k_head, v_head in zip(
            np.split(q, model.n_kv_heads),
            np.split(k, model.n_kv_heads),
            np.split(v, model.n_kv_heads),
            strict=True,
        ):
            blocks += [q_group, k_head, v_head]
        held[attention + f"linear_qkv.{kind}"] = np.split(np.concatenate(blocks), tp)[t]
    held[attention + "linear_proj.weight"] = np.split(w[old + "self_attn.o_proj.weight"], tp, axis=1)[t]
    for source, target in (
        ("self_attn.o_proj.bias", "self_attention.linear_proj.bias"),
        ("self_attn.q_norm.weight", "self_attention.q_layernorm.weight"),
        ("self_attn.k_norm.weight", "self_attention.k_layernorm.weight"),
        ("mlp.down_proj.bias", "mlp.linear_fc2.bias"),
        ("mlp.gate.weight", "mlp.router.weight"),
    ):
        if old + source in w:
            held[new + target] = w[old + source]
    if old + "mlp.gate.weight" not in w:
        held[new + "mlp.linear_fc1.layer_norm_weight"] = w[old + "post_attention_layernorm.weight"]
        held |= _dense_mlp(w, old, new + "mlp.linear_fc1.", new + "mlp.linear_fc2.weight", t, tp)
        return held
    held[new + "pre_mlp_layernorm.weight"] = w[old + "post_attention_layernorm.weight"]
    gate, up, down = (w[old + f"mlp.experts.*.{p}_proj.weight"] for p in ("gate", "up", "down"))
    n_local = model.n_experts // n_ep
    local = range(ep * n_local, (ep + 1) * n_local)
    fc1 = [np.concatenate([np.split(gate[e], n_etp)[etp], np.split(up[e], n_etp)[etp]]) for e in local]
    fc2 = [np.split(down[e], n_etp, axis=1)[etp] for e in local]
    held[new + "mlp.experts.linear_fc1.weight"] = np.stack(fc1)
    held[new + "mlp.experts.linear_fc2.weight"] = np.stack(fc2)
    return held


def vllm_buffers(model: Model, job: Job, first_rank: int = 0) -> Buffers:
    """Rank and name to content of every buffer of a vLLM job; PADDING where no element is."""
    w, rank = whole_tensors(model), first_rank
    out: Buffers = {}
    for _replica in range(job.dp):
        first_layer = 0
        for stage, n_layers in enumerate(job.stages):
            first, last = stage == 0, stage == len(job.stages) - 1
            for t in range(job.tp):
                held: dict[str, Array] = {}
                if first or (last and model.tied):
                    held["model.embed_tokens.weight"] = _rows(w["model.embed_tokens.weight"], t, job.tp, 64)
                if last:
                    held["model.norm.weight"] = w["model.norm.weight"]
                    if not model.tied:
                        held["lm_head.weight"] = _rows(w["lm_head.weight"], t, job.tp, 64)
                for layer in range(first_layer, first_layer + n_layers):
                    held |= _vllm_layer(model, w, layer, t, job.tp, job.ep)
                out |= {(rank, name): content for name, content in held.items()}
                rank += 1
            first_layer += n_layers
    return out


def _vllm_layer(model: Model, w: dict[str, Array], layer: int, t: int, tp: int, n_ep: int) -> dict[str, Array]:
    prefix = f"model.layers.{layer}."
    held = {}
    for name in (
        "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight",
        "self_attn.k_norm.weight", "self_attn.o_proj.bias", "mlp.down_proj.bias", "mlp.gate.weight",
    ):  # fmt: skip
        if prefix + name in w:
            held[prefix + name] = w[prefix + name]
    for kind in ("weight", "bias"):
        if prefix + f"self_attn.q_proj.{kind}" not in w:
            continue
        q, k, v = (w[prefix + f"self_attn.{p}_proj.{kind}"] for p in "qkv")
        if tp > model.n_kv_heads:  # vLLM: shard id is tp_rank // num_kv_head_replicas
            parts, shard = model.n_kv_heads, t // (tp // model.n_kv_heads)
        else:
            parts, shard = tp, t
        mine = [np.split(q, tp)[t], np.split(k, parts)[shard], np.split(v, parts)[shard]]
        held[prefix + f"self_attn.qkv_proj.{kind}"] = np.concatenate(mine)
    held[prefix + "self_attn.o_proj.weight"] = np.split(w[prefix + "self_attn.o_proj.weight"], tp, axis=1)[t]
    if prefix + "mlp.gate.weight" not in w:
        held |= _dense_mlp(w, prefix, prefix + "mlp.gate_up_proj.", prefix + "mlp.down_proj.weight", t, tp)
        return held
    gate, up, down = (w[prefix + f"mlp.experts.*.{p}_proj.weight"] for p in ("gate", "up", "down"))
    if n_ep > 1:
        local, n_tp, slice_of = np.array_split(np.arange(model.n_experts), n_ep)[t].tolist(), 1, 0
    else:
        local, n_tp, slice_of = list(range(model.n_experts)), tp, t
    w13 = [np.concatenate([np.split(gate[e], n_tp)[slice_of], np.split(up[e], n_tp)[slice_of]]) for e in local]
    held[prefix + "mlp.experts.w13_weight"] = np.stack(w13)
    held[prefix + "mlp.experts.w2_weight"] = np.stack([np.split(down[e], n_tp, axis=1)[slice_of] for e in local])
    return held


def _dense_mlp(w: dict[str, Array], old: str, gate_up: str, down: str, t: int, tp: int) -> dict[str, Array]:
    held = {down: np.split(w[old + "mlp.down_proj.weight"], tp, axis=1)[t]}
    for kind in ("weight", "bias"):
        if old + f"mlp.gate_proj.{kind}" in w:
            gate, up = w[old + f"mlp.gate_proj.{kind}"], w[old + f"mlp.up_proj.{kind}"]
            held[gate_up + kind] = np.concatenate([np.split(gate, tp)[t], np.split(up, tp)[t]])
    return held


def _rows(whole: Array, t: int, tp: int, multiple: int) -> Array:
    """This rank's rows of a matrix that is padded to a multiple of rows."""
    n_padding = -len(whole) % multiple
    padding = np.full((n_padding, whole.shape[1]), PADDING)
    return np.split(np.concatenate([whole, padding]), tp)[t]


def layout_buffers(model: Model, layout: Layout, tensors: Mapping[str, Array] | None = None) -> Buffers:
    """Rank and name to flat content of every buffer that a layout's fragments fill, from the whole tensors."""
    tensors = whole_tensors(model) if tensors is None else tensors
    out: Buffers = {}
    for tensor, fragments, names in zip(model.tensors, layout.fragments, layout.buffers, strict=True):
        for i in range(len(fragments)):
            key = (int(fragments.rank[i]), names[int(fragments.buffer[i])])
            buffer = out.setdefault(key, np.full(int(fragments.buffer_size[i]), PADDING))
            assert len(buffer) == fragments.buffer_size[i], f"{key}: tensors disagree on the buffer's size"
            at = places(fragments, i)
            assert (buffer[at] == PADDING).all(), f"{key}: two fragments overlap in the buffer"
            buffer[at] = tensors[tensor.name][box(fragments, i)]
    return out


def flat(buffers: Buffers) -> dict[tuple[int, str], list[int]]:
    """Buffers as lists of their elements in order, for comparing; those that hold nothing but padding left out."""
    return {key: b.ravel().tolist() for key, b in sorted(buffers.items()) if (b != PADDING).any()}


def places(fragments: Fragments, i: int) -> Array:
    """Where each element of fragment i lies in its buffer, in the shape of its box."""
    at = np.array(int(fragments.offset[i]))
    for dim in range(len(fragments.shape)):
        steps = np.arange(int(fragments.hi[i, dim] - fragments.lo[i, dim])) * int(fragments.strides[i, dim])
        at = at[..., None] + steps
    return at


def box(fragments: Fragments, i: int) -> tuple[slice, ...]:
    """Fragment i's box as slices of the whole tensor."""
    return tuple(slice(int(a), int(b)) for a, b in zip(fragments.lo[i], fragments.hi[i], strict=True))


def holding(fragments: Fragments, rank: int, lo: Array, hi: Array) -> Iterator[int]:
    """The fragments of a rank that hold the whole box [lo, hi)."""
    for i in np.flatnonzero(fragments.rank == rank).tolist():
        if (fragments.lo[i] <= lo).all() and (hi <= fragments.hi[i]).all():
            yield i


def moved(problem: Problem, held: Buffers, choose: Callable[[list[int]], int]) -> Buffers:
    """The buffers of the destination ranks after each needer copied each piece from some holder."""
    out: Buffers = {}
    for n, (source, target) in enumerate(zip(problem.source.fragments, problem.target.fragments, strict=True)):
        pieces = overlap(source, target)
        for lo, hi, pattern in zip(pieces.lo, pieces.hi, pieces.pattern.tolist(), strict=True):
            for needer in pieces.needers[pattern].tolist():
                holder = choose(pieces.holders[pattern].tolist())
                i = next(holding(source, holder, lo, hi))
                content = held[holder, problem.source.buffers[n][int(source.buffer[i])]]
                for j in holding(target, needer, lo, hi):
                    key = (needer, problem.target.buffers[n][int(target.buffer[j])])
                    buffer = out.setdefault(key, np.full(int(target.buffer_size[j]), PADDING))
                    assert (buffer[piece_places(target, j, lo, hi)] == PADDING).all(), "written twice"
                    buffer[piece_places(target, j, lo, hi)] = content[piece_places(source, i, lo, hi)]
    return out


def piece_places(fragments: Fragments, i: int, lo: Array, hi: Array) -> Array:
    """Where each element of the box [lo, hi) lies in the buffer of fragment i."""
    inside = tuple(slice(int(a), int(b)) for a, b in zip(lo - fragments.lo[i], hi - fragments.lo[i], strict=True))
    return places(fragments, i)[inside]
