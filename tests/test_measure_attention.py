"""Costs of attention on CPUs are fitted so that they explain what was measured, and are never negative."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.executors.measuring.attention import _CASES, _fitted, _parts, _Sample, attention_figures
from shardroute.planner.ring.chunks import chunks_of
from shardroute.planner.ring.tiles import work
from shardroute.planner.ring.workloads import Attention, SequenceLayout
from shardroute.topologies.calibrations import calibration_figure, calibration_from_figures
from shardroute.topologies.costs import COST_TABLES

COSTS = st.tuples(*(st.floats(least, 10 * least) for least in (1e-9, 1e-11, 1e-9, 1e-9, 1e-5)))


def samples(costs, noise=1.0):
    """What each case would take with these costs, the seconds of every second one off by `noise`."""
    found = []
    for i, (tokens, heads, kv_heads, width) in enumerate(_CASES):
        for causal in (False, True):
            call = Attention((tokens,), 1, heads, kv_heads, width, causal=causal, layout=SequenceLayout.CONTIGUOUS, dtype="f32")
            rows = chunks_of(call).rows
            parts = _parts(work(call, rows, 0, rows, 0, heads // kv_heads).times(kv_heads), width)
            found.append(_Sample(parts, float(np.dot(parts, costs)) * (noise if i % 2 else 1.0)))
    return tuple(found)


@given(COSTS)
def test_costs_that_explain_all_are_found(costs) -> None:
    assert _fitted(samples(costs)) == pytest.approx(costs, rel=1e-6)


@given(COSTS, st.floats(0.5, 2.0))
def test_no_cost_is_negative_and_noise_is_split(costs, noise) -> None:
    measured = samples(costs, noise)

    fitted = _fitted(measured)

    assert min(fitted) >= 0
    errors = [np.dot(sample.parts, fitted) / sample.seconds - 1 for sample in measured]
    assert max(map(abs, errors)) <= max(noise, 1 / noise) * abs(noise - 1) + 1e-6


@pytest.mark.slow
def test_this_machines_costs_make_a_calibration() -> None:
    values = attention_figures(300.0) | {"step.launch": 1e-6, "step.piece": 0.0, "cpu.cores": 2.0, "cpu.copy_bandwidth": 1e9}

    figures = [calibration_figure(key, value, "measured by a test") for key, value in values.items()]
    calibration = calibration_from_figures("cpu-processes", "processes", "now", "none", figures)

    tables = ("attend_f32", "grad_f32", "attend_f64", "grad_f64", "sums")
    assert {f"{table}.{key}" for table in tables for key in COST_TABLES[table][1]} <= set(values)
    assert calibration.attend_f32 is not None
    assert calibration.grad_f64 is not None
    # Of wide heads a score takes some nanoseconds: 4 x 64 FLOP at 10 to 500 GFLOP/s, and its exponential.
    assert 0.5e-9 < calibration.attend_f32.score_s + 64 * calibration.attend_f32.product_s < 1e-7
