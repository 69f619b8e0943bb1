"""`shardroute strategies`: the strategies by name, or all of them compared on one problem and one or several machines."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from shardroute.planner.cli.cautions import say_costs
from shardroute.planner.cli.options import check_known
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress
from shardroute.planner.cli.plan import (
    CalibrationOption,
    MaxStagingOption,
    calibration_for,
    planned_by,
    topology_for,
    within,
)
from shardroute.planner.cli.program import app
from shardroute.planner.cli.requests import Asked, with_request_options
from shardroute.planner.cli.texts import ratio_text
from shardroute.planner.problems import Problem
from shardroute.planner.reports import PlanReport
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import STRATEGIES, effort
from shardroute.planner.routing.sums import SUMMING
from shardroute.planner.shares import Told, parts
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import machine_names
from shardroute.topologies.topologies import Topology
from shardroute.topologies.units import format_bytes, format_count, format_seconds


class Contest(msgspec.Struct, frozen=True):
    """All strategies on one machine, fastest first; the field names are those of `strategies --json`, and stay."""

    machine: str
    calibrated: bool
    lower_bound_s: float
    bound: str
    least_bytes_cross_domain: int
    strategies: list[PlanReport]


class Strategies(msgspec.Struct, frozen=True):
    """All strategies on each machine."""

    layouts: dict[str, str]
    machines: list[Contest]


class StrategyEntry(msgspec.Struct, frozen=True):
    """A strategy by its name."""

    name: str
    summary: str


@app.command("strategies", rich_help_panel="Plan and predict")
@with_request_options
def strategies_command(
    machine: Annotated[
        list[str] | None,
        typer.Option(
            "--machine",
            "-m",
            help='A machine and how many of it, "dgx-h100 x 32"; without a count, as many as needed. Repeat it for several.',
            autocompletion=machine_names,
        ),
    ] = None,
    *,
    asked: Asked,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="Only this one; repeat it for several.", autocompletion=lambda: [*STRATEGIES]),
    ] = None,
    calibration: CalibrationOption = None,
    max_staging: MaxStagingOption = None,
    json: JsonFlag = False,
) -> None:
    """List the strategies, or, given a problem and a machine, plan by each and compare: time, bound, traffic, memory, bottleneck.

    \b
    shardroute strategies --model deepseek-v3 --from "PP16 x EP16" --to "TP32 x DP8" \\
      --machine dgx-h100 --machine gb200-nvl72
    """
    names = [*STRATEGIES] if strategy is None else strategy
    for name in names:
        check_known("--strategy", name, [*STRATEGIES, *SUMMING])
    if machine is None and asked.model is None and asked.shape is None and asked.from_json is None:
        _list(names, json)
        return
    if machine is None:
        raise InputError("--machine is missing: name one or several machines, such as --machine dgx-h100")
    request = asked.request()
    if strategy is None and request.problem.summed:
        names = [*SUMMING]
    options = within(Options(), max_staging)
    machines = []
    for text in machine:  # all of them before the first is planned for, which takes a while
        topology = topology_for(text, request.problem.n_ranks)
        machines.append((topology, calibration_for(topology.machine, calibration)))
    if not json:
        print_facts(request.title, request.facts)
    with progress(f"planning by {format_count(len(names), 'strategy', 'strategies')}") as done:
        contests = [
            _contest(request.problem, topology, costs, names, options, calibration, of_machine)
            for (topology, costs), of_machine in zip(machines, parts(done, [1.0] * len(machines)), strict=True)
        ]
    if json:
        print_json(Strategies(dict(request.facts), contests))
        return
    for contest in contests:
        _print_contest(contest)


def _list(names: Sequence[str], json: bool) -> None:
    if json:
        print_json([StrategyEntry(name, _summary(name)) for name in names])
        return
    print_table(["strategy", ""], [[name, _summary(name)] for name in names], title="Strategies")


def _summary(name: str) -> str:
    return SUMMING[name] if name in SUMMING else STRATEGIES[name].summary


def _contest(
    problem: Problem,
    topology: Topology,
    costs: Calibration,
    names: Sequence[str],
    options: Options,
    calibration: str | None,
    done: Told,
) -> Contest:
    calibrated = say_costs(topology.machine, costs)
    reports = []
    for name, each in zip(names, parts(done, [effort(name) for name in names]), strict=True):
        reports.append(planned_by(problem, topology, costs, name, each, options, costs=calibration).report)
        each(1.0)
    ranked = sorted(reports, key=_rank)
    first = ranked[0]
    return Contest(
        machine=first.machine,
        calibrated=calibrated,
        lower_bound_s=first.lower_bound_s,
        bound=first.bound,
        least_bytes_cross_domain=first.least_bytes_cross_domain,
        strategies=ranked,
    )


def _rank(report: PlanReport) -> tuple[float, str]:
    assert report.predicted_s is not None
    return report.predicted_s, report.strategy


def _print_contest(contest: Contest) -> None:
    rows = []
    for report in contest.strategies:
        assert report.predicted_s is not None
        busy = report.busiest
        rows.append(
            [
                report.strategy,
                format_seconds(report.predicted_s),
                ratio_text(report.ratio_to_bound).removesuffix(" bound"),
                format_bytes(report.n_bytes_cross_domain),
                format_bytes(report.peak_staging_bytes),
                "" if busy is None else f"{busy.resource}, {busy.seconds / report.predicted_s:.0%}",
            ]
        )
    bound, across = f"{format_seconds(contest.lower_bound_s)} ({contest.bound})", format_bytes(contest.least_bytes_cross_domain)
    print_table(
        ["strategy", "predicted", "bound", "across", "staging", "busiest, of the time"],
        rows,
        right=["predicted", "bound", "across", "staging"],
        title=f"\n{contest.machine}: lower bound {bound}; at least {across} across domains",
    )
