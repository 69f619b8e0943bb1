"""`shardroute report`: plans as a page of pictures and tables."""

from typing import Annotated

import typer

from shardroute.planner.cli.cautions import say_costs, say_tolerance
from shardroute.planner.cli.explain import AloneFlag, RivalsOption, refuse_both
from shardroute.planner.cli.files import read_plan, read_timeline
from shardroute.planner.cli.options import about, check_output
from shardroute.planner.cli.output import progress, say
from shardroute.planner.cli.plan import CalibrationOption, calibration_for, costs_file
from shardroute.planner.cli.program import app
from shardroute.planner.cli.study_files import PAGES
from shardroute.planner.plans import Plan
from shardroute.planner.reporting.chapters import chapter
from shardroute.planner.reporting.charts import check_charts
from shardroute.planner.reporting.contest_pictures import WhatIf, plans_section, what_ifs
from shardroute.planner.reporting.layout_pictures import tensor_index
from shardroute.planner.reporting.pages import Chapter, page
from shardroute.planner.reporting.rivals import Rival, rivals_of
from shardroute.planner.reports import PlanReport, report, reporting_us
from shardroute.planner.shares import parts
from shardroute.planner.simulator.refit import predict, predicting_us
from shardroute.planner.timelines import Timeline
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import write_file


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
    refuse_both(strategy, alone)
    check_output(output, "a report", suffixes=PAGES)
    check_charts()
    loaded = [read_plan(path) for path in plans]
    runs = _measured_of(loaded, measured or [])
    for plan in loaded:
        with about("--tensor"):
            tensor_index(plan.problem, tensor)  # before anything takes time
    chapters: list[Chapter] = []
    reports: list[PlanReport] = []
    for path, plan in zip(plans, loaded, strict=True):
        costs = calibration_for(plan.topology.machine, calibration)
        say_costs(plan.topology.machine, costs)
        weights = (predicting_us(plan), reporting_us(plan))
        with progress(f"predicting {path}", sum(weights)) as done:
            predicted, reported = parts(done, weights)
            prediction = say_tolerance(predict(plan, costs, progress=predicted))
            reports.append(report(plan, prediction, costs, costs_file=costs_file(calibration), progress=reported))
        rivals: list[Rival] = []
        if not alone:
            with about("--strategy"), progress("planning by other strategies") as done:
                rivals = rivals_of(plan, prediction.predicted_s, costs, strategy, progress=done)
        changed: list[WhatIf] = []
        if not no_what_if:
            with progress("planning for other machines") as done:
                changed = what_ifs(plan, costs, progress=done)
        run = runs.get(plan.digest)
        with progress(f"explaining {path}") as done:
            chapters.append(
                chapter(
                    path, plan, reports[-1], prediction, costs, rivals=rivals, what_ifs=changed, measured=run, tensor=tensor,
                    progress=done,
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
        with about("--measured"):
            timeline = read_timeline(path)
        if timeline.kind != "measured":
            raise InputError(f"--measured {path}: a predicted timeline; `run PLAN -o {path}` writes a measured one")
        if timeline.digest not in digests:
            raise InputError(f"--measured {path}: of plan {timeline.digest[:16]}, which is none of those given")
        if timeline.digest in found:
            raise InputError(f"--measured {path}: a second timeline of plan {timeline.digest[:16]}; give one a plan")
        found[timeline.digest] = timeline
    return found
