"""`shardroute plan`: from a model or a bare tensor and two layouts to a plan file and its numbers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from msgspec import to_builtins

from shardroute.planner.arguments import parse_nics
from shardroute.planner.cli.backends import BackendsOption, carried_by, parse_backends
from shardroute.planner.cli.cautions import say_tolerance
from shardroute.planner.cli.files import write_plan
from shardroute.planner.cli.options import about, bytes_of, check_known, check_output, machine_of
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, progress, say, tell
from shardroute.planner.cli.program import app
from shardroute.planner.cli.requests import Asked, with_request_options
from shardroute.planner.cli.texts import devices_text, report_facts
from shardroute.planner.file_kinds import CALIBRATION, reading
from shardroute.planner.plans import Plan
from shardroute.planner.problems import Problem
from shardroute.planner.reports import PlanReport, report, reporting_us
from shardroute.planner.routing.auto import PLANNING_SHARE, choose
from shardroute.planner.routing.caches import cached_plan
from shardroute.planner.routing.options import DEFAULT_BACKENDS, TIME_LIMIT_S, Options
from shardroute.planner.routing.strategies import STRATEGIES, make_plan, make_solution
from shardroute.planner.routing.sums import SUMMING
from shardroute.planner.shares import Told, part, parts
from shardroute.planner.simulator.refit import Prediction, predict, predicting_us
from shardroute.planner.stagings import staging_of
from shardroute.topologies.calibrations import (
    Calibration,
    calibration_names,
    default_calibration,
    load_calibration,
    nominal_calibration,
)
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine, MachineKind, load_machine, machine_names
from shardroute.topologies.topologies import Topology, build_topology, join_topologies
from shardroute.topologies.units import format_count, format_seconds, parse_bytes

AUTO = "auto"
# The share of planning by it; what is left is adding up the plan's figures.
_CHOSEN = 0.96

MachineOption = Annotated[
    str,
    typer.Option(
        "--machine",
        "-m",
        help='A machine and how many of it, "dgx-h100 x 32"; without a count, as many as needed. '
        'Several kinds on one fabric: "dgx-h100 x 4 + gb200-nvl72".',
        autocompletion=machine_names,
    ),
]
OneMachineOption = Annotated[
    str,
    typer.Option(
        "--machine",
        "-m",
        help='A machine, or how many of it there are at most, "dgx-h100 x 32".',
        autocompletion=machine_names,
    ),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option("--calibration", help="Measured costs: a shipped name, a .toml file, or `nominal`. Default: the machine's own."),
]
StrategyOption = Annotated[
    str,
    typer.Option(
        "--strategy",
        "-s",
        help="; ".join(
            [
                *(f"`{s.name}`: {s.summary}" for s in STRATEGIES.values()),
                *(f"`{name}`: {summary}" for name, summary in SUMMING.items()),
                f"`{AUTO}`: the fastest by prediction",
            ]
        ),
        autocompletion=lambda: [*STRATEGIES, *SUMMING, AUTO],
    ),
]

MaxStagingOption = Annotated[
    str | None,
    typer.Option(
        "--max-staging",
        help="Most memory a GPU beside its weights, 512MiB: for pieces that it passes on, and to pack in; 0B: none. "
        "Default: 1GiB and 32MiB.",
    ),
]


def within(options: Options, max_staging: str | None) -> Options:
    """The options with the memory that `--max-staging` allows."""
    return options if max_staging is None else options.within(bytes_of("--max-staging", max_staging))


def calibration_for(machine: Machine, name: str | None, option: str = "--calibration") -> Calibration:
    """The calibration that the user named, else the machine's own; InputError says what to do when there is none."""
    if name == "nominal":
        with about(option):
            found = nominal_calibration(machine)
    elif name is None:
        if machine.name not in calibration_names() and (alike := calibrated_alike(machine)):
            raise InputError(
                f"no calibration ships for machine {machine.name!r}, and predicting needs one; give --calibration {alike}, a "
                "machine with the same GPUs, --calibration FILE with measured costs, or --calibration nominal for nominal rates"
            )
        found = default_calibration(machine.name)
    else:
        with about(option), reading(name, CALIBRATION):
            found = load_calibration(name)
    tell(f"costs: {found.library} on {found.machine}, {found.measured}")
    return found


def costs_file(name: str | None) -> str:
    """The file that --calibration names; empty where it names none."""
    return name if name is not None and name.endswith(".toml") else ""


def calibrated_alike(machine: Machine) -> str:
    """The first shipped machine with the same GPUs whose costs ship, too; empty where there is none."""
    names = [name for name in machine_names() if name in calibration_names() and load_machine(name).gpu == machine.gpu]
    return names[0] if names and machine.kind is MachineKind.GPU else ""


NicOption = Annotated[
    list[str] | None,
    typer.Option(
        "--nic", metavar="GPUS=RATE", help="GPUs whose NICs are not the machine's, 16-23=200Gb/s; 17=0 is down. Repeatable."
    ),
]


def topology_for(machine: str, n_ranks: int, nics: Sequence[str] | None = None) -> Topology:
    """The machines of the `--machine` text, with as many units as it says or the ranks need, and NICs of their own (`--nic`).

    The last machine without a count fills up what the ranks need; others must have one.
    """
    *first, last = machine.split(" + ")
    parts = []
    for text in first:
        found, count = machine_of(text)
        if count is None:
            raise InputError(f"--machine {machine!r}: {text!r} needs a count, '{text.strip()} x 4'; the last may go without")
        with about("--machine"):
            parts.append(build_topology(found, count))
    found, count = machine_of(last)
    with about("--machine"):
        parts.append(build_topology(found, count, max(1, n_ranks - sum(part.n_gpus for part in parts))))
        topology = join_topologies(parts)
    tell(f"machine: {topology.title}, for {format_count(n_ranks, 'rank')}")
    if not nics:
        return topology
    with about("--nic"):
        return replace(topology, own_nic_Bps=tuple(parse_nics("--nic", nics).items()))


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with what was found out about it; `notes` (name, text) is what its strategy has to say."""

    plan: Plan
    report: PlanReport
    notes: tuple[tuple[str, str], ...] = ()


def plan_and_predict(
    problem: Problem,
    topology: Topology,
    calibration: Calibration,
    strategy: str,
    options: Options | None = None,
    cache: str | None = None,
    costs: str | None = None,
) -> Planned:
    """`planned_by`, showing progress on a terminal."""
    with progress(f"planning ({strategy})") as done:
        return planned_by(problem, topology, calibration, strategy, done, options, cache, costs)


def planned_by(
    problem: Problem,
    topology: Topology,
    calibration: Calibration,
    strategy: str,
    done: Told,
    options: Options | None = None,
    cache: str | None = None,
    costs: str | None = None,
) -> Planned:
    """Plan, predict and report; `done` is told the share. `plan_s` is the time to plan, prediction left out. `costs` is what
    --calibration says.

    The strategy `auto` predicts in order to plan, so there `plan_s` holds both. With a `cache` the plan comes from that folder
    where it is there, and is put there where not.
    """
    notes: list[tuple[str, str]] = []
    prediction: Prediction | None = None

    def make() -> Plan:
        nonlocal prediction
        plan, said, prediction = _planned(problem, topology, calibration, strategy, options, done)
        notes.extend(said)
        return plan

    began = time.perf_counter()
    if cache is None:
        plan = make()
    else:
        reads = calibration if strategy == AUTO else None
        kept = replace(Options() if options is None else options, told=part(done, 0.0, PLANNING_SHARE))
        plan, was_there = cached_plan(problem, topology, strategy, cache, kept, calibration=reads, make=make)
        notes.append(("from cache" if was_there else "kept in", cache))
    plan_s = time.perf_counter() - began
    if prediction is None:
        tell(f"planned by {strategy}: {format_count(len(plan.steps), 'step')} in {format_seconds(plan_s)}")
        done(PLANNING_SHARE)
        predicted, reported = parts(part(done, PLANNING_SHARE, 1.0), (predicting_us(plan), reporting_us(plan)))
        prediction = predict(plan, calibration, progress=predicted)
    else:
        reported = part(done, _CHOSEN, 1.0)
    say_tolerance(prediction)
    return Planned(plan, report(plan, prediction, calibration, plan_s, costs_file(costs), reported), tuple(notes))


def _planned(
    problem: Problem,
    topology: Topology,
    calibration: Calibration,
    strategy: str,
    options: Options | None,
    done: Callable[[float], None],
) -> tuple[Plan, list[tuple[str, str]], Prediction | None]:
    """The plan, what its strategy has to say, and its prediction where that was needed to plan."""
    options = replace(Options() if options is None else options, told=part(done, 0.0, PLANNING_SHARE))
    if strategy == AUTO:
        choice = choose(problem, topology, calibration, replace(options, told=None), progress=part(done, 0.0, _CHOSEN))
        tell(f"chosen: {choice.reason}")
        return choice.plan, [("chosen", choice.reason)], choice.prediction
    if strategy == "optimal":
        found = make_solution(problem, topology, options)
        return found.plan, [
            ("busiest link, nominal", format_seconds(found.objective_s)),
            ("no plan beats, nominal", f"{format_seconds(found.bound_s)} (gap {found.gap:.2%})"),
            ("solver", found.solver),
        ], None
    return make_plan(problem, topology, strategy, options=options), [], None


@app.command("plan", rich_help_panel="Plan and predict")
@with_request_options
def plan_command(
    machine: MachineOption,
    asked: Asked,
    strategy: StrategyOption = AUTO,
    calibration: CalibrationOption = None,
    message_size: Annotated[str | None, typer.Option("--message-size", help="Largest message, 64MiB; default: by size.")] = None,
    max_staging: MaxStagingOption = None,
    nic: NicOption = None,
    backends: BackendsOption = None,
    max_ops_in_flight: Annotated[
        int | None, typer.Option("--max-ops-in-flight", help="Most steps that a GPU drives at once, and that arrive.")
    ] = None,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Seconds that `optimal` may solve for.")] = TIME_LIMIT_S,
    cache: Annotated[
        str | None, typer.Option("--cache", help="Keep plans in this folder, and take the plan from it where it is there.")
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Plan how a model, a bare tensor, or layouts of your own move, and predict how long that takes.

    \b
    A model:
      shardroute plan --model qwen3-235b-a22b --from "TP4 x PP8 x EP16" \\
        --to "TP8 x DP16" --machine dgx-h100 -o q.plan

    \b
    A bare tensor:
      shardroute plan --shape 256,2048,7168 --from-mesh ep=16 \\
        --from-placements S0 --to-mesh dp=8,tp=32 --to-placements R,S1 \\
        --machine "dgx-h100 x 34"
    """
    check_known("--strategy", strategy, [*STRATEGIES, *SUMMING, AUTO])
    if cache == "":
        raise InputError("--cache '': expected the name of a folder")
    request = asked.request()
    topology = topology_for(machine, request.problem.n_ranks, nic)
    costs = calibration_for(topology.machine, calibration)
    message_bytes = None if message_size is None else bytes_of("--message-size", message_size)
    with about("--message-size"):
        Options(message_bytes=message_bytes)
    with about("--max-ops-in-flight"):
        Options(max_ops_in_flight=max_ops_in_flight)
    with about("--time-limit"):
        Options(time_limit_s=time_limit)
    options = Options(
        message_bytes=message_bytes,
        max_ops_in_flight=max_ops_in_flight,
        time_limit_s=time_limit,
        backends=DEFAULT_BACKENDS if backends is None else parse_backends(backends, strategy, topology),
        calibration=None if calibration is None else costs,
    )
    options = within(options, max_staging)
    check_output(output, "the plan")
    planned = plan_and_predict(request.problem, topology, costs, strategy, options, cache, calibration)
    if backends is not None:
        planned = replace(planned, notes=(*planned.notes, ("carried by", carried_by(planned.plan))))
    if max_staging is not None and (staging_of(planned.plan).n_bytes > parse_bytes(max_staging)).any():
        over = f"{planned.report.strategy} takes the slots that it needs, more than --max-staging {max_staging} allows"
        planned = replace(planned, notes=(*planned.notes, ("over the limit", over)))
    if output is not None:
        write_plan(planned.plan, output)
    if json:
        print_json(to_builtins(planned.report) | {"layouts": dict(request.facts), "notes": dict(planned.notes)})
        return
    print_facts(request.title, [*request.facts, *report_facts(planned.report, devices_text(planned.plan)), *planned.notes])
    if output is not None:
        say(f"plan written to {output}")
