"""Memory that a training step takes on one GPU, part by part."""

from dataclasses import dataclass

from shardroute.planner.steps.models import DenseModel
from shardroute.planner.steps.settings import Recompute, Scheme, StepLayout
from shardroute.topologies.machines import Machine

# MaxText: weight_dtype fp32 (so gradients and Adam's moments too), dtype bf16 for activations.
_MASTER_BYTES, _BYTES = 4, 2
# Assumption: the output layer and the loss are computed in 8 tiles of the tokens (MaxText's num_vocab_tiling), in bf16 with
# one copy in fp32; whole logits of 128,256 words would be the largest tensor of the step.
_LOGITS_BYTES, _LOGITS_TILES = 6, 8
# Assumption: the share that XLA's allocator may use, XLA_PYTHON_CLIENT_MEM_FRACTION; 0.75 by default, raised for training.
USABLE_SHARE = 0.9
# Of queries that travel: two blocks in flight, each with its output and that one's gradient; beside these all partial outputs (or
# dQ), before they go home and when they have come.
_Q_IN_FLIGHT = 6


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes on one GPU. weights: the sharded fp32 weights, their gradients, and two gathered layers; optimizer: two moments;
    activations: what is kept for the backward pass, one layer at work, logits; kv: slots of keys and values,
    or queries, that travel.
    """

    weights: float
    optimizer: float
    activations: float
    kv: float
    capacity: float

    @property
    def total(self) -> float:
        """All bytes."""
        return self.weights + self.optimizer + self.activations + self.kv

    @property
    def fits(self) -> bool:
        """Whether a GPU has room: 0.9 of its memory."""
        return self.total <= USABLE_SHARE * self.capacity


def step_memory(model: DenseModel, layout: StepLayout, machine: Machine) -> StepMemory:
    """The memory of a step under MaxText's shardings."""
    shards = layout.cp * layout.tp * layout.fsdp
    tokens = layout.tokens / layout.tp  # activations are sharded over the tensor axis too
    gathered = 2 * model.layer_weights * _BYTES / layout.tp if shards > layout.tp else 0
    q, kv = model.n_heads * model.head_dim, 2 * model.n_kv_heads * model.head_dim
    # Inputs of both norms, of the matrices and of attention (query, keys, values, output), and the MLP's middle.
    layer = tokens * (4 * model.hidden + 2 * q + kv + model.n_mlp_matrices * model.intermediate) * _BYTES
    kept = tokens * model.hidden * _BYTES if layout.recompute is Recompute.FULL else layer
    logits = tokens * model.vocab * _LOGITS_BYTES / _LOGITS_TILES
    travelling = q * (_Q_IN_FLIGHT + 2 * layout.cp) if layout.scheme is Scheme.PASS_Q else kv * _slots(model, layout)
    # The layer at work: its activations and their gradients.
    return StepMemory(
        weights=2 * model.n_parameters * _MASTER_BYTES / shards + gathered,
        optimizer=2 * model.n_parameters * _MASTER_BYTES / shards,
        activations=model.n_layers * kept + max(2 * layer, logits),
        kv=tokens * _BYTES * travelling,
        capacity=float(machine.memory_bytes),
    )


def _slots(model: DenseModel, layout: StepLayout) -> float:
    """Blocks of keys and values beside a rank's own: two in flight, each with gradients; or all that were gathered, of two groups
    of heads where they are gathered by groups.
    """
    match layout.scheme:
        case Scheme.RING | Scheme.HYBRID:
            return 4 if layout.ring > 1 else 0
        case Scheme.ALL_GATHER:
            n = layout.gathers(model.n_kv_heads)
            return 2 * layout.cp * min(n, 2) / n if layout.cp > 1 else 0
        case Scheme.ULYSSES:
            return 2 if layout.cp > 1 else 0
        case Scheme.PASS_Q:
            raise AssertionError("queries travel")
