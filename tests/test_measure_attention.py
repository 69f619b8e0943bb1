"""Costs of attention on CPUs are fitted so that they explain what was measured, and are never negative."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.executors.measuring.attention import _CASES, _fitted, _parts, _Sample
from shardroute.planner.ring.chunks import chunks_of
from shardroute.planner.ring.tiles import work
from shardroute.planner.ring.workloads import Attention, SequenceLayout

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
