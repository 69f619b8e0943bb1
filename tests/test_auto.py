"""`auto` predicts each strategy's plan, and plans of the same steps once."""

from dataclasses import replace

from shardroute.planner.arguments import tensor_problem
from shardroute.planner.routing.auto import choose
from shardroute.planner.routing.strategies import make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import load_calibration
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology


def test_strategies_that_come_to_the_same_steps_have_one_prediction_under_the_name_of_the_plan_that_is_taken() -> None:
    problem = tensor_problem("512,512", "bf16", "dp=8,tp=8", "R,S0", "tp=8", "S0")
    topology, costs = build_topology(load_machine("dgx-h100"), None, problem.n_ranks), load_calibration("dgx-h100")
    shares: list[float] = []

    found = choose(problem, topology, costs, progress=shares.append)

    plans = {name: make_plan(problem, topology, name) for name, _ in found.predicted_s}
    assert len({replace(plan, strategy="any").digest for plan in plans.values()}) < len(plans)
    assert dict(found.predicted_s) == {name: predict(plan, costs).predicted_s for name, plan in plans.items()}
    assert found.prediction.timeline.digest == found.plan.digest
    assert shares == sorted(shares)


def test_strategies_of_unlike_steps_are_predicted_each_by_its_own() -> None:
    problem = tensor_problem("512,512", "bf16", "dp=8", "R", "dp=4,tp=4", "R,S0")
    topology, costs = build_topology(load_machine("dgx-h100"), None, problem.n_ranks), load_calibration("dgx-h100")

    found = choose(problem, topology, costs)

    predicted = {name: predict(make_plan(problem, topology, name), costs).predicted_s for name, _ in found.predicted_s}
    assert dict(found.predicted_s) == predicted
    assert len(set(predicted.values())) > 1
