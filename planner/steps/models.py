"""What a training step needs to know of a dense model: its sizes, read from the logical tensors."""

from dataclasses import dataclass

from shardroute.planner.layouts.models import Model, Role
from shardroute.topologies.errors import InputError

# Roles that a plain decoder layer doesn't have; a step of such a model would be timed wrongly.
_NOT_DENSE = {
    Role.ROUTER: "experts",
    Role.KV_A_PROJ: "latent attention",
    Role.MAMBA_IN: "state-space layers",
}


@dataclass(frozen=True, slots=True)
class DenseModel:
    """Sizes of a decoder of equal layers: attention with grouped KV heads, and an MLP of `n_mlp_matrices` (3 when gated)."""

    name: str
    n_layers: int
    hidden: int
    intermediate: int
    n_mlp_matrices: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    n_parameters: int

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer."""
        heads = 2 * self.n_heads + 2 * self.n_kv_heads
        return self.hidden * (self.n_mlp_matrices * self.intermediate + heads * self.head_dim)


def dense_model(model: Model) -> DenseModel:
    """The sizes of a model whose layers are all alike and dense. Raises InputError, with the reason, for any other."""
    for role, what in _NOT_DENSE.items():
        if model.shapes(role):
            raise InputError(
                f"{model.name}: its layers have {what}; the training step is known for dense models only, such as llama-3-8b"
            )
    gated, plain = model.shapes(Role.GATE_PROJ), model.shapes(Role.UNGATED_UP)
    found = gated or plain
    if len(found) != 1 or bool(gated) == bool(plain):
        raise InputError(f"{model.name}: expected one width of MLP in all layers, found {len(gated) + len(plain)}")
    intermediate, hidden = found[0]
    ((vocab, _),) = model.shapes(Role.EMBEDDING)
    return DenseModel(
        name=model.name,
        n_layers=model.n_layers,
        hidden=hidden,
        intermediate=intermediate,
        n_mlp_matrices=3 if gated else 2,
        n_heads=model.n_heads,
        n_kv_heads=model.n_kv_heads,
        head_dim=model.head_dim,
        vocab=vocab,
        n_parameters=model.n_parameters,
    )
