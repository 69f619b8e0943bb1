"""Floating-point operations of a training step, counted as MaxText counts them.

Source: MaxText, utils/maxtext_utils.py, calculate_tflops_training_per_device (causal attention halved since commit a4c01726e,
2025-07-18). Counted: the matrices of the layers, attention, the output layer; forward once and backward twice. Not counted:
what is computed again in the backward pass, the look-up of embeddings, norms, softmax.
"""

from dataclasses import dataclass

from shardroute.planner.steps.models import DenseModel

# Backward takes two products of matrices for each one of the forward pass.
_PASSES = 3


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Operations a GPU and step: `layers` (their matrices), `attention` (causal, so half of the square), `logits`."""

    layers: float
    attention: float
    logits: float

    @property
    def total(self) -> float:
        """What MaxText divides by the step's time to state TFLOP/s a device."""
        return self.layers + self.attention + self.logits


def step_flops(model: DenseModel, seq: int, batch_per_gpu: float) -> StepFlops:
    """Operations of one step for each GPU, when each GPU has `batch_per_gpu` sequences of `seq` tokens to its account.

    `batch_per_gpu` is the global batch over all GPUs, so it may be below 1: one sequence on a ring of 16 is 1/16.
    Llama-3-8B, one sequence of 65,536 tokens on each GPU: layers 2.744e15, attention 3.378e15, logits 2.066e14.
    """
    tokens = batch_per_gpu * seq
    layers = _PASSES * 2 * tokens * model.n_layers * model.layer_weights
    attention = _PASSES * 4 * tokens * seq * model.n_layers * model.n_heads * model.head_dim / 2
    logits = _PASSES * 2 * tokens * model.hidden * model.vocab
    return StepFlops(float(layers), float(attention), float(logits))
