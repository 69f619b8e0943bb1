"""Published attention over several GPUs: predicted against published, with what was fitted to it left out in turn."""

import statistics
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

import numpy as np

from shardroute.planner.steps.works import BACKWARD_FLOPS
from shardroute.planner.validation.attention_calls import AttentionCall, attention_calls, read_calls
from shardroute.planner.validation.attentions import Block, Rates, StepTraffic, attention_s, chart_rate
from shardroute.planner.validation.kernels import kernel_curves
from shardroute.planner.validation.rows import ValidationRow
from shardroute.planner.validation.shipped import ring_source
from shardroute.planner.validation.systems import ring_system
from shardroute.topologies.errors import InputError

# FlashAttention-2: a block of threads takes 128 rows of queries of a head; an A100 has 108 SMs, and two blocks fit on one
# (assumption, as its registers and shared memory allow for heads of up to 128).
_FA2_ROWS: Final = 128
_A100_BLOCKS: Final = 2 * 108
# A run whose own call without a ring is this much slower than the same kernel on a long sequence isn't timed by the GPU.
_GPU_BOUND: Final = 0.5


def skipped_calls() -> Iterator[tuple[AttentionCall, str]]:
    """Published calls for which nothing is predicted, and why."""
    for call in attention_calls():
        if reason := call.skip or _not_gpu_bound(call):
            yield call, reason


def n_attention_rows() -> int:
    """How many rows `attention_rows` has."""
    return len(_predicted_calls())


def attention_rows() -> Iterator[ValidationRow]:
    """Every other published call. Fitted are the two constants of a ring step, and the rate of FlashAttention-2 on A100."""
    calls = _predicted_calls()
    traffic = fitted_traffic()
    fitted_to = [call for call in calls if _fits_traffic(call)]
    for call in calls:
        left_out_s, held = None, ""
        if _fits_traffic(call):
            rest = fit_traffic([other for other in fitted_to if other is not call])
            left_out_s, held = attention_s(call, rest, rates_of(call)), "row"
        elif _fits_rate(call):
            left_out_s, held = attention_s(call, traffic, _usp_rates(call)), "row"
        source = ring_source(call.source)
        yield ValidationRow(
            kind="attention",
            series=f"{source.title}: {call.impl}, {call.mask} {call.direction} on {call.system}",
            name=_name(call),
            measured_s=call.measured_s,
            predicted_s=attention_s(call, traffic, rates_of(call)),
            fitted=held != "",
            left_out_s=left_out_s,
            held_out=held,
            how=f"{call.scheme}, {call.layout}",
            url=source.url,
            note=ring_system(call.system).note,
        )


def kernel_rows() -> Iterator[ValidationRow]:
    """Every point of the kernels' charts, predicted by the chart without it; the ends, which would be guessed, left out."""
    source = ring_source("magi-kernels")
    for kernel, curve in kernel_curves().items():
        name = f"{kernel.name} {kernel.mask} {kernel.direction}"
        for seq, rate in list(zip(curve.seq, curve.rate_Fps, strict=True))[1:]:
            # Seconds of 10^15 operations: the charts give rates.
            guess = curve.without(seq).at(seq)
            yield ValidationRow(
                "kernel", f"{source.title}: {name} on {kernel.gpu}", f"{name} {seq // 1024}K", 1e15 / rate, 1e15 / rate, True,
                1e15 / guess, "row", "its chart, without the row", source.url,
            )  # fmt: skip


def own_rows(path: str) -> Iterator[ValidationRow]:
    """Calls of a table of one's own, none of them fitted; those with a reason in `skip` are left out."""
    traffic = fitted_traffic()
    for call in read_calls(path):
        if call.skip:
            continue
        yield ValidationRow(
            "attention", f"{path}: {call.impl} on {call.system}", _name(call), call.measured_s,
            attention_s(call, traffic, rates_of(call)), False, None, "", f"{call.scheme}, {call.layout}", path,
            ring_system(call.system).note,
        )  # fmt: skip


def _name(call: AttentionCall) -> str:
    length = f"{call.seq // 1024}K tokens" if call.seq % 1024 == 0 else f"{call.seq} tokens"
    return f"{call.impl} {call.mask} {call.direction} cp {call.cp}, {length}, {call.heads} heads"


@cache
def fitted_traffic() -> StepTraffic:
    """Memory traffic of a ring step, fitted to the rings of one node of MagiAttention's charts."""
    return fit_traffic([call for call in _predicted_calls() if _fits_traffic(call)])


def fit_traffic(calls: Sequence[AttentionCall]) -> StepTraffic:
    """The traffic that meets the calls with the least relative error, each direction on its own."""
    found = {}
    for direction in ("fwd", "bwd"):
        own = [call for call in calls if call.direction == direction]
        least = np.array([attention_s(call, StepTraffic(0, 0), rates_of(call)) for call in own])
        slope = np.array([attention_s(call, StepTraffic(100, 100), rates_of(call)) for call in own])
        measured = np.array([call.measured_s for call in own])
        per_byte = (slope - least) / 100 / measured
        found[direction] = float(per_byte @ (1 - least / measured) / (per_byte @ per_byte))
    return StepTraffic(found["fwd"], found["bwd"])


def rates_of(call: AttentionCall) -> Rates:
    """The rates of a call's kernel: its chart, the source's own time on one GPU, or FlashAttention-2 on A100."""
    if call.kernel:
        return chart_rate
    if call.alone_s:
        return _alone_rate
    if call.system != "a100" or call.head_dim not in {other.head_dim for other in _usp_alone()}:
        raise InputError(f"{call.name}: give a kernel that has a chart, or in `alone` the runs a second of a cp-th on one GPU")
    return _usp_rates(None)


@cache
def _predicted_calls() -> tuple[AttentionCall, ...]:
    return tuple(call for call in attention_calls() if not (call.skip or _not_gpu_bound(call)))


def _fits_traffic(call: AttentionCall) -> bool:
    return call.source == "magi" and call.impl == "ring_p2p" and call.n_nodes == 1


def _fits_rate(call: AttentionCall) -> bool:
    return call.source == "usp" and call.ulysses == call.cp


def _alone_rate(call: AttentionCall, block: Block) -> float:
    """The rate that the source's run of a cp-th of the sequence on one GPU had; it is of forward and backward together."""
    alone = call.batch * (call.seq / call.cp) ** 2 * call.heads * call.head_dim * 4 / 2
    return alone * (1 + BACKWARD_FLOPS if call.direction == "fwd+bwd" else 1.0) / call.alone_s


def _usp_rates(left_out: AttentionCall | None) -> Rates:
    """FlashAttention-2 on A100, as fast as long calls without a ring show, less what its last wave leaves idle."""

    def rate(call: AttentionCall, block: Block) -> float:
        peers = [other for other in _long_calls(call.head_dim) if other is not left_out]
        peak = statistics.median(other.flops / other.measured_s for other in peers)
        n_blocks = -(-block.queries // _FA2_ROWS) * call.batch * call.heads / call.ulysses
        waves = -(-n_blocks // _A100_BLOCKS)
        return peak * n_blocks / (waves * _A100_BLOCKS)

    return rate


@cache
def _usp_alone() -> tuple[AttentionCall, ...]:
    return tuple(call for call in attention_calls() if _fits_rate(call))


@cache
def _long_calls(head_dim: int) -> tuple[AttentionCall, ...]:
    """The calls without a ring over the longest sequence, for heads of this size."""
    own = [call for call in _usp_alone() if call.head_dim == head_dim]
    longest = max(call.seq for call in own)
    return tuple(call for call in own if call.seq == longest)


def _not_gpu_bound(call: AttentionCall) -> str:
    """Why a call isn't timed by the GPU: its own run without a ring is far slower than the kernel; "" where it is."""
    if call.source != "usp":
        return ""
    shape = (call.seq, call.heads, call.kv_heads, call.head_dim)
    own = [c.flops / c.measured_s for c in _usp_alone() if (c.seq, c.heads, c.kv_heads, c.head_dim) == shape]
    if not own:
        return ""
    share = statistics.median(own) / statistics.median(c.flops / c.measured_s for c in _long_calls(call.head_dim))
    if share >= _GPU_BOUND:
        return ""
    return f"its own run without a ring reaches {share:.2g} of what the same kernel does on long sequences: not timed by the GPU"
