"""The predicted time of a training step, and what it is made of."""

from dataclasses import dataclass

from shardroute.planner.backends.rates import StepRates
from shardroute.planner.simulator import simulate
from shardroute.planner.steps.flops import step_flops
from shardroute.planner.steps.graphs import LayerWork, StepGraph, StepWork, step_graph
from shardroute.planner.steps.memories import StepMemory, step_memory
from shardroute.planner.steps.models import DenseModel
from shardroute.planner.steps.settings import StepLayout, check_layout
from shardroute.planner.steps.transfers import Network
from shardroute.planner.steps.works import step_work

# Layers that are simulated: the first ones fill the lanes, one is like all that follow, the last has no next one to fetch for.
SIMULATED_LAYERS = 4


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A step's seconds; `compute_s` of them a GPU computes, `exposed_s` it waits for others' data.

    tflops_per_gpu is as MaxText states it: operations counted once (see shardroute.planner.steps.flops) over the time.
    hop_s is one forward hop alone; n_sms what it holds of the GPU while it runs.
    """

    layout: StepLayout
    step_s: float
    compute_s: float
    exposed_s: float
    tflops_per_gpu: float
    hop_s: float
    n_sms: int
    memory: StepMemory


def predict_step(model: DenseModel, layout: StepLayout, rates: StepRates, net: Network) -> StepPrediction:
    """Simulate one training step. Raises InputError for a layout that the model or the carrier doesn't allow."""
    check_layout(model, layout)
    return predict_work(step_work(model, layout, rates, net), model, layout, net)


def predict_work(work: StepWork, model: DenseModel, layout: StepLayout, net: Network) -> StepPrediction:
    """predict_step of a layout that was checked and whose work is known."""
    step_s = simulated_s(work, model.n_layers, (net.machine.nvlink_Bps, net.machine.gpu_nic_Bps))
    compute_s = computed_s(work, model.n_layers)
    flops = step_flops(model, layout.seq, layout.batch).total
    hop = work.forward.attention.hop
    return StepPrediction(
        layout=layout,
        step_s=step_s,
        compute_s=compute_s,
        exposed_s=max(step_s - compute_s, 0.0),
        tflops_per_gpu=flops / step_s / 1e12,
        hop_s=hop.alone_s,
        n_sms=hop.n_sms,
        memory=step_memory(model, layout, net.machine),
    )


def simulated_s(work: StepWork, n_layers: int, capacity: tuple[float, float], n_simulated: int = SIMULATED_LAYERS) -> float:
    """Seconds of a step: the first layers simulated, the others as long as the last of those that settled."""
    n = min(n_layers, n_simulated)
    laid = step_graph(work, n, capacity)
    result = simulate(laid.graph)
    left = n_layers - n
    if not left:
        return result.makespan_s
    return result.makespan_s + left * _period_s(laid, [float(t) for t in result.finish_s])


def computed_s(work: StepWork, n_layers: int) -> float:
    """Seconds that a GPU computes in a step: what is left when nothing has to be waited for."""
    passes = [work.forward, work.backward] + ([work.again] if work.again is not None else [])
    return n_layers * sum(_layer_s(layer) for layer in passes) + work.logits_s + work.optimizer_s


def _layer_s(layer: LayerWork) -> float:
    return layer.before_s + layer.attention.computed_s + layer.after_s


def _period_s(laid: StepGraph, finish_s: list[float]) -> float:
    # The last layer of a pass has no next one whose weights come in beside it.
    forward, backward = laid.forward_ends, laid.backward_ends
    return finish_s[forward[-2]] - finish_s[forward[-3]] + finish_s[backward[-2]] - finish_s[backward[-3]]
