"""DeepSeek-V3, and Kimi K2 that shares its class: latent attention (MLA), shared experts, leading dense layers."""

from collections.abc import Iterator

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.decoders import Decoder
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.topologies.errors import InputError


def build_deepseek_v3(name: str, config: Config) -> Model:
    """Every parameter of DeepseekV3ForCausalLM; with `config.mtp`, those of its `num_nextn_predict_layers` too."""
    if config.flag("attention_bias", False):
        raise InputError(f"{config.where}: attention_bias = true isn't known for {config.text('model_type')}; expected false")
    q_lora, kv_lora = config.width("q_lora_rank", 0, least=0), config.width("kv_lora_rank")
    nope, rope, v = config.width("qk_nope_head_dim"), config.width("qk_rope_head_dim"), config.width("v_head_dim")
    decoder = Decoder.of(config, head_dim=nope + rope)
    n_experts, n_dense = config.count("n_routed_experts"), config.count("first_k_dense_replace", 0, least=0)
    step = config.count("moe_layer_freq", 1)
    sparse = [layer >= n_dense and layer % step == 0 for layer in range(decoder.n_layers)]
    expert_width = config.width("moe_intermediate_size")
    shared_width = expert_width * config.count("n_shared_experts", 0, least=0)
    dense_width = config.width("intermediate_size") if not all(sparse) else 0
    n_mtp = config.count("num_nextn_predict_layers", 0, least=0) if config.mtp else 0

    def attention(layer: int) -> Iterator[Parameter]:
        prefix, heads, make = f"model.layers.{layer}", decoder.n_heads, decoder.parameter
        yield make(f"{prefix}.input_layernorm.weight", (decoder.hidden,), Role.INPUT_NORM, layer)
        at = f"{prefix}.self_attn"
        if q_lora:
            yield make(f"{at}.q_a_proj.weight", (q_lora, decoder.hidden), Role.Q_A_PROJ, layer)
            yield make(f"{at}.q_a_layernorm.weight", (q_lora,), Role.Q_A_NORM, layer)
            yield make(f"{at}.q_b_proj.weight", (heads * (nope + rope), q_lora), Role.Q_B_PROJ, layer)
        else:
            yield make(f"{at}.q_proj.weight", (heads * (nope + rope), decoder.hidden), Role.LATENT_Q_PROJ, layer)
        yield make(f"{at}.kv_a_proj_with_mqa.weight", (kv_lora + rope, decoder.hidden), Role.KV_A_PROJ, layer)
        yield make(f"{at}.kv_a_layernorm.weight", (kv_lora,), Role.KV_A_NORM, layer)
        yield make(f"{at}.kv_b_proj.weight", (heads * (nope + v), kv_lora), Role.KV_B_PROJ, layer)
        yield make(f"{at}.o_proj.weight", (decoder.hidden, heads * v), Role.O_PROJ, layer)
        yield make(f"{prefix}.post_attention_layernorm.weight", (decoder.hidden,), Role.POST_ATTENTION_NORM, layer)

    def with_experts(layer: int) -> Iterator[Parameter]:
        yield from decoder.experts(layer, n_experts, expert_width, correction=True)
        if shared_width:
            yield from decoder.shared_experts(layer, shared_width)

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from attention(layer)
            yield from with_experts(layer) if sparse[layer] else decoder.gated_mlp(layer, dense_width)
        for layer in range(decoder.n_layers, decoder.n_layers + n_mtp):
            yield from attention(layer)
            yield from with_experts(layer)
            yield from decoder.mtp_head(layer)

    return decoder.model(name, config.text("model_type"), layers(), n_experts=n_experts if any(sparse) else 0)
