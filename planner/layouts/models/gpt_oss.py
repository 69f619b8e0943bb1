"""GPT-OSS: GptOssForCausalLM, with attention sinks, biases everywhere and experts stacked in the checkpoint.

Rule: the tensors are those of the bf16 class. `gate_up_proj` [E, h, 2f] has gate and up columns in turn and is a view
[E, h, f, 2] here, so that gate and up are boxes; `down_proj` is [E, f, h]. The published files hold the experts as MXFP4
blocks and scales, which frameworks turn into these; the packed form itself isn't described.
"""

from collections.abc import Iterator

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.decoders import Decoder
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.tensors import Tensor


def build_gpt_oss(name: str, config: Config) -> Model:
    """Every parameter of a GPT-OSS."""
    decoder = Decoder.of(config, heads_given=True)
    n, f, h = config.count("num_local_experts"), config.width("intermediate_size"), decoder.hidden
    bias = config.flag("attention_bias", True)

    def layers() -> Iterator[Parameter]:
        for layer in range(decoder.n_layers):
            yield from decoder.attention(layer, bias=bias, head_norms=False, sinks=True)
            prefix = f"model.layers.{layer}.mlp"
            yield from decoder.linear(f"{prefix}.router", (n, h), Role.ROUTER, Role.ROUTER_BIAS, layer)
            gate_up, bias_up = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.gate_up_proj_bias"
            yield _view(decoder, gate_up, (n, h, f, 2), (n, h, 2 * f), Role.EXPERT_GATE_UP, layer)
            yield _view(decoder, bias_up, (n, f, 2), (n, 2 * f), Role.EXPERT_GATE_UP_BIAS, layer)
            yield decoder.parameter(f"{prefix}.experts.down_proj", (n, f, h), Role.EXPERT_DOWN_TRANSPOSED, layer)
            yield decoder.parameter(f"{prefix}.experts.down_proj_bias", (n, h), Role.EXPERT_DOWN_BIAS, layer)

    return decoder.model(name, "gpt_oss", layers(), n_experts=n)


def _view(decoder: Decoder, name: str, shape: tuple[int, ...], stored: tuple[int, ...], role: Role, layer: int) -> Parameter:
    return Parameter(Tensor(name, shape, decoder.dtype), role, layer, stored=stored)
