"""Planning: the problem, the plan, the prediction. Pure: no GPU, no clock, no process group.

problem, summary = refit_problem(load_model("qwen3-30b-a3b"), parse_spec("EP8 x PP2"), parse_spec("TP8 x DP2"))
plan = make_plan(problem, build_topology(load_machine("dgx-h100"), min_gpus=problem.n_ranks), "domain-relay")
check(plan)
print(predict(plan, default_calibration("dgx-h100")).predicted_s)
"""

from shardroute.planner.check import Proof, check
from shardroute.planner.compare import Comparison, compare
from shardroute.planner.critical_paths import critical_path
from shardroute.planner.layouts import (
    Fragments,
    Layout,
    Mesh,
    Replicate,
    Shard,
    StridedShard,
    Tensor,
    load_model,
    model_names,
    overlap,
    parse_spec,
    place,
)
from shardroute.planner.parts import RankPart, load_part, part_of
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.plans import Plan
from shardroute.planner.problems import Problem, one_tensor
from shardroute.planner.refits import RefitSummary, refit_problem
from shardroute.planner.reports import PlanReport, report
from shardroute.planner.routing.auto import Choice, choose
from shardroute.planner.routing.caches import cached_plan
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.replans import replan
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.simulator.refit import Prediction, predict
from shardroute.planner.timelines import Timeline, load_timeline, save_timeline
from shardroute.planner.traces import trace

__all__ = [
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
]
