"""Training steps with long contexts: what one takes in time and memory, and the best way to lay it over GPUs.

model = dense_model(load_model("llama-3-8b"))
machine = load_machine("gb200-nvl72")
net = network(machine, default_calibration("gb200-nvl72"), 16)
layout = StepLayout(seq=131072, cp=16, carrier=Carrier.NVSHMEM)
print(predict_step(model, layout, load_rates("gb200-nvl72"), net).tflops_per_gpu)
"""

from shardroute.planner.backends.rates import StepRates, load_rates, rates_names
from shardroute.planner.steps.flops import StepFlops, step_flops
from shardroute.planner.steps.memories import StepMemory, step_memory
from shardroute.planner.steps.models import DenseModel, dense_model
from shardroute.planner.steps.predictions import StepPrediction, predict_step
from shardroute.planner.steps.searches import Wanted, batch_that_fits, search, why
from shardroute.planner.steps.settings import Carrier, Recompute, Scheme, StepLayout
from shardroute.planner.steps.transfers import Network, network

__all__ = [
    "Carrier",
    "DenseModel",
    "Network",
    "Recompute",
    "Scheme",
    "StepFlops",
    "StepLayout",
    "StepMemory",
    "StepPrediction",
    "StepRates",
    "Wanted",
    "batch_that_fits",
    "dense_model",
    "load_rates",
    "network",
    "predict_step",
    "rates_names",
    "search",
    "step_flops",
    "step_memory",
    "why",
]
