"""Nemotron-H hybrids: layers of one mixer each (Mamba-2, attention, feed-forward or experts) in a given pattern.

Rule: names are those of NemotronHForCausalLM (`backbone.layers.N.mixer`). Feed-forward parts have no gate: relu^2.
"""

from collections.abc import Iterator

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.decoders import Decoder
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role, Segment
from shardroute.planner.layouts.tensors import Tensor
from shardroute.topologies.errors import InputError

_KINDS = {"M": "Mamba-2", "*": "attention", "-": "feed-forward", "E": "experts"}


def build_nemotron_h(name: str, config: Config) -> Model:
    """Every parameter of a Nemotron-H."""
    for key in ("mamba_proj_bias", "use_bias", "mlp_bias", "attention_bias"):
        if config.given(key):
            raise InputError(f"{config.where}: {key} is set, which isn't known for nemotron_h; describe the tensors instead")
    decoder = Decoder.of(config, heads_given=True)
    pattern = _pattern(config, decoder.n_layers)
    mamba = _mamba(config, decoder) if "M" in pattern else ()
    n_experts = config.count("n_routed_experts") if "E" in pattern else 0
    expert_width = config.width("moe_intermediate_size") if "E" in pattern else 0
    # Where there is a latent size, experts work in it; the router and the shared experts do not (LatentMoE).
    latent = config.width("moe_latent_size") if "E" in pattern and config.given("moe_latent_size") else 0
    # The width is that of all shared experts together (NemotronHMOE).
    shared_width = config.width("moe_shared_expert_intermediate_size") if "E" in pattern else 0
    dense_width = config.width("intermediate_size") if "-" in pattern else 0

    def mixer(layer: int, kind: str) -> Iterator[Parameter]:
        at, h = f"backbone.layers.{layer}.mixer", decoder.hidden
        if kind == "M":
            for suffix, shape, role, segments in mamba:
                yield Parameter(Tensor(f"{at}.{suffix}", shape, decoder.dtype), role, layer, segments)
        elif kind == "*":
            n_q, n_kv = decoder.n_heads * decoder.head_dim, decoder.n_kv_heads * decoder.head_dim
            for suffix, shape, role in (
                ("q_proj", (n_q, h), Role.Q_PROJ),
                ("k_proj", (n_kv, h), Role.K_PROJ),
                ("v_proj", (n_kv, h), Role.V_PROJ),
                ("o_proj", (h, n_q), Role.O_PROJ),
            ):
                yield decoder.parameter(f"{at}.{suffix}.weight", shape, role, layer)
        elif kind == "-":
            yield decoder.parameter(f"{at}.up_proj.weight", (dense_width, h), Role.UNGATED_UP, layer)
            yield decoder.parameter(f"{at}.down_proj.weight", (h, dense_width), Role.DOWN_PROJ, layer)
        else:
            yield decoder.parameter(f"{at}.gate.weight", (n_experts, h), Role.ROUTER, layer)
            yield decoder.correction(f"{at}.gate", n_experts, layer)
            if latent:
                yield decoder.parameter(f"{at}.fc1_latent_proj.weight", (latent, h), Role.LATENT_IN, layer)
                yield decoder.parameter(f"{at}.fc2_latent_proj.weight", (h, latent), Role.LATENT_OUT, layer)
            inside = latent or h
            for suffix, shape, role in (
                ("experts.*.up_proj", (n_experts, expert_width, inside), Role.EXPERT_UNGATED_UP),
                ("experts.*.down_proj", (n_experts, inside, expert_width), Role.EXPERT_DOWN),
                ("shared_experts.up_proj", (shared_width, h), Role.SHARED_UNGATED_UP),
                ("shared_experts.down_proj", (h, shared_width), Role.SHARED_DOWN),
            ):
                yield decoder.parameter(f"{at}.{suffix}.weight", shape, role, layer)

    def layers() -> Iterator[Parameter]:
        for layer, kind in enumerate(pattern):
            yield decoder.parameter(f"backbone.layers.{layer}.norm.weight", (decoder.hidden,), Role.MIXER_NORM, layer)
            yield from mixer(layer, kind)

    names = ("backbone.embeddings.weight", "backbone.norm_f.weight", "lm_head.weight")
    return decoder.model(name, "nemotron_h", layers(), n_experts=n_experts, names=names)


def _pattern(config: Config, n_layers: int) -> str:
    pattern = config.text("hybrid_override_pattern")
    unknown = sorted(set(pattern) - set(_KINDS))
    if unknown or len(pattern) != n_layers:
        kinds = ", ".join(f"{sign} ({kind})" for sign, kind in _KINDS.items())
        raise InputError(
            f"{config.where}: hybrid_override_pattern {pattern!r} has {len(pattern)} layers"
            f"{' and the unknown ' + ', '.join(unknown) if unknown else ''}; expected {n_layers} of {kinds}"
        )
    return pattern


def _mamba(config: Config, decoder: Decoder) -> tuple[tuple[str, tuple[int, ...], Role, tuple[Segment, ...]], ...]:
    """Names, shapes, roles and segments of a Mamba-2 mixer; in_proj has the rows z, x, B, C and dt (NemotronHMamba2Mixer)."""
    heads, groups = config.count("mamba_num_heads"), config.count("n_groups")
    head, state = Segment(heads, config.width("mamba_head_dim")), Segment(groups, config.width("ssm_state_size"))
    per_head = Segment(heads, 1)
    n_inner, n_state = heads * head.rows, groups * state.rows
    n_conv, kernel = n_inner + 2 * n_state, config.count("conv_kernel", 4)
    conv = (head, state, state)
    projected = n_inner + n_conv + heads
    return (
        ("in_proj.weight", (projected, decoder.hidden), Role.MAMBA_IN, (head, *conv, per_head)),
        ("conv1d.weight", (n_conv, 1, kernel), Role.MAMBA_CONV, conv),
        *((("conv1d.bias", (n_conv,), Role.MAMBA_CONV_BIAS, conv),) if config.flag("use_conv_bias", True) else ()),
        ("dt_bias", (heads,), Role.MAMBA_HEAD, (per_head,)),
        ("A_log", (heads,), Role.MAMBA_HEAD, (per_head,)),
        ("D", (heads,), Role.MAMBA_HEAD, (per_head,)),
        ("norm.weight", (n_inner,), Role.MAMBA_NORM, (head,)),
        ("out_proj.weight", (decoder.hidden, n_inner), Role.MAMBA_OUT, ()),
    )
