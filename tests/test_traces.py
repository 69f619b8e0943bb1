"""Traces obey the trace event format, show what the timeline says, and stay within their size."""

import itertools
import json
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.executors.run import run_plan
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.plans import Op
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.testing import tensor_problems
from shardroute.planner.timelines import Timeline
from shardroute.planner.traces import trace
from shardroute.topologies import build_topology, default_calibration, load_machine
from shardroute.topologies.errors import InputError

H100 = load_machine("dgx-h100")
NEEDED = {  # fields that the format asks of each kind of event, beside ph, pid and tid
    "M": {"name", "args"},
    "X": {"name", "cat", "ts", "dur"},
    "s": {"name", "cat", "ts", "id"},
    "f": {"name", "cat", "ts", "id", "bp"},
    "C": {"name", "ts", "args"},
}


def planned(strategy: str, machine=H100):
    problem = tensor_problem("64,96", "f32", "x=4", "S0", "dp=3,tp=4", "R,S1")
    return make_plan(problem, build_topology(machine, min_gpus=problem.n_ranks), strategy, message_bytes=512)


def written(found, tmp_path):
    """The events as a viewer reads them."""
    found.save(tmp_path / "t.json")
    return json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def check_format(events) -> None:
    """Every event is of a kind that the format has, with what that kind needs; slices nest; arrows have two ends in slices."""
    slices = defaultdict(list)
    ends = defaultdict(list)
    named = set()
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert set(event) >= NEEDED[event["ph"]], event
        if event["ph"] == "M":
            assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
    for thread, spans in slices.items():
        assert ("thread_name", *thread) in named
        assert ("process_name", thread[0], 0) in named
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans)), thread
    for pair in ends.values():
        start, end = sorted(pair, key=lambda e: e["ph"], reverse=True)
        assert (start["ph"], end["ph"]) == ("s", "f")
        assert len(pair) == 2
        assert start["ts"] <= end["ts"]
        for event in pair:
            inside = [a - 1e-6 <= event["ts"] <= b + 1e-6 for a, b in slices[event["pid"], event["tid"]]]
            assert any(inside), event


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_prediction_makes_a_trace_that_obeys_the_format(strategy: str, tmp_path) -> None:
    plan = planned(strategy)
    prediction = predict(plan, default_calibration("dgx-h100"))

    events = written(trace(plan, prediction.timeline, prediction), tmp_path)

    check_format(events)
    slices = [e for e in events if e["ph"] == "X"]
    copies = int((plan.steps.op == Op.COPY).sum())
    members = sum(len(plan.group(int(g))) for g in plan.steps.group[plan.steps.op != Op.COPY])
    assert len(slices) == copies + members
    assert len([e for e in events if e["ph"] == "s"]) == len(plan.steps.after)


@settings(max_examples=25)
@given(tensor_problems(n_ranks=12), st.sampled_from([*STRATEGIES]), st.integers(1, 200))
def test_slices_of_a_queue_never_overlap(problem, strategy: str, message_bytes: int) -> None:
    plan = make_plan(problem, build_topology(H100, n_units=2), strategy, message_bytes)
    prediction = predict(plan, default_calibration("dgx-h100"))

    found = trace(plan, prediction.timeline, prediction)

    check_format([json.loads(line) for line in map(_as_json, found.events)])


def _as_json(event) -> bytes:
    import msgspec

    return msgspec.json.encode(event)


def test_a_slice_says_who_sends_what_to_whom_and_when(tmp_path) -> None:
    plan = planned("direct")
    prediction = predict(plan, default_calibration("dgx-h100"))

    slices = [e for e in written(trace(plan, prediction.timeline), tmp_path) if e["ph"] == "X"]

    for event in slices:
        step = event["args"]["step"]
        assert event["pid"] == event["args"]["from"] == plan.steps.src[step]
        assert event["args"]["to"] == plan.steps.dst[step]
        assert event["args"]["bytes"] == plan.step_bytes[step]
        assert event["ts"] == pytest.approx(prediction.timeline.start_s[step] * 1e6, abs=1e-3)
        assert event["ts"] + event["dur"] == pytest.approx(prediction.timeline.end_s[step] * 1e6, abs=2e-3)


def test_counters_show_the_share_of_a_link_that_is_in_use(tmp_path) -> None:
    plan = planned("direct")
    prediction = predict(plan, default_calibration("dgx-h100"))

    events = written(trace(plan, prediction.timeline, prediction), tmp_path)

    busiest = prediction.resources[0]
    points = [e for e in events if e["ph"] == "C" and e["name"] == busiest.name]
    shares = np.array([e["args"]["percent"] for e in points[:-1]])
    assert shares.min() >= 0
    assert shares.max() <= 100.01
    assert shares.mean() / 100 == pytest.approx(busiest.busy_s / prediction.predicted_s, abs=1e-3)
    assert points[-1]["args"]["percent"] == 0


def test_a_measured_timeline_makes_a_trace_without_counters(tmp_path) -> None:
    plan = planned("m2n-pack", load_machine("cpu-processes"))
    measured = run_plan(plan, timeout_s=60).timeline

    events = written(trace(plan, measured), tmp_path)

    check_format(events)
    assert {e["ph"] for e in events} == {"M", "X", "s", "f"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} <= {f"rank {r}" for r in range(16)}


def test_a_large_trace_keeps_the_last_arrival_and_the_busiest_ranks_and_says_what_it_left_out(tmp_path) -> None:
    plan = planned("domain-relay")
    timeline = predict(plan, default_calibration("dgx-h100")).timeline
    everything = trace(plan, timeline)
    last = int(plan.steps.src[np.argmax(timeline.end_s)])

    found = trace(plan, timeline, most_slices=40)

    shown = {e.pid for e in found.events if e.ph == "X"}
    assert everything.note == ""
    assert len([e for e in found.events if e.ph == "X"]) <= 40
    assert last in shown
    assert "ranks are shown" in found.note
    assert found.about["left out"] == found.note
    check_format(written(found, tmp_path))


def test_ranks_that_are_named_are_shown_and_no_others() -> None:
    plan = planned("direct")
    timeline = predict(plan, default_calibration("dgx-h100")).timeline

    found = trace(plan, timeline, ranks=[1, 2])

    assert {e.pid for e in found.events} == {1, 2}


def test_what_can_not_be_shown_is_refused_in_words() -> None:
    plan = planned("direct")
    timeline = predict(plan, default_calibration("dgx-h100")).timeline
    other = Timeline("predicted", "0" * 64, "another", timeline.start_s, timeline.end_s)

    with pytest.raises(InputError, match="the timeline is of another plan"):
        trace(plan, other)
    with pytest.raises(InputError, match="rank 99 isn't one of the plan's: these are 0 to 15"):
        trace(plan, timeline, ranks=[99])
    with pytest.raises(InputError, match="name fewer ranks"):
        trace(plan, timeline, ranks=[0, 1], most_slices=1)
