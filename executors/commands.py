"""The running half of the command line: `run`, `calibrate`, `demo`; and `emulate`, which stands in its own package."""

from contextlib import nullcontext
from typing import Annotated

import typer
from msgspec import to_builtins

from shardroute.executors.attention.seam import Arithmetic
from shardroute.executors.demo import run_demo
from shardroute.executors.emulation import commands as _emulation  # noqa: F401  # adds its command to the program
from shardroute.executors.foresee import foresee
from shardroute.executors.launching.launches import find_place
from shardroute.executors.launching.ranks import PROCESSES
from shardroute.executors.measuring.copies import PARTS_S, calibrate_here
from shardroute.executors.run import (
    DEFAULT_TIMEOUT_S,
    TRANSPORTS,
    RunResult,
    check_limits,
    check_transport,
    run_as_rank,
    run_plan,
)
from shardroute.planner.check import check, checking_us
from shardroute.planner.cli import app
from shardroute.planner.cli.calibrate import calibrate_from_files, figure_text, print_fitted
from shardroute.planner.cli.files import read_plan, write_timeline
from shardroute.planner.cli.inspect import PlanArgument
from shardroute.planner.cli.options import about, check_output
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, progress
from shardroute.planner.cli.program import main
from shardroute.planner.plans import Plan
from shardroute.planner.ring.overlaps import overlap_facts, overlap_of
from shardroute.planner.timelines import Timeline
from shardroute.topologies.calibrations import calibration_to_dict, check_calibration_path, save_calibration
from shardroute.topologies.errors import InputError, RunError
from shardroute.topologies.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["main"]

# How often a plan that computes is run unless told otherwise: the first trial finds caches and memory cold, as no later one does.
_TRIALS = 5


@app.command("run", rich_help_panel="Run and measure")
def run_command(
    plan: PlanArgument,
    transport: Annotated[
        str, typer.Option("--transport", "-t", help=f"What moves the bytes: {', '.join(TRANSPORTS)}.")
    ] = "processes",
    spawn: Annotated[
        bool, typer.Option("--spawn", help="Start all ranks on this machine; `processes` always does.", rich_help_panel="Ranks")
    ] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", help="This process's rank, if not what the launcher says.", rich_help_panel="Ranks")
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", help="How many ranks there are.", rich_help_panel="Ranks")
    ] = None,
    rendezvous: Annotated[
        str, typer.Option("--rendezvous", help="Where ranks meet: tcp://HOST:PORT or file:///PATH.", rich_help_panel="Ranks")
    ] = "",
    arithmetic: Annotated[
        Arithmetic | None,
        typer.Option("--arithmetic", help="What computes attention: numpy (default on CPUs), or torch (always on GPUs)."),
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the measured timeline (JSON) to this file.")] = None,
    repeats: Annotated[
        int | None,
        typer.Option("--repeats", help="Run this often and report the median.", show_default=f"1; {_TRIALS} where it computes"),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Follow each piece by checksums, and name where one was corrupted.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that everything may take.")] = DEFAULT_TIMEOUT_S,
    json: JsonFlag = False,
) -> None:
    """Run a plan for real: fill the source, move, verify every destination byte, measure.

    With processes on this machine, or as one of the ranks that torchrun, srun or mpirun has started; rank 0 then reports.
    """
    with about("--transport"):
        check_transport(transport)
    with about("--timeout"):
        check_limits(timeout, 1)
    with about("--repeats"):
        check_limits(DEFAULT_TIMEOUT_S, 1 if repeats is None else repeats)
    place = None if spawn else find_place(rank, world_size, rendezvous)
    if place is None and transport != PROCESSES and not spawn:
        raise InputError(
            f"nothing says which rank this process is: --spawn starts all ranks of transport {transport} here; else start this "
            f"with torchrun, srun or mpirun, or give --rank, --world-size and --rendezvous"
        )
    loaded = read_plan(plan)
    if repeats is None:
        repeats = 1 if loaded.attention is None else _TRIALS
    reports = place is None or place.rank == 0
    check_output(output if reports else None, "the timeline")
    with progress("checking", checking_us(loaded)) as done:
        check(loaded, progress=done)
    what, foreseen_us = f"running {loaded.problem.n_ranks} ranks", 1e6 * foresee(loaded, transport).whole_s(repeats)
    result: RunResult | None
    if place is None:
        with progress(what, foreseen_us) as done:
            result = run_plan(
                loaded, transport=transport, timeout_s=timeout, repeats=repeats, progress=done, arithmetic=arithmetic,
                verify=verify,
            )  # fmt: skip
    else:
        with progress(what, foreseen_us, between_shares=False) if reports else nullcontext() as done:
            result = run_as_rank(
                loaded, place, transport=transport, timeout_s=timeout, repeats=repeats, progress=done, arithmetic=arithmetic,
                verify=verify,
            )  # fmt: skip
    if result is None:
        return
    if output is not None:
        write_timeline(result.timeline, output)
    if json:
        print_json(_run_record(result, loaded.digest) | _overlap_record(loaded, result.timeline))
    else:
        print_facts(plan, [*run_facts(result), *overlap_facts(loaded, result.timeline)])
    if result.corrupted:
        raise RunError("a piece was corrupted on its way; " + "; ".join(result.corrupted[:4]))
    if result.mismatches:
        raise RunError("the destination holds wrong bytes; " + "; ".join(m.text for m in result.mismatches[:4]))


def _run_record(result: RunResult, digest: str) -> dict[str, object]:
    return {
        "measured_s": result.measured_s,
        "verified": to_builtins(result.verified),
        "trials_s": list(result.trials_s),
        "n_bytes_copied": result.n_bytes_copied,
        "peak_staging_bytes": int(result.staging_bytes.max(initial=0)),
        "memory_bytes": result.memory_bytes,
        "packing_bytes": result.packing_bytes,
        "digest": digest,
        "source": result.timeline.source,
        "mismatches": [m.text for m in result.mismatches],
        **({} if result.corrupted is None else {"corrupted": list(result.corrupted)}),
    }


def _overlap_record(plan: Plan, timeline: Timeline) -> dict[str, object]:
    return {} if plan.attention is None else {"overlap": to_builtins(overlap_of(plan, timeline))}


def run_facts(result: RunResult) -> list[tuple[str, str]]:
    """The lines that describe a run to a person."""
    rate = f" ({format_bandwidth(result.n_bytes_copied / result.measured_s)})" if result.measured_s > 0 else ""
    wrong, n_runs = result.verified.mismatches, len(result.trials_s)
    return [
        ("measured", format_seconds(result.measured_s) + (f", median of {n_runs} runs" if n_runs > 1 else "")),
        ("copied", format_bytes(result.n_bytes_copied) + rate),
        (
            "verified",
            f"{format_bytes(result.verified.bytes)} of destination{f' in each of {n_runs} runs' if n_runs > 1 else ''}, "
            + ("all right" if wrong == 0 else f"{wrong} bytes WRONG"),
        ),
        *([("against", result.verified.against)] if result.verified.against else []),
        *([] if result.corrupted is None else [("checksums", _checksums_text(result.corrupted))]),
        (
            "memory",
            f"{format_bytes(result.memory_bytes)} of buffers, "
            f"at most {format_bytes(int(result.staging_bytes.max(initial=0)))} staging a rank"
            + (f", {format_bytes(result.packing_bytes)} to pack messages" if result.packing_bytes else ""),
        ),
        ("by", result.timeline.source),
    ]


def _checksums_text(corrupted: tuple[str, ...]) -> str:
    return f"{len(corrupted)} pieces CORRUPTED" if corrupted else "every piece is what was sent, from rank to rank"


@app.command("calibrate", rich_help_panel="Run and measure")
def calibrate_command(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES", help="Logs of nccl-tests, nvbandwidth and NVSHMEM's perftest, or timelines that `run -o` wrote."
        ),
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Measure processes on this machine.")] = False,
    machine: Annotated[str | None, typer.Option("--machine", "-m", help="The machine that the logs are of.")] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="Calibration that says what the files don't; without it, the machine's own.")
    ] = None,
    plan: Annotated[str | None, typer.Option("--plan", help="The plan that the timelines are of.")] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the calibration (TOML) to this file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Fit a calibration to logs of nccl-tests, nvbandwidth and NVSHMEM, or to runs of plans; or measure processes here.

    `simulate --calibration FILE` then predicts with it. What the files don't say is kept from the base.
    """
    if here and (files or machine is not None or base is not None or plan is not None):
        raise InputError("--here measures this machine; leave FILES, --machine, --base and --plan out")
    if not here and not files:
        raise InputError("nothing to calibrate from: give logs or timelines, or --here to measure processes on this machine")
    if output is not None:
        with about("--output"):
            check_calibration_path(output)
    if files:
        fitted = calibrate_from_files(files, machine, base, plan)
        calibration = fitted.calibration
    else:
        with progress("measuring", 1e6 * sum(PARTS_S)) as done:
            calibration = calibrate_here(progress=done)
    if output is not None:
        save_calibration(calibration, output)
    if json:
        print_json(calibration_to_dict(calibration))
    elif files:
        print_fitted(fitted)
    else:
        print_facts(f"Costs of {calibration.library} here", [(f.key, figure_text(f)) for f in calibration.figures])
        print_facts(calibration.figures[0].source, [])


@app.command("demo", rich_help_panel="Start here")
def demo_command(json: JsonFlag = False) -> None:
    """The main job on a real model: Qwen3-235B from training to inference on DGX H100, planned, predicted, and run small."""
    figures = run_demo(quiet=json)
    if json:
        print_json(figures)
