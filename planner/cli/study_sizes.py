"""`shardroute study refit-vs-size` and `gather-vs-reshard`: refits as the model grows, and what gathering would load."""

import math
import os
from dataclasses import replace
from typing import Annotated, Final

import typer

from shardroute.planner.cli.options import about, model_of, spec_of
from shardroute.planner.cli.output import JsonFlag
from shardroute.planner.cli.plan import CalibrationOption, OneMachineOption
from shardroute.planner.cli.requests import Asked, with_request_options
from shardroute.planner.cli.study import SHOWN, show_refits, study
from shardroute.planner.cli.studying import PageOption, Setting, StrategiesOption, check_page, listed, rows_of, setting, show
from shardroute.planner.file_kinds import CONFIG, reading
from shardroute.planner.layouts import Axis, Model, load_model, model_names
from shardroute.planner.layouts.models.precisions import with_scales
from shardroute.planner.problems import Problem
from shardroute.planner.reporting.study_pictures import MODELS, load_sections
from shardroute.planner.shares import Told
from shardroute.planner.studies import STAND_INS, Case, LoadStudy, StudiedModel, estimate, studied_model
from shardroute.planner.studies.sizes import parameter_count
from shardroute.topologies.errors import InputError
from shardroute.topologies.topologies import Topology

# Shipped models a decade of sizes apart, then the two that are known by their counts.
_SIZES: Final = "qwen3-30b-a3b,qwen3-235b-a22b,deepseek-v3,kimi-k2,qwen-3.8,kimi-k3"
_LARGE: Final = "qwen-3.8,kimi-k3"
_BF16_BYTES: Final = 2
# Options of a model that change how many parameters there are to count.
_COUNTED: Final = ("--model", "--scale", "--mtp", "--precision")

_HELP: Final = (
    f"Models by name or path, or numbers of parameters, 671B,2.8T; {' and '.join(STAND_INS)} are numbers, too. A number is met "
    "by more or fewer experts of --model, or of the shipped model nearest in size."
)


@study.command("refit-vs-size")
@with_request_options
def refit_vs_size(
    machine: OneMachineOption,
    asked: Asked,
    sizes: Annotated[str, typer.Option("--sizes", help=_HELP)] = _SIZES,
    strategy: StrategiesOption = None,
    calibration: CalibrationOption = None,
    output: PageOption = None,
    json: JsonFlag = False,
) -> None:
    """Refit time over the size of the model, between the same layouts. --model is what a number of parameters is made of.

    \b
    shardroute study refit-vs-size --from "TP4 x EP32" --to "TP32 x DP2" \\
      --machine gb200-nvl72
    """
    check_page(output)
    found = setting(machine, calibration, strategy)
    models = _models(asked, sizes)
    rows = rows_of(found, [_case(asked, found, model) for model in models])
    notes = [
        f"`fits` says whether the weights alone are within the {found.machine.memory_bytes / 1e9:.0f} GB of a GPU, on both "
        "sides; the time is predicted where they aren't, too.",
        *(model.note for model in models if model.note),
        *found.assumed,
    ]
    moved = f"each model: {asked.from_spec} -> {asked.to_spec}"
    title = f"Refit time over the size of the model on {found.machine.name}"
    show_refits("refit-vs-size", title, MODELS, notes, rows, moved, found, json, output)


@study.command("gather-vs-reshard")
@with_request_options
def gather_vs_reshard(
    asked: Asked,
    sizes: Annotated[str, typer.Option("--sizes", help=_HELP)] = _LARGE,
    machine: Annotated[
        str | None, typer.Option("--machine", "-m", help="With --from and --to: what plans move on this machine, too.")
    ] = None,
    strategy: StrategiesOption = None,
    calibration: CalibrationOption = None,
    output: PageOption = None,
    json: JsonFlag = False,
) -> None:
    """Bytes that gathering and broadcasting a model moves, against resharding it: counted, and of plans where --machine is given.

    \b
    shardroute study gather-vs-reshard
    shardroute study gather-vs-reshard --from "TP4 x EP32" \\
      --to "TP32 x DP2" --machine gb200-nvl72
    """
    check_page(output)
    found = None if machine is None else setting(machine, calibration, strategy)
    of_model, of_tensor, of_files = asked.given()
    if other := [name for name, value in (of_tensor | of_files).items() if value is not None]:
        raise InputError(f"{other[0]}: this study is of models, which --sizes names; leave it out")
    if found is None:
        planned = {name: value for name, value in of_model.items() if name not in _COUNTED}
        planned |= {"--strategy": strategy, "--calibration": calibration}
        if given := [name for name, value in planned.items() if value is not None]:
            raise InputError(
                f"{given[0]} is for plans, which need --machine, such as --machine gb200-nvl72; leave it out to count bytes"
            )
    models = _models(asked, sizes)
    rows = [] if found is None else rows_of(found, [_case(asked, found, model) for model in models])
    notes = [
        "Two phases: all weights are gathered once into whole tensors, and broadcast once. Resharding sends each byte once. "
        "Counted in BF16, 2 bytes a parameter, for one copy of the model at the destination; plans send as many copies as their "
        "layouts need.",
        *(model.note for model in models if model.note and found is not None),
        *([] if found is None else found.assumed),
    ]
    made = LoadStudy(
        study="gather-vs-reshard", title="Gather and broadcast against reshard",
        calibration="" if found is None else found.calibration, calibrated=found is not None and found.caution is None,
        notes=notes,
        estimates=[estimate(model.name, model.asked, _BF16_BYTES) for model in models], rows=rows,
    )  # fmt: skip
    moved = [] if found is None else [("planned", f"{asked.from_spec} -> {asked.to_spec} on {found.machine.name}")]
    shown = (*SHOWN, "gathered", "broadcast", "two phases", "resharded")
    reasons = [(f"{row.name}, {row.strategy}", row.why_not) for row in rows if row.why_not]
    show(made, load_sections(made), moved, shown, reasons, found=found, json=json, output=output, n_printed=2)


def _models(asked: Asked, sizes: str) -> list[StudiedModel]:
    """The models of `--sizes`, experts of stand-ins in multiples that both layouts can split."""
    if asked.model is not None:
        model_of(asked.model)  # what is wrong with it is no trouble of --sizes
    specs = [] if asked.from_spec is None or asked.to_spec is None else [
        spec_of("--from", asked.from_spec), *(spec_of("--to", group) for group in asked.to_spec.split(" + "))
    ]  # fmt: skip
    step = math.lcm(*(spec.size(Axis.EP) for spec in specs))
    found = []
    for size in listed("--sizes", sizes, str, "deepseek-v3,2.8T"):
        model = _model(asked, size, step)
        with about("--precision"):
            found.append(model if asked.precision is None else replace(model, model=with_scales(model.model, asked.precision)))
    return found


def _model(asked: Asked, size: str, step: int) -> StudiedModel:
    """The model of one size, scaled and with what else the options say but --precision."""

    def load(name: str) -> Model:
        return load_model(name, 1 if asked.scale is None else asked.scale, mtp=asked.mtp)

    try:
        return studied_model(size, asked.model, load, step)
    except InputError as error:
        with about("--sizes"), reading(size, CONFIG):
            if size not in model_names() and parameter_count(size) is None and not os.path.exists(size):
                raise InputError(f"{error}, or a number of parameters, such as 671B") from None
            studied_model(size, asked.model, load_model, step)
        with about("--mtp" if asked.scale is None else "--scale"):
            raise


def _case(asked: Asked, found: Setting, model: StudiedModel) -> Case:
    def make(done: Told) -> tuple[Problem, Topology]:
        problem = asked.request_of(model.model, done).problem
        return problem, found.topology(problem.n_ranks)

    return Case(model.name, float(model.met), make)
