"""Mixtral: MixtralForCausalLM, whose experts call gate, down and up w1, w2 and w3."""

from collections.abc import Iterator

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.decoders import Decoder
from shardroute.planner.layouts.models.parameters import Model, Parameter


def build_mixtral(name: str, config: Config) -> Model:
    """Every parameter of a Mixtral, by the names of the checkpoint (Transformers 5 renames them on loading)."""
    decoder = Decoder.of(config)
    n_experts, width = config.count("num_local_experts"), config.width("intermediate_size")

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from decoder.attention(layer, bias=False, head_norms=False)
            yield from decoder.experts(layer, n_experts, width, module="block_sparse_moe", names=("w1", "w3", "w2"))

    return decoder.model(name, "mixtral", layers(), n_experts=n_experts)
