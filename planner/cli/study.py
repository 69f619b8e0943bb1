"""`shardroute study`: refits as NICs, NVLink domains and the number of inference replicas vary."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Final

import typer

from shardroute.planner.cli.mistakes import Group
from shardroute.planner.cli.output import JsonFlag, print_facts, print_table
from shardroute.planner.cli.plan import CalibrationOption, OneMachineOption
from shardroute.planner.cli.program import app
from shardroute.planner.cli.requests import Asked, Request, with_request_options
from shardroute.planner.cli.studying import (
    PageOption,
    Setting,
    StrategiesOption,
    check_page,
    counts,
    listed,
    rows_of,
    setting,
    show,
)
from shardroute.planner.machine_changes import with_domains, with_nics
from shardroute.planner.problems import Problem
from shardroute.planner.reporting.study_pictures import refit_section
from shardroute.planner.shares import Told
from shardroute.planner.studies import Case, RefitRow, RefitStudy
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine
from shardroute.topologies.topologies import Topology
from shardroute.topologies.units import parse_rate

study = typer.Typer(
    help="Ask one question many times over: tables and plots of what varies.", cls=Group, invoke_without_command=True
)
app.add_typer(study, name="study", rich_help_panel="Plan and predict")

# Rates of the NICs over the machine's own where none are given: half of it to two generations on.
_FACTORS: Final = (0.5, 1.0, 2.0, 4.0)
# Far more replicas than anybody serves; each takes memory and time to plan for.
_MOST_REPLICAS: Final = 1024
# Columns that 80 characters have room for.
SHOWN: Final = ("strategy", "predicted", "bound", "x bound", "across", "fits")
STUDIES: Final = {
    "refit-vs-nic": "refit time over the rate of the NICs",
    "refit-vs-domain": "refit time over the size of NVLink domains: NVL8, NVL36, NVL72",
    "refit-vs-replicas": "refit time over the number of inference replicas",
    "refit-vs-size": "refit time over the size of the model, to 2.8 T parameters (5.6 TB)",
    "gather-vs-reshard": "bytes that gathering and broadcasting move, against resharding",
    "ring-vs-seq": "training steps with ring attention by NCCL and by NVSHMEM, over the length of sequences",
    "split": "refit, and a step of learning, over the split of GPUs between training and inference",
}


@study.callback()
def list_studies(context: typer.Context) -> None:
    """List the studies; `study NAME --help` explains one."""
    if context.invoked_subcommand is None:
        print_table(["study", ""], list(STUDIES.items()))
        print_facts("\n`shardroute study NAME --help` explains one", [])


@study.command("refit-vs-nic")
@with_request_options
def refit_vs_nic(
    machine: OneMachineOption,
    asked: Asked,
    rates: Annotated[
        str | None,
        typer.Option(
            "--rates", help="What the NICs of one GPU carry, one way, 200Gb/s,400Gb/s; default: 0.5 to 4 times the machine's."
        ),
    ] = None,
    strategy: StrategiesOption = None,
    calibration: CalibrationOption = None,
    output: PageOption = None,
    json: JsonFlag = False,
) -> None:
    """Refit time over the rate of the NICs, all else of the machine as it is. Takes a problem as `plan` does.

    \b
    shardroute study refit-vs-nic --model deepseek-v3 --from "PP16 x EP16" \\
      --to "TP32 x DP8" --machine dgx-h100 -o study.html
    """
    check_page(output)
    found = setting(machine, calibration, strategy)
    own_Bps = found.machine.gpu_nic_Bps
    all_Bps = [own_Bps * f for f in _FACTORS] if rates is None else listed("--rates", rates, parse_rate, "200Gb/s,400Gb/s")
    if not all(all_Bps):
        raise InputError(f"--rates {rates!r}: expected rates above 0, such as 200Gb/s")
    changed = [(f"{rate * 8 / 1e9:g} Gb/s", rate, with_nics(found.machine, rate)) for rate in all_Bps]
    title = f"Refit time over the NICs of {found.machine.name}"
    note = f"{found.machine.name} has {own_Bps * 8 / 1e9:g} Gb/s a GPU."
    _vary_machine("refit-vs-nic", title, "NICs a GPU", note, asked, found, changed, json, output)


@study.command("refit-vs-domain")
@with_request_options
def refit_vs_domain(
    machine: OneMachineOption,
    asked: Asked,
    domains: Annotated[str, typer.Option("--domains", help="GPUs of an NVLink domain, 8,36,72.")] = "8,36,72",
    strategy: StrategiesOption = None,
    calibration: CalibrationOption = None,
    output: PageOption = None,
    json: JsonFlag = False,
) -> None:
    """Refit time over the size of NVLink domains, all else of the machine as it is. Takes a problem as `plan` does.

    \b
    shardroute study refit-vs-domain --model deepseek-v3 --from "PP16 x EP16" \\
      --to "TP32 x DP8" --machine gb200-nvl72
    """
    check_page(output)
    found = setting(machine, calibration, strategy)
    changed = [(f"NVL{n}", float(n), with_domains(found.machine, n)) for n in counts("--domains", domains, "8,36,72")]
    title = f"Refit time over NVLink domains, GPUs and NICs of {found.machine.name}"
    note = f"{found.machine.name} has domains of {found.machine.gpus_per_domain}."
    _vary_machine("refit-vs-domain", title, "domain", note, asked, found, changed, json, output)


@study.command("refit-vs-replicas")
@with_request_options
def refit_vs_replicas(
    machine: OneMachineOption,
    asked: Asked,
    replicas: Annotated[str, typer.Option("--replicas", help="Numbers of inference replicas, 1,2,4.")] = "1,2,4,8",
    strategy: StrategiesOption = None,
    calibration: CalibrationOption = None,
    output: PageOption = None,
    json: JsonFlag = False,
) -> None:
    """Refit time over the number of inference replicas: --to is the layout of one, which serves by itself. For models.

    \b
    shardroute study refit-vs-replicas --model qwen3-30b-a3b \\
      --from "PP2 x EP8" --to TP8 --machine dgx-h100
    """
    check_page(output)
    found = setting(machine, calibration, strategy)
    n_replicas = counts("--replicas", replicas, "1,2,4,8", _MOST_REPLICAS)
    one = model_request(asked)

    def case(n: int) -> Case:
        def make(done: Told) -> tuple[Problem, Topology]:
            problem = repeated(asked, n).request(done).problem
            return problem, found.topology(problem.n_ranks)

        return Case(str(n), float(n), make, weight=len(one.problem.source.ranks) + n * len(one.problem.target.ranks))

    rows = rows_of(found, [case(n) for n in n_replicas])
    notes = [
        f"The inference side once for each replica: {len(one.problem.target.ranks)} GPUs each, beside "
        f"{len(one.problem.source.ranks)} for training. One plan serves all.",
        *found.assumed,
    ]
    title = f"Refit time over inference replicas on {found.machine.name}"
    show_refits("refit-vs-replicas", title, "replicas", notes, rows, one.title, found, json, output)


def repeated(asked: Asked, n: int) -> Asked:
    """The same with `n` destinations like the one asked for, each with GPUs of its own."""
    assert asked.to_spec is not None
    conventions = None if asked.to_convention is None else " + ".join([asked.to_convention] * n)
    many = asked.to_convention is not None and " + " in asked.to_convention
    to_convention = conventions if many else asked.to_convention
    return replace(asked, to_spec=" + ".join([asked.to_spec] * n), to_convention=to_convention)


def model_request(asked: Asked) -> Request:
    """The request, which must be of a model. Raises InputError for any other."""
    if asked.model is None:
        raise InputError("this study is of models: give --model with --from and --to")
    return asked.request()


def _vary_machine(
    name: str, title: str, varies: str, note: str, asked: Asked, found: Setting, changed: Sequence[tuple[str, float, Machine]],
    json: bool, output: str | None,
) -> None:  # fmt: skip
    request = asked.request()

    def case(text: str, value: float, machine: Machine) -> Case:
        return Case(text, value, lambda _done: (request.problem, found.topology(request.problem.n_ranks, machine)))

    rows = rows_of(found, [case(*change) for change in changed])
    notes = [
        f"{note} Each row is planned anew, at the same measured costs: latencies, and the share of nominal rates that is "
        "reached. Nobody has measured the machines that aren't built so.",
        *found.assumed,
    ]
    show_refits(name, title, varies, notes, rows, request.title, found, json, output)


def show_refits(
    name: str, title: str, varies: str, notes: list[str], rows: list[RefitRow], moved: str, found: Setting, json: bool,
    output: str | None,
) -> None:  # fmt: skip
    """Print a study of refits, and write its page."""
    made = RefitStudy(
        study=name, title=title, moved=moved, varies=varies, calibration=found.calibration, calibrated=found.caution is None,
        notes=notes, rows=rows,
    )  # fmt: skip
    reasons = [(f"{row.name}, {row.strategy}", row.why_not) for row in rows if row.why_not]
    show(made, [refit_section(made)], [("moved", moved)], SHOWN, reasons, found=found, json=json, output=output)
