"""`shardroute diff`: how two plans, or two timelines, differ."""

import os
import zipfile
from collections.abc import Sequence
from typing import Annotated

import typer

from shardroute.planner.cli.cautions import say_costs, say_tolerance
from shardroute.planner.cli.files import read_plan, read_timeline
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress
from shardroute.planner.cli.plan import CalibrationOption, calibration_for, costs_file
from shardroute.planner.cli.program import app
from shardroute.planner.plans import Plan
from shardroute.planner.reporting.differences import (
    NumberRow,
    PlanDifference,
    TextRow,
    TimelineDifference,
    comparing_us,
    difference,
    timeline_difference,
)
from shardroute.planner.reports import PlanReport, report, reporting_us
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import predict, predicting_us
from shardroute.topologies.calibrations import calibration_names
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_bytes, format_count, format_seconds

_MOST_TENSORS = 20  # a screenful; --json lists them all
_SHOWN_DIGEST = 16


@app.command("diff", rich_help_panel="Plan and predict")
def diff_command(
    first: Annotated[str, typer.Argument(metavar="A", help="A plan file, or a timeline that `simulate -o` or `run -o` wrote.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one of the same kind.")],
    calibration: CalibrationOption = None,
    json: JsonFlag = False,
) -> None:
    """Say how two plans differ: numbers, bytes by link, predicted time, which tensors go another way. Or how two timelines do."""
    for path in (first, second):
        if not os.path.isfile(path):  # False, too, for names that no file can have
            what = f"{path} is a folder" if os.path.isdir(path) else f"no file {path}"
            raise InputError(f"{what}; give two plan files, or two timelines that `simulate -o` or `run -o` wrote")
    kinds = [zipfile.is_zipfile(path) for path in (first, second)]
    if kinds[0] != kinds[1]:
        plan, other = (first, second) if kinds[0] else (second, first)
        raise InputError(f"{plan} is a plan and {other} isn't; give two plans, or two timelines")
    if not kinds[0]:
        if calibration is not None:
            raise InputError("--calibration is for plans, which are predicted anew; a timeline's times are its own, leave it out")
        found = timeline_difference(read_timeline(first), read_timeline(second))
        if json:
            print_json(found)
        else:
            _print_timelines(found, first, second)
        return
    plans = [read_plan(path) for path in (first, second)]
    weights = [predicting_us(plan) + reporting_us(plan) for plan in plans]
    weights.append(sum(comparing_us(plan) for plan in plans))
    with progress("predicting and comparing", sum(weights)) as done:
        *told, compared = parts(done, weights)
        reports = [_report(plan, calibration, each) for plan, each in zip(plans, told, strict=True)]
        differs = difference(plans[0], plans[1], reports[0], reports[1], compared)
    if json:
        print_json(differs)
    else:
        _print_plans(differs, first, second)


def _report(plan: Plan, calibration: str | None, done: Told) -> PlanReport:
    """The plan in numbers, predicted where the machine has a calibration or one is named."""
    machine = plan.topology.machine
    known = calibration is not None or machine.name in calibration_names()
    costs = calibration_for(machine, calibration if known else "nominal")
    if not known:
        return report(plan, None, costs, progress=done)
    predicted, reported = parts(done, (predicting_us(plan), reporting_us(plan)))
    try:
        prediction = say_tolerance(predict(plan, costs, progress=predicted))
    except InputError:
        if plan.attention is None:
            raise
        # Attention has no costs on this machine; its bytes and steps still compare.
        return report(plan, None, costs, progress=reported)
    say_costs(machine, costs)
    return report(plan, prediction, costs, costs_file=costs_file(calibration), progress=reported)


def _print_plans(found: PlanDifference, first: str, second: str) -> None:
    print_facts(f"{first} and {second}" + (" are the same plan" if found.same else ""), [])
    if found.same:
        return
    _print_rows(found.texts, found.numbers)
    facts = []
    for what, names in (("only in A", found.only_first), ("only in B", found.only_second), ("laid out otherwise", found.relaid)):
        if names:
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            facts.append((what, f"{format_count(len(names), 'tensor')}: {', '.join(names[:3])}{more}"))
    facts.append(("problem", "the same tensors and layouts" if found.same_problem else "not the same"))
    facts.append(("go another way", f"{len(found.other_way):,} of {format_count(found.n_tensors, 'tensor')} of both"))
    print_facts("", facts)
    if found.other_way:
        shown = found.other_way[:_MOST_TENSORS]
        print_table(
            ["tensor", "bytes", "only A sends", "only B sends"],
            [[t.name, *(format_bytes(n) for n in (t.n_bytes, t.n_bytes_first, t.n_bytes_second))] for t in shown],
            right=["bytes", "only A sends", "only B sends"],
            title=f"\nGo another way: the first {len(shown)} of {len(found.other_way):,}, most bytes first",
        )


def _print_timelines(found: TimelineDifference, first: str, second: str) -> None:
    print_facts(f"{first} and {second}" + ("" if found.same_plan else " are of different plans"), [])
    _print_rows(found.texts, found.numbers)
    if found.n_longer is None or found.n_shorter is None:
        return
    facts = [
        ("over a tenth longer in B", format_count(found.n_longer, "step")),
        ("over a tenth shorter in B", format_count(found.n_shorter, "step")),
    ]
    print_facts("", facts)
    if found.shifts:
        print_table(
            ["step", "A", "B", "change"],
            [[str(s.step), *(format_seconds(v) for v in (s.first_s, s.second_s, s.second_s - s.first_s))] for s in found.shifts],
            right=["step", "A", "B", "change"],
            title="\nSteps whose time changed most",
        )


def _print_rows(texts: Sequence[TextRow], numbers: Sequence[NumberRow]) -> None:
    """What differs of the words, side by side, and all numbers."""
    words = [row for row in texts if row.first != row.second]
    if words:
        shown = [[row.name, _short(row, row.first), _short(row, row.second)] for row in words]
        print_table(["", "A", "B"], shown, title="\nDiffers")
    print_table(
        ["", "A", "B", "B / A"],
        [
            [row.name, _figure(row, row.first), _figure(row, row.second), "" if row.ratio is None else f"{row.ratio:.3g}"]
            for row in numbers
        ],
        right=["A", "B", "B / A"],
        title="\nNumbers",
    )


def _short(row: TextRow, text: str) -> str:
    return text[:_SHOWN_DIGEST] if row.name in ("digest", "plan") else text


def _figure(row: NumberRow, value: float | int | None) -> str:
    if value is None:
        return "-"
    match row.unit:
        case "s":
            return format_seconds(value)
        case "B":
            return format_bytes(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
