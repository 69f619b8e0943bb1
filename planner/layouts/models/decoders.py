"""The parts that decoder-only families are made of, as parameters under their Hugging Face names.

Rule: shapes follow torch.nn.Linear, [out, in]. A family is a sequence of calls of these.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.parameters import Parameter, Role
from shardroute.planner.layouts.tensors import Tensor
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes that every layer shares, and the makers of its parts."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    tied: bool
    dtype: str

    @classmethod
    def of(cls, config: Config, *, heads_given: bool = False) -> "Decoder":
        """The sizes in a config.

        `heads_given`: `num_key_value_heads` and `head_dim` must be there, since the defaults of the family's
        class fit few of its models; otherwise they are the heads and hidden / heads, as in LlamaConfig.
        """
        n_heads = config.count("num_attention_heads")
        n_kv_heads = config.count("num_key_value_heads", None if heads_given else n_heads)
        if n_heads % n_kv_heads:
            raise InputError(
                f"{config.where}: num_key_value_heads = {n_kv_heads} doesn't divide num_attention_heads = "
                f"{n_heads}; every KV head serves the same number of query heads"
            )
        hidden = config.width("hidden_size")
        return cls(
            n_layers=config.count("num_hidden_layers"),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=config.width("head_dim", None if heads_given else config.widths["hidden_size"] // n_heads),
            hidden=hidden,
            vocab=config.width("vocab_size"),
            tied=config.flag("tie_word_embeddings", False),
            dtype=config.dtype,
        )

    def whole(self, layers: Iterator[Parameter]) -> tuple[Parameter, ...]:
        """The embedding, the parameters of the layers, the final norm and, unless tied, the output layer."""
        vocab = (self.vocab, self.hidden)
        return (
            self._parameter("model.embed_tokens.weight", vocab, Role.EMBEDDING),
            *layers,
            self._parameter("model.norm.weight", (self.hidden,), Role.FINAL_NORM),
            *([] if self.tied else [self._parameter("lm_head.weight", vocab, Role.LM_HEAD)]),
        )

    def attention(self, layer: int, *, bias: bool, head_norms: bool) -> Iterator[Parameter]:
        """Attention with the norms before and after it; biases and norms of heads where there are any."""
        n_q, n_kv, prefix = (
            self.n_heads * self.head_dim,
            self.n_kv_heads * self.head_dim,
            f"model.layers.{layer}",
        )
        yield self._parameter(f"{prefix}.input_layernorm.weight", (self.hidden,), Role.INPUT_NORM, layer)
        for name, shape, role, bias_role in (
            ("q_proj", (n_q, self.hidden), Role.Q_PROJ, Role.Q_BIAS),
            ("k_proj", (n_kv, self.hidden), Role.K_PROJ, Role.K_BIAS),
            ("v_proj", (n_kv, self.hidden), Role.V_PROJ, Role.V_BIAS),
            ("o_proj", (self.hidden, n_q), Role.O_PROJ, Role.O_BIAS),
        ):
            yield from self._linear(f"{prefix}.self_attn.{name}", shape, role, bias_role if bias else None, layer)
        if head_norms:
            yield self._parameter(f"{prefix}.self_attn.q_norm.weight", (self.head_dim,), Role.Q_NORM, layer)
            yield self._parameter(f"{prefix}.self_attn.k_norm.weight", (self.head_dim,), Role.K_NORM, layer)
        yield self._parameter(f"{prefix}.post_attention_layernorm.weight", (self.hidden,), Role.POST_ATTENTION_NORM, layer)

    def gated_mlp(self, layer: int, intermediate: int, *, bias: bool = False) -> Iterator[Parameter]:
        """A dense feed-forward part: gate, up and down."""
        for name, shape, role, bias_role in (
            ("gate_proj", (intermediate, self.hidden), Role.GATE_PROJ, Role.GATE_BIAS),
            ("up_proj", (intermediate, self.hidden), Role.UP_PROJ, Role.UP_BIAS),
            ("down_proj", (self.hidden, intermediate), Role.DOWN_PROJ, Role.DOWN_BIAS),
        ):
            yield from self._linear(f"model.layers.{layer}.mlp.{name}", shape, role, bias_role if bias else None, layer)

    def experts(self, layer: int, n_experts: int, intermediate: int) -> Iterator[Parameter]:
        """Gated experts and their router; each projection of all experts is one tensor, dim 0 the expert."""
        prefix = f"model.layers.{layer}.mlp"
        yield self._parameter(f"{prefix}.gate.weight", (n_experts, self.hidden), Role.ROUTER, layer)
        for name, shape, role in (
            ("gate_proj", (n_experts, intermediate, self.hidden), Role.EXPERT_GATE),
            ("up_proj", (n_experts, intermediate, self.hidden), Role.EXPERT_UP),
            ("down_proj", (n_experts, self.hidden, intermediate), Role.EXPERT_DOWN),
        ):
            yield self._parameter(f"{prefix}.experts.*.{name}.weight", shape, role, layer)

    def _linear(self, name: str, shape: tuple[int, int], role: Role, bias: Role | None, layer: int) -> Iterator[Parameter]:
        yield self._parameter(f"{name}.weight", shape, role, layer)
        if bias is not None:
            yield self._parameter(f"{name}.bias", shape[:1], bias, layer)

    def _parameter(self, name: str, shape: tuple[int, ...], role: Role, layer: int | None = None) -> Parameter:
        return Parameter(Tensor(name, shape, self.dtype), role, layer)
