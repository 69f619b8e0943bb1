"""Shares of work that is done: parts of a whole, and that whatever takes long tells shares that rise to 1."""

import dataclasses
import io
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.check import check
from shardroute.planner.critical_paths import critical_path
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.measurements.calibrate import calibrate_from_logs
from shardroute.planner.measurements.timeline_fits import calibrate_from_timelines
from shardroute.planner.parquet_tables import write_parquet
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.plans import Plan
from shardroute.planner.refits import refit_problem
from shardroute.planner.reporting.chapters import chapter
from shardroute.planner.reporting.differences import difference
from shardroute.planner.reporting.explanations import explain
from shardroute.planner.reports import bounds_of, needs_on, report
from shardroute.planner.ring.reports import ring_report
from shardroute.planner.ring.strategies import ring_plan
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.replans import replan
from shardroute.planner.routing.strategies import make_plan, pieces_of
from shardroute.planner.shares import Told, heard, part, parts
from shardroute.planner.simulator.refit import Prediction, predict
from shardroute.planner.step_tables import write_steps
from shardroute.planner.timelines import load_timeline, save_timeline
from shardroute.planner.traces import trace
from shardroute.planner.validation.published import published_refits
from shardroute.planner.validation.refits import refit_rows
from shardroute.topologies import build_topology, default_calibration, load_machine

LOGS = Path(__file__).parent.parent / "examples" / "logs"
COSTS = default_calibration("dgx-h100")


def test_parts_follow_each_other_each_as_long_as_its_weight() -> None:
    told: list[float] = []

    first, second = parts(told.append, (1, 3))
    first(0.5)
    first(1.0)
    second(0.0)
    second(0.5)
    second(1.0)

    assert told == [0.125, 0.25, 0.25, 0.625, 1.0]


def test_parts_without_weight_take_no_share() -> None:
    told: list[float] = []

    for done in parts(told.append, (0, 2, 0)):
        done(1.0)
    for done in parts(told.append, (0, 0)):
        done(1.0)

    assert told == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_where_nobody_waits_nothing_is_told() -> None:
    for done in parts(None, (1, 2)):
        done(0.5)
    heard(None)(0.5)


@given(
    weights=st.lists(st.floats(0.0, 1e12), min_size=1, max_size=6),
    shares=st.lists(st.floats(0.0, 1.0), max_size=4).map(sorted),
    deep=st.integers(0, 2),
)
def test_shares_of_nested_parts_never_fall_and_end_at_1(weights: list[float], shares: list[float], deep: int) -> None:
    told: list[float] = []

    def work(done: Told, depth: int) -> None:
        for inner in parts(done, weights):
            if depth:
                work(inner, depth - 1)
            for share in shares:
                inner(share if not depth else 1.0)
            inner(1.0)

    work(part(told.append, 0.25, 1.0), deep)

    assert all(a <= b + 1e-15 for a, b in pairwise(told))  # a share within a part may be rounded
    assert told[0] >= 0.25
    assert told[-1] == 1.0


@pytest.fixture(scope="module")
def made() -> Plan:
    problem, _ = refit_problem(load_model("qwen3-0.6b", 256), parse_spec("TP2 x PP2"), parse_spec("TP4 x DP2"))
    topology = build_topology(load_machine("dgx-h100"), None, problem.n_ranks)
    return make_plan(problem, topology, "gather-broadcast")


@pytest.fixture(scope="module")
def prediction(made: Plan) -> Prediction:
    return predict(made, COSTS)


def timelines_fitted(plan: Plan, prediction: Prediction, told: Told) -> None:
    slower = dataclasses.replace(prediction.timeline, kind="measured", end_s=prediction.timeline.end_s * 1.1)
    calibrate_from_timelines([("run.json", slower)], plan, COSTS, told)


def explained(plan: Plan, prediction: Prediction, told: Told) -> None:
    explain(plan, prediction, COSTS, [], told)


def drawn(plan: Plan, prediction: Prediction, told: Told) -> None:
    chapter("a.plan", plan, report(plan, prediction, COSTS), prediction, COSTS, progress=told)


def compared(plan: Plan, prediction: Prediction, told: Told) -> None:
    numbers = report(plan, prediction, COSTS)
    difference(plan, plan, numbers, numbers, told)


def replanned(plan: Plan, _prediction: Prediction, told: Told) -> None:
    copies = make_plan(plan.problem, plan.topology, "domain-relay")
    replan(copies, copies.problem, copies.topology, Options(told=told))


Work = Callable[[Plan, Prediction, Told], object]
WHOLE: dict[str, Work] = {
    "pieces": lambda plan, _, told: pieces_of(plan.problem, told),
    "needs": lambda plan, _, told: needs_on(plan.problem, plan.topology, told),
    "bounds": lambda plan, _, told: bounds_of(plan, COSTS, told),
    "predict": lambda plan, _, told: predict(plan, COSTS, progress=told),
    "report": lambda plan, prediction, told: report(plan, prediction, COSTS, progress=told),
    "check": lambda plan, _, told: check(plan, told),
    "critical path": lambda plan, prediction, told: critical_path(plan, prediction, told),
    "trace": lambda plan, prediction, told: trace(plan, prediction.timeline, prediction, progress=told),
    "explain": explained,
    "chapter": drawn,
    "difference": compared,
    "steps": lambda plan, _, told: write_steps(plan, None, io.BytesIO(), told),
    "fit of runs": timelines_fitted,
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_takes_long_tells_shares_that_rise_to_1(made: Plan, prediction: Prediction, name: str) -> None:
    told: list[float] = []

    WHOLE[name](made, prediction, told.append)

    assert len(set(told)) > 1
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0, abs=1e-12)


def test_a_proof_and_a_report_of_attention_tell_shares_that_rise_to_1() -> None:
    attention = Attention((256,), 4, 2, 2, 8)
    plan = ring_plan(attention, build_topology(load_machine("dgx-h100"), None, 4), "ring")
    proved: list[float] = []
    reported: list[float] = []

    check(plan, proved.append)
    ring_report(plan, COSTS, progress=reported.append)

    for told in (proved, reported):
        assert len(set(told)) > 1
        assert told == sorted(told)
        assert told[-1] == 1.0


def test_planning_again_tells_a_share_while_trees_are_compared(made: Plan, prediction: Prediction) -> None:
    told: list[float] = []

    replanned(made, prediction, told.append)

    assert told == sorted(told)
    assert len({share for share in told if share < 0.4}) > 2


def test_files_tell_the_share_that_is_read_and_written(made: Plan, prediction: Prediction, tmp_path: Path) -> None:
    told: dict[str, list[float]] = {"save": [], "load": [], "save timeline": [], "load timeline": []}

    save_plan(made, tmp_path / "a.plan", told["save"].append)
    load_plan(tmp_path / "a.plan", told["load"].append)
    save_timeline(prediction.timeline, tmp_path / "a.json", told["save timeline"].append)
    load_timeline(tmp_path / "a.json", told["load timeline"].append)

    for name, shares in told.items():
        assert len(set(shares)) > 2, name
        assert shares == sorted(shares), name
        assert shares[-1] == 1.0, name


def test_a_table_in_parquet_tells_the_share_that_is_written(made: Plan) -> None:
    pytest.importorskip("pyarrow")
    told: list[float] = []

    write_parquet(made, None, io.BytesIO(), told.append)

    assert told[0] == 0.0
    assert told[-1] == 1.0


def test_logs_tell_the_share_of_their_bytes_that_was_read(tmp_path: Path) -> None:
    text = (LOGS / "sendrecv_perf.txt").read_text()
    long, short = tmp_path / "sendrecv_perf_long.txt", tmp_path / "sendrecv_perf_short.txt"
    long.write_text("node001:1:1 [0] NCCL INFO a line of a log that says much\n" * 20_000 + text)
    short.write_text(text)
    told: list[float] = []

    calibrate_from_logs([str(long), str(short)], load_machine("dgx-h100"), COSTS, told.append)

    of_long = long.stat().st_size / (long.stat().st_size + short.stat().st_size)
    assert told == sorted(told)
    assert len([share for share in told if share < of_long]) > 4
    assert min(abs(share - of_long) for share in told) < 1e-9
    assert told[-1] == 1.0


def test_published_refits_are_weighed_by_their_gpus() -> None:
    refits = [case for case in published_refits() if case.model == "qwen3-4b"][:2]
    refits += [case for case in published_refits() if case.model == "qwen3-30b-a3b"][:1]
    told: list[float] = []

    [*refit_rows(refits, told.append)]

    assert told == sorted(told)
    assert told[-1] == 1.0
    # 8 and 8 GPUs, twice, beside 16 and 16.
    assert any(share == pytest.approx(0.25) for share in told)
    assert any(share == pytest.approx(0.5) for share in told)


def test_routes_over_many_links_are_added_up_as_those_over_few_are(made: Plan, prediction: Prediction, monkeypatch) -> None:
    monkeypatch.setattr("shardroute.planner.critical_paths._LONG_ROUTE", 10**9)
    one_by_one = critical_path(made, prediction)

    monkeypatch.setattr("shardroute.planner.critical_paths._LONG_ROUTE", 1)
    at_once = critical_path(made, prediction)

    assert len(np.unique([link.resource for link in at_once])) > 1
    assert at_once == one_by_one
