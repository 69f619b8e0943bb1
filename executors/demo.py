"""`shardroute demo`: the main job end to end on a real model, told to a newcomer.

Rule: nothing here is canned; every figure is planned, simulated or measured when the command runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardroute.executors.foresee import foresee
from shardroute.executors.launching.ranks import PROCESSES
from shardroute.executors.measuring.copies import PARTS_S, calibrate_here
from shardroute.executors.run import RunResult, run_plan
from shardroute.planner.check import Proof, check, checking_us
from shardroute.planner.cli.output import print_facts, print_table, progress, stdout
from shardroute.planner.cli.plan import Planned, plan_and_predict
from shardroute.planner.cli.predict import print_comparison
from shardroute.planner.compare import Comparison, compare
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.refits import RefitSummary, refit_problem
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.sizes import LARGEST_MESSAGE_BYTES
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.simulator.refit import predict, predicting_us
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.errors import RunError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology
from shardroute.topologies.units import format_bytes, format_seconds

MODEL, FROM, TO, MACHINE = "qwen3-235b-a22b", "TP4 x PP8 x EP16", "TP8 x DP16", "dgx-h100"
# 256 processes share the memory of a laptop: at 1/4096 all buffers together take some 2.2 GB.
SCALE = 4096
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Small:
    """The best plan's twin for the scaled-down model: its run, and the comparison with its prediction."""

    n_steps: int
    result: RunResult
    comparison: Comparison


def run_demo(*, quiet: bool) -> dict[str, object]:
    """Plan the model by every strategy, run the best plan's small twin for real, compare; tell it unless `quiet`.

    Returns the figures. Raises RunError when a destination byte is wrong.
    """
    if not quiet:
        _title(f"1. {MODEL} from {FROM} to {TO} on {MACHINE}")
    summary, planned = _plan_all()
    best = planned[0]
    with progress("checking", checking_us(best.plan)) as done:
        proof = check(best.plan, progress=done)
    if not quiet:
        _tell_planned(summary, planned, proof)
        _title(f"\n2. The same plan for the model shrunk {SCALE} times, run by {best.plan.problem.n_ranks} processes here")
    small = _run_small(best.report.strategy)
    if not quiet:
        _tell_small(best, small)
    return {
        "model": MODEL,
        "n_parameters": summary.n_parameters,
        "plans": [p.report for p in planned],
        "n_deliveries": proof.n_deliveries,
        "scale": SCALE,
        "n_steps": small.n_steps,
        "measured_s": small.result.measured_s,
        "verified": small.result.verified,
        "comparison": small.comparison,
    }


def _title(text: str) -> None:
    stdout().print(text, style="bold", markup=False)


def _plan_all() -> tuple[RefitSummary, list[Planned]]:
    """The refit's summary, and its plans by every strategy, fastest first."""
    problem, summary = refit_problem(load_model(MODEL), parse_spec(FROM), parse_spec(TO))
    topology = build_topology(load_machine(MACHINE), None, problem.n_ranks)
    planned = [plan_and_predict(problem, topology, default_calibration(MACHINE), strategy) for strategy in STRATEGIES]
    return summary, sorted(planned, key=lambda p: (_known(p.report.predicted_s), p.report.strategy))


def _known(figure: float | None) -> float:
    """A figure of a report that only reports without a prediction lack; every plan of the demo has one."""
    assert figure is not None
    return figure


def _tell_planned(summary: RefitSummary, planned: Sequence[Planned], proof: Proof) -> None:
    best = planned[0].report
    print_facts(
        "",
        [
            ("parameters", f"{summary.n_parameters:,} ({format_bytes(best.n_tensor_bytes)})"),
            ("training", f"{FROM} (Megatron-Core): {best.n_src_gpus} GPUs"),
            ("inference", f"{TO} (vLLM): {best.n_dst_gpus} GPUs"),
        ],
    )
    print_table(
        ["strategy", "predicted", "x bound", "across domains", "steps", "planned in"],
        [
            [
                p.report.strategy,
                format_seconds(_known(p.report.predicted_s)),
                f"{_known(p.report.ratio_to_bound):.2f}",
                format_bytes(p.report.n_bytes_cross_domain),
                f"{p.report.n_steps:,}",
                format_seconds(_known(p.report.plan_s)),
            ]
            for p in planned
        ],
        right=["predicted", "x bound", "across domains", "steps", "planned in"],
        title="\nHow the weights best move",
    )
    print_facts(
        f"\nBest: {best.strategy}",
        [
            ("proved", f"{proof.n_deliveries:,} deliveries: each element once, from a GPU that holds it"),
            ("no plan beats", f"{format_seconds(best.lower_bound_s)} ({best.bound})"),
            ("costs from", best.calibration),
        ],
    )


def _run_small(strategy: str) -> Small:
    """Plan, predict for this machine, and run. Messages shrink as the matrices do, so that the plan keeps its steps."""
    problem, _ = refit_problem(load_model(MODEL, SCALE), parse_spec(FROM), parse_spec(TO))
    topology = build_topology(load_machine(MACHINE), None, problem.n_ranks)
    with progress(f"planning ({strategy})") as done:
        plan = make_plan(problem, topology, strategy, LARGEST_MESSAGE_BYTES // SCALE, Options(told=done))
    with progress("measuring what a copy costs here", 1e6 * sum(PARTS_S)) as done:
        calibration = calibrate_here(progress=done)
    with progress("predicting", predicting_us(plan)) as done:
        prediction = predict(plan, calibration, build_topology(load_machine("cpu-processes"), problem.n_ranks), done)
    with progress(f"running {problem.n_ranks} processes", 1e6 * foresee(plan, PROCESSES).whole_s(REPEATS)) as done:
        result = run_plan(plan, repeats=REPEATS, progress=done)
    if result.mismatches:
        raise RunError("the destination holds wrong bytes; " + "; ".join(m.text for m in result.mismatches[:4]))
    return Small(len(plan.steps), result, compare(prediction.timeline, result.timeline))


def _tell_small(best: Planned, small: Small) -> None:
    print_facts(
        "",
        [
            ("steps", f"{small.n_steps:,} ({best.report.n_steps:,} above)"),
            ("verified", f"{format_bytes(small.result.verified.bytes)} of destination in each of {REPEATS} runs, bit for bit"),
        ],
    )
    stdout().print()
    print_comparison(small.comparison)
    print_facts("\nTo use it yourself: . .venv/bin/activate; shardroute --help", [])
