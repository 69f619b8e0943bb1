"""A model as its logical tensors, each with the role that it plays: all that a convention asks of it.

Rule: a parameter is named and shaped as in the Hugging Face checkpoint, whole and unpadded. Two departures,
both said in the name or the role: the experts of a layer are one tensor a projection (`*` in the name is dim
0), and a tied embedding is one tensor that also serves as the output layer.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from shardroute.planner.layouts.tensors import Tensor


class Role(StrEnum):
    """What a parameter is for. The shapes are [out, in]; biases and norms are [out]."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    FINAL_NORM = "final_norm"
    INPUT_NORM = "input_norm"
    POST_ATTENTION_NORM = "post_attention_norm"
    Q_PROJ = "q_proj"
    K_PROJ = "k_proj"
    V_PROJ = "v_proj"
    O_PROJ = "o_proj"
    Q_BIAS = "q_bias"
    K_BIAS = "k_bias"
    V_BIAS = "v_bias"
    O_BIAS = "o_bias"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    GATE_PROJ = "gate_proj"
    UP_PROJ = "up_proj"
    DOWN_PROJ = "down_proj"
    GATE_BIAS = "gate_bias"
    UP_BIAS = "up_bias"
    DOWN_BIAS = "down_bias"
    ROUTER = "router"
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    UNGATED_UP = "ungated_up"
    EXPERT_UNGATED_UP = "expert_ungated_up"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    SHARED_UNGATED_UP = "shared_ungated_up"
    SHARED_ROUTER = "shared_router"
    LATENT_IN = "latent_in"
    LATENT_OUT = "latent_out"
    ROUTER_BIAS = "router_bias"
    ROUTER_CORRECTION = "router_correction"
    EXPERT_GATE_UP = "expert_gate_up"
    EXPERT_GATE_UP_BIAS = "expert_gate_up_bias"
    EXPERT_DOWN_TRANSPOSED = "expert_down_transposed"
    EXPERT_DOWN_BIAS = "expert_down_bias"
    SINKS = "sinks"
    Q_A_PROJ = "q_a_proj"
    Q_A_NORM = "q_a_norm"
    Q_B_PROJ = "q_b_proj"
    LATENT_Q_PROJ = "latent_q_proj"
    KV_A_PROJ = "kv_a_proj"
    KV_A_NORM = "kv_a_norm"
    KV_B_PROJ = "kv_b_proj"
    MIXER_NORM = "mixer_norm"
    MAMBA_IN = "mamba_in"
    MAMBA_CONV = "mamba_conv"
    MAMBA_CONV_BIAS = "mamba_conv_bias"
    MAMBA_HEAD = "mamba_head"
    MAMBA_NORM = "mamba_norm"
    MAMBA_OUT = "mamba_out"
    MTP_EMBEDDING_NORM = "mtp_embedding_norm"
    MTP_HIDDEN_NORM = "mtp_hidden_norm"
    MTP_PROJ = "mtp_proj"
    MTP_FINAL_NORM = "mtp_final_norm"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of rows that is split on its own: `n_units` units (heads, groups) of `rows` rows, none of which is ever cut."""

    n_units: int
    rows: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """One logical tensor, its role, and the layer it belongs to (None outside of the layers).

    segments  runs of dim 0 that are split one by one (the z, x, B, C and dt rows of Mamba's in_proj), in order
    stored    the shape in the checkpoint, where `tensor` is a view of it
    weight    the weight whose scales these are; the role is then that of the weight
    block     elements of the weight that share one scale, dim by dim; empty when these aren't scales
    """

    tensor: Tensor
    role: Role
    layer: int | None = None
    segments: tuple[Segment, ...] = ()
    stored: tuple[int, ...] | None = None
    weight: "Parameter | None" = None
    block: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PublishedCount:
    """How many parameters the model's makers say it has, and where they say so.

    `within` is how far a count may lie from that: half of the last digit where the figure is rounded, 0 where it is exact.
    """

    n_parameters: int
    source: str
    within: int = 0

    def agrees_with(self, n_parameters: int) -> bool:
        """Whether a count is what was published, to its precision."""
        return abs(n_parameters - self.n_parameters) <= self.within


@dataclass(frozen=True, slots=True)
class PipelineSplit:
    """Layers of each pipeline stage that are used in practice, and where."""

    layers: tuple[int, ...]
    source: str


@dataclass(frozen=True)
class Model:
    """Every parameter of a model, in order of layers, and the counts that decide how it may be split.

    n_experts is 0 for a dense model. Layers from n_layers on predict further tokens (MTP) and are there on request.
    `precision` names the scales that travel with the weights, None for weights without. `tied`: the embedding is also
    the output layer. `scale`: matrices hold 1/scale of the published elements; counts of layers, heads and experts are
    those of the full model. `published` is of the full model.
    """

    name: str
    family: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_experts: int
    tied: bool
    parameters: tuple[Parameter, ...]
    scale: int = 1
    published: PublishedCount | None = None
    pipeline_splits: tuple[PipelineSplit, ...] = ()
    precision: str | None = None

    @cached_property
    def n_parameters(self) -> int:
        """Elements of all tensors but scales, a tied embedding counted once."""
        return sum(p.tensor.n_elements for p in self.parameters if p.weight is None)

    @cached_property
    def has_mtp(self) -> bool:
        """Whether layers that predict further tokens are among the parameters."""
        return any(p.layer is not None and p.layer >= self.n_layers for p in self.parameters)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The logical tensors, in the order of `parameters`."""
        return tuple(p.tensor for p in self.parameters)

    def shapes(self, role: Role) -> tuple[tuple[int, ...], ...]:
        """The different shapes that parameters of this role have, smallest first; empty if there are none."""
        return self._shapes.get(role, ())

    @cached_property
    def _shapes(self) -> dict[Role, tuple[tuple[int, ...], ...]]:
        found: dict[Role, set[tuple[int, ...]]] = {}
        for p in self.parameters:
            if p.weight is None:
                found.setdefault(p.role, set()).add(p.tensor.shape)
        return {role: tuple(sorted(shapes)) for role, shapes in found.items()}
