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


@dataclass(frozen=True, slots=True)
class Parameter:
    """One logical tensor, its role, and the layer it belongs to (None outside of the layers)."""

    tensor: Tensor
    role: Role
    layer: int | None = None


@dataclass(frozen=True, slots=True)
class PublishedCount:
    """How many parameters the model's makers say it has, and where they say so."""

    n_parameters: int
    source: str


@dataclass(frozen=True, slots=True)
class PipelineSplit:
    """Layers of each pipeline stage that are used in practice, and where."""

    layers: tuple[int, ...]
    source: str


@dataclass(frozen=True)
class Model:
    """Every parameter of a model, in order of layers, and the counts that decide how it may be split.

    n_experts is 0 for a dense model. `tied`: the embedding is also the output layer. `scale`: matrices hold
    1/scale of the published elements; counts of layers, heads and experts are those of the full model.
    `published` is of the full model.
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

    @cached_property
    def n_parameters(self) -> int:
        """Elements of all tensors, a tied embedding counted once."""
        return sum(p.tensor.n_elements for p in self.parameters)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The logical tensors, in the order of `parameters`."""
        return tuple(p.tensor for p in self.parameters)

    def shapes(self, role: Role) -> tuple[tuple[int, ...], ...]:
        """The different shapes that parameters of this role have, smallest first; empty if there are none."""
        return tuple(sorted({p.tensor.shape for p in self.parameters if p.role is role}))
