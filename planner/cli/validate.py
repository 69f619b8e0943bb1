"""`shardroute validate`: published measurements beside what is predicted for them."""

from typing import Annotated

import typer

from shardroute.planner.cli.output import JsonFlag
from shardroute.planner.cli.program import app
from shardroute.planner.cli.ring_report import print_ring_report
from shardroute.planner.cli.validation_report import print_validation
from shardroute.topologies.errors import InputError


@app.command("validate", rich_help_panel="Plan and predict")
def validate_command(
    collectives: Annotated[bool, typer.Option("--collectives", help="Only collectives and permutes.")] = False,
    refits: Annotated[bool, typer.Option("--refits", help="Only refits.")] = False,
    ring: Annotated[bool, typer.Option("--ring", help="Instead, training steps and attention over several GPUs.")] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Every collective, not only series and the worst.")] = False,
    ring_rows: Annotated[
        str | None, typer.Option("--ring-rows", help="With --ring: calls of your own, in the columns of docs/ring-steps.md.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Predict what was published, row by row, and say how far off each prediction is and which rows were fitted."""
    if ring and (collectives or refits):
        raise InputError("--ring is shown alone; leave --collectives and --refits out")
    if ring:
        print_ring_report(json, ring_rows)
        return
    if ring_rows is not None:
        raise InputError("--ring-rows goes with --ring")
    both = collectives == refits
    print_validation(collectives or both, refits or both, rows, json)
