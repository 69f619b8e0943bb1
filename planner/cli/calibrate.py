"""What `shardroute calibrate` does with files; the command itself stands beside `run`, as it can also measure here."""

from pathlib import Path

from shardroute.planner.cli.files import read_plan, read_timeline
from shardroute.planner.cli.options import about, machine_of
from shardroute.planner.cli.output import print_facts, print_table, progress, say
from shardroute.planner.cli.plan import calibration_for
from shardroute.planner.file_kinds import LOG, reading
from shardroute.planner.measurements.calibrate import Fitted, calibrate_from_logs
from shardroute.planner.measurements.timeline_fits import calibrate_from_timelines
from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import Figure
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.units import format_bandwidth, format_bytes, format_count, format_seconds


def calibrate_from_files(files: list[str], machine: str | None, base: str | None, plan: str | None) -> Fitted:
    """The calibration that logs, or measured timelines of a plan, give a machine.

    Raises InputError for logs without a machine, timelines without their plan, and both at once.
    """
    timelines = [file for file in files if Path(file).suffix == ".json"]
    if timelines:
        if len(timelines) < len(files) or plan is None:
            raise InputError("timelines (.json) are fitted alone, with the plan that ran: --plan FILE")
        with about("--plan"):
            loaded = read_plan(plan)
        topology_machine = loaded.topology.machine if machine is None else machine_of(machine)[0]
        costs = calibration_for(topology_machine, base, "--base")
        runs = [(file, read_timeline(file)) for file in timelines]
        with progress("fitting") as done:
            return calibrate_from_timelines(runs, loaded, costs, done)
    if machine is None:
        raise InputError("logs don't say which machine they are of; give --machine, for example --machine dgx-h100")
    if plan is not None:
        raise InputError("--plan goes with timelines (.json) that `run -o` wrote; logs of libraries need none")
    found, _ = machine_of(machine)
    if found.kind is not MachineKind.GPU:
        raise InputError(f"--machine {found.name} has no GPUs, which these logs are of; name theirs, or measure it with --here")
    kept = calibration_for(found, base, "--base")
    if kept.nvlink is None:
        raise InputError(f"--base {base}: its costs are of CPUs (machine {kept.machine}); expected those of a GPU machine")
    with reading(files, LOG), progress("fitting") as done:
        return calibrate_from_logs(files, found, kept, done)


def print_fitted(fitted: Fitted) -> None:
    """Print for people what was fitted, each number with the data that gave it; trouble goes to stderr."""
    figures = [figure for figure in fitted.calibration.figures if figure.key in fitted.fitted]
    sources = [figure.source for figure in figures]
    print_table(
        ["figure", "value", "from"],
        [
            [figure.key, figure_text(figure), "as above" if i and sources[i - 1] == figure.source else figure.source]
            for i, figure in enumerate(figures)
        ],
        right=["value"],
        title=f"Fitted for {fitted.calibration.machine}",
    )
    n_curves = len(fitted.fitted) - len(figures)
    print_facts(
        "",
        [
            ("curves", ", ".join(name for name in fitted.fitted if name not in {f.key for f in figures}) or "none"),
            ("kept", f"{format_count(len(fitted.calibration.figures) - len(figures), 'figure')} of the base calibration, "
             f"{len(fitted.calibration.curves) - n_curves} of its curves"),
        ],
    )  # fmt: skip
    for note in fitted.unused:
        say(f"not used: {note}")


def figure_text(figure: Figure) -> str:
    """A figure for people; the file keeps the exact one."""
    key = figure.key
    if key.endswith("bandwidth"):
        return format_bandwidth(figure.value)
    if key.endswith("chunk"):
        return format_bytes(figure.value)
    if key.endswith(("efficiency", "cores", "channels")):
        return f"{figure.value:.3g}"
    return format_seconds(figure.value)
