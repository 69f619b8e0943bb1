"""`explain`: sentences whose numbers are the prediction's, the bound's and those of the other strategies."""

import json

import numpy as np
import pytest

from shardroute.planner import make_plan, predict
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.plan_files import save_plan
from shardroute.planner.reporting.explanations import explain, reached
from shardroute.planner.reporting.rivals import Rival, rivals_of, strategies_for
from shardroute.planner.reports import needs_of
from shardroute.planner.ring.strategies import RING_STRATEGIES, ring_plan
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.routing.bounds import cuts
from shardroute.planner.routing.strategies import STRATEGIES
from shardroute.planner.routing.sums import SUMMING
from shardroute.topologies import build_topology, default_calibration, load_machine
from shardroute.topologies.errors import InputError


@pytest.fixture(scope="module")
def costs():
    return default_calibration("dgx-h100")


@pytest.fixture(scope="module")
def plan():
    problem = tensor_problem("8192,8192", "bf16", "x=8", "S0", "dp=2,tp=8", "R,S1")
    return make_plan(problem, build_topology(load_machine("dgx-h100"), 3), "m2n-pack")


def test_the_parts_of_an_explanation_add_up_to_the_prediction(plan, costs) -> None:
    prediction = predict(plan, costs)

    found = explain(plan, prediction, costs, [])

    assert sum(part.seconds for part in found.parts) == pytest.approx(prediction.predicted_s)
    assert found.ratio_to_bound == pytest.approx(prediction.predicted_s / found.bounds[0].seconds)
    assert found.busiest is not None
    assert found.busiest.seconds == prediction.resources[0].busy_s


def test_rivals_are_the_predictions_of_the_other_strategies_fastest_first(plan, costs) -> None:
    ours = predict(plan, costs).predicted_s

    rivals = rivals_of(plan, ours, costs)

    assert {rival.strategy for rival in rivals} == {*STRATEGIES} - {"m2n-pack"}
    assert [r.predicted_s for r in rivals] == sorted(r.predicted_s for r in rivals)
    for rival in rivals:
        again = predict(make_plan(plan.problem, plan.topology, rival.strategy), costs).predicted_s
        assert rival.predicted_s == again
        assert rival.ratio == again / ours


def test_a_plan_that_another_strategy_beats_is_said_to_be_beaten(plan, costs) -> None:
    prediction = predict(plan, costs)
    faster = Rival("greedy", prediction.predicted_s / 2, 0.5)

    said = explain(plan, prediction, costs, [faster]).sentences

    assert any("1 would be FASTER" in sentence for sentence in said)
    assert any(sentence.startswith("greedy: ") and "0.50 x as long" in sentence for sentence in said)
    assert not any("FASTER" in sentence for sentence in explain(plan, prediction, costs, [Rival("x", 1.0, 2.0)]).sentences)


def test_the_reached_bound_is_the_cut_at_the_efficiency_of_the_nics(plan, costs) -> None:
    found = explain(plan, predict(plan, costs), costs, [])

    assert found.bounds[0].name.startswith("NICs")
    assert found.reached_bound_s == pytest.approx(found.bounds[0].seconds / costs.nic.efficiency)
    assert found.reached_bound_s == cuts(needs_of(plan), reached(plan.topology, costs), costs)[0].seconds


def test_nics_of_their_own_are_slowed_with_the_rest(costs) -> None:
    topology = build_topology(load_machine("dgx-h100"), 1)
    slower = type(topology)(topology.machine, 8, ((3, 1e9),))

    found = reached(slower, costs)

    np.testing.assert_allclose(found.nic_Bps, slower.nic_Bps * costs.nic.efficiency)
    np.testing.assert_allclose(found.nvlink_Bps, slower.nvlink_Bps * costs.nvlink.efficiency)


def test_a_strategy_that_does_something_else_is_refused(plan, costs) -> None:
    with pytest.raises(InputError, match="'two-shot' can't do what this plan does"):
        rivals_of(plan, 1.0, costs, ["two-shot"])


def test_attention_is_explained_by_computing_and_compared_with_ways_of_attention() -> None:
    call = Attention((32768,), 4, 8, 8, 128)
    topology = build_topology(load_machine("gb200-nvl72"), 1)
    plan, costs = ring_plan(call, topology, "ring"), default_calibration("gb200-nvl72")
    prediction = predict(plan, costs)

    found = explain(plan, prediction, costs, rivals_of(plan, prediction.predicted_s, costs))

    assert {r.strategy for r in found.rivals} == {*RING_STRATEGIES} - {"ring"}
    assert found.bounds == []
    assert "computing" in {part.what for part in found.parts}


def test_sums_are_compared_with_ways_of_adding_up(costs) -> None:
    problem = tensor_problem("4096,1024", "f32", "dp=4", "P", "dp=4", "R", to_ranks="0-3")
    plan = make_plan(problem, build_topology(load_machine("dgx-h100"), 1), "two-shot")

    assert strategies_for(plan) == tuple(SUMMING)
    assert [r.strategy for r in rivals_of(plan, predict(plan, costs).predicted_s, costs)] == ["one-shot"]


def test_the_command_says_what_its_json_holds(plan, cli, tmp_path) -> None:
    path = str(tmp_path / "t.plan")
    save_plan(plan, path)

    code, out, err = cli("explain", path, "-s", "greedy", "-s", "direct")
    same, printed, _ = cli("explain", path, "-s", "greedy", "-s", "direct", "--json")

    assert (code, same, err) == (0, 0, "")
    found = json.loads(printed)
    words = " ".join(out.split())
    assert all(sentence in words for sentence in (" ".join(s.split()) for s in found["sentences"]))
    assert {r["strategy"] for r in found["rivals"]} == {"greedy", "direct"}
    assert max(map(len, out.splitlines())) <= 110


def test_a_plan_without_steps_says_that_nothing_moves(cli, tmp_path) -> None:
    problem = tensor_problem("8,8", "bf16", "x=2", "R", "x=1", "R", to_ranks="0")
    plan = make_plan(problem, build_topology(load_machine("dgx-h100"), 1), "greedy")
    save_plan(plan, tmp_path / "t.plan")

    code, out, _ = cli("explain", str(tmp_path / "t.plan"), "--alone")

    assert code == 0
    assert ("nothing has to move" in out) == (len(plan.steps) == 0)
