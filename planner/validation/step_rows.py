"""Published training steps and attention on GB200 under XLA: predicted against published, with the three fitted rates left out.

The steps are NVIDIA's table of Llama 3 8B with MaxText, NCCL beside NVSHMEM. Three rates (products of matrices, attention,
memory traffic of ring steps) are fitted to its NVSHMEM column; its NCCL column follows from NCCL's channel law. One sequence a
GPU is taken as the batch, which the table doesn't state: with one sequence in all, the ring alone would outlast the step of
128K tokens on 32 GPUs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.models import load_model
from shardroute.planner.layouts.tensors import DTYPES
from shardroute.planner.steps import (
    Carrier,
    DenseModel,
    StepLayout,
    StepRates,
    dense_model,
    load_rates,
    network,
    predict_step,
    step_flops,
)
from shardroute.planner.steps.transfers import Network, hop
from shardroute.planner.validation.rows import ValidationRow
from shardroute.planner.validation.shipped import ring_source, table_rows
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.machines import load_machine

_MACHINE: Final = "gb200-nvl72"
# Rates can't be told apart beyond what these ratios say: cuDNN's attention on B200 (full mask, 8K: 861.6 backward, 1320.7
# forward) and the memory traffic of ring steps (MagiAttention's charts of B200: 34 B/element forward, 110 backward).
BACKWARD_RATE: Final = 861.6 / 1320.7
BACKWARD_TRAFFIC: Final = 3.0
_TE_HEADS: Final = 128
_TE_HEAD_DIM: Final = 128
_TE_BATCH: Final = 2
_TE_CP: Final = 4
_BYTES: Final = DTYPES["bf16"]
UNEXPLAINED: Final = "UNEXPLAINED: published as 30 to 36 % slower than NVSHMEM, which no ring or collective of the step can make"


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """One row of the table; TFLOP/s a GPU as MaxText counts them."""

    seq: int
    cp: int
    tp: int
    nccl_tflops: float
    nvshmem_tflops: float
    note: str

    def layout(self, carrier: Carrier) -> StepLayout:
        """How it was run, as far as the table says."""
        return StepLayout(seq=self.seq, cp=self.cp, tp=self.tp, carrier=carrier)

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.seq // 1024}K tokens, cp {self.cp} x tp {self.tp}"

    def seconds(self, tflops: float) -> float:
        """A step's time from its TFLOP/s."""
        return step_flops(llama(), self.seq, 1.0).total / (tflops * 1e12)


@dataclass(frozen=True, slots=True)
class Gain:
    """How much faster NVSHMEM was published and is predicted to be, as shares; explained is False where nothing known does it."""

    name: str
    published: float
    predicted: float
    explained: bool


@cache
def published_steps() -> tuple[PublishedStep, ...]:
    """The rows of the table."""
    return tuple(
        PublishedStep(int(r["seq"]), int(r["cp"]), int(r["tp"]), float(r["nccl_tflops"]), float(r["nvshmem_tflops"]), r["note"])
        for r in table_rows("ring_steps.csv")
    )


@cache
def llama() -> DenseModel:
    """The table's model."""
    return dense_model(load_model("llama-3-8b"))


def fit_rates(steps: Sequence[PublishedStep]) -> StepRates:
    """The three rates that meet the NVSHMEM column of these rows with the least relative error.

    A step's time is linear in the seconds an operation and the bytes an element, as nothing overlaps but weights.
    """
    measured = np.array([step.seconds(step.nvshmem_tflops) for step in steps])
    least = np.array([_linear(step)[0] for step in steps])
    slopes = np.array([_linear(step)[1] for step in steps])
    found, *_ = np.linalg.lstsq(slopes / measured[:, None], 1 - least / measured, rcond=None)
    return _rates(_units() * found)


def step_rows() -> Iterator[ValidationRow]:
    """Both columns of the table. The NVSHMEM rows are fitted, each also predicted by rates fitted to the others."""
    steps, rates, source = published_steps(), load_rates(_MACHINE), ring_source("nvidia-blog")
    for step in steps:
        left_out = fit_rates([other for other in steps if other is not step])
        yield ValidationRow(
            "step", f"{source.title}: NVSHMEM", f"NVSHMEM {step.name}", step.seconds(step.nvshmem_tflops),
            _step_s(step, Carrier.NVSHMEM, rates), True, _step_s(step, Carrier.NVSHMEM, left_out), "row",
            "three rates, puts not hidden", source.url, step.note,
        )  # fmt: skip
    for step in steps:
        explained = step.tp == 1
        yield ValidationRow(
            "step" if explained else "unexplained", f"{source.title}: NCCL, tp {step.tp}", f"NCCL {step.name}",
            step.seconds(step.nccl_tflops), _step_s(step, Carrier.NCCL, rates), False, None, "",
            "three rates, hops by the channel law not hidden", source.url, step.note if explained else UNEXPLAINED,
        )  # fmt: skip


def gains() -> list[Gain]:
    """NVSHMEM over NCCL, row by row of the table."""
    rates = load_rates(_MACHINE)
    return [
        Gain(
            step.name,
            step.nvshmem_tflops / step.nccl_tflops - 1,
            _step_s(step, Carrier.NCCL, rates) / _step_s(step, Carrier.NVSHMEM, rates) - 1,
            step.tp == 1,
        )
        for step in published_steps()
    ]


def te_rows() -> Iterator[ValidationRow]:
    """TransformerEngine's ring over 4 GB200 under JAX: a quarter of the time on one GPU, ring steps, hops that nothing hides."""
    source, rates = ring_source("te-jax"), load_rates(_MACHINE)
    net = _network(_TE_CP)
    for row in table_rows("ring_te.csv"):
        seq = int(row["seq"])
        predicted_s = float(row["alone_ms"]) / 1e3 / _TE_CP + _te_ring_s(seq, rates, net)
        yield ValidationRow(
            "attention", f"{source.title}", f"{row['layout']} fwd+bwd cp {_TE_CP}, {seq // 1024}K tokens, "
            f"{row['segments']} documents", float(row["ring4_ms"]) / 1e3, predicted_s, False, None, "",
            "ring, not hidden; rates of the training step", source.url,
        )  # fmt: skip


def _te_ring_s(seq: int, rates: StepRates, net: Network) -> float:
    tokens = _TE_BATCH * seq / _TE_CP
    layout = StepLayout(seq=seq, cp=_TE_CP, batch=_TE_BATCH / _TE_CP)
    kv = tokens * 2 * _TE_HEADS * _TE_HEAD_DIM * _BYTES
    once, twice = hop(net, layout, rates, kv).alone_s, hop(net, layout, rates, 2 * kv).alone_s
    traffic = tokens * _TE_HEADS * _TE_HEAD_DIM * (rates.forward_bytes + rates.backward_bytes) / net.machine.hbm_Bps
    return _TE_CP * traffic + (_TE_CP - 1) * once + _TE_CP * twice + once


@cache
def _linear(step: PublishedStep) -> tuple[float, tuple[float, ...]]:
    """Seconds of a step whose three rates are endless, and what each adds at its shipped value."""
    units = _units()
    at = _step_s(step, Carrier.NVSHMEM, _rates(units))
    more = [_step_s(step, Carrier.NVSHMEM, _rates(units * (1 + 0.5 * (np.arange(3) == i)))) for i in range(3)]
    slopes = tuple((s - at) / 0.5 for s in more)
    return at - sum(slopes), slopes


def _units() -> NDArray[np.float64]:
    """The shipped rates as what a step's time is linear in: seconds an operation (twice), bytes an element."""
    rates = load_rates(_MACHINE)
    return np.array([1 / rates.linear_Fps, 1 / rates.forward_Fps, rates.forward_bytes])


def _rates(found: NDArray[np.float64]) -> StepRates:
    linear_s, attention_s, traffic = (float(x) for x in found)
    return replace(
        load_rates(_MACHINE),
        linear_Fps=1 / linear_s,
        forward_Fps=1 / attention_s,
        backward_Fps=BACKWARD_RATE / attention_s,
        forward_bytes=traffic,
        backward_bytes=BACKWARD_TRAFFIC * traffic,
    )


def _step_s(step: PublishedStep, carrier: Carrier, rates: StepRates) -> float:
    return predict_step(llama(), step.layout(carrier), rates, _network(step.cp * step.tp)).step_s


@cache
def _network(n_gpus: int) -> Network:
    return network(load_machine(_MACHINE), default_calibration(_MACHINE), n_gpus)
