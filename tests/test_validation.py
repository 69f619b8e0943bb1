"""shardroute.planner.validation and `validate`: published rows, honest about what was fitted, within the goals that are met."""

import csv
import json
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from shardroute.executors.commands import main
from shardroute.planner.layouts.models.catalogue import load_model
from shardroute.planner.layouts.notation import parse_spec
from shardroute.planner.refits import refit_problem
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.validation.collectives import collective_rows, left_out_groups, most_collective_rows
from shardroute.planner.validation.goals import REFITS, goal_of
from shardroute.planner.validation.published import (
    assumed_refits,
    collectives_left_out,
    published_collectives,
    published_permutes,
    published_refits,
    refits_left_out,
)
from shardroute.planner.validation.refits import BENCH_WAYS, ROOT_ALONE, exported_weights, forecasts, refit_rows, refit_time
from shardroute.planner.validation.rows import ValidationRow, summarise, telling
from shardroute.planner.validation.systems import system
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

ROW = ValidationRow("collective", "s", "n", 2.0, 3.0, False, None, "", "model", "https://example.org")


@pytest.fixture(scope="module")
def rows() -> list[ValidationRow]:
    return list(collective_rows())


def test_who_waits_for_rows_is_told_a_share_that_only_grows_to_nearly_all(rows: list[ValidationRow]) -> None:
    told: list[float] = []

    assert list(telling(rows, most_collective_rows(), told.append)) == rows

    assert sorted(told) == told
    assert 0.7 < told[-1] <= 1


def test_every_published_row_names_its_source_and_what_it_was_measured_on() -> None:
    collectives, permutes, refits = published_collectives(), published_permutes(), published_refits()

    assert min(len(collectives), len(permutes)) > 100
    assert all(row.source.url.startswith("https://") and row.source.title for row in collectives)
    assert all(row.origin.url.startswith("https://") for row in refits)
    assert {row.strategy for row in (*refits, *assumed_refits())} <= {*STRATEGIES, ROOT_ALONE, *BENCH_WAYS}


def test_an_error_is_predicted_over_measured_and_a_fitted_row_is_judged_without_itself() -> None:
    fitted = replace(ROW, fitted=True, left_out_s=1.0, held_out="row")
    alone = replace(ROW, fitted=True)

    assert (ROW.error, ROW.judged_error) == (0.5, 0.5)
    assert (fitted.error, fitted.judged_error) == (0.5, -0.5)
    assert alone.judged_error is None


def test_a_summary_counts_unseen_rows_apart() -> None:
    left_out = replace(ROW, fitted=True, left_out_s=2.0)
    found = summarise("x", [ROW, replace(ROW, predicted_s=2.2), replace(ROW, fitted=True), left_out])

    assert (found.n_rows, found.n_fitted, found.n_unseen) == (4, 2, 3)
    assert found.error_worst == 0.5
    assert found.unseen_median == pytest.approx(0.1)


def test_a_point_of_a_curve_is_met_and_predicted_again_without_it(rows: list[ValidationRow]) -> None:
    points = [row for row in rows if row.held_out == "row" and not row.note]

    assert len(points) > 800
    assert statistics.median(abs(row.error) for row in points) < 0.001
    assert statistics.median(abs(row.left_out_error) for row in points) > 0.01


def test_unseen_collectives_and_permutes_are_within_a_tenth_in_the_median(rows: list[ValidationRow]) -> None:
    for chosen in (rows, [row for row in rows if not row.fitted], [row for row in rows if row.kind == "permute"]):
        errors = [abs(error) for row in chosen if (error := row.judged_error) is not None]

        assert statistics.median(errors) < 0.10


def test_what_misses_by_over_two_fifths_says_a_likely_reason(rows: list[ValidationRow]) -> None:
    missed = [row for row in rows if row.judged_error is not None and abs(row.judged_error) > 0.4]

    assert 0 < len(missed) < 0.05 * len(rows)
    assert all(row.note for row in missed)


def test_small_messages_of_two_published_tables_go_up_and_down_with_bytes_and_large_ones_do_not() -> None:
    """By measure: of neighbours, how many took over a tenth less for more bytes."""

    def falling(machine: str, least: int, most: int) -> float:
        pairs = [
            (small, large)
            for curve in system(machine).calibration.curves
            if curve.source.startswith("XLA")
            for (small, large), (at, _) in zip(pairwise(curve.time_s), pairwise(curve.n_bytes), strict=True)
            if least <= at < most
        ]
        return sum(small > 1.1 * large for small, large in pairs) / len(pairs)

    small = {machine: falling(machine, 0, 2**19) for machine in ("dgx-h100", "dgx-b200", "gb200-nvl72")}
    large = [falling(machine, 2**21, 2**40) for machine in small]

    assert min(small["dgx-h100"], small["dgx-b200"]) > 0.3
    assert max(small["gb200-nvl72"], *large) < 0.03


def test_what_a_table_says_against_a_point_of_its_own_is_said_with_the_size_and_the_ratio(rows: list[ValidationRow]) -> None:
    """XLA's reduce-scatter of 4 H100: 32 KiB in 45.4 us, 64 KiB in 14.5, 256 KiB in 15.4, 512 KiB in 28.7."""
    series = [row for row in rows if row.series.endswith("reduce-scatter of 4 on dgx-h100") and row.name.startswith("reduce")]
    notes = {row.name: row.note for row in series}

    assert notes["reduce-scatter 256 KiB"] == "in its own table 32 KiB took 2.95 times as long"
    assert notes["reduce-scatter 32 KiB"] == "it took 3.12 times as long as 64 KiB: not used"


def test_a_goal_is_met_below_its_limit_by_rows_that_are_unseen() -> None:
    """Errors of 12.5, 25 and 50 %, and of a fitted row that can't be left out."""
    seen = replace(ROW, fitted=True, predicted_s=20.0)
    rows = [replace(ROW, predicted_s=2 * (1 + error)) for error in (0.125, -0.25, 0.5)]

    goal = goal_of("x", [seen, *rows], (0.3, 0.5))
    strict = goal_of("x", [seen, *rows], (0.25, 0.2))

    assert (goal.n_rows, goal.median, goal.worst) == (3, 0.25, 0.5)
    assert (goal.median_met, goal.worst_met, goal.misses) == (True, False, (rows[2],))
    assert (strict.median_met, strict.misses) == (False, (rows[2], rows[1]))


def test_refits_without_a_number_and_the_micro_benchmark_stand_beside_with_what_is_assumed() -> None:
    cases = assumed_refits()
    [ultra] = forecasts([case for case in cases if case.name == "nemo_broadcast_ultra_gb200"])
    spoken = [case for case in cases if case.time_s is not None]

    assert (ultra.published_s, ultra.error) == (None, None)
    assert 1 < ultra.predicted_s < 10
    assert {case.time_s for case in spoken} == {4.3}
    assert {case.machine for case in spoken} == {"dgx-h100", "gb200-nvl72"}
    assert all("assumed" in case.note and "no public source" in case.said for case in spoken)


def test_a_group_that_was_not_measured_is_predicted_from_its_neighbours() -> None:
    errors = [abs(row.error) for row in left_out_groups()]

    assert statistics.median(errors) < 0.10


def test_a_refit_continued_from_a_few_layers_comes_out_as_the_whole() -> None:
    problem, _ = refit_problem(load_model("qwen3-30b-a3b"), parse_spec("EP8 x PP2"), parse_spec("TP8 x DP2"))
    topology = build_topology(load_machine("dgx-h100"), None, problem.n_ranks)
    costs = default_calibration("dgx-h100")

    whole = predict(make_plan(problem, topology, "hybrid"), costs).predicted_s
    found = refit_time(problem, topology, "hybrid", costs)

    assert (found.n_layers, found.n_simulated) == (48, 8)
    assert found.time_s == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("name", ["nemo_anchor_470.2", "nemo_rs_q30"])
def test_a_published_refit_is_predicted_within_its_range(name: str) -> None:
    published = next(row for row in published_refits() if row.name == name)

    [found] = refit_rows([published])

    assert published.low_s <= found.predicted_s <= published.high_s
    assert found.fitted


@pytest.mark.parametrize("name", ["m2n_q235_hierarchical", "m2n_q235_direct"])
def test_a_run_of_m2ns_benchmark_is_predicted_within_the_goal(name: str) -> None:
    published = next(row for row in published_refits() if row.name == name)

    [found] = refit_rows([published])

    assert not found.fitted
    assert abs(found.error) < REFITS[1]
    assert "15 patterns of 1,131 tensors" in found.how


@pytest.mark.parametrize("name", ["nemo_rs_ultra", "nemo_broadcast_q30", "nemo_broadcast_q235"])
def test_a_refit_that_nothing_is_fitted_to_is_predicted_within_a_tenth(name: str) -> None:
    published = next(row for row in published_refits() if row.name == name)

    [found] = refit_rows([published])

    assert not found.fitted
    assert abs(found.error) < 0.10


def test_weights_are_counted_as_in_the_checkpoint_by_what_a_training_rank_takes_part_in() -> None:
    problem, _ = refit_problem(load_model("qwen3-30b-a3b"), parse_spec("EP8 x PP2"), parse_spec("TP8 x DP2"))
    experts, others = 128 // 8 * 3, len([t for t in problem.tensors if "*" not in t.name])

    assert exported_weights(problem, "hybrid") == experts * 48 // 2 + others
    assert exported_weights(problem, "gather-broadcast") == experts * 48 + others
    assert experts * 48 // 2 < exported_weights(problem, ROOT_ALONE) < experts * 48 // 2 + others


@pytest.mark.parametrize("kind", ["refit", "collective"])
def test_every_published_row_is_predicted_or_left_out_for_a_stated_reason(kind: str) -> None:
    """The list is that of a collection of published measurements."""
    with (Path(__file__).parent / "data" / "published_ids.csv").open(encoding="utf-8") as file:
        published = {row["id"] for row in csv.DictReader(file) if row["kind"] == kind}
    shown = published_refits() if kind == "refit" else published_collectives()
    left_out = refits_left_out() if kind == "refit" else collectives_left_out()

    predicted, skipped = {row.name for row in shown}, [name for left in left_out for name in left.names]

    assert not published - predicted - set(skipped)
    assert not predicted & set(skipped)
    assert len(skipped) == len(set(skipped))
    assert all(left.n_rows == len(left.names) for left in left_out if left.names)
    assert all(left.reason for left in left_out)


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["shardroute", "validate", *options])
    with pytest.raises(SystemExit) as stopped:
        main()
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_the_command_prints_series_the_worst_rows_and_what_all_comes_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = command(capsys, monkeypatch, "--collectives")

    assert code == 0
    assert "rows never fitted" in out
    assert "below 10%: met" in " ".join(out.split())
    assert "likely reason" in out


def test_json_has_every_row_with_its_errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = command(capsys, monkeypatch, "--collectives", "--json")

    found = json.loads(out)
    assert code == 0
    assert len(found["rows"]) > 1500
    assert {"published_s", "predicted_s", "error", "fitted", "left_out", "left_out_error", "source"} <= set(found["rows"][0])
    assert found["summaries"][0]["n_rows"] == len(found["rows"])
    [goal] = found["goals"]
    assert goal["median_met"] is (goal["median_error"] < goal["median_below"])
    assert goal["worst_met"] is (not goal["misses"])
    assert all(abs(miss["error"]) >= goal["worst_below"] and miss["reason"] for miss in goal["misses"])
    assert found["beside"] == []


def test_ring_is_shown_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, error = command(capsys, monkeypatch, "--ring", "--refits")

    assert code == 2
    assert "--ring is shown alone" in error
