"""`shardroute plan`: from a model or a bare tensor and two layouts to a plan file and its numbers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer

from shardroute.planner.arguments import tensor_problem
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, progress
from shardroute.planner.cli.program import app
from shardroute.planner.cli.texts import report_facts
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.plan_files import save_plan
from shardroute.planner.plans import Plan
from shardroute.planner.problems import Problem
from shardroute.planner.refits import refit_problem
from shardroute.planner.reports import PlanReport, report
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import Calibration, default_calibration, load_calibration, nominal_calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine, parse_machine
from shardroute.topologies.topologies import Topology, build_topology
from shardroute.topologies.units import parse_bytes

MachineOption = Annotated[
    str,
    typer.Option("--machine", "-m", help='A machine and how many of it, "dgx-h100 x 32"; without a count, as many as needed.'),
]
CalibrationOption = Annotated[
    str | None,
    typer.Option("--calibration", help="Measured costs: a shipped name, a .toml file, or `nominal`. Default: the machine's own."),
]
StrategyOption = Annotated[
    str, typer.Option("--strategy", "-s", help="; ".join(f"`{s.name}`: {s.summary}" for s in STRATEGIES.values()))
]


def calibration_for(machine: Machine, name: str | None) -> Calibration:
    """The calibration that the user named, else the machine's own; InputError says what to do when there is none."""
    if name == "nominal":
        return nominal_calibration(machine)
    return default_calibration(machine.name) if name is None else load_calibration(name)


def topology_for(machine: str, n_ranks: int) -> Topology:
    """The machine of the `--machine` text, with as many units as it says or the ranks need."""
    found, count = parse_machine(machine)
    return build_topology(found, count, n_ranks)


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan with what was found out about it."""

    plan: Plan
    report: PlanReport


def plan_and_predict(
    problem: Problem, topology: Topology, calibration: Calibration, strategy: str, message_bytes: int | None = None
) -> Planned:
    """Plan, predict and report, showing progress on a terminal. `plan_s` is the time to plan, prediction left out."""
    with progress(f"planning ({strategy})") as done:
        began = time.perf_counter()
        plan = make_plan(problem, topology, strategy, message_bytes)
        plan_s = time.perf_counter() - began
        prediction = predict(plan, calibration, progress=done)
        return Planned(plan, report(plan, prediction, calibration, plan_s))


@app.command("plan", rich_help_panel="Plan and predict")
def plan_command(
    machine: MachineOption,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="A shipped model (`shardroute models`), or the path of a config.json.", rich_help_panel="A model"
        ),
    ] = None,
    from_spec: Annotated[
        str | None, typer.Option("--from", help='Training layout, "TP4 x PP8 x EP16" (Megatron-Core).', rich_help_panel="A model")
    ] = None,
    to_spec: Annotated[
        str | None, typer.Option("--to", help='Inference layout, "TP8 x DP16" (vLLM).', rich_help_panel="A model")
    ] = None,
    scale: Annotated[
        int | None,
        typer.Option(
            "--scale",
            help="Shrink every matrix by this factor (a square), keeping the model's structure.",
            rich_help_panel="A model",
        ),
    ] = None,
    shape: Annotated[str | None, typer.Option("--shape", help="256,2048,7168", rich_help_panel="A bare tensor")] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bf16 (the default), f32, ...", rich_help_panel="A bare tensor")
    ] = None,
    from_mesh: Annotated[
        str | None,
        typer.Option("--from-mesh", help="Axes of the source mesh in rank order, ep=16", rich_help_panel="A bare tensor"),
    ] = None,
    from_placements: Annotated[
        str | None,
        typer.Option("--from-placements", help="One an axis: S0 (shard dim 0), R (replicate)", rich_help_panel="A bare tensor"),
    ] = None,
    to_mesh: Annotated[
        str | None, typer.Option("--to-mesh", help="Axes of the destination mesh, dp=8,tp=32", rich_help_panel="A bare tensor")
    ] = None,
    to_placements: Annotated[str | None, typer.Option("--to-placements", help="R,S1", rich_help_panel="A bare tensor")] = None,
    from_ranks: Annotated[
        str | None,
        typer.Option(
            "--from-ranks", help="Ranks of the source mesh, 0-15 or 0,2,4; default: from 0.", rich_help_panel="A bare tensor"
        ),
    ] = None,
    to_ranks: Annotated[
        str | None,
        typer.Option(
            "--to-ranks", help="Ranks of the destination mesh; default: after the source's.", rich_help_panel="A bare tensor"
        ),
    ] = None,
    strategy: StrategyOption = "domain-relay",
    calibration: CalibrationOption = None,
    message_size: Annotated[
        str | None, typer.Option("--message-size", help="Largest message, 64MiB; default: chosen by size.")
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Plan how a model, or a bare tensor, moves from one layout to another, and predict how long that takes.

    A model:        shardroute plan --model qwen3-235b-a22b --from "TP4 x PP8 x EP16" --to "TP8 x DP16"
    --machine dgx-h100 -o q.plan

    A bare tensor:  shardroute plan --shape 256,2048,7168 --from-mesh ep=16 --from-placements S0
    --to-mesh dp=8,tp=32 --to-placements R,S1 --machine "dgx-h100 x 34"
    """
    of_tensor = {
        "--shape": shape, "--dtype": dtype, "--from-mesh": from_mesh, "--from-placements": from_placements, "--to-mesh": to_mesh,
        "--to-placements": to_placements, "--from-ranks": from_ranks, "--to-ranks": to_ranks,
    }  # fmt: skip
    of_model = {"--model": model, "--from": from_spec, "--to": to_spec, "--scale": scale}
    facts: list[tuple[str, str]] = []
    if model is not None:
        _refuse("--model", of_tensor)
        if from_spec is None or to_spec is None:
            raise InputError('--model needs both layouts: --from "TP4 x PP8 x EP16" (training) and --to "TP8 x DP16" (inference)')
        loaded = load_model(model, 1 if scale is None else scale)
        problem, summary = refit_problem(loaded, parse_spec(from_spec), parse_spec(to_spec))
        facts = [
            *((f"source {k}", v) for k, v in summary.source.items()),
            *((f"destination {k}", v) for k, v in summary.target.items()),
        ]
        title = f"{summary.model}: {from_spec} -> {to_spec}" + (
            f", scaled down {summary.scale} times" if summary.scale > 1 else ""
        )
    elif shape is not None:
        _refuse("--shape", of_model)
        problem = tensor_problem(
            shape, dtype or "bf16", from_mesh, from_placements, to_mesh, to_placements, from_ranks=from_ranks, to_ranks=to_ranks
        )
        title = f"tensor {shape}: {from_mesh} {from_placements} -> {to_mesh} {to_placements}"
    else:
        raise InputError(
            "nothing to plan: give --model with --from and --to, or --shape with the two meshes (shardroute plan --help)"
        )
    topology = topology_for(machine, problem.n_ranks)
    costs = calibration_for(topology.machine, calibration)
    planned = plan_and_predict(problem, topology, costs, strategy, None if message_size is None else parse_bytes(message_size))
    if output is not None:
        save_plan(planned.plan, output)
    if json:
        print_json(planned.report)
        return
    print_facts(title, [*facts, *report_facts(planned.report)])
    if output is not None:
        print_facts(f"plan written to {output}", [])


def _refuse(chosen: str, others: Mapping[str, object]) -> None:
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise InputError(f"{chosen} and {given[0]} don't go together: a plan is of a model or of a bare tensor")
