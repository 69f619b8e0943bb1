"""`shardroute emulate`, and the part of `shardroute validate` that runs plans."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from msgspec import to_builtins

from shardroute.executors.emulation.emulate import check_moves, emulate
from shardroute.executors.emulation.machines import (
    NIC_BPS,
    NVLINK_BPS,
    check_emulated,
    check_machine_path,
    emulated_machine,
    save_machine,
)
from shardroute.executors.emulation.namespaces import Namespaces
from shardroute.executors.emulation.ping_pong import calibrate_emulated
from shardroute.executors.emulation.report import print_emulated
from shardroute.executors.foresee import foresee
from shardroute.executors.launching.processes import check_files
from shardroute.executors.launching.ranks import EMULATED
from shardroute.executors.run import DEFAULT_TIMEOUT_S, check_limits
from shardroute.planner.check import check, checking_us
from shardroute.planner.cli import app
from shardroute.planner.cli.calibrate import figure_text
from shardroute.planner.cli.files import read_plan, write_timeline
from shardroute.planner.cli.options import about, check_output
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, progress
from shardroute.planner.cli.plan import calibration_for
from shardroute.planner.cli.predict import print_comparison
from shardroute.planner.cli.validate import EMULATION
from shardroute.planner.compare import compare
from shardroute.planner.simulator.refit import predict, predicting_us
from shardroute.topologies.calibrations import (
    Calibration,
    calibration_to_dict,
    check_calibration_path,
    save_calibration,
)
from shardroute.topologies.errors import InputError, RunError
from shardroute.topologies.topologies import Topology, build_topology
from shardroute.topologies.units import format_bandwidth, parse_rate

EMULATION.append(print_emulated)

_CLUSTER, _PLAN = "A cluster of your own (without PLAN)", "Running a plan"
_MACHINE_FILE, _CALIBRATION_FILE = "emulated.toml", "emulated-calibration.toml"
_DOMAINS, _GPUS, _NVLINK, _NIC = 4, 4, format_bandwidth(NVLINK_BPS), format_bandwidth(NIC_BPS)


@app.command("emulate", rich_help_panel="Run and measure")
def emulate_command(
    plan: Annotated[
        str | None, typer.Argument(metavar="PLAN", help="A plan file to run; without one, the links are only measured.")
    ] = None,
    domains: Annotated[int, typer.Option("--domains", help="NVLink domains.", rich_help_panel=_CLUSTER)] = _DOMAINS,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of a domain.", rich_help_panel=_CLUSTER)] = _GPUS,
    nvlink: Annotated[
        str, typer.Option("--nvlink", help="Rate of a GPU's NVLink, one way.", rich_help_panel=_CLUSTER)
    ] = _NVLINK,
    nic: Annotated[str, typer.Option("--nic", help="Rate of a GPU's NIC, one way.", rich_help_panel=_CLUSTER)] = _NIC,
    write: Annotated[
        str | None,
        typer.Option(
            "--write", metavar="FOLDER", rich_help_panel=_CLUSTER,
            help=f"Write the machine ({_MACHINE_FILE}) and what was measured ({_CALIBRATION_FILE}) to this folder.",
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option("--calibration", help="Predict with this file, instead of by ping-pong first.", rich_help_panel=_PLAN),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Run this often and report the median.", rich_help_panel=_PLAN)
    ] = 1,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="Write the measured timeline (JSON) to this file.", rich_help_panel=_PLAN),
    ] = None,
    namespaces: Annotated[
        bool, typer.Option("--namespaces", help="Let the kernel keep to the rates, in network namespaces: needs root.")
    ] = False,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds that each run may take.")] = DEFAULT_TIMEOUT_S,
    json: JsonFlag = False,
) -> None:  # fmt: skip
    """Emulate a cluster on this machine: a process a GPU, and between them links of given rates, measured by ping-pong.

    \b
    What its links reach, and files to plan with:
      shardroute emulate --write emu
      shardroute plan --machine "emu/emulated.toml x 4" --calibration \\
        emu/emulated-calibration.toml --message-size 32KiB ... -o e.plan

    \b
    A plan on it, predicted and measured:
      shardroute emulate e.plan
    """
    with about("--timeout"):
        check_limits(timeout, 1)
    with about("--repeats"):
        check_limits(DEFAULT_TIMEOUT_S, repeats)
    own = (
        ("--domains", domains, _DOMAINS), ("--gpus", gpus, _GPUS), ("--nvlink", nvlink, _NVLINK), ("--nic", nic, _NIC),
        ("--write", write, None),
    )  # fmt: skip
    if plan is not None:
        if given := [name for name, value, default in own if value != default]:
            raise InputError(f"{given[0]} goes without PLAN, whose machine is known; leave one of them out")
        _run(plan, calibration, repeats, output, timeout, namespaces=namespaces, json=json)
        return
    if calibration is not None or output is not None or repeats != 1:
        raise InputError("--calibration, --output and --repeats go with PLAN; without one, --write FOLDER keeps what is measured")
    if gpus < 1:
        raise InputError(f"--gpus {gpus}: an NVLink domain has 1 GPU or more")
    machine = emulated_machine(gpus, _rate_of("--nvlink", nvlink), _rate_of("--nic", nic))
    with about("--domains"):
        topology = build_topology(machine, domains)
    check_files(topology.n_gpus)
    if write is not None:
        with about("--write"):
            if not write:
                raise InputError("expected the name of a folder, found none")
            _make(Path(write))
            check_machine_path(str(Path(write) / _MACHINE_FILE))
            check_calibration_path(Path(write) / _CALIBRATION_FILE)
    found = _measure(topology, timeout, namespaces=namespaces)
    if write is not None:
        save_machine(machine, str(Path(write) / _MACHINE_FILE))
        save_calibration(found, Path(write) / _CALIBRATION_FILE)
    if json:
        print_json(calibration_to_dict(found))
        return
    print_facts(f"{domains} x {machine.title}", [(figure.key, figure_text(figure)) for figure in found.figures])
    print_facts(found.figures[-1].source, [] if write is None else [("written to", write)])


def _rate_of(option: str, text: str) -> float:
    with about(option):
        rate_Bps = parse_rate(text)
    if not rate_Bps:
        raise InputError(f"{option} {text!r}: expected a rate above 0, such as 400MB/s")
    return rate_Bps


def _measure(topology: Topology, timeout_s: float, *, namespaces: bool) -> Calibration:
    with progress("ping-pong") as done, Namespaces(topology) if namespaces else nullcontext() as links:
        return calibrate_emulated(topology, links, timeout_s=timeout_s, progress=done)


def _make(folder: Path) -> None:
    """Make a folder where there is none."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: can't be made a folder ({error.strerror}); name another one") from error


def _run(
    path: str, calibration: str | None, repeats: int, output: str | None, timeout_s: float, *, namespaces: bool, json: bool
) -> None:
    plan = read_plan(path)
    check_emulated(plan.topology)
    check_moves(plan)
    check_output(output, "the timeline")
    given = None if calibration is None else calibration_for(plan.topology.machine, calibration)
    with progress("checking", checking_us(plan)) as done:
        check(plan, progress=done)
    with Namespaces(plan.topology) if namespaces else nullcontext() as links:
        if given is None:
            with progress("ping-pong") as done:
                given = calibrate_emulated(plan.topology, links, timeout_s=timeout_s, progress=done)
        with progress("predicting", predicting_us(plan)) as done:
            predicted = predict(plan, given, progress=done)
        foreseen_us = 1e6 * foresee(plan, EMULATED, predicted.predicted_s).whole_s(repeats)
        with progress(f"emulating {plan.problem.n_ranks} ranks", foreseen_us) as done:
            found = emulate(
                plan, links=links, timeout_s=timeout_s, repeats=repeats, progress=done, foreseen_s=predicted.predicted_s
            )
    comparison = compare(predicted.timeline, found.timeline)
    if output is not None:
        write_timeline(found.timeline, output)
    if json:
        print_json({**to_builtins(comparison), "trials_s": list(found.trials_s)})
    else:
        print_comparison(comparison)
    if found.mismatches:
        raise RunError("the destination holds wrong bytes; " + "; ".join(m.text for m in found.mismatches[:4]))
