"""The work of a training step: what each pass of a layer computes and moves on one GPU.

As MaxText runs it on GPUs: weights sharded over the fsdp and the context axis and gathered layer by layer, activations of the
tensor axis gathered before and scattered behind each block of matrices, attention by TransformerEngine. The counts of bytes
and hops are those of its code (jax/cpp_extensions/attention.py, FusedRingAttn).
"""

from shardroute.planner.backends.rates import StepRates
from shardroute.planner.layouts.tensors import DTYPES
from shardroute.planner.steps.graphs import LayerWork, RingWork, StepWork
from shardroute.planner.steps.models import DenseModel
from shardroute.planner.steps.settings import Recompute, Scheme, StepLayout
from shardroute.planner.steps.transfers import NOTHING, Flow, Network, collective, hop, in_turn
from shardroute.topologies.collectives import Collective

# MaxText: dtype bf16 for what travels, weight_dtype fp32 for weights, gradients and both moments of Adam.
_BYTES = DTYPES["bf16"]
# The log-sum-exp of a row and head is a float32.
_LSE_BYTES = 4
# The optimizer reads weight, gradient and two moments, and writes weight and moments: 7 numbers of fp32 a parameter.
_OPTIMIZER_BYTES = 28
# Five products of matrices in the backward pass of attention, two in the forward pass.
BACKWARD_FLOPS = 2.5


def kv_bytes(model: DenseModel, layout: StepLayout) -> float:
    """Bytes of the keys and values that one GPU holds of one layer: what a hop carries in the forward pass."""
    return layout.tokens * 2 * model.n_kv_heads * model.head_dim * _BYTES / layout.tp


def output_elements(model: DenseModel, layout: StepLayout) -> float:
    """Elements of attention's output on one GPU, for one layer."""
    return layout.tokens * model.n_heads * model.head_dim / layout.tp


def attention_flops(model: DenseModel, layout: StepLayout) -> float:
    """Operations of one GPU in the forward pass of one layer's attention, of the causal half."""
    square = 4 * layout.sequences * layout.seq**2 * model.n_heads * model.head_dim
    return square / 2 / (layout.cp * layout.tp)


def step_work(model: DenseModel, layout: StepLayout, rates: StepRates, net: Network) -> StepWork:
    """The work of a step. Raises InputError when the layout's carrier can't take its hops."""
    linear = 2 * layout.tokens * model.layer_weights / layout.tp / rates.linear_Fps
    # Query, key and value before attention; its output and the MLP behind.
    before = model.hidden * (model.n_heads + 2 * model.n_kv_heads) * model.head_dim / model.layer_weights
    activations = layout.tokens * model.hidden * _BYTES
    gather = collective(net, Collective.ALL_GATHER, activations, net.group(layout.tp))
    scatter = collective(net, Collective.REDUCE_SCATTER, activations, net.group(layout.tp))
    forward = LayerWork(linear * before, _forward(model, layout, rates, net), linear * (1 - before), gather, scatter)
    backward = LayerWork(
        2 * linear * before, _backward(model, layout, rates, net), 2 * linear * (1 - before), gather, scatter
    )
    shards = layout.cp * layout.fsdp
    weights = model.layer_weights / layout.tp * _BYTES
    logits = 3 * 2 * layout.tokens * model.hidden * model.vocab / layout.tp
    held_by = net.group(shards, layout.tp)
    parameters = model.n_parameters / (shards * layout.tp)
    return StepWork(
        forward=forward,
        again=forward if layout.recompute is Recompute.FULL else None,
        backward=backward,
        weights=collective(net, Collective.ALL_GATHER, weights, held_by),
        gradients=collective(net, Collective.REDUCE_SCATTER, weights, held_by),
        logits_s=logits / rates.linear_Fps,
        optimizer_s=parameters * _OPTIMIZER_BYTES / net.machine.hbm_Bps,
        overlapped=layout.overlapped,
        n_sms=rates.n_sms,
    )


def _by_stride(
    model: DenseModel, layout: StepLayout, net: Network, seconds: float, *, backward: bool
) -> RingWork:
    """Attention of an all-gather: of all heads, or of some at a time, of which the next are gathered meanwhile.

    Backward, the gradients of the heads before are reduced behind the gather of the next; so one reduction is left at the end.
    """
    n, kv, group = layout.gathers(model.n_kv_heads), kv_bytes(model, layout), net.group(layout.cp, layout.tp)
    gather = collective(net, Collective.ALL_GATHER, layout.cp * kv / n, group)
    reduce = collective(net, Collective.REDUCE_SCATTER, layout.cp * kv / n, group) if backward else NOTHING
    return RingWork(n, seconds / n, seconds / n, n - 1, in_turn(gather, reduce), NOTHING, gather, reduce)


def _pass_q(
    model: DenseModel, layout: StepLayout, rates: StepRates, net: Network, seconds: float, *, backward: bool
) -> RingWork:
    """Attention whose queries travel: forward q, and home o with its log-sum-exp; backward q, o, dO and the log-sum-exp, and home
    dQ. What goes home does so at the end, from all to all (Yang et al. 2024, arXiv 2411.01783).
    """
    output = output_elements(model, layout)
    q, lse = output * _BYTES, output / model.head_dim * _LSE_BYTES
    travels, home = (3 * q + lse, q) if backward else (q, q + lse)
    at_home = collective(net, Collective.ALL_TO_ALL, layout.cp * home, net.group(layout.cp, layout.tp))
    return RingWork(layout.cp, seconds, seconds, layout.cp - 1, hop(net, layout, rates, travels), NOTHING, NOTHING, at_home)


def _forward(model: DenseModel, layout: StepLayout, rates: StepRates, net: Network) -> RingWork:
    n = layout.ring
    seconds = attention_flops(model, layout) / rates.forward_Fps / n
    if n > 1:
        seconds += output_elements(model, layout) * rates.forward_bytes / net.machine.hbm_Bps
    if layout.scheme is Scheme.ALL_GATHER and layout.cp > 1:
        return _by_stride(model, layout, net, seconds, backward=False)
    if layout.scheme is Scheme.PASS_Q:
        return _pass_q(model, layout, rates, net, seconds, backward=False)
    whole, after = _around(model, layout, net, backward=False)
    travels = hop(net, layout, rates, kv_bytes(model, layout)) if n > 1 else NOTHING
    return RingWork(n, seconds, seconds, n - 1, travels, NOTHING, whole, after)


def _backward(model: DenseModel, layout: StepLayout, rates: StepRates, net: Network) -> RingWork:
    """Each block's hop carries keys, values and their gradients; one more hop takes the gradients home."""
    n, kv = layout.ring, kv_bytes(model, layout)
    seconds = BACKWARD_FLOPS * attention_flops(model, layout) / rates.backward_Fps / n
    if n > 1:
        seconds += output_elements(model, layout) * rates.backward_bytes / net.machine.hbm_Bps
    if layout.scheme is Scheme.ALL_GATHER and layout.cp > 1:
        return _by_stride(model, layout, net, seconds, backward=True)
    if layout.scheme is Scheme.PASS_Q:
        return _pass_q(model, layout, rates, net, seconds, backward=True)
    whole, after = _around(model, layout, net, backward=True)
    travels, home = (hop(net, layout, rates, 2 * kv), hop(net, layout, rates, kv)) if n > 1 else (NOTHING, NOTHING)
    return RingWork(n, seconds, seconds, n, travels, home, whole, after)


def _around(model: DenseModel, layout: StepLayout, net: Network, *, backward: bool) -> tuple[Flow, Flow]:
    """What a scheme moves before and behind all blocks."""
    kv, output = kv_bytes(model, layout), output_elements(model, layout) * _BYTES
    match layout.scheme:
        case Scheme.RING | Scheme.ALL_GATHER | Scheme.PASS_Q:  # the latter two have works of their own
            return NOTHING, NOTHING
        case Scheme.ULYSSES | Scheme.HYBRID:
            # Query, keys and values in, output out; backward their gradients the other way, and query, keys and values again
            # only where they weren't kept, which they are.
            inner = net.group(layout.ulysses, layout.tp)
            into = collective(net, Collective.ALL_TO_ALL, output + kv, inner)
            out = collective(net, Collective.ALL_TO_ALL, output, inner)
            return (out, into) if backward else (into, out)
