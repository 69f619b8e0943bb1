"""`shardroute simulate` and `shardroute compare`: predicted time, alone and beside a measurement."""

from typing import Annotated

import typer

from shardroute.planner.cli.inspect import PlanArgument
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress, stderr
from shardroute.planner.cli.plan import CalibrationOption, calibration_for, topology_for
from shardroute.planner.cli.program import app
from shardroute.planner.compare import Comparison, compare
from shardroute.planner.plan_files import load_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.timelines import load_timeline, save_timeline
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_bytes, format_seconds

SHOWN_RESOURCES = 8


@app.command("simulate", rich_help_panel="Plan and predict")
def simulate_command(
    plan: PlanArgument,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write the predicted timeline (JSON) to this file.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", "-m", help="Predict for another machine than the plan's (rank i on its GPU i).")
    ] = None,
    calibration: CalibrationOption = None,
    json: JsonFlag = False,
) -> None:
    """Predict how long a plan takes and which links it keeps busy."""
    loaded = load_plan(plan)
    topology = loaded.topology if machine is None else topology_for(machine, loaded.problem.n_ranks)
    costs = calibration_for(topology.machine, calibration)
    with progress("simulating") as done:
        prediction = predict(loaded, costs, topology, progress=done)
    if output is not None:
        save_timeline(prediction.timeline, output)
    if json:
        busy = [{"resource": r.name, "n_bytes": r.n_bytes, "busy_s": r.busy_s} for r in prediction.resources]
        print_json(
            {
                "predicted_s": prediction.predicted_s,
                "digest": loaded.digest,
                "source": prediction.timeline.source,
                "resources": busy,
            }
        )
        return
    print_facts(plan, [("predicted", format_seconds(prediction.predicted_s)), ("for", prediction.timeline.source)])
    total = prediction.predicted_s
    print_table(
        ["resource", "bytes", "busy", "of the time"],
        [
            [r.name, format_bytes(r.n_bytes), format_seconds(r.busy_s), f"{r.busy_s / total:.0%}"]
            for r in prediction.resources[:SHOWN_RESOURCES]
        ],
        right=["bytes", "busy", "of the time"],
        title=f"\nBusiest of {len(prediction.resources)} resources",
    )


@app.command("compare", rich_help_panel="Run and measure")
def compare_command(
    predicted: Annotated[str, typer.Argument(metavar="PREDICTED", help="A timeline that `simulate -o` wrote.")],
    measured: Annotated[str, typer.Argument(metavar="MEASURED", help="A timeline that `run -o` wrote, of the same plan.")],
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", help="Exit with 1 when the total is off by more than this share, 0.2 for 20 %.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Compare two timelines of one plan, predicted beside measured: the total, and how the steps' ends spread over time."""
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise InputError(f"--tolerance {tolerance}: expected a share from 0, such as 0.2")
    found = compare(load_timeline(predicted), load_timeline(measured))
    if json:
        print_json(found)
    else:
        print_comparison(found)
    if tolerance is not None and (found.error is None or abs(found.error) > tolerance):
        off = "can't be compared" if found.error is None else f"is off by {found.error:+.1%}"
        stderr().print(f"the total {off}; --tolerance allows {tolerance:.1%}", markup=False)
        raise typer.Exit(1)


def print_comparison(found: Comparison) -> None:
    """Print a comparison for people."""
    print_table(
        ["", found.first_kind, found.second_kind, "difference"],
        [
            [
                row.name,
                format_seconds(row.first_s),
                format_seconds(row.second_s),
                "-" if row.error is None else f"{row.error:+.1%}",
            ]
            for row in found.rows
        ],
        right=[found.first_kind, found.second_kind, "difference"],
    )
    facts = [(found.first_kind, found.first_source), (found.second_kind, found.second_source)]
    if found.verified is not None:
        facts.append(("verified", f"{format_bytes(found.verified.bytes)}, {found.verified.mismatches} wrong"))
    print_facts("", facts)
