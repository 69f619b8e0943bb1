"""`shardroute steps`: a plan's steps as CSV."""

from typing import Annotated

import typer

from shardroute.planner.cli.inspect import PlanArgument
from shardroute.planner.cli.output import progress, stderr
from shardroute.planner.cli.program import app
from shardroute.planner.plan_files import load_plan
from shardroute.planner.step_tables import write_steps
from shardroute.planner.timelines import load_timeline
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import written_whole


@app.command("steps", rich_help_panel="Plan and predict")
def steps_command(
    plan: PlanArgument,
    output: Annotated[str, typer.Option("--output", "-o", help="Write the table to this file, steps.csv.")],
    timeline: Annotated[
        str | None, typer.Argument(metavar="[TIMELINE]", help="What `simulate -o` or `run -o` wrote: adds start_s and end_s.")
    ] = None,
) -> None:
    """Write a plan's steps as CSV, one row a step, for spreadsheets and data frames."""
    if not output.endswith(".csv"):
        raise InputError(f"--output {output}: expected a name that ends in .csv")
    loaded = load_plan(plan)
    times = None if timeline is None else load_timeline(timeline)
    with progress("writing the steps"), written_whole(output, "the steps") as file:
        write_steps(loaded, times, file)
    stderr().print(f"{len(loaded.steps):,} steps written to {output}", markup=False)
