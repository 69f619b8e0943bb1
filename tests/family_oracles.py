"""What frameworks store of every family, built the slow way: NumPy arrays split, concatenated and stacked as their code does.

Knows parameters by their names in the checkpoint and shares nothing with the conventions under test but buffer names.
"""

from collections.abc import Iterator

import numpy as np
from framework_oracles import PADDING, Array, Buffers, Job, config_of, whole_tensors

from shardroute.planner.layouts.models import FAMILIES, Model
from shardroute.planner.layouts.models.config_files import Config

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 70, "hidden_size": 4}
TINY: dict[str, dict[str, object]] = {
    "deepseek_v3": {
        **_ATTENTION, "num_hidden_layers": 3, "first_k_dense_replace": 1, "q_lora_rank": 3, "kv_lora_rank": 2,
        "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 3, "n_routed_experts": 4,
        "n_shared_experts": 2, "moe_intermediate_size": 4, "intermediate_size": 8, "num_nextn_predict_layers": 1,
    },
    "deepseek_v3_plain_q": {
        **_ATTENTION, "num_hidden_layers": 2, "first_k_dense_replace": 0, "kv_lora_rank": 2, "qk_nope_head_dim": 2,
        "qk_rope_head_dim": 1, "v_head_dim": 3, "n_routed_experts": 4, "moe_intermediate_size": 4, "intermediate_size": 8,
    },
    "glm4_moe": {
        **_ATTENTION, "num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1,
        "moe_intermediate_size": 4, "intermediate_size": 8, "attention_bias": True, "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
    },
    "gpt_oss": {**_ATTENTION, "num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 4},
    "llama": {**_ATTENTION, "num_hidden_layers": 2, "intermediate_size": 8, "attention_bias": True, "mlp_bias": True},
    "mixtral": {**_ATTENTION, "num_hidden_layers": 2, "num_local_experts": 4, "intermediate_size": 4},
    "nemotron_h": {
        **_ATTENTION, "num_hidden_layers": 5, "hybrid_override_pattern": "M*E-M", "mamba_num_heads": 4, "mamba_head_dim": 2,
        "n_groups": 4, "ssm_state_size": 3, "conv_kernel": 2, "n_routed_experts": 4, "moe_intermediate_size": 4,
        "moe_shared_expert_intermediate_size": 8, "intermediate_size": 8,
    },
    "qwen2": {**_ATTENTION, "num_hidden_layers": 2, "intermediate_size": 8, "tie_word_embeddings": True},
    "qwen2_moe": {
        **_ATTENTION, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 4, "intermediate_size": 8,
        "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2,
    },
    "qwen3_moe": config_of(hidden_size=4, intermediate_size=8),
}  # fmt: skip


def tiny(name: str, *, mtp: bool = False, **values: object) -> Model:
    """The small model of TINY with the given values in place of its own."""
    family = name.removesuffix("_plain_q")
    config = {"model_type": family, **TINY[name], **values}
    return FAMILIES[family](name, Config(config, f"{name}/config.json", mtp=mtp))


def parts_of(w: dict[str, Array], layer: int) -> dict[str, Array]:
    """The tensors of a layer by what follows its number."""
    prefixes = (f"model.layers.{layer}.", f"backbone.layers.{layer}.")
    return {name.removeprefix(p): array for name, array in w.items() for p in prefixes if name.startswith(p)}


_SHARED = ("shared_experts", "shared_expert")
_WHOLE = {  # the same on every rank: the checkpoint's name to Megatron's, None where it depends on the layer
    "input_layernorm.weight": None, "post_attention_layernorm.weight": None, "norm.weight": None,
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias", "mlp.down_proj.bias": "mlp.linear_fc2.bias",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "mlp.gate.weight": "mlp.router.weight", "mixer.gate.weight": "mlp.router.weight", "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias", "block_sparse_moe.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias", "mixer.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
    "enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight", "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
}  # fmt: skip
_ROWS = {  # np.split along dim 0
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attn.sinks": "self_attention.core_attention.softmax_offset", "mixer.up_proj.weight": "mlp.linear_fc1.weight",
    "mixer.shared_experts.up_proj.weight": "mlp.shared_experts.linear_fc1.weight", "mixer.A_log": "mixer.A_log",
    "mixer.D": "mixer.D", "mixer.dt_bias": "mixer.dt_bias", "mixer.norm.weight": "mixer.norm.weight",
}  # fmt: skip
_COLUMNS = {  # np.split along dim 1
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight", "mixer.o_proj.weight": "self_attention.linear_proj.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight", "mixer.down_proj.weight": "mlp.linear_fc2.weight",
    "mixer.out_proj.weight": "mixer.out_proj.weight",
    "mixer.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    **{f"mlp.{s}.down_proj.weight": "mlp.shared_experts.linear_fc2.weight" for s in _SHARED},
}  # fmt: skip
_MTP = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "final_layernorm.weight")


def megatron_family(model: Model, job: Job) -> Buffers:
    """Rank and name to content of every buffer of a Megatron-Core job without virtual stages, in the default rank order."""
    w = whole_tensors(model)
    out: Buffers = {}
    for rank, stage, layers in _stage_ranks(job, model):
        in_stage = rank % (job.tp * job.cp * job.dp)
        t, etp, ep = in_stage % job.tp, in_stage % job.etp, in_stage // job.etp % job.ep
        first, last = stage == 0, stage == len(job.stages) - 1
        embedding, final = _named(w, "embed"), _named(w, "final")
        held: dict[str, Array] = {}
        if first or (last and model.has_mtp):
            held["embedding.word_embeddings.weight"] = _vocabulary(embedding, t, job.tp, 128 * job.tp)
        if last:
            held["decoder.final_norm.weight" if "backbone.norm_f.weight" in w else "decoder.final_layernorm.weight"] = final
            if "lm_head.weight" in w or not first:
                held["output_layer.weight"] = _vocabulary(w.get("lm_head.weight", embedding), t, job.tp, 128 * job.tp)
        for layer in layers:
            held |= _megatron_layer(model, parts_of(w, layer), layer, t, ep, etp, job)
        out |= {(rank, name): content for name, content in held.items()}
    return out


def _megatron_layer(model: Model, parts: dict[str, Array], layer: int, t: int, ep: int, etp: int, job: Job) -> dict[str, Array]:
    mtp = layer - model.n_layers
    new = f"decoder.layers.{layer}." if mtp < 0 else f"mtp.layers.{mtp}.transformer_layer."
    held: dict[str, Array] = {}
    for name, array in parts.items():
        if _WHOLE.get(name) in _MTP:
            held[f"mtp.layers.{mtp}.{_WHOLE[name]}"] = array
        elif _WHOLE.get(name):
            held[f"{new}{_WHOLE[name]}"] = array
        elif name in _ROWS and name != "norm.weight":
            held[new + _ROWS[name]] = np.split(array, job.tp)[t]
        elif name in _COLUMNS:
            held[new + _COLUMNS[name]] = np.split(array, job.tp, axis=1)[t]
    router = next((n for n in ("mlp.gate", "mlp.router", "mixer.gate", "block_sparse_moe.gate") if f"{n}.weight" in parts), None)
    held |= {new + name: array for name, array in _megatron_norms(parts, router is not None).items()}
    at = "self_attn" if any(n.startswith("self_attn") for n in parts) else "mixer"
    if f"{at}.k_proj.weight" in parts:
        for kind in ("weight", "bias"):
            if f"{at}.q_proj.{kind}" in parts:
                groups = [np.split(parts[f"{at}.{p}_proj.{kind}"], model.n_kv_heads) for p in "qkv"]
                whole = np.concatenate([part for group in zip(*groups, strict=True) for part in group])
                held[f"{new}self_attention.linear_qkv.{kind}"] = np.split(whole, job.tp)[t]
    elif f"{at}.q_proj.weight" in parts:
        held[f"{new}self_attention.linear_q_proj.weight"] = np.split(parts[f"{at}.q_proj.weight"], job.tp)[t]
    for module, target in (("mlp", "mlp"), *((f"mlp.{s}", "mlp.shared_experts") for s in _SHARED)):
        for kind in ("weight", "bias"):
            if f"{module}.gate_proj.{kind}" in parts:
                held[f"{new}{target}.linear_fc1.{kind}"] = _gate_up(parts, module, kind, t, job.tp)
    for name in ("in_proj.weight", "conv1d.weight", "conv1d.bias"):
        if f"mixer.{name}" in parts:
            held[f"{new}mixer.{name}"] = np.concatenate([np.split(s, job.tp)[t] for s in _mamba_segments(parts, f"mixer.{name}")])
    if router is not None:
        n_local = model.n_experts // job.ep
        experts = range(ep * n_local, (ep + 1) * n_local)
        for name, stack in _expert_stacks(parts, experts, etp, job.etp, interleave=False).items():
            held[f"{new}mlp.experts.{name}"] = stack
    return held


def _megatron_norms(parts: dict[str, Array], routed: bool) -> dict[str, Array]:
    held = {}
    if "input_layernorm.weight" in parts:
        latent = "self_attn.kv_a_proj_with_mqa.weight" in parts
        name = "input_layernorm.weight" if latent else "self_attention.linear_qkv.layer_norm_weight"
        held[name] = parts["input_layernorm.weight"]
        after = "pre_mlp_layernorm.weight" if routed else "mlp.linear_fc1.layer_norm_weight"
        held[after] = parts["post_attention_layernorm.weight"]
    if "norm.weight" in parts:  # a hybrid's layer has one norm
        if "mixer.in_proj.weight" in parts:
            name = "mixer.in_proj.layer_norm_weight"
        elif "mixer.q_proj.weight" in parts:
            name = "self_attention.linear_qkv.layer_norm_weight"
        else:
            name = "pre_mlp_layernorm.weight" if routed else "mlp.linear_fc1.layer_norm_weight"
        held[name] = parts["norm.weight"]
    return held


def serving_family(model: Model, job: Job, server: str, first_rank: int = 0) -> Buffers:
    """Rank and name to content of every buffer of a vLLM or SGLang job; `job.dp` counts replicas."""
    w = whole_tensors(model)
    n = max(job.tp, job.ep)
    out: Buffers = {}
    stage_of_layers = list(_stages(job, model))
    for rank in range(job.dp * len(job.stages) * n):
        in_replica = rank % (len(job.stages) * n)
        if server == "vllm":  # ranks are (replica, group, stage, tp); experts count (group, tp)
            group, stage, t = np.unravel_index(in_replica, (n // job.tp, len(job.stages), job.tp))
            of_stage = int(group) * job.tp + int(t)
        else:  # (replica, stage, rank of the stage)
            stage, of_stage = divmod(in_replica, n)
            t = of_stage % job.tp
        first, last = stage == 0, stage == len(job.stages) - 1
        held: dict[str, Array] = {}
        embedding = _named(w, "embed")
        if first or (last and (model.tied or model.has_mtp)):
            name = "embedding" if server == "vllm" and model.family == "gpt_oss" else "embed_tokens"
            held[f"model.{name}.weight"] = _vocabulary(embedding, int(t), job.tp, 64)
        if last:
            held["model.norm_f.weight" if model.family == "nemotron_h" else "model.norm.weight"] = _named(w, "final")
            if "lm_head.weight" in w:
                held["lm_head.weight"] = _vocabulary(w["lm_head.weight"], int(t), job.tp, 64)
        for layer in stage_of_layers[int(stage)]:
            held |= _serving_layer(model, parts_of(w, layer), layer, int(t), of_stage, n, job, server)
        out |= {(first_rank + rank, name): content for name, content in held.items()}
    return out


def _serving_layer(
    model: Model, parts: dict[str, Array], layer: int, t: int, of_stage: int, n: int, job: Job, server: str
) -> dict[str, Array]:
    new = f"model.layers.{layer}."
    held: dict[str, Array] = {}
    for name, array in parts.items():
        target = new + name.replace("A_log", "A")
        if name in _WHOLE and "kv_a_proj" not in name and "q_a_proj" not in name:
            held[target] = array
        elif name in _ROWS:
            held[target] = np.split(array, job.tp)[t]
        elif name in _COLUMNS:
            held[target] = np.split(array, job.tp, axis=1)[t]
    at = "self_attn" if any(name.startswith("self_attn") for name in parts) else "mixer"
    if f"{at}.k_proj.weight" in parts:
        for kind in ("weight", "bias"):
            if f"{at}.q_proj.{kind}" in parts:
                q, k, v = (parts[f"{at}.{p}_proj.{kind}"] for p in "qkv")
                n_parts = min(job.tp, model.n_kv_heads)
                kv = t // (job.tp // n_parts)
                pieces = [np.split(q, job.tp)[t], np.split(k, n_parts)[kv], np.split(v, n_parts)[kv]]
                held[f"{new}{at}.qkv_proj.{kind}"] = np.concatenate(pieces)
    elif f"{at}.q_proj.weight" in parts:
        held[f"{new}{at}.q_proj.weight"] = np.split(parts[f"{at}.q_proj.weight"], job.tp)[t]
    if "self_attn.q_a_proj.weight" in parts:
        fused = "fused_qkv_a_proj" if server == "vllm" else "fused_qkv_a_proj_with_mqa"
        both = [parts["self_attn.q_a_proj.weight"], parts["self_attn.kv_a_proj_with_mqa.weight"]]
        held[f"{new}self_attn.{fused}.weight"] = np.concatenate(both)
    elif "self_attn.kv_a_proj_with_mqa.weight" in parts:
        held[f"{new}self_attn.kv_a_proj_with_mqa.weight"] = parts["self_attn.kv_a_proj_with_mqa.weight"]
    for module in ("mlp", *(f"mlp.{s}" for s in _SHARED)):
        for kind in ("weight", "bias"):
            if f"{module}.gate_proj.{kind}" in parts:
                held[f"{new}{module}.gate_up_proj.{kind}"] = _gate_up(parts, module, kind, t, job.tp)
    for name in ("in_proj.weight", "conv1d.weight", "conv1d.bias"):
        if f"mixer.{name}" in parts:
            held[f"{new}mixer.{name}"] = np.concatenate([np.split(s, job.tp)[t] for s in _mamba_segments(parts, f"mixer.{name}")])
    module = next((name.partition(".experts.")[0] for name in parts if ".experts." in name), None)
    if module is not None:
        n_moe_tp = n // job.ep
        ep, moe_tp = divmod(of_stage, n_moe_tp)
        experts = np.array_split(np.arange(model.n_experts), job.ep)[ep].tolist()
        names = {"linear_fc1.weight": "w13_weight", "linear_fc2.weight": "w2_weight", "linear_fc1.bias": "w13_bias"}
        for name, stack in _expert_stacks(parts, experts, moe_tp, n_moe_tp, interleave=True).items():
            if name in names:
                held[f"{new}{module}.experts.{names[name]}"] = stack
            elif moe_tp == 0:  # the bias behind the sum over ranks is added once
                held[f"{new}{module}.experts.w2_bias"] = stack
    if server == "vllm" and model.family == "gpt_oss":
        held = {name.replace(".self_attn.", ".attn."): content for name, content in held.items()}
    return held


def _expert_stacks(
    parts: dict[str, Array], experts: "range | list[int]", t: int, tp: int, *, interleave: bool
) -> dict[str, Array]:
    """Both stacks of a rank's experts by Megatron's names; gate and up rows of GPT-OSS stay in turn with `interleave`."""
    fc1, fc2 = [], []
    bias1, bias2 = [], []
    for e in experts:
        if "mlp.experts.gate_up_proj" in parts:
            gate, up = (parts["mlp.experts.gate_up_proj"][e][:, :, i].T for i in (0, 1))  # [f, h] each
            gate_bias, up_bias = (parts["mlp.experts.gate_up_proj_bias"][e][:, i] for i in (0, 1))
            mine, mine_bias = _slices((gate, up), t, tp), _slices((gate_bias, up_bias), t, tp)
            turns = [np.stack(pair, axis=1).reshape(-1, *pair[0].shape[1:]) for pair in (mine, mine_bias)]
            fc1.append(turns[0] if interleave else np.concatenate(mine))
            bias1.append(turns[1] if interleave else np.concatenate(mine_bias))
            fc2.append(np.split(parts["mlp.experts.down_proj"][e].T, tp, axis=1)[t])
            bias2.append(parts["mlp.experts.down_proj_bias"][e])
            continue
        spellings = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        gate_name, up_name, down_name = (_expert_name(parts, options) for options in spellings)
        rows = [parts[name][e] for name in (gate_name, up_name) if name]
        fc1.append(np.concatenate(_slices(tuple(rows), t, tp)))
        fc2.append(np.split(parts[down_name][e], tp, axis=1)[t])
    out = {"linear_fc1.weight": np.stack(fc1), "linear_fc2.weight": np.stack(fc2)}
    return out | ({"linear_fc1.bias": np.stack(bias1), "linear_fc2.bias": np.stack(bias2)} if bias1 else {})


def _expert_name(parts: dict[str, Array], options: tuple[str, str]) -> str:
    return next((name for name in parts for o in options if name.endswith(f".experts.*.{o}.weight")), "")


def _slices(arrays: tuple[Array, ...], t: int, tp: int) -> list[Array]:
    return [np.split(array, tp)[t] for array in arrays]


def _gate_up(parts: dict[str, Array], module: str, kind: str, t: int, tp: int) -> Array:
    return np.concatenate([np.split(parts[f"{module}.{p}_proj.{kind}"], tp)[t] for p in ("gate", "up")])


def _mamba_segments(parts: dict[str, Array], name: str) -> list[Array]:
    """z, x, B, C and dt of in_proj, or x, B and C of the convolution."""
    array, n_heads = parts[name], len(parts["mixer.D"])
    inner = len(parts["mixer.norm.weight"])
    state = (len(parts["mixer.conv1d.bias"]) - inner) // 2
    sizes = [inner, inner, state, state, n_heads] if "in_proj" in name else [inner, state, state]
    return np.split(array, np.cumsum(sizes)[:-1])


_COLWISE = {
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "w1", "w3", "embed_tokens", "lm_head",
}  # fmt: skip


def fsdp_family(model: Model, n_replicas: int, n_shards: int, tp: int) -> Buffers:
    """Rank and name to content of every parameter under FSDP2 over TP; each expert is its own parameter, stacked here."""
    out: Buffers = {}
    for name, whole in whole_tensors(model).items():
        for rank in range(n_replicas * n_shards * tp):
            t, shard = rank % tp, rank // tp % n_shards

            def local(array: Array, *, name: str = name, t: int = t, shard: int = shard) -> Array:
                return _torch_chunk(_tensor_parallel(name, array, t, tp), n_shards)[shard]

            out[rank, name] = np.stack([local(expert) for expert in whole]) if "*" in name else local(whole)
    return out


def _tensor_parallel(name: str, array: Array, t: int, tp: int) -> Array:
    module = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if module in _COLWISE:
        return _torch_chunk(array, tp)[t]
    if module in {"o_proj", "down_proj", "w2"} and array.ndim == 2:
        return _torch_chunk(array.T, tp)[t].T
    return array


def _torch_chunk(array: Array, n: int) -> list[Array]:
    """torch.chunk with empty chunks for those that it leaves out, as DTensor gives them."""
    step = -(-len(array) // n)
    return [array[i * step : (i + 1) * step] for i in range(n)]


def _stages(job: Job, model: Model) -> Iterator[list[int]]:
    """Layers of each stage; those that predict further tokens are on the last."""
    first = 0
    for i, count in enumerate(job.stages):
        layers = list(range(first, first + count))
        first += count
        if i == len(job.stages) - 1:
            layers += sorted({p.layer for p in model.parameters if p.layer is not None and p.layer >= model.n_layers})
        yield layers


def _stage_ranks(job: Job, model: Model) -> Iterator[tuple[int, int, list[int]]]:
    per_stage = job.tp * job.cp * job.dp
    for stage, layers in enumerate(_stages(job, model)):
        for in_stage in range(per_stage):
            yield stage * per_stage + in_stage, stage, layers


def _named(w: dict[str, Array], what: str) -> Array:
    names = {
        "embed": ("model.embed_tokens.weight", "backbone.embeddings.weight"),
        "final": ("model.norm.weight", "backbone.norm_f.weight"),
    }
    return next(w[name] for name in names[what] if name in w)


def _vocabulary(whole: Array, t: int, tp: int, multiple: int) -> Array:
    padding = np.full((-len(whole) % multiple, whole.shape[1]), PADDING)
    return np.split(np.concatenate([whole, padding]), tp)[t]
