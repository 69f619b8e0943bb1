"""`shardroute show` and `shardroute check`: what is in a plan file, whether it delivers, and whether two layouts fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
import typer
from msgspec import to_builtins
from numpy.typing import NDArray

from shardroute.planner.arguments import ranges_text
from shardroute.planner.check import check, checking_us
from shardroute.planner.cli.cautions import say_tolerance
from shardroute.planner.cli.files import read_plan
from shardroute.planner.cli.options import bytes_of, inventory_of
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress
from shardroute.planner.cli.plan import CalibrationOption, calibration_for, costs_file
from shardroute.planner.cli.plan_ring import costs_of
from shardroute.planner.cli.program import app
from shardroute.planner.cli.texts import devices_text, report_facts
from shardroute.planner.coverage import Coverage, coverage
from shardroute.planner.exchange import problem_between
from shardroute.planner.memories import bytes_in_place, check_memory
from shardroute.planner.parts import load_part
from shardroute.planner.plans import Lane, Op, Plan, lane_of
from shardroute.planner.reports import bounds_of, report, reporting_us
from shardroute.planner.ring.reports import ring_facts, ring_report
from shardroute.planner.shares import parts
from shardroute.planner.simulator.refit import predict, predicting_us
from shardroute.planner.stagings import check_staging, staging_facts, staging_of
from shardroute.topologies.calibrations import calibration_names
from shardroute.topologies.errors import InfeasibleError, InputError
from shardroute.topologies.units import format_bytes, format_count, format_seconds

_MOST_LACKS = 20  # a screenful; --json lists them all

PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file that `shardroute plan -o` wrote.")]


@dataclass(frozen=True, slots=True)
class LaneTotal:
    """What the steps of one lane carry."""

    lane: str
    n_steps: int
    n_bytes: int
    largest_bytes: int


class ShownPart(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's part of a plan: what it drives, and what comes to it; the field names are those of `show --rank N --json`."""

    rank: int
    digest: str
    n_steps: int
    n_steps_driven: int
    n_bytes_sent: int
    sends_to: list[int]
    n_steps_got: int
    n_bytes_got: int
    gets_from: list[int]
    staging_bytes: int
    packing_bytes: int
    lanes: list[LaneTotal]


class CheckedPlan(msgspec.Struct, frozen=True):
    """What was proved of a plan; the field names are those of `check PLAN --json`, and stay."""

    ok: Literal[True]
    digest: str
    n_steps: int
    n_deliveries: int
    n_bytes: int
    peak_staging_bytes: int
    peak_packing_bytes: int


class CheckedLayouts(msgspec.Struct, frozen=True):
    """Whether two layouts fit; the field names are those of `check --from-json A --to-json B --json`, and stay."""

    ok: bool
    coverage: Coverage
    n_bytes_in_place: int


@app.command("show", rich_help_panel="Plan and predict")
def show_command(
    plan: PlanArgument,
    rank: Annotated[
        int | None, typer.Option("--rank", help="Show this rank's own part: what it sends and gets. Reads no more than that.")
    ] = None,
    calibration: CalibrationOption = None,
    json: JsonFlag = False,
) -> None:
    """Show a plan: its numbers, what bounds it, its steps by kind, and its largest tensors. Or a rank's own part of it."""
    if rank is not None:
        _show_part(plan, rank, json)
        return
    loaded = read_plan(plan)
    machine = loaded.topology.machine
    if loaded.attention is not None:
        _show_ring(loaded, plan, calibration, json)
        return
    known = calibration is not None or machine.name in calibration_names()
    costs = calibration_for(machine, calibration if known else "nominal")
    weights = (predicting_us(loaded) if known else 0.0, reporting_us(loaded), reporting_us(loaded))
    with progress("predicting", sum(weights)) as done:
        predicted, reported, bounded = parts(done, weights)
        prediction = say_tolerance(predict(loaded, costs, progress=predicted)) if known else None
        found = report(loaded, prediction, costs, costs_file=costs_file(calibration), progress=reported)
        bounds, lanes = bounds_of(loaded, costs, bounded), _by_lane(loaded, np.ones(len(loaded.steps), dtype=bool))
    if json:
        print_json(to_builtins(found) | {"layouts": dict(loaded.problem.about), "bounds": bounds, "lanes": lanes})
        return
    print_facts(plan, [*loaded.problem.about, *report_facts(found, devices_text(loaded))])
    if bounds:
        print_table(
            ["lower bound", "bytes", "at least"],
            [[cut.name, format_bytes(cut.n_bytes), format_seconds(cut.seconds)] for cut in bounds],
            right=["bytes", "at least"],
            title="\nWhat no plan can beat",
        )
    _print_lanes(lanes, "\nSteps")
    largest = sorted(loaded.problem.tensors, key=lambda tensor: (-tensor.n_bytes, tensor.name))[:5]
    print_table(
        ["tensor", "shape", "dtype", "bytes"],
        [[t.name, " x ".join(map(str, t.shape)), t.dtype, format_bytes(t.n_bytes)] for t in largest],
        right=["bytes"],
        title=f"\nLargest of {format_count(len(loaded.problem.tensors), 'tensor')}",
    )


def _show_ring(loaded: Plan, path: str, calibration: str | None, json: bool) -> None:
    """A plan of an attention call: its numbers and its steps by kind."""
    with progress("predicting") as done:
        found = ring_report(loaded, *costs_of(loaded.topology.machine, calibration), progress=done)
    lanes = _by_lane(loaded, np.ones(len(loaded.steps), dtype=bool))
    if json:
        print_json(to_builtins(found) | {"lanes": lanes})
        return
    print_facts(path, ring_facts(found))
    _print_lanes(lanes, "\nSteps")


def _show_part(path: str, rank: int, json: bool) -> None:
    try:
        part = load_part(path, rank)
    except InputError as error:
        if str(error).startswith(f"rank {rank}:"):  # not the plan's path
            raise InputError(f"--{error}") from None
        raise
    steps, n_bytes = part.plan.steps, part.plan.step_bytes
    driven = (steps.src == rank) | (steps.op != Op.COPY)
    away = steps.src != steps.dst
    sent, got = driven & away, (steps.dst == rank) & away
    declared = staging_of(part.plan)
    staging, packing = int(declared.slots[rank]), int(declared.packing[rank])
    lanes = _by_lane(part.plan, driven)
    shown = ShownPart(
        rank=rank, digest=part.digest, n_steps=part.n_steps, n_steps_driven=int(driven.sum()),
        n_bytes_sent=int(n_bytes[sent & (steps.op == Op.COPY)].sum()), sends_to=np.unique(steps.dst[sent]).tolist(),
        n_steps_got=int(got.sum()), n_bytes_got=int(n_bytes[got].sum()), gets_from=np.unique(steps.src[got]).tolist(),
        staging_bytes=staging, packing_bytes=packing, lanes=lanes,
    )  # fmt: skip
    if json:
        print_json(shown)
        return
    print_facts(
        f"{path}, rank {rank}",
        [
            ("steps of its own", f"{len(part.step):,} of {part.n_steps:,}"),
            ("drives", f"{shown.n_steps_driven:,}, {format_bytes(int(n_bytes[sent].sum()))} to other ranks"),
            ("to ranks", ranges_text([to for to in shown.sends_to if to >= 0]) or "-"),
            ("gets", f"{shown.n_steps_got:,}, {format_bytes(shown.n_bytes_got)} from other ranks"),
            ("from ranks", ranges_text(shown.gets_from) or "-"),
            ("staging", format_bytes(staging)),
            ("packing", f"{format_bytes(packing)}, where ranks send and receive"),
            ("digest", f"{part.digest[:16]}, of the whole plan"),
        ],
    )
    _print_lanes(lanes, "\nSteps that it drives")


def _print_lanes(lanes: Sequence[LaneTotal], title: str) -> None:
    print_table(
        ["lane", "steps", "bytes", "largest"],
        [[lane.lane, f"{lane.n_steps:,}", format_bytes(lane.n_bytes), format_bytes(lane.largest_bytes)] for lane in lanes],
        right=["steps", "bytes", "largest"],
        title=title,
    )


def _by_lane(plan: Plan, rows: NDArray[np.bool_]) -> list[LaneTotal]:
    """The totals of these steps (bool[n_steps])."""
    of_step = lane_of(plan.steps.lane)
    totals = []
    for lane in Lane:
        n_bytes = plan.step_bytes[rows & (of_step == lane)]
        if len(n_bytes):
            totals.append(LaneTotal(lane.name.lower().replace("_", " "), len(n_bytes), int(n_bytes.sum()), int(n_bytes.max())))
    return totals


@app.command("check", rich_help_panel="Plan and predict")
def check_command(
    plan: Annotated[str | None, typer.Argument(metavar="PLAN", help="A plan file that `shardroute plan -o` wrote.")] = None,
    from_json: Annotated[
        str | None, typer.Option("--from-json", help="What the source ranks hold, a file.", rich_help_panel="Your own layouts")
    ] = None,
    to_json: Annotated[
        str | None, typer.Option("--to-json", help="What the destination ranks must hold.", rich_help_panel="Your own layouts")
    ] = None,
    max_staging: Annotated[
        str | None,
        typer.Option("--max-staging", help="Prove, too, that no rank takes more memory beside its weights, such as 512MiB."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Prove that a plan delivers: every needed element once, from a GPU that holds it, nothing else, and no staging overwritten.

    Or, with --from-json and --to-json, prove that two layouts fit: all that is needed is held, and no two elements are to be
    written to one place.
    """
    if from_json is not None and to_json is not None and plan is None and max_staging is None:
        _check_layouts(from_json, to_json, json)
        return
    if plan is None or from_json is not None or to_json is not None:
        raise InputError("give a PLAN, or two layout files: --from-json SOURCE --to-json DESTINATION")
    if max_staging is not None:
        bytes_of("--max-staging", max_staging)  # what can't be read is said before the plan is checked
    loaded = read_plan(plan)
    with progress("checking", checking_us(loaded)) as done:
        proof = check(loaded, progress=done)
    declared = staging_of(loaded)
    if max_staging is not None:
        check_staging(declared, max_staging)
    peaks = [int(n_bytes.max(initial=0)) for n_bytes in (declared.slots, declared.packing)]
    if json:
        print_json(CheckedPlan(True, loaded.digest, len(loaded.steps), proof.n_deliveries, proof.n_bytes, *peaks))
        return
    print_facts(
        f"{plan} delivers",
        [
            ("deliveries", f"{format_count(proof.n_deliveries, 'piece')}, {format_bytes(proof.n_bytes)}"),
            ("steps", f"{len(loaded.steps):,}"),
            *staging_facts(*peaks),
            ("digest", loaded.digest[:16]),
        ],
    )


def _check_layouts(from_json: str, to_json: str, json: bool) -> None:
    """Print what two layout files come to. Raises InfeasibleError when something is lacking, after printing it."""
    source, target = inventory_of("--from-json", from_json), inventory_of("--to-json", to_json)
    problem = problem_between(source, target)
    with progress("checking"):
        check_memory(target.tensors, target.layout)
        found = coverage(problem)
        in_place = bytes_in_place(problem, source.aliases, target.aliases)
    if json:
        print_json(CheckedLayouts(not found.lacks, found, in_place))
    else:
        facts = [
            ("tensors", f"{found.n_tensors:,} of {format_bytes(problem.n_bytes)}"),
            ("pieces", f"{found.n_pieces:,}"),
            ("needed", f"{format_bytes(found.n_bytes_needed)}, over {format_count(len(target.layout.ranks), 'rank')}"),
            ("held there already", f"{format_bytes(found.n_bytes_held)}, {format_bytes(in_place)} of it in the same memory"),
            ("needed by no rank", format_bytes(found.n_bytes_unneeded)),
        ]
        print_facts(f"{from_json} -> {to_json}: {'they fit' if not found.lacks else 'THEY DO NOT FIT'}", facts)
    if found.lacks:
        if not json:
            rows = [[str(lack), ", ".join(map(str, lack.ranks))] for lack in found.lacks[:_MOST_LACKS]]
            print_table(["held by no source rank", "needed by ranks"], rows, title="\nLacking")
        first = found.lacks[0]
        more = f" (the first of {len(found.lacks)})" if len(found.lacks) > 1 else ""
        raise InfeasibleError(f"no source rank holds {first}, which rank {first.ranks[0]} needs{more}")
