"""Llama 2 and 3, and what shares their class: LlamaForCausalLM of Transformers."""

from collections.abc import Iterator

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.decoders import Decoder
from shardroute.planner.layouts.models.parameters import Model, Parameter


def build_llama(name: str, config: Config) -> Model:
    """Every parameter of a Llama."""
    decoder = Decoder.of(config)
    intermediate = config.width("intermediate_size")
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from decoder.attention(layer, bias=attention_bias, head_norms=False)
            yield from decoder.gated_mlp(layer, intermediate, bias=mlp_bias)

    return decoder.model(name, "llama", layers())
