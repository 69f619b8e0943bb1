"""`shardroute simulate`, `trace` and `compare`: predicted time, what bounds it, as a picture, and beside a measurement."""

from typing import Annotated, Final

import msgspec
import typer

from shardroute.planner.arguments import parse_ranks
from shardroute.planner.cli.cautions import say_costs, say_tolerance
from shardroute.planner.cli.files import read_plan, read_timeline, write_timeline
from shardroute.planner.cli.inspect import PlanArgument
from shardroute.planner.cli.options import check_output
from shardroute.planner.cli.output import JsonFlag, bar_text, print_facts, print_json, print_table, progress, say, stderr
from shardroute.planner.cli.plan import CalibrationOption, calibration_for, topology_for
from shardroute.planner.cli.program import app
from shardroute.planner.compare import Comparison, compare
from shardroute.planner.critical_paths import Link, Part, critical_path, following_us, reasons, summarise
from shardroute.planner.plans import Plan
from shardroute.planner.ring.overlaps import Overlap, overlap_facts, overlap_of
from shardroute.planner.shares import part
from shardroute.planner.simulator.refit import Prediction, predict, predicting_us
from shardroute.planner.timelines import Timeline
from shardroute.planner.traces import trace
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_bytes, format_count, format_seconds

SHOWN_RESOURCES = 8
# A start may be taken late by the tolerance, an end early: with a half each, a transfer need not slow any other.
MEANINGLESS: Final = 0.5
# Of a critical path, `--json` lists so many steps, the last ones; its parts are of all.
_MOST_LINKS = 1000
# The share of a trace that is over before it is written: with some 50 MB to write, a second of 1.1.
_TRACED = 0.9

TraceToOption = Annotated[
    str | None, typer.Option("--trace", metavar="FILE", help="Write a trace for https://ui.perfetto.dev to this file.")
]
TraceRanksOption = Annotated[
    str | None,
    typer.Option("--trace-ranks", metavar="RANKS", help="Ranks that the trace shows, 0-7,128. Default: all, or the busiest."),
]


class BusyResource(msgspec.Struct, frozen=True):
    """A link, bytes through it, and the seconds in which it is in use."""

    resource: str
    n_bytes: int
    busy_s: float


class CriticalPath(msgspec.Struct, frozen=True):
    """What the end of a plan waits for; the last of its steps."""

    parts: list[Part]
    waited_for: list[Part]
    steps: list[Link]


class Simulated(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction; the field names are those of `simulate --json`, and stay.

    tolerance   share of a transfer's time within which starts and ends were taken together; 0: exact; reached_tolerance: the most
    overlap     there for plans that compute attention
    """

    predicted_s: float
    digest: str
    source: str
    calibrated: bool
    tolerance: float
    reached_tolerance: float
    resources: list[BusyResource]
    overlap: Overlap | msgspec.UnsetType = msgspec.UNSET
    critical_path: CriticalPath


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
    trace_to: TraceToOption = None,
    trace_ranks: TraceRanksOption = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            help="Share of a transfer's time within which starts and ends of transfers are taken together, 0.01; 0: exact. "
            "Default: exact, and 0.01 for the rest of a plan that would take more than minutes.",
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Predict how long a plan takes, what bounds the end, and which links it keeps busy."""
    if trace_ranks is not None and trace_to is None:
        raise InputError("--trace-ranks says whose trace to write; give --trace FILE with it")
    if tolerance is not None and not 0 <= tolerance < MEANINGLESS:
        raise InputError(
            f"--tolerance {tolerance:g}: expected a share from 0 (exact) to below {MEANINGLESS}, such as 0.01; from there on the "
            "start and the end of one transfer may be taken together"
        )
    loaded = read_plan(plan)
    topology = loaded.topology if machine is None else topology_for(machine, loaded.problem.n_ranks)
    costs = calibration_for(topology.machine, calibration)
    check_output(output, "the timeline")
    check_output(trace_to, "the trace", "--trace")
    with progress("simulating", predicting_us(loaded)) as done:
        prediction = predict(loaded, costs, topology, progress=done, tolerance=tolerance)
    say_tolerance(prediction)
    if output is not None:
        write_timeline(prediction.timeline, output)
    if trace_to is not None:
        _save_trace(loaded, prediction.timeline, prediction, trace_to, trace_ranks)
    with progress("following the critical path", following_us(prediction)) as done:
        chain = critical_path(loaded, prediction, done)
    parts = summarise(loaded, chain)
    calibrated = say_costs(topology.machine, costs)
    if json:
        print_json(
            Simulated(
                predicted_s=prediction.predicted_s,
                digest=loaded.digest,
                source=prediction.timeline.source,
                calibrated=calibrated,
                tolerance=prediction.result.tolerance,
                reached_tolerance=prediction.result.reached_tolerance,
                resources=[BusyResource(r.name, r.n_bytes, r.busy_s) for r in prediction.resources],
                overlap=msgspec.UNSET if loaded.attention is None else overlap_of(loaded, prediction.timeline),
                critical_path=CriticalPath(parts, reasons(chain), chain[-_MOST_LINKS:]),
            )
        )
        return
    facts = [("predicted", format_seconds(prediction.predicted_s)), ("for", prediction.timeline.source)]
    print_facts(plan, [*facts, *overlap_facts(loaded, prediction.timeline)])
    total = prediction.predicted_s
    print_table(
        ["what the end waited for", "seconds", "of the time", "steps", ""],
        [
            [
                part.what, format_seconds(part.seconds), f"{part.seconds / total:.0%}", f"{part.n_steps:,}",
                bar_text(part.seconds / total),
            ]
            for part in parts[:SHOWN_RESOURCES]
        ],
        right=["seconds", "of the time", "steps"],
        title=f"\nCritical path: {format_count(len(chain), 'step')}, one after the other",
    )  # fmt: skip
    if chain:
        waits = ", ".join(f"{part.n_steps:,} by {part.what}" for part in reasons(chain))
        print_facts("", [("held up", waits)])
    print_table(
        ["resource", "bytes", "busy", "of the time", ""],
        [
            [r.name, format_bytes(r.n_bytes), format_seconds(r.busy_s), f"{r.busy_s / total:.0%}", bar_text(r.busy_s / total)]
            for r in prediction.resources[:SHOWN_RESOURCES]
        ],
        right=["bytes", "busy", "of the time"],
        title=f"\nBusiest of {format_count(len(prediction.resources), 'resource')}",
    )


@app.command("trace", rich_help_panel="Plan and predict")
def trace_command(
    plan: PlanArgument,
    timeline: Annotated[str, typer.Argument(metavar="TIMELINE", help="What `simulate -o` or `run -o` wrote of this plan.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Write the trace (JSON) to this file.")],
    trace_ranks: TraceRanksOption = None,
) -> None:
    """Turn a timeline, predicted or measured, into a trace for https://ui.perfetto.dev."""
    check_output(output, "the trace")
    loaded = read_plan(plan)
    _save_trace(loaded, read_timeline(timeline), None, output, trace_ranks)


def _save_trace(plan: Plan, timeline: Timeline, prediction: Prediction | None, path: str, ranks: str | None) -> None:
    with progress("writing the trace") as done:
        chosen = None if ranks is None else parse_ranks("--trace-ranks", ranks)
        found = trace(plan, timeline, prediction, ranks=chosen, progress=part(done, 0.0, _TRACED))
        found.save(path)
        done(1.0)
    say(f"trace written to {path}; open it in https://ui.perfetto.dev")
    if found.note:
        say(f"{found.note}; --trace-ranks chooses others")


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
    first, second = read_timeline(predicted), read_timeline(measured)
    if (first.kind, second.kind) == ("measured", "predicted"):
        raise InputError(
            f"{predicted} is measured and {measured} is predicted; the prediction comes first: compare {measured} {predicted}"
        )
    found = compare(first, second)
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
        if found.verified.against:
            facts.append(("against", found.verified.against))
    print_facts("", facts)
