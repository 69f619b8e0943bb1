"""`shardroute machines` and `shardroute models`: what is known, and where each figure comes from."""

from typing import Annotated

import msgspec
import typer

from shardroute.planner.cli.mistakes import Group
from shardroute.planner.cli.options import about
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table
from shardroute.planner.cli.program import app
from shardroute.planner.file_kinds import CONFIG, MACHINE, reading
from shardroute.planner.layouts import load_model, model_names
from shardroute.planner.layouts.models import PublishedCount
from shardroute.topologies.calibrations import calibration_names, calibration_to_dict, load_calibration
from shardroute.topologies.machines import MachineKind, load_machine, machine_names, machine_to_dict
from shardroute.topologies.units import format_bandwidth, format_bytes

machines = typer.Typer(help="List the known machines, or explain one.", cls=Group, invoke_without_command=True)
models = typer.Typer(help="List the shipped models, or show one's parameters.", cls=Group, invoke_without_command=True)
app.add_typer(machines, name="machines", rich_help_panel="Catalogues")
app.add_typer(models, name="models", rich_help_panel="Catalogues")


class ModelEntry(msgspec.Struct, frozen=True):
    """A shipped model; the field names are those of `models --json`, and stay."""

    name: str
    family: str
    n_parameters: int


class ParameterEntry(msgspec.Struct, frozen=True):
    """A parameter of a model."""

    name: str
    shape: list[int]
    dtype: str
    n_elements: int


class ShownModel(msgspec.Struct, frozen=True):
    """A model with its parameters; the field names are those of `models show --json`, and stay.

    `published` is the count that its authors state, null if none is known.
    """

    name: str
    n_parameters: int
    published: int | None
    parameters: list[ParameterEntry]


@machines.callback()
def list_machines(context: typer.Context, json: JsonFlag = False) -> None:
    """List the known machines; `machines show NAME` explains one."""
    if context.invoked_subcommand is not None:
        return
    found = [load_machine(name) for name in machine_names()]
    if json:
        print_json([machine_to_dict(m) for m in found])
        return
    print_table(
        ["machine", "GPUs a unit", "NVLink a GPU", "NICs a GPU", "what"],
        [
            [
                m.name,
                str(m.gpus_per_unit) if m.kind is MachineKind.GPU else "1 process",
                format_bandwidth(m.nvlink_Bps) if m.nvlink_Bps else "-",
                f"{m.nics_per_gpu} x {format_bandwidth(m.nic_Bps)}" if m.nic_Bps else "-",
                m.title,
            ]
            for m in found
        ],
    )


@machines.command("show")
def show_machine(
    name: Annotated[str, typer.Argument(help="A machine's name, or the path of a .toml file.", autocompletion=machine_names)],
    json: JsonFlag = False,
) -> None:
    """Explain a machine: its figures, measured costs, and the source of each."""
    with reading(name, MACHINE):
        machine = load_machine(name)
    calibration = load_calibration(machine.name) if machine.name in calibration_names() else None
    if json:
        print_json({**machine_to_dict(machine), "calibration": None if calibration is None else calibration_to_dict(calibration)})
        return
    unit = f"{machine.gpus_per_unit} GPUs" if machine.kind is MachineKind.GPU else "1 process"
    print_facts(
        machine.title,
        [("name", machine.name), ("kind", machine.kind.value), ("one unit", f"{unit}: `{name} x 4` has four of them")],
    )
    if machine.figures:
        rows = [[f.key, f.text, f.source] for f in machine.figures]
        print_table(["figure", "value", "source"], rows, title="\nThe machine")
    if calibration is None:
        print_facts("\nno calibration ships for it; predicting needs --calibration FILE or --calibration nominal", [])
        return
    title = f"\nMeasured costs: {calibration.library}, {calibration.versions}"
    print_table(["cost", "value", "source"], [[f.key, f.text, f.source] for f in calibration.figures], title=title)
    if calibration.curves:
        print_table(
            ["collective", "ranks", "domains", "sizes", "source"],
            [[str(c.op), str(c.n_ranks), str(c.n_domains), str(len(c.n_bytes)), c.source] for c in calibration.curves],
            right=["ranks", "domains", "sizes"],
            title="\nMeasured curves: times over bytes",
        )


@models.callback()
def list_models(context: typer.Context, json: JsonFlag = False) -> None:
    """List the shipped models; `models show NAME` lists one's parameters."""
    if context.invoked_subcommand is not None:
        return
    found = [load_model(name) for name in model_names()]
    if json:
        print_json([ModelEntry(m.name, m.family, m.n_parameters) for m in found])
        return
    print_table(
        ["model", "family", "parameters", "published"],
        [
            [m.name, m.family, f"{m.n_parameters:,}", "-" if m.published is None else _published_text(m.published)]
            for m in found
        ],
        right=["parameters", "published"],
    )


@models.command("show")
def show_model(
    name: Annotated[str, typer.Argument(help="A shipped model, or the path of a config.json.", autocompletion=model_names)],
    scale: Annotated[int, typer.Option("--scale", help="Shrink every matrix by this factor (a square).")] = 1,
    json: JsonFlag = False,
) -> None:
    """List every parameter of a model with its shape and dtype, and check their total against the published count."""
    with reading(name, CONFIG):
        load_model(name)
    with about("--scale"):
        model = load_model(name, scale)
    published = None if model.published is None else model.published.n_parameters
    if json:
        parameters = [ParameterEntry(t.name, list(t.shape), t.dtype, t.n_elements) for t in model.tensors]
        print_json(ShownModel(model.name, model.n_parameters, published, parameters))
        return
    print_table(
        ["parameter", "shape", "dtype", "bytes"],
        [[t.name, " x ".join(map(str, t.shape)), t.dtype, format_bytes(t.n_bytes)] for t in model.tensors],
        right=["bytes"],
    )
    facts = [("parameters", f"{model.n_parameters:,}"), ("bytes", format_bytes(sum(t.n_bytes for t in model.tensors)))]
    if published is not None and model.published is not None and scale == 1:
        verdict = "agrees" if model.published.agrees_with(model.n_parameters) else "DIFFERS"
        facts.append(("published", f"{_published_text(model.published)}, {verdict} ({model.published.source})"))
    print_facts(f"\n{model.name}", facts)


def _published_text(published: PublishedCount) -> str:
    """The published count; a rounded one with its precision."""
    if published.within < 1_000_000:
        return f"{published.n_parameters:,}" + (f" +- {published.within:,}" if published.within else "")
    return f"{published.n_parameters / 1e9:,.5g}e9 +- {published.within / 1e9:.2g}e9"
