"""The parts that decoder-only families are made of, as parameters under their Hugging Face names.

Rule: shapes follow torch.nn.Linear, [out, in]. A family is a sequence of calls of these.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
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
    def of(cls, config: Config, *, heads_given: bool = False, head_dim: int | None = None) -> "Decoder":
        """The sizes in a config.

        `heads_given`: `num_key_value_heads` and `head_dim` must be there, since the defaults of the family's
        class fit few of its models; otherwise they are the heads and hidden / heads, as in LlamaConfig.
        `head_dim`: said by the family, where the config's own key means something else.
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
            head_dim=config.width("head_dim", None if heads_given else config.widths["hidden_size"] // n_heads)
            if head_dim is None
            else head_dim,
            hidden=hidden,
            vocab=config.width("vocab_size"),
            tied=config.flag("tie_word_embeddings", False),
            dtype=config.dtype,
        )

    def attention(
        self, layer: int, *, bias: bool, head_norms: bool, output_bias: bool | None = None, sinks: bool = False
    ) -> Iterator[Parameter]:
        """Attention with the norms before and after it; biases, norms of heads and sinks where there are any.

        `output_bias`: whether o_proj has one; as the others unless said.
        """
        n_q, n_kv, prefix = (
            self.n_heads * self.head_dim,
            self.n_kv_heads * self.head_dim,
            f"model.layers.{layer}",
        )
        yield self.parameter(f"{prefix}.input_layernorm.weight", (self.hidden,), Role.INPUT_NORM, layer)
        for name, shape, role, bias_role in (
            ("q_proj", (n_q, self.hidden), Role.Q_PROJ, Role.Q_BIAS),
            ("k_proj", (n_kv, self.hidden), Role.K_PROJ, Role.K_BIAS),
            ("v_proj", (n_kv, self.hidden), Role.V_PROJ, Role.V_BIAS),
            ("o_proj", (self.hidden, n_q), Role.O_PROJ, Role.O_BIAS),
        ):
            biased = output_bias if role is Role.O_PROJ and output_bias is not None else bias
            yield from self.linear(f"{prefix}.self_attn.{name}", shape, role, bias_role if biased else None, layer)
        if sinks:
            yield self.parameter(f"{prefix}.self_attn.sinks", (self.n_heads,), Role.SINKS, layer)
        if head_norms:
            yield self.parameter(f"{prefix}.self_attn.q_norm.weight", (self.head_dim,), Role.Q_NORM, layer)
            yield self.parameter(f"{prefix}.self_attn.k_norm.weight", (self.head_dim,), Role.K_NORM, layer)
        yield self.parameter(f"{prefix}.post_attention_layernorm.weight", (self.hidden,), Role.POST_ATTENTION_NORM, layer)

    def gated_mlp(self, layer: int, intermediate: int, *, bias: bool = False) -> Iterator[Parameter]:
        """A dense feed-forward part: gate, up and down."""
        for name, shape, role, bias_role in (
            ("gate_proj", (intermediate, self.hidden), Role.GATE_PROJ, Role.GATE_BIAS),
            ("up_proj", (intermediate, self.hidden), Role.UP_PROJ, Role.UP_BIAS),
            ("down_proj", (self.hidden, intermediate), Role.DOWN_PROJ, Role.DOWN_BIAS),
        ):
            yield from self.linear(f"model.layers.{layer}.mlp.{name}", shape, role, bias_role if bias else None, layer)

    def experts(
        self,
        layer: int,
        n_experts: int,
        intermediate: int,
        *,
        module: str = "mlp",
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        correction: bool = False,
    ) -> Iterator[Parameter]:
        """Gated experts and their router; each projection of all experts is one tensor, dim 0 the expert.

        `names` are those of gate, up and down; `correction`: the router has a bias for balance, fp32 as it is trained.
        """
        prefix = f"model.layers.{layer}.{module}"
        yield self.parameter(f"{prefix}.gate.weight", (n_experts, self.hidden), Role.ROUTER, layer)
        if correction:
            yield self.correction(f"{prefix}.gate", n_experts, layer)
        gate, up, down = names
        for name, shape, role in (
            (gate, (n_experts, intermediate, self.hidden), Role.EXPERT_GATE),
            (up, (n_experts, intermediate, self.hidden), Role.EXPERT_UP),
            (down, (n_experts, self.hidden, intermediate), Role.EXPERT_DOWN),
        ):
            yield self.parameter(f"{prefix}.experts.*.{name}.weight", shape, role, layer)

    def correction(self, router: str, n_experts: int, layer: int) -> Parameter:
        """The bias that balances the experts (DeepSeek-V3); fp32 in every checkpoint that has it."""
        return Parameter(Tensor(f"{router}.e_score_correction_bias", (n_experts,), "f32"), Role.ROUTER_CORRECTION, layer)

    def shared_experts(self, layer: int, intermediate: int, module: str = "shared_experts") -> Iterator[Parameter]:
        """The experts that every token visits, as one gated feed-forward part of their joint width."""
        prefix = f"model.layers.{layer}.mlp.{module}"
        for name, shape, role in (
            ("gate_proj", (intermediate, self.hidden), Role.SHARED_GATE),
            ("up_proj", (intermediate, self.hidden), Role.SHARED_UP),
            ("down_proj", (self.hidden, intermediate), Role.SHARED_DOWN),
        ):
            yield self.parameter(f"{prefix}.{name}.weight", shape, role, layer)

    def mtp_head(self, layer: int) -> Iterator[Parameter]:
        """What a layer for predicting a further token has beside a decoder layer (DeepSeek-V3, README_WEIGHTS.md).

        Its embed_tokens and shared_head.head are copies of the model's own in the file, and so no tensors here.
        """
        prefix = f"model.layers.{layer}"
        yield self.parameter(f"{prefix}.enorm.weight", (self.hidden,), Role.MTP_EMBEDDING_NORM, layer)
        yield self.parameter(f"{prefix}.hnorm.weight", (self.hidden,), Role.MTP_HIDDEN_NORM, layer)
        yield self.parameter(f"{prefix}.eh_proj.weight", (self.hidden, 2 * self.hidden), Role.MTP_PROJ, layer)
        yield self.parameter(f"{prefix}.shared_head.norm.weight", (self.hidden,), Role.MTP_FINAL_NORM, layer)

    def model(
        self,
        name: str,
        family: str,
        layers: Iterator[Parameter],
        *,
        n_experts: int = 0,
        names: tuple[str, str, str] = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    ) -> Model:
        """The model of these layers between the embedding, the final norm and, unless tied, the output layer (`names`)."""
        vocab = (self.vocab, self.hidden)
        embedding, final_norm, lm_head = names
        return Model(
            name=name,
            family=family,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            n_experts=n_experts,
            tied=self.tied,
            parameters=(
                self.parameter(embedding, vocab, Role.EMBEDDING),
                *layers,
                self.parameter(final_norm, (self.hidden,), Role.FINAL_NORM),
                *([] if self.tied else [self.parameter(lm_head, vocab, Role.LM_HEAD)]),
            ),
        )

    def linear(self, name: str, shape: tuple[int, int], role: Role, bias: Role | None, layer: int) -> Iterator[Parameter]:
        """A weight [out, in] and, when its role is given, its bias [out]."""
        yield self.parameter(f"{name}.weight", shape, role, layer)
        if bias is not None:
            yield self.parameter(f"{name}.bias", shape[:1], bias, layer)

    def parameter(self, name: str, shape: tuple[int, ...], role: Role, layer: int | None = None) -> Parameter:
        """A parameter in the model's dtype."""
        return Parameter(Tensor(name, shape, self.dtype), role, layer)
