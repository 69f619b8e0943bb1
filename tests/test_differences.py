"""`diff`: what differs between plans and between timelines, against sums taken step by step."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from shardroute.planner import make_plan, predict
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.plan_files import save_plan
from shardroute.planner.plans import Op
from shardroute.planner.refits import refit_problem
from shardroute.planner.reporting.differences import difference, timeline_difference
from shardroute.planner.reports import report, traffic
from shardroute.planner.timelines import Timeline, save_timeline
from shardroute.topologies import build_topology, default_calibration, load_machine

COSTS = default_calibration("dgx-h100")


@pytest.fixture(scope="module")
def plans():
    problem, _ = refit_problem(load_model("qwen3-30b-a3b", 64), parse_spec("TP2 x PP2 x EP4"), parse_spec("TP4 x DP4"))
    topology = build_topology(load_machine("dgx-h100"), min_gpus=problem.n_ranks)
    return {name: make_plan(problem, topology, name) for name in ("direct", "domain-relay", "gather-broadcast")}


def diff(first, second):
    return difference(first, second, report(first, predict(first, COSTS), COSTS), report(second, predict(second, COSTS), COSTS))


def ways_by_hand(plan):
    """{(tensor name, way): bytes between ranks}, one step and one bundle entry after the other."""
    found: Counter[tuple[str, object]] = Counter()
    for step in range(len(plan.steps)):
        copy = plan.steps.op[step] == Op.COPY
        where = (int(plan.steps.src[step]), int(plan.steps.dst[step]))
        if copy and where[0] == where[1]:
            continue
        group = () if copy else tuple(plan.group(int(plan.steps.group[step])).tolist())
        bundle = int(plan.steps.bundle[step])
        for entry in range(int(plan.bundles.ptr[bundle]), int(plan.bundles.ptr[bundle + 1])):
            tensor = plan.problem.tensors[int(plan.bundles.tensor[entry])].name
            found[tensor, (int(plan.steps.op[step]), where, group)] += int(plan.entry_bytes[entry])
    return found


def test_a_plan_does_not_differ_from_itself(plans) -> None:
    found = diff(plans["domain-relay"], plans["domain-relay"])

    assert found.same
    assert found.same_problem
    assert found.other_way == []
    assert all(row.first == row.second for row in found.numbers)


@pytest.mark.parametrize("names", [("direct", "domain-relay"), ("domain-relay", "gather-broadcast")])
def test_tensors_that_go_another_way_are_those_whose_bytes_by_step_differ(plans, names) -> None:
    first, second = (plans[name] for name in names)

    found = diff(first, second)

    a, b = ways_by_hand(first), ways_by_hand(second)
    expected: dict[str, list[int]] = {}
    for tensor, way in {*a, *b}:
        change = a[tensor, way] - b[tensor, way]
        if change:
            both = expected.setdefault(tensor, [0, 0])
            both[change < 0] += abs(change)
    assert {row.name: [row.n_bytes_first, row.n_bytes_second] for row in found.other_way} == expected
    totals = [row.n_bytes_first + row.n_bytes_second for row in found.other_way]
    assert totals == sorted(totals, reverse=True)


def test_the_difference_the_other_way_round_has_its_sides_swapped(plans) -> None:
    there, back = diff(plans["direct"], plans["domain-relay"]), diff(plans["domain-relay"], plans["direct"])

    assert [(r.name, r.first, r.second) for r in there.numbers] == [(r.name, r.second, r.first) for r in back.numbers]
    assert {(r.name, r.n_bytes_first, r.n_bytes_second) for r in there.other_way} == {
        (r.name, r.n_bytes_second, r.n_bytes_first) for r in back.other_way
    }


def test_bytes_by_link_are_those_of_the_traffic(plans) -> None:
    found = {row.name: row for row in diff(plans["direct"], plans["gather-broadcast"]).numbers}

    first, second = traffic(plans["direct"]), traffic(plans["gather-broadcast"])
    assert found["into other domains"].first == first.n_bytes_cross_domain
    assert found["within domains"].second == second.n_bytes_moved - second.n_bytes_cross_domain
    assert found["broadcast steps"].first == 0


def test_tensors_of_one_side_and_other_layouts_are_named() -> None:
    topology = build_topology(load_machine("dgx-h100"), 2)
    problem = tensor_problem("64,96", "bf16", "x=4", "S0", "y=4", "S1")
    wider = tensor_problem("64,96", "bf16", "x=4", "S0", "y=8", "S1")
    renamed = replace(problem, tensors=(replace(problem.tensors[0], name="other"),))
    plan = make_plan(problem, topology, "direct")

    laid, named = diff(plan, make_plan(wider, topology, "direct")), diff(plan, make_plan(renamed, topology, "direct"))

    assert (laid.relaid, laid.same_problem) == (["tensor"], False)
    assert (named.only_first, named.only_second, named.n_tensors) == (["tensor"], ["other"], 0)


def test_the_command_compares_plans_for_people_and_programs(plans, cli, tmp_path) -> None:
    paths = [str(tmp_path / f"{name}.plan") for name in ("direct", "domain-relay")]
    for name, path in zip(("direct", "domain-relay"), paths, strict=True):
        save_plan(plans[name], path)

    code, out, _ = cli("diff", *paths)
    _, printed, _ = cli("diff", *paths, "--json")
    _, same, _ = cli("diff", paths[0], paths[0])

    found = json.loads(printed)
    assert code == 0
    assert f"{len(found['other_way']):,} of {found['n_tensors']:,} tensors" in out
    predicted = next(row for row in found["numbers"] if row["name"] == "predicted")
    assert predicted["first"] == predict(plans["direct"], COSTS).predicted_s
    assert "are the same plan" in same


def test_timelines_of_one_plan_are_compared_step_by_step(cli, tmp_path) -> None:
    start, end = np.zeros(4), np.array([1.0, 2.0, 3.0, 4.0])
    first = Timeline("predicted", "d", "here", start, end)
    second = Timeline("measured", "d", "there", start, np.array([1.0, 2.1, 6.0, 2.0]))

    found = timeline_difference(first, second)

    assert found.same_plan
    assert (found.n_longer, found.n_shorter) == (1, 1)
    assert [shift.step for shift in found.shifts] == [2, 3, 1]
    assert next(row for row in found.numbers if row.name == "total").ratio == 1.5


def test_timelines_of_other_plans_are_compared_in_total_alone(cli, tmp_path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    save_timeline(Timeline("measured", "d", "x", np.zeros(1), np.ones(1)), paths[0])
    save_timeline(Timeline("measured", "e", "x", np.zeros(2), np.ones(2) * 3), paths[1])

    code, out, _ = cli("diff", *map(str, paths), "--json")

    found = json.loads(out)
    assert code == 0
    assert (found["same_plan"], found["n_longer"], found["shifts"]) == (False, None, [])
    assert found["numbers"][0] == {"name": "total", "unit": "s", "first": 1.0, "second": 3.0, "ratio": 3.0}


def test_a_plan_and_a_timeline_do_not_compare(plans, cli, tmp_path) -> None:
    save_plan(plans["direct"], tmp_path / "a.plan")
    save_timeline(Timeline("measured", "d", "x", np.zeros(1), np.ones(1)), tmp_path / "b.json")

    code, _, err = cli("diff", str(tmp_path / "a.plan"), str(tmp_path / "b.json"))

    assert code == 2
    assert "give two plans, or two timelines" in err


def test_a_file_that_is_not_there_is_named(cli, plans, tmp_path) -> None:
    save_plan(plans["direct"], tmp_path / "a.plan")

    code, _, errors = cli("diff", str(tmp_path / "a.plan"), str(tmp_path / "b.plan"))

    assert code == 2
    assert f"no file {tmp_path / 'b.plan'}" in errors
