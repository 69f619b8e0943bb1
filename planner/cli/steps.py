"""`shardroute steps`: a plan's steps as CSV or Parquet."""

from typing import Annotated

import typer

from shardroute.planner.cli.files import read_plan, read_timeline
from shardroute.planner.cli.inspect import PlanArgument
from shardroute.planner.cli.output import progress, say
from shardroute.planner.cli.program import app
from shardroute.planner.parquet_tables import check_parquet, write_parquet
from shardroute.planner.step_tables import write_steps
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import written_whole
from shardroute.topologies.units import format_count


@app.command("steps", rich_help_panel="Plan and predict")
def steps_command(
    plan: PlanArgument,
    output: Annotated[str, typer.Option("--output", "-o", help="Write the table to this file, steps.csv or steps.parquet.")],
    timeline: Annotated[
        str | None, typer.Argument(metavar="[TIMELINE]", help="What `simulate -o` or `run -o` wrote: adds start_s and end_s.")
    ] = None,
) -> None:
    """Write a plan's steps as a table, one row a step: CSV for spreadsheets, or Parquet for data frames.

    Parquet needs the extra `parquet`: pip install 'shardroute\\[parquet]'.
    """
    if not output.endswith((".csv", ".parquet")):
        raise InputError(f"--output {output}: expected a name that ends in .csv or .parquet")
    write = write_steps
    if output.endswith(".parquet"):
        check_parquet()
        write = write_parquet
    loaded = read_plan(plan)
    times = None if timeline is None else read_timeline(timeline)
    with progress("writing the steps") as done, written_whole(output, "the steps") as file:
        write(loaded, times, file, done)
    say(f"{format_count(len(loaded.steps), 'step')} written to {output}")
