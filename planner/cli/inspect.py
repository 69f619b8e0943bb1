"""`shardroute show` and `shardroute check`: what is in a plan file, and whether it delivers."""

from typing import Annotated

import numpy as np
import typer

from shardroute.planner.check import check
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress
from shardroute.planner.cli.plan import CalibrationOption, calibration_for
from shardroute.planner.cli.program import app
from shardroute.planner.cli.texts import report_facts
from shardroute.planner.plan_files import load_plan
from shardroute.planner.plans import Lane, Plan, lane_of
from shardroute.planner.reports import bounds_of, report
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.units import format_bytes, format_seconds

PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file that `shardroute plan -o` wrote.")]


@app.command("show", rich_help_panel="Plan and predict")
def show_command(plan: PlanArgument, calibration: CalibrationOption = None, json: JsonFlag = False) -> None:
    """Show a plan: its numbers, what bounds it, its steps by kind, and its largest tensors."""
    loaded = load_plan(plan)
    costs = calibration_for(loaded.topology.machine, calibration)
    with progress("predicting") as done:
        found = report(loaded, predict(loaded, costs, progress=done), costs)
    if json:
        print_json(found)
        return
    print_facts(plan, report_facts(found))
    print_table(
        ["lower bound", "bytes", "at least"],
        [[cut.name, format_bytes(cut.n_bytes), format_seconds(cut.seconds)] for cut in bounds_of(loaded, costs)],
        right=["bytes", "at least"],
        title="\nWhat no plan can beat",
    )
    print_table(["lane", "steps", "bytes", "largest"], _by_lane(loaded), right=["steps", "bytes", "largest"], title="\nSteps")
    largest = sorted(loaded.problem.tensors, key=lambda tensor: (-tensor.n_bytes, tensor.name))[:5]
    print_table(
        ["tensor", "shape", "dtype", "bytes"],
        [[t.name, " x ".join(map(str, t.shape)), t.dtype, format_bytes(t.n_bytes)] for t in largest],
        right=["bytes"],
        title=f"\nLargest of {len(loaded.problem.tensors):,} tensors",
    )


def _by_lane(plan: Plan) -> list[list[str]]:
    rows = []
    of_step = lane_of(plan.steps.lane)
    for lane in Lane:
        n_bytes = plan.step_bytes[of_step == lane]
        if len(n_bytes):
            name = lane.name.lower().replace("_", " ")
            rows.append([name, f"{len(n_bytes):,}", format_bytes(int(np.sum(n_bytes))), format_bytes(int(n_bytes.max()))])
    return rows


@app.command("check", rich_help_panel="Plan and predict")
def check_command(plan: PlanArgument, json: JsonFlag = False) -> None:
    """Prove that a plan delivers: every needed element once, from a GPU that holds it, nothing else, and no staging
    overwritten.
    """
    loaded = load_plan(plan)
    with progress("checking"):
        proof = check(loaded)
    if json:
        print_json({"ok": True, "digest": loaded.digest, "n_deliveries": proof.n_deliveries, "n_bytes": proof.n_bytes})
        return
    print_facts(
        f"{plan} delivers",
        [
            ("deliveries", f"{proof.n_deliveries:,} pieces, {format_bytes(proof.n_bytes)}"),
            ("steps", f"{len(loaded.steps):,}"),
            ("digest", loaded.digest[:16]),
        ],
    )
