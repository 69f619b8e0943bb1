"""What Megatron-Core calls the buffer of each parameter, with layers numbered over the whole model.

Rule: names are those of Megatron-Core's Transformer Engine layers, as Megatron-Bridge maps them to Hugging Face names.
"""

from typing import Final

from shardroute.planner.layouts.models.parameters import Model, Parameter, Role

OUTPUT_LAYER: Final = "output_layer.weight"
_FC1: Final = "mlp.experts.linear_fc1.weight"
_FC2: Final = "mlp.experts.linear_fc2.weight"
_GLOBAL: Final = {
    Role.EMBEDDING: "embedding.word_embeddings.weight",
    Role.LM_HEAD: OUTPUT_LAYER,
    Role.FINAL_NORM: "decoder.final_layernorm.weight",
}
_IN_LAYER: Final = {
    Role.INPUT_NORM: "self_attention.linear_qkv.layer_norm_weight",
    Role.POST_ATTENTION_NORM: "mlp.linear_fc1.layer_norm_weight",
    Role.Q_PROJ: "self_attention.linear_qkv.weight",
    Role.K_PROJ: "self_attention.linear_qkv.weight",
    Role.V_PROJ: "self_attention.linear_qkv.weight",
    Role.O_PROJ: "self_attention.linear_proj.weight",
    Role.Q_BIAS: "self_attention.linear_qkv.bias",
    Role.K_BIAS: "self_attention.linear_qkv.bias",
    Role.V_BIAS: "self_attention.linear_qkv.bias",
    Role.O_BIAS: "self_attention.linear_proj.bias",
    Role.Q_NORM: "self_attention.q_layernorm.weight",
    Role.K_NORM: "self_attention.k_layernorm.weight",
    Role.SINKS: "self_attention.core_attention.softmax_offset",
    Role.Q_A_PROJ: "self_attention.linear_q_down_proj.weight",
    Role.Q_A_NORM: "self_attention.linear_q_up_proj.layer_norm_weight",
    Role.Q_B_PROJ: "self_attention.linear_q_up_proj.weight",
    Role.LATENT_Q_PROJ: "self_attention.linear_q_proj.weight",
    Role.KV_A_PROJ: "self_attention.linear_kv_down_proj.weight",
    Role.KV_A_NORM: "self_attention.linear_kv_up_proj.layer_norm_weight",
    Role.KV_B_PROJ: "self_attention.linear_kv_up_proj.weight",
    Role.GATE_PROJ: "mlp.linear_fc1.weight",
    Role.UP_PROJ: "mlp.linear_fc1.weight",
    Role.UNGATED_UP: "mlp.linear_fc1.weight",
    Role.DOWN_PROJ: "mlp.linear_fc2.weight",
    Role.GATE_BIAS: "mlp.linear_fc1.bias",
    Role.UP_BIAS: "mlp.linear_fc1.bias",
    Role.DOWN_BIAS: "mlp.linear_fc2.bias",
    Role.SHARED_GATE: "mlp.shared_experts.linear_fc1.weight",
    Role.SHARED_UP: "mlp.shared_experts.linear_fc1.weight",
    Role.SHARED_UNGATED_UP: "mlp.shared_experts.linear_fc1.weight",
    Role.SHARED_DOWN: "mlp.shared_experts.linear_fc2.weight",
    Role.SHARED_ROUTER: "mlp.shared_experts.gate_weight",
    Role.LATENT_IN: "mlp.fc1_latent_proj.weight",
    Role.LATENT_OUT: "mlp.fc2_latent_proj.weight",
    Role.ROUTER: "mlp.router.weight",
    Role.ROUTER_BIAS: "mlp.router.bias",
    Role.ROUTER_CORRECTION: "mlp.router.expert_bias",
    Role.EXPERT_GATE: _FC1,
    Role.EXPERT_UP: _FC1,
    Role.EXPERT_UNGATED_UP: _FC1,
    Role.EXPERT_GATE_UP: _FC1,
    Role.EXPERT_GATE_UP_BIAS: "mlp.experts.linear_fc1.bias",
    Role.EXPERT_DOWN: _FC2,
    Role.EXPERT_DOWN_TRANSPOSED: _FC2,
    Role.EXPERT_DOWN_BIAS: "mlp.experts.linear_fc2.bias",
    Role.MAMBA_IN: "mixer.in_proj.weight",
    Role.MAMBA_CONV: "mixer.conv1d.weight",
    Role.MAMBA_CONV_BIAS: "mixer.conv1d.bias",
    Role.MAMBA_NORM: "mixer.norm.weight",
    Role.MAMBA_OUT: "mixer.out_proj.weight",
}
_IN_MTP: Final = {
    Role.MTP_EMBEDDING_NORM: "enorm.weight",
    Role.MTP_HIDDEN_NORM: "hnorm.weight",
    Role.MTP_PROJ: "eh_proj.weight",
    Role.MTP_FINAL_NORM: "final_layernorm.weight",
}
# Norms are fused into the linear layer behind them where Transformer Engine can. It can't where two read the same norm:
# the router and the experts, the two down projections of MLA.
_MIXER_NORMS: Final = {
    Role.MAMBA_IN: "mixer.in_proj.layer_norm_weight",
    Role.Q_PROJ: "self_attention.linear_qkv.layer_norm_weight",
    Role.ROUTER: "pre_mlp_layernorm.weight",
    Role.UNGATED_UP: "mlp.linear_fc1.layer_norm_weight",
}


class MegatronNames:
    """The buffer of a parameter, by its role and by what else its layer has."""

    def __init__(self, model: Model) -> None:
        self.n_layers = model.n_layers
        self.is_hybrid = bool(model.shapes(Role.MIXER_NORM))
        self.roles: dict[int | None, set[Role]] = {}
        for parameter in model.parameters:
            self.roles.setdefault(parameter.layer, set()).add(parameter.role)

    def __call__(self, parameter: Parameter) -> str:
        role, layer = parameter.role, parameter.layer
        if role is Role.FINAL_NORM and self.is_hybrid:
            return "decoder.final_norm.weight"  # MambaStack's word for it
        if layer is None:
            return _GLOBAL[role]
        if role in _IN_MTP:
            return f"mtp.layers.{layer - self.n_layers}.{_IN_MTP[role]}"
        mtp = layer >= self.n_layers
        prefix = f"mtp.layers.{layer - self.n_layers}.transformer_layer." if mtp else f"decoder.layers.{layer}."
        return prefix + self._in_layer(parameter, self.roles[layer])

    def _in_layer(self, parameter: Parameter, beside: set[Role]) -> str:
        match parameter.role:
            case Role.INPUT_NORM if Role.KV_A_PROJ in beside:
                return "input_layernorm.weight"
            case Role.POST_ATTENTION_NORM if Role.ROUTER in beside:
                return "pre_mlp_layernorm.weight"
            case Role.MIXER_NORM:
                return next(name for role, name in _MIXER_NORMS.items() if role in beside)
            case Role.MAMBA_HEAD:
                return "mixer." + parameter.tensor.name.rpartition(".")[2]
            case role:
                return _IN_LAYER[role]
