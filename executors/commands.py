"""The running half of the command line: `run`, `calibrate`, `demo`."""

from typing import Annotated

import typer

from shardroute.executors.demo import run_demo
from shardroute.executors.measure import calibrate_here
from shardroute.executors.run import DEFAULT_TIMEOUT_S, TRANSPORTS, RunResult, run_plan
from shardroute.planner.cli import app
from shardroute.planner.cli.inspect import PlanArgument
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, progress
from shardroute.planner.cli.program import main
from shardroute.planner.plan_files import load_plan
from shardroute.planner.timelines import save_timeline
from shardroute.topologies.calibrations import calibration_to_dict, check_calibration_path, save_calibration
from shardroute.topologies.errors import InputError, RunError
from shardroute.topologies.figures import Figure
from shardroute.topologies.files import check_writable
from shardroute.topologies.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["main"]


@app.command("run", rich_help_panel="Run and measure")
def run_command(
    plan: PlanArgument,
    transport: Annotated[
        str, typer.Option("--transport", "-t", help=f"What moves the bytes: {', '.join(TRANSPORTS)}.")
    ] = "processes",
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the measured timeline (JSON) to this file.")] = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Run this often and report the median.")] = 1,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that everything may take.")] = DEFAULT_TIMEOUT_S,
    json: JsonFlag = False,
) -> None:
    """Run a plan with real processes on this machine: fill the source, move, verify every destination byte, measure."""
    loaded = load_plan(plan)
    if output is not None:
        check_writable(output, "the timeline")
    with progress(f"running {loaded.problem.n_ranks} ranks") as done:
        result = run_plan(loaded, transport=transport, timeout_s=timeout, repeats=repeats, progress=done)
    if output is not None:
        save_timeline(result.timeline, output)
    if json:
        print_json(_run_record(result, loaded.digest))
    else:
        print_facts(plan, run_facts(result))
    if result.mismatches:
        raise RunError("the destination holds wrong bytes; " + "; ".join(m.text for m in result.mismatches[:4]))


def _run_record(result: RunResult, digest: str) -> dict[str, object]:
    return {
        "measured_s": result.measured_s,
        "verified": {"bytes": result.verified.bytes, "mismatches": result.verified.mismatches},
        "trials_s": list(result.trials_s),
        "n_bytes_copied": result.n_bytes_copied,
        "peak_staging_bytes": int(result.staging_bytes.max(initial=0)),
        "memory_bytes": result.memory_bytes,
        "digest": digest,
        "source": result.timeline.source,
        "mismatches": [m.text for m in result.mismatches],
    }


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
        (
            "memory",
            f"{format_bytes(result.memory_bytes)} of buffers, "
            f"at most {format_bytes(int(result.staging_bytes.max(initial=0)))} staging a rank",
        ),
        ("by", result.timeline.source),
    ]


@app.command("calibrate", rich_help_panel="Run and measure")
def calibrate_command(
    here: Annotated[bool, typer.Option("--here", help="Measure processes on this machine.")] = False,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the calibration (TOML) to this file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Measure what copies between processes cost on this machine, for `simulate --machine cpu-processes --calibration FILE`."""
    if not here:
        raise InputError("nothing to calibrate from: --here measures processes on this machine")
    if output is not None:
        check_calibration_path(output)
    with progress("measuring"):
        calibration = calibrate_here()
    if output is not None:
        save_calibration(calibration, output)
    if json:
        print_json(calibration_to_dict(calibration))
        return
    print_facts(f"Costs of {calibration.library} here", [(f.key, _value_text(f)) for f in calibration.figures])
    print_facts(calibration.figures[0].source, [])


def _value_text(figure: Figure) -> str:
    """A measured figure for people; the file keeps the exact one."""
    if figure.key.startswith("step."):
        return format_seconds(figure.value)
    return format_bandwidth(figure.value) if figure.key == "cpu.copy_bandwidth" else figure.text


@app.command("demo", rich_help_panel="Start here")
def demo_command(json: JsonFlag = False) -> None:
    """The main job on a real model: Qwen3-235B from training to inference on DGX H100, planned, predicted, and run small."""
    figures = run_demo(quiet=json)
    if json:
        print_json(figures)
