"""GLM-4.5 and 4.5-Air: Glm4MoeForCausalLM."""

from collections.abc import Iterator

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.decoders import Decoder
from shardroute.planner.layouts.models.parameters import Model, Parameter


def build_glm4_moe(name: str, config: Config) -> Model:
    """Every parameter of a GLM-4.5: grouped-query attention with biases on query, key and value, experts as DeepSeek-V3's."""
    decoder = Decoder.of(config, heads_given=True)
    n_experts, n_dense = config.count("n_routed_experts"), config.count("first_k_dense_replace", 1, least=0)
    expert_width = config.width("moe_intermediate_size")
    shared_width = expert_width * config.count("n_shared_experts", 1, least=0)
    dense_width = config.width("intermediate_size") if n_dense else 0
    bias, head_norms = config.flag("attention_bias", False), config.flag("use_qk_norm", False)
    n_mtp = config.count("num_nextn_predict_layers", 0, least=0) if config.mtp else 0

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers + n_mtp):
            yield from decoder.attention(layer, bias=bias, output_bias=False, head_norms=head_norms)
            if layer < n_dense:
                yield from decoder.gated_mlp(layer, dense_width)
                continue
            yield from decoder.experts(layer, n_experts, expert_width, correction=True)
            if shared_width:
                yield from decoder.shared_experts(layer, shared_width)
            if layer >= decoder.n_layers:
                yield from decoder.mtp_head(layer)

    return decoder.model(name, "glm4_moe", layers(), n_experts=n_experts if n_dense < decoder.n_layers else 0)
