"""Published ring attention against predictions: the errors that the documentation states, and what keeps them honest."""

import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.backends.channels import Path, channel_law
from shardroute.planner.steps import load_rates
from shardroute.planner.steps.transfers import send_recv
from shardroute.planner.validation.attention_calls import AttentionCall, attention_calls
from shardroute.planner.validation.attention_rows import (
    attention_rows,
    fit_traffic,
    fitted_traffic,
    kernel_rows,
    rates_of,
    skipped_calls,
)
from shardroute.planner.validation.attentions import Block, StepTraffic, attention_s
from shardroute.planner.validation.kernels import KernelCurve
from shardroute.planner.validation.ring import RingReport, ring_report
from shardroute.planner.validation.step_rows import fit_rates, gains, published_steps
from shardroute.planner.validation.systems import ring_system

TOLD: list[float] = []


@pytest.fixture(scope="module")
def report() -> RingReport:
    return ring_report(TOLD.append)


def test_who_waits_for_the_rows_is_told_a_share_that_only_grows(report: RingReport) -> None:
    assert 200 < len(set(TOLD)) <= len(report.rows)
    assert sorted(TOLD) == TOLD
    assert 0 < TOLD[0] < 0.1 < 0.8 < TOLD[-1] <= 1


def test_the_nvshmem_column_is_met_within_4_percent_when_each_row_is_left_out(report: RingReport) -> None:
    errors = [row.left_out_error for row in report.rows if row.kind == "step" and row.fitted]

    assert len(errors) == 8
    assert all(error is not None for error in errors)
    rms = statistics.fmean(error**2 for error in errors if error is not None) ** 0.5
    assert rms < 0.04
    assert report.goals[0].found == pytest.approx(rms)
    assert report.goals[0].met


def test_gains_at_tp_1_follow_within_1_5_points_and_at_tp_2_stay_unexplained() -> None:
    found = gains()

    assert [gain.explained for gain in found] == [True] * 6 + [False] * 2
    assert all(abs(gain.predicted - gain.published) < 0.015 for gain in found if gain.explained)
    # Nothing in the model makes these; should that change, say how, and stop calling them unexplained.
    assert all(gain.published - gain.predicted > 0.25 for gain in found if not gain.explained)


def test_calls_that_were_not_fitted_are_met_at_a_median_under_10_and_a_worst_under_25_percent(report: RingReport) -> None:
    errors = [abs(row.error) for row in report.rows if row.kind == "attention" and not row.fitted]

    assert len(errors) > 200
    assert statistics.median(errors) < 0.10
    assert max(errors) < 0.25
    assert all(goal.met for goal in report.goals)


def test_goals_are_judged_by_rows_that_are_not_fitted(report: RingReport) -> None:
    unseen = sorted(abs(row.error) for row in report.rows if not row.fitted)
    explained = [abs(gain.predicted - gain.published) for gain in report.gains if gain.explained]

    assert [goal.n_rows for goal in report.goals] == [8, 6, len(unseen), len(unseen)]
    assert [goal.found for goal in report.goals[1:]] == pytest.approx([max(explained), statistics.median(unseen), unseen[-1]])


def test_unexplained_rows_are_in_no_summary(report: RingReport) -> None:
    counted = sum(s.n_rows for s in report.summaries if not s.name.startswith((" ", "kernels")))

    assert len(report.unexplained) == 2
    assert counted == len(report.rows)


def test_the_shipped_rates_are_the_fit_to_the_published_steps() -> None:
    fitted, shipped = fit_rates(published_steps()), load_rates("gb200-nvl72")

    for name in ("linear_Fps", "forward_Fps", "backward_Fps", "forward_bytes", "backward_bytes"):
        assert getattr(shipped, name) == pytest.approx(getattr(fitted, name), rel=2e-3)


def test_a_fit_finds_the_traffic_that_made_the_times() -> None:
    calls = [c for c in attention_calls() if c.source == "magi" and c.impl == "ring_p2p" and c.n_nodes == 1 and not c.skip]
    truth = StepTraffic(30.0, 90.0)
    made = [replace(call, measured_s=attention_s(call, truth, rates_of(call))) for call in calls]

    found = fit_traffic(made)

    assert (found.forward, found.backward) == (pytest.approx(30.0, rel=1e-6), pytest.approx(90.0, rel=1e-6))


def test_every_published_call_is_predicted_or_says_why_not() -> None:
    predicted, skipped, every = len(list(attention_rows())), len(list(skipped_calls())), len(list(attention_calls()))

    assert predicted + skipped == every
    assert all(reason for _, reason in skipped_calls())


def test_fitted_calls_are_the_rings_of_one_node_and_the_runs_without_a_ring() -> None:
    fitted = [row for row in attention_rows() if row.fitted]

    assert {row.how.split(",")[0] for row in fitted} == {"ring", "ulysses"}
    assert all(row.left_out_s is not None for row in fitted)


def call(**change: object) -> AttentionCall:
    whole = {
        "name": "a", "source": "magi", "system": "h100", "impl": "", "scheme": "ring", "layout": "zigzag", "ulysses": 1,
        "direction": "fwd", "mask": "causal", "cp": 8, "n_nodes": 1, "seq": 65536, "heads": 8, "kv_heads": 1, "head_dim": 128,
        "batch": 1, "kernel": "", "alone_s": 0.0, "measured_s": 1.0, "skip": "",
    }  # fmt: skip
    return AttentionCall(**{**whole, **change})  # type: ignore[arg-type]


def flat(call: AttentionCall, block: Block) -> float:
    return 1e14


# Keys and values of 8,192 tokens, one head of 128 in bf16, by send and receive inside one H100 node.
_LAW = channel_law(ring_system("h100").machine, ring_system("h100").calibration)
assert _LAW is not None
HOP = send_recv(_LAW, 8192 * 2 * 128 * 2, 8, True, Path.NVLINK)


def test_a_zigzag_ring_takes_its_operations_and_its_traffic_when_hops_are_hidden() -> None:
    asked = call()
    traffic_s = 8 * (65536 / 8 * 8 * 128) * 50 / ring_system("h100").machine.hbm_Bps

    # A hop holds a channel's SM each, and attention has 132 less those.
    hops_s = 7 * HOP.n_sms / 132 * HOP.alone_s

    assert attention_s(asked, StepTraffic(50, 0), flat) == pytest.approx(asked.flops / 1e14 + traffic_s + hops_s, rel=1e-9)


def test_a_contiguous_ring_waits_for_the_rank_with_whole_squares() -> None:
    even, uneven = (attention_s(call(layout=layout), StepTraffic(0, 0), flat) for layout in ("zigzag", "contiguous"))

    hops_s = 7 * HOP.n_sms / 132 * HOP.alone_s
    assert (uneven - hops_s) / (even - hops_s) == pytest.approx((2 * 8 - 1) / 8)


def test_hops_that_are_slower_than_blocks_show() -> None:
    asked = call(kv_heads=8)

    def fast(call: AttentionCall, block: Block) -> float:
        return 1e18

    assert attention_s(asked, StepTraffic(0, 0), fast) > 100 * asked.flops / 1e18


@given(st.lists(st.integers(1, 6), min_size=3, max_size=6, unique=True), st.floats(1e-15, 1e-12), st.floats(1e-12, 1e-9))
def test_a_kernel_curve_goes_on_as_a_time_of_squares_and_lengths(logs: list[int], a: float, b: float) -> None:
    seq = tuple(1024 * 2**k for k in sorted(logs))
    curve = KernelCurve(seq, tuple(1 / (a + b / s) for s in seq))

    assert curve.at(10 * seq[-1]) == pytest.approx(1 / (a + b / (10 * seq[-1])), rel=1e-6)
    assert curve.at(seq[1]) == pytest.approx(curve.rate_Fps[1])
    assert curve.without(seq[1]).seq == (seq[0], *seq[2:])


def test_charts_interpolate_to_within_a_few_percent_where_kernels_are_busy() -> None:
    long = [abs(row.judged_error) for row in kernel_rows() if row.name.split()[-1] in ("8K", "16K", "32K") and row.judged_error]

    assert max(long) < 0.15


def test_the_fitted_traffic_is_of_the_order_of_reading_and_writing_an_output_in_fp32_a_few_times() -> None:
    # 4 bytes read and 4 written for each merge of outputs, several times over; 10 to 100 bytes an element.
    found = fitted_traffic()

    assert 10 < found.forward < found.backward < 120
