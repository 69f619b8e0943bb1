"""`shardroute demo`: the main job end to end on a real model, told to a newcomer.

Rule: nothing here is canned; every figure is planned, simulated or measured when the command runs.
"""

from shardroute.executors.measure import calibrate_here
from shardroute.executors.run import run_plan
from shardroute.planner.check import check
from shardroute.planner.cli.output import print_facts, print_table, progress, stdout
from shardroute.planner.cli.plan import Planned, plan_and_predict
from shardroute.planner.cli.predict import print_comparison
from shardroute.planner.cli.texts import ratio_text
from shardroute.planner.compare import compare
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.refits import refit_problem
from shardroute.planner.routing.strategies import STRATEGIES
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.errors import RunError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology
from shardroute.topologies.units import format_bytes, format_seconds

MODEL, FROM, TO, MACHINE = "qwen3-235b-a22b", "TP4 x PP8 x EP16", "TP8 x DP16", "dgx-h100"
# 256 processes share the memory of a laptop: at 1/4096 all buffers together take some 2.2 GB.
SCALE = 4096
REPEATS = 3


def show_demo() -> None:
    """Plan the model by every strategy, then run the best plan's small twin for real and compare."""
    console = stdout()
    console.print(f"1. {MODEL} from {FROM} (training) to {TO} (inference) on {MACHINE}", style="bold", markup=False)
    best = _plan_all()
    console.print(
        f"\n2. The same plan for the model scaled down {SCALE} times, run by real processes here", style="bold", markup=False
    )
    _run_small(best.report.strategy)


def _plan_all() -> Planned:
    problem, summary = refit_problem(load_model(MODEL), parse_spec(FROM), parse_spec(TO))
    topology = build_topology(load_machine(MACHINE), None, problem.n_ranks)
    calibration = default_calibration(MACHINE)
    print_facts("", [("parameters", f"{summary.n_parameters:,} ({format_bytes(problem.n_bytes)})"), *summary.source.items()][:5])
    planned = [plan_and_predict(problem, topology, calibration, strategy) for strategy in STRATEGIES]
    planned.sort(key=lambda p: (p.report.predicted_s, p.report.strategy))
    print_table(
        ["strategy", "predicted", "", "across domains", "steps", "planned in"],
        [
            [
                p.report.strategy,
                format_seconds(p.report.predicted_s),
                ratio_text(p.report.ratio_to_bound),
                format_bytes(p.report.n_bytes_cross_domain),
                f"{p.report.n_steps:,}",
                format_seconds(p.report.plan_s or 0.0),
            ]
            for p in planned
        ],
        right=["predicted", "across domains", "steps", "planned in"],
    )
    best = planned[0]
    with progress("checking"):
        proof = check(best.plan)
    print_facts(
        f"\nbest: {best.report.strategy}",
        [
            ("proved", f"{proof.n_deliveries:,} deliveries, every element once, from a GPU that holds it"),
            ("no plan beats", f"{format_seconds(best.report.lower_bound_s)} ({best.report.bound})"),
            ("costs from", best.report.calibration),
        ],
    )
    return best


def _run_small(strategy: str) -> None:
    problem, summary = refit_problem(load_model(MODEL, SCALE), parse_spec(FROM), parse_spec(TO))
    topology = build_topology(load_machine(MACHINE), None, problem.n_ranks)
    plan = plan_and_predict(problem, topology, default_calibration(MACHINE), strategy).plan
    with progress("measuring what a copy costs here"):
        calibration = calibrate_here()
    here = build_topology(load_machine("cpu-processes"), problem.n_ranks)
    prediction = predict(plan, calibration, here)
    with progress(f"running {problem.n_ranks} processes") as done:
        result = run_plan(plan, repeats=REPEATS, progress=done)
    if result.mismatches:
        raise RunError("the destination holds wrong bytes; " + "; ".join(m.text for m in result.mismatches[:4]))
    print_facts(
        "",
        [
            ("processes", f"{summary.n_src_gpus} training + {summary.n_dst_gpus} inference ranks, one each"),
            ("steps", f"{len(plan.steps):,}"),
        ],
    )
    print_comparison(compare(prediction.timeline, result.timeline))
