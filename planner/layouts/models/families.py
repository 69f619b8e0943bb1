"""The families of models, by the `model_type` of their config. A family is one function and one entry.

Rule: names, shapes and defaults are those of the family's class in Transformers.
"""

from collections.abc import Callable, Iterator, Mapping

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.decoders import Decoder
from shardroute.planner.layouts.models.parameters import Model, Parameter
from shardroute.topologies.errors import InputError

Family = Callable[[str, Config], Model]


def build_llama(name: str, config: Config) -> Model:
    """LlamaForCausalLM: Llama 2 and 3, and what shares their class."""
    decoder = Decoder.of(config)
    intermediate = config.width("intermediate_size")
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from decoder.attention(layer, bias=attention_bias, head_norms=False)
            yield from decoder.gated_mlp(layer, intermediate, bias=mlp_bias)

    return _model(name, "llama", decoder, layers(), n_experts=0)


def build_qwen3(name: str, config: Config) -> Model:
    """Qwen3ForCausalLM, the dense Qwen3: Llama with norms on query and key heads."""
    decoder = Decoder.of(config, heads_given=True)
    intermediate = config.width("intermediate_size")
    bias = config.flag("attention_bias", False)

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from decoder.attention(layer, bias=bias, head_norms=True)
            yield from decoder.gated_mlp(layer, intermediate)

    return _model(name, "qwen3", decoder, layers(), n_experts=0)


def build_qwen3_moe(name: str, config: Config) -> Model:
    """Qwen3MoeForCausalLM: each `decoder_sparse_step`-th layer has experts, but for `mlp_only_layers`."""
    decoder = Decoder.of(config, heads_given=True)
    n_experts = config.count(config.spelled("num_experts", "num_local_experts"), least=0)
    bias = config.flag("attention_bias", False)
    step, dense_layers = config.count("decoder_sparse_step", 1), config.counts("mlp_only_layers")
    sparse = [n_experts > 0 and layer not in dense_layers and (layer + 1) % step == 0 for layer in range(decoder.n_layers)]
    # A width that no layer uses (intermediate_size, when all have experts) is not needed and limits no scale.
    expert_width = config.width("moe_intermediate_size") if any(sparse) else 0
    dense_width = config.width("intermediate_size") if not all(sparse) else 0

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from decoder.attention(layer, bias=bias, head_norms=True)
            if sparse[layer]:
                yield from decoder.experts(layer, n_experts, expert_width)
            else:
                yield from decoder.gated_mlp(layer, dense_width)

    return _model(name, "qwen3_moe", decoder, layers(), n_experts=n_experts if any(sparse) else 0)


FAMILIES: Mapping[str, Family] = {
    "llama": build_llama,
    "qwen3": build_qwen3,
    "qwen3_moe": build_qwen3_moe,
}


def family_of(config: Config) -> Family:
    """The builder for a config's `model_type`. Raises InputError, with the supported ones, for any other."""
    model_type = config.text("model_type")
    if model_type not in FAMILIES:
        raise InputError(f"{config.where}: model_type {model_type!r} isn't known; expected {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def _model(name: str, family: str, decoder: Decoder, layers: Iterator[Parameter], n_experts: int) -> Model:
    return Model(
        name=name,
        family=family,
        n_layers=decoder.n_layers,
        n_heads=decoder.n_heads,
        n_kv_heads=decoder.n_kv_heads,
        head_dim=decoder.head_dim,
        n_experts=n_experts,
        tied=decoder.tied,
        parameters=decoder.whole(layers),
    )
