"""What each package offers stands in its `__init__`: a name that appears or goes is a change that a user sees."""

import shardroute.executors
import shardroute.planner
import shardroute.planner.choice
import shardroute.planner.ring
import shardroute.planner.steps
import shardroute.planner.studies


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
        "RankPart",
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
        "critical_path",
        "load_model",
        "load_part",
        "load_plan",
        "load_timeline",
        "make_plan",
        "model_names",
        "one_tensor",
        "overlap",
        "parse_spec",
        "part_of",
        "place",
        "predict",
        "refit_problem",
        "replan",
        "report",
        "save_plan",
        "save_timeline",
        "trace",
    }
    assert all(hasattr(shardroute.planner, name) for name in shardroute.planner.__all__)


def test_the_executors_offer_these_names() -> None:
    assert set(shardroute.executors.__all__) == {
        "Arithmetic",
        "Mismatch",
        "Resharder",
        "RunResult",
        "Session",
        "TRANSPORTS",
        "Transfer",
        "Transport",
        "Trial",
        "calibrate_here",
        "reshard",
        "run_plan",
        "xferdtensor",
    }
    assert all(hasattr(shardroute.executors, name) for name in shardroute.executors.__all__)


def test_the_choice_of_backends_offers_these_names() -> None:
    assert set(shardroute.planner.choice.__all__) == {
        "NEWEST",
        "RULE_SETS",
        "Assigned",
        "Choice",
        "HloModule",
        "Libraries",
        "Operation",
        "Option",
        "RuleSet",
        "Setting",
        "Verdict",
        "Version",
        "Way",
        "assign",
        "choose",
        "hazards",
        "operation",
        "options",
        "parse_hlo",
        "permute",
        "read_hlo",
        "rule_set",
    }
    assert all(hasattr(shardroute.planner.choice, name) for name in shardroute.planner.choice.__all__)


def test_training_steps_offer_these_names() -> None:
    assert set(shardroute.planner.steps.__all__) == {
        "Carrier",
        "DenseModel",
        "Network",
        "Recompute",
        "Scheme",
        "StepFlops",
        "StepLayout",
        "StepMemory",
        "StepPrediction",
        "StepRates",
        "Wanted",
        "batch_that_fits",
        "dense_model",
        "load_rates",
        "network",
        "predict_step",
        "rates_names",
        "search",
        "step_flops",
        "step_memory",
        "why",
    }
    assert all(hasattr(shardroute.planner.steps, name) for name in shardroute.planner.steps.__all__)


def test_attention_plans_offer_these_names() -> None:
    assert set(shardroute.planner.ring.__all__) == {
        "RING_STRATEGIES",
        "Attention",
        "Options",
        "Overlap",
        "Pass",
        "RingReport",
        "SequenceLayout",
        "overlap_of",
        "ring_plan",
        "ring_report",
    }
    assert all(hasattr(shardroute.planner.ring, name) for name in shardroute.planner.ring.__all__)


def test_studies_offer_these_names() -> None:
    assert set(shardroute.planner.studies.__all__) == {
        "STAND_INS",
        "Case",
        "LoadEstimate",
        "LoadStudy",
        "RefitRow",
        "RefitStudy",
        "RingRow",
        "RingStudy",
        "Split",
        "SplitRow",
        "SplitStudy",
        "StudiedModel",
        "count_text",
        "estimate",
        "ring_rows",
        "split_row",
        "splits_of",
        "studied_model",
        "study_rows",
        "widened",
        "with_experts",
    }
    assert all(hasattr(shardroute.planner.studies, name) for name in shardroute.planner.studies.__all__)
