"""`shardroute explain`: why a plan takes as long as it does, in sentences."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from shardroute.planner.cli.cautions import say_costs, say_tolerance
from shardroute.planner.cli.files import read_plan
from shardroute.planner.cli.inspect import PlanArgument
from shardroute.planner.cli.options import about
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, printable, progress, stdout
from shardroute.planner.cli.plan import CalibrationOption, calibration_for
from shardroute.planner.cli.program import app
from shardroute.planner.reporting.explanations import explain
from shardroute.planner.reporting.rivals import Rival, rivals_of
from shardroute.planner.simulator.refit import predict, predicting_us
from shardroute.topologies.errors import InputError

RivalsOption = Annotated[
    list[str] | None,
    typer.Option("--strategy", "-s", help="Compare with this strategy only, however long it takes; repeat it for several."),
]
AloneFlag = Annotated[bool, typer.Option("--alone", help="Compare with no other strategy: planning them takes time.")]


def refuse_both(strategies: Sequence[str] | None, alone: bool) -> None:
    """Raise InputError for --strategy and --alone at once."""
    if strategies and alone:
        raise InputError(
            f"--strategy {strategies[0]} and --alone don't go together: one compares with a strategy, the other with none"
        )


@app.command("explain", rich_help_panel="Plan and predict")
def explain_command(
    plan: PlanArgument,
    strategy: RivalsOption = None,
    alone: AloneFlag = False,
    calibration: CalibrationOption = None,
    json: JsonFlag = False,
) -> None:
    """Say in sentences why a plan takes as long as it does: what bounds it, what its end waits for, what others would take."""
    refuse_both(strategy, alone)
    loaded = read_plan(plan)
    costs = calibration_for(loaded.topology.machine, calibration)
    with progress("predicting", predicting_us(loaded)) as done:
        prediction = predict(loaded, costs, progress=done)
    say_tolerance(prediction)
    rivals: list[Rival] = []
    if not alone:
        with about("--strategy"), progress("planning by other strategies") as done:
            rivals = rivals_of(loaded, prediction.predicted_s, costs, strategy, progress=done)
    with progress("following the critical path") as done:
        found = explain(loaded, prediction, costs, rivals, done)
    say_costs(loaded.topology.machine, costs)
    if json:
        print_json(found)
        return
    print_facts(plan, [])
    for sentence in found.sentences:
        stdout().print(Padding(Text(printable(sentence)), (0, 0, 0, 2), expand=False))
