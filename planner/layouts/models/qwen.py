"""Qwen2 and Qwen3, dense and with experts: Qwen2ForCausalLM, Qwen2MoeForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM."""

from collections.abc import Iterator

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.decoders import Decoder
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role


def build_qwen2(name: str, config: Config) -> Model:
    """The dense Qwen2 and Qwen2.5: Llama with biases on query, key and value."""
    decoder = Decoder.of(config)
    intermediate = config.width("intermediate_size")

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from decoder.attention(layer, bias=True, output_bias=False, head_norms=False)
            yield from decoder.gated_mlp(layer, intermediate)

    return decoder.model(name, "qwen2", layers())


def build_qwen2_moe(name: str, config: Config) -> Model:
    """Qwen1.5-MoE and Qwen2-MoE: routed experts beside a shared one that has a gate of its own."""
    decoder = Decoder.of(config)
    n_experts, sparse, expert_width, dense_width = _mixture(config, decoder.n_layers)
    shared_width = config.width("shared_expert_intermediate_size") if any(sparse) else 0
    bias = config.flag("qkv_bias", True)

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from decoder.attention(layer, bias=bias, output_bias=False, head_norms=False)
            if not sparse[layer]:
                yield from decoder.gated_mlp(layer, dense_width)
                continue
            yield from decoder.experts(layer, n_experts, expert_width)
            yield from decoder.shared_experts(layer, shared_width, "shared_expert")
            gate = f"model.layers.{layer}.mlp.shared_expert_gate.weight"
            yield decoder.parameter(gate, (1, decoder.hidden), Role.SHARED_ROUTER, layer)

    return decoder.model(name, "qwen2_moe", layers(), n_experts=n_experts)


def build_qwen3(name: str, config: Config) -> Model:
    """The dense Qwen3: Llama with norms on query and key heads."""
    decoder = Decoder.of(config, heads_given=True)
    intermediate = config.width("intermediate_size")
    bias = config.flag("attention_bias", False)

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from decoder.attention(layer, bias=bias, head_norms=True)
            yield from decoder.gated_mlp(layer, intermediate)

    return decoder.model(name, "qwen3", layers())


def build_qwen3_moe(name: str, config: Config) -> Model:
    """Qwen3-MoE: each `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""
    decoder = Decoder.of(config, heads_given=True)
    n_experts, sparse, expert_width, dense_width = _mixture(config, decoder.n_layers)
    bias = config.flag("attention_bias", False)

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from decoder.attention(layer, bias=bias, head_norms=True)
            if sparse[layer]:
                yield from decoder.experts(layer, n_experts, expert_width)
            else:
                yield from decoder.gated_mlp(layer, dense_width)

    return decoder.model(name, "qwen3_moe", layers(), n_experts=n_experts)


def _mixture(config: Config, n_layers: int) -> tuple[int, list[bool], int, int]:
    """Experts (0 if no layer has any), which layers have them, the width of one, and that of a dense layer.

    A width that no layer uses (intermediate_size, when all have experts) is not needed and limits no scale.
    """
    n_experts = config.count(config.spelled("num_experts", "num_local_experts"), least=0)
    step, dense_layers = config.count("decoder_sparse_step", 1), config.counts("mlp_only_layers")
    sparse = [n_experts > 0 and layer not in dense_layers and (layer + 1) % step == 0 for layer in range(n_layers)]
    expert_width = config.width("moe_intermediate_size") if any(sparse) else 0
    dense_width = config.width("intermediate_size") if not all(sparse) else 0
    return n_experts if any(sparse) else 0, sparse, expert_width, dense_width
