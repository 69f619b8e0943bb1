"""`shardroute import`: the two layouts of a refit from commands and recipes, and the plan's command for them."""

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import typer

from shardroute.planner.cli.options import about
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, say, stdout
from shardroute.planner.cli.program import app
from shardroute.planner.file_kinds import RECIPE, SCRIPT, reading
from shardroute.planner.importers import (
    ImportedLayout,
    known_model,
    layout_of_command,
    read_settings,
    refit_of_settings,
)
from shardroute.planner.importers.commands import FRAMEWORKS
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import read_text

_MAX_SCRIPT_BYTES: Final = 2**20  # a launch script has some kB
_KNOWN: Final = ", ".join(FRAMEWORKS)


class ImportedSide(msgspec.Struct, frozen=True):
    """A side's layout as --from and --to take it."""

    spec: str
    convention: str
    notes: tuple[str, ...]


class ImportedLayouts(msgspec.Struct, frozen=True):
    """Layouts of commands or a recipe; a side that wasn't given is null. The field names are those of `import --json`."""

    model: str
    colocated: bool
    from_: ImportedSide | None = msgspec.field(name="from")
    to: ImportedSide | None


@app.command("import", rich_help_panel="Plan and predict")
def import_layouts(
    recipe: Annotated[
        list[str] | None,
        typer.Argument(help="YAML of NeMo RL or verl, later files over earlier ones, and KEY=VALUE over both."),
    ] = None,
    train: Annotated[
        str | None, typer.Option("--train", help="The command that trains, as you type it; @FILE reads a launch script.")
    ] = None,
    serve: Annotated[
        str | None, typer.Option("--serve", help="The command that serves, 'vllm serve MODEL -tp 8'; @FILE reads a script.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs of --train, where the command doesn't say them.")] = None,
    serve_gpus: Annotated[
        int | None, typer.Option("--serve-gpus", help="GPUs of --serve: as many replicas as fit. Default: those of one command.")
    ] = None,
    train_framework: Annotated[
        str | None, typer.Option("--train-framework", help=f"Who reads --train, if its words don't tell: {_KNOWN}.")
    ] = None,
    serve_framework: Annotated[str | None, typer.Option("--serve-framework", help="The same for --serve.")] = None,
    json: JsonFlag = False,
) -> None:
    """Read the layouts that you already run, and print them as `shardroute plan` takes them.

    shardroute import grpo.yaml cluster.num_nodes=4

    shardroute import --train "torchrun ... pretrain_gpt.py --tensor-model-parallel-size 4" --serve "vllm serve MODEL -tp 8"
    """
    source: ImportedLayout | None = None
    target: ImportedLayout | None = None
    colocated = False
    if recipe:
        overrides = [text for text in recipe if "=" in text]
        files = [text for text in recipe if "=" not in text]
        with reading(files, RECIPE):
            refit = refit_of_settings(read_settings(files, overrides))
        source, target, colocated = refit.source, refit.target, refit.colocated
    if train is not None:
        with about("--train"):
            source = layout_of_command(_command(train), gpus, train_framework)
        colocated = False
    elif gpus is not None or train_framework is not None:
        raise InputError("--gpus and --train-framework go with --train; a recipe says its GPUs itself")
    if serve is not None:
        with about("--serve"):
            target = layout_of_command(_command(serve), serve_gpus, serve_framework)
        colocated = False
    elif serve_gpus is not None or serve_framework is not None:
        raise InputError("--serve-gpus and --serve-framework go with --serve; a recipe says its GPUs itself")
    sides = {"from": source, "to": target}
    if source is None and target is None:
        raise InputError("nothing to import: give a recipe (grpo.yaml), or --train COMMAND and --serve COMMAND")
    for side in (source, target):
        for note in () if side is None else side.notes:
            say(f"note: {note}")
    model = next((side.model for side in (source, target) if side is not None and side.model), "")
    if json:
        print_json(ImportedLayouts(known_model(model) or model, colocated, _imported_side(source), _imported_side(target)))
        return
    facts = [(name, f"{side.spec} ({side.convention})") for name, side in sides.items() if side is not None]
    print_facts(model or "a model", facts)
    # One line, however long: it is for copying.
    stdout().print("\n" + " ".join(_arguments(model, source, target, colocated)), soft_wrap=True)


def _arguments(model: str, source: ImportedLayout | None, target: ImportedLayout | None, colocated: bool) -> Sequence[str]:
    """The command `shardroute plan` for these, with what isn't known in capitals."""
    found = ["shardroute plan --model", known_model(model) or "CONFIG.json"]
    for name, side in (("from", source), ("to", target)):
        if side is None:
            found.append(f"--{name} LAYOUT")
        else:
            found.append(f'--{name} "{side.spec}" --{name}-convention {side.convention}')
    return [*found, *(["--to-first-rank 0"] if colocated else []), "--machine MACHINE"]


def _imported_side(side: ImportedLayout | None) -> ImportedSide | None:
    return None if side is None else ImportedSide(str(side.spec), side.convention, side.notes)


def _command(text: str) -> str:
    """The command itself, or the text of the script that @FILE names."""
    if not text.startswith("@"):
        return text
    with reading(text[1:], SCRIPT):
        return read_text(text[1:], _MAX_SCRIPT_BYTES)
