"""`shardroute report`: plans as a page of pictures and tables."""

from typing import Annotated

import typer

from shardroute.planner.cli.cautions import say_costs, say_tolerance
from shardroute.planner.cli.explain import AloneFlag, RivalsOption
from shardroute.planner.cli.output import progress, say
from shardroute.planner.cli.plan import CalibrationOption, calibration_for
from shardroute.planner.cli.program import app
from shardroute.planner.plan_files import load_plan
from shardroute.planner.plans import Plan
from shardroute.planner.reporting.chapters import chapter
from shardroute.planner.reporting.charts import check_charts
from shardroute.planner.reporting.contest_pictures import WhatIf, plans_section, what_ifs
from shardroute.planner.reporting.layout_pictures import tensor_index
from shardroute.planner.reporting.pages import Chapter, page
from shardroute.planner.reporting.rivals import Rival, rivals_of
from shardroute.planner.reports import PlanReport, report
from shardroute.planner.simulator.refit import predict
from shardroute.planner.timelines import Timeline, load_timeline
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import check_writable, write_file


@app.command("report", rich_help_panel="Plan and predict")
def report_command(
    plans: Annotated[list[str], typer.Argument(metavar="PLAN...", help="Plan files that `shardroute plan -o` wrote.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Write the page (HTML) to this file.")],
    measured: Annotated[
        list[str] | None,
        typer.Option("--measured", help="A timeline that `run -o` wrote of one of the plans; repeat it for several."),
    ] = None,
    tensor: Annotated[
        str | None, typer.Option("--tensor", help="The tensor whose layouts are drawn; default: the largest.")
    ] = None,
    strategy: RivalsOption = None,
    alone: AloneFlag = False,
    no_what_if: Annotated[
        bool, typer.Option("--no-what-if", help="Leave out other NICs and domain sizes: planning for them takes time.")
    ] = False,
    calibration: CalibrationOption = None,
) -> None:
    """Write a page about plans: the machine, load on links, time lines, other strategies, a measurement. Opens in any browser.

    One file that loads nothing. Needs the extra `report`: pip install 'shardroute\\[report]'.
    """
    check_charts()
    check_writable(output, "the report")
    loaded = [load_plan(path) for path in plans]
    runs = _measured_of(loaded, measured or [])
    for plan in loaded:
        tensor_index(plan.problem, tensor)  # before anything takes time
    chapters: list[Chapter] = []
    reports: list[PlanReport] = []
    for path, plan in zip(plans, loaded, strict=True):
        costs = calibration_for(plan.topology.machine, calibration)
        say_costs(plan.topology.machine, costs)
        with progress(f"predicting {path}") as done:
            prediction = say_tolerance(predict(plan, costs, progress=done))
        reports.append(report(plan, prediction, costs))
        rivals: list[Rival] = []
        if not alone:
            with progress("planning by other strategies") as done:
                rivals = rivals_of(plan, prediction.predicted_s, costs, strategy, progress=done)
        changed: list[WhatIf] = []
        if not no_what_if:
            with progress("planning for other machines") as done:
                changed = what_ifs(plan, costs, progress=done)
        run = runs.get(plan.digest)
        chapters.append(
            chapter(
                path, plan, reports[-1], prediction, costs, rivals=rivals, what_ifs=changed, measured=run, tensor=tensor
            )
        )  # fmt: skip
    n_sections = 1 + sum(len(found.sections) for found in chapters)
    n_drawn = 0
    with progress("drawing") as done:

        def drawn() -> None:
            nonlocal n_drawn
            n_drawn += 1
            done(n_drawn / n_sections)

        title = "shardroute: " + (plans[0] if len(plans) == 1 else f"{len(plans)} plans")
        text = page(title, [plans_section(plans, reports)], chapters, drawn)
    write_file(output, text.encode(), "the report")
    say(f"report written to {output}; open it in a browser")


def _measured_of(plans: list[Plan], paths: list[str]) -> dict[str, Timeline]:
    """The measured timelines by the digest of their plan. Raises InputError for one of none of the plans, and for two of one."""
    found: dict[str, Timeline] = {}
    digests = {plan.digest for plan in plans}
    for path in paths:
        timeline = load_timeline(path)
        if timeline.kind != "measured":
            raise InputError(f"--measured {path}: a predicted timeline; `run PLAN -o {path}` writes a measured one")
        if timeline.digest not in digests:
            raise InputError(f"--measured {path}: of plan {timeline.digest[:16]}, which is none of those given")
        if timeline.digest in found:
            raise InputError(f"--measured {path}: a second timeline of plan {timeline.digest[:16]}; give one a plan")
        found[timeline.digest] = timeline
    return found
