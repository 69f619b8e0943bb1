"""What each package offers stands in its `__init__`: a name that appears or goes is a change that a user sees."""

import shardroute.executors
import shardroute.planner


def test_the_planner_offers_these_names() -> None:
    assert set(shardroute.planner.__all__) == {
        "STRATEGIES",
        "Choice",
        "Comparison",
        "Fragments",
        "Layout",
        "Mesh",
        "Options",
        "Plan",
        "PlanReport",
        "Prediction",
        "Problem",
        "Proof",
        "RefitSummary",
        "Replicate",
        "Shard",
        "StridedShard",
        "Tensor",
        "Timeline",
        "cached_plan",
        "check",
        "choose",
        "compare",
        "load_model",
        "load_plan",
        "load_timeline",
        "make_plan",
        "model_names",
        "one_tensor",
        "overlap",
        "parse_spec",
        "place",
        "predict",
        "refit_problem",
        "replan",
        "report",
        "save_plan",
        "save_timeline",
    }
    assert all(hasattr(shardroute.planner, name) for name in shardroute.planner.__all__)


def test_the_executors_offer_these_names() -> None:
    assert set(shardroute.executors.__all__) == {
        "Mismatch",
        "RunResult",
        "Session",
        "TRANSPORTS",
        "Transport",
        "Trial",
        "calibrate_here",
        "run_plan",
    }
    assert all(hasattr(shardroute.executors, name) for name in shardroute.executors.__all__)
