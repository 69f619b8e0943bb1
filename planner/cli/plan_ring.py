"""`shardroute plan-ring`: from an attention call to a plan of it over ranks, and its numbers."""

import time
from typing import Annotated, Final

import typer
from msgspec import to_builtins

from shardroute.planner.cli.backends import BACKENDS, parse_backend
from shardroute.planner.cli.cautions import say_costs
from shardroute.planner.cli.files import write_plan
from shardroute.planner.cli.options import about, check_known, check_output, model_of
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, progress, say
from shardroute.planner.cli.plan import CalibrationOption, MachineOption, calibration_for, costs_file, topology_for
from shardroute.planner.cli.program import app
from shardroute.planner.layouts import model_names
from shardroute.planner.layouts.tensors import dtype_name
from shardroute.planner.reports import calibration_text
from shardroute.planner.ring.reports import ring_facts, ring_report
from shardroute.planner.ring.strategies import RING_PLANNING_SHARE, RING_STRATEGIES, Options, ring_plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import MAX_COUNT, MAX_TOKENS, Attention, SequenceLayout
from shardroute.planner.shares import parts
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine
from shardroute.topologies.units import format_count, parse_tokens

_CALL, _SPLIT = "The attention call", "How it is split"
SEQ_HELP: Final = "Tokens of a sequence, 131072 or 128K: K is 1024, M 1024 x 1024."


@app.command("plan-ring", rich_help_panel="Plan and predict")
def plan_ring_command(
    machine: MachineOption,
    cp: Annotated[int, typer.Option("--cp", help="Ranks that share the sequence (context parallel).", rich_help_panel=_SPLIT)],
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Take heads and head width from a shipped model, or a config.json.", rich_help_panel=_CALL,
            autocompletion=model_names,
        ),
    ] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Query heads.", rich_help_panel=_CALL)] = None,
    kv_heads: Annotated[int | None, typer.Option("--kv-heads", help="KV heads; default: as many.", rich_help_panel=_CALL)] = None,
    head_dim: Annotated[int | None, typer.Option("--head-dim", help="Width of a head.", rich_help_panel=_CALL)] = None,
    seq: Annotated[str | None, typer.Option("--seq", metavar="TOKENS", help=SEQ_HELP, rich_help_panel=_CALL)] = None,
    documents: Annotated[
        str | None,
        typer.Option(
            "--documents", help="Instead of --seq: tokens of packed documents, 1000,3000,96; each is padded by itself.",
            rich_help_panel=_CALL,
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences.", rich_help_panel=_CALL)] = 1,
    full: Annotated[
        bool, typer.Option("--full", help="Every token sees every token; default: causal.", rich_help_panel=_CALL)
    ] = False,
    dtype: Annotated[
        str, typer.Option("--dtype", help="When run, NumPy computes f32 and f64, torch all.", rich_help_panel=_CALL)
    ] = "bf16",
    grad_dtype: Annotated[
        str | None, typer.Option("--grad-dtype", help="Of gradients while they are added up.", rich_help_panel=_CALL)
    ] = None,
    what: Annotated[
        Pass,
        typer.Option("--pass", help="backward: o and lse were kept; recompute: forward first.", rich_help_panel=_CALL),
    ] = Pass.FORWARD,
    layout: Annotated[
        SequenceLayout, typer.Option("--layout", help="Which tokens each rank holds.", rich_help_panel=_SPLIT)
    ] = SequenceLayout.ZIGZAG,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", "-s", help="; ".join(f"`{s.name}`: {s.summary}" for s in RING_STRATEGIES.values()),
            autocompletion=lambda: list(RING_STRATEGIES), rich_help_panel=_SPLIT,
        ),
    ] = "ring",
    ulysses: Annotated[
        int | None,
        typer.Option("--ulysses", help="hybrid: ranks that split heads; default: most in a domain.", rich_help_panel=_SPLIT),
    ] = None,
    head_stride: Annotated[
        int | None, typer.Option("--head-stride", help="all-gather: KV heads at a time; default: 1.", rich_help_panel=_SPLIT)
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", help=f"What carries copies between GPUs: {', '.join(BACKENDS)}.", rich_help_panel=_SPLIT),
    ] = None,
    calibration: CalibrationOption = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the plan to this file.")] = None,
    json: JsonFlag = False,
) -> None:  # fmt: skip
    """Plan one attention call whose sequence is split over ranks, and predict how long it takes.

    \b
      shardroute plan-ring --model llama-3-8b --seq 131072 --cp 16 \\
        --machine gb200-nvl72

    \b
    To run it here, on processes:
      shardroute plan-ring --heads 8 --kv-heads 2 --head-dim 64 --seq 2048 \\
        --cp 4 --dtype f32 --machine cpu-processes -o r.plan
      shardroute run r.plan
    """
    counts = {
        "--cp": cp, "--heads": heads, "--kv-heads": kv_heads, "--head-dim": head_dim, "--batch": batch, "--ulysses": ulysses,
        "--head-stride": head_stride,
    }  # fmt: skip
    for option, count in counts.items():
        if count is not None and not 1 <= count <= MAX_COUNT:
            raise InputError(f"{option} {count}: expected a count from 1 to {MAX_COUNT}")
    check_known("--strategy", strategy, RING_STRATEGIES)
    for option, name in (("--dtype", dtype), ("--grad-dtype", grad_dtype)):
        if name is not None:
            with about(option):
                dtype_name(name)
    n_heads, n_kv_heads, width = _heads(model, heads, kv_heads, head_dim)
    lengths = _lengths(seq, documents)
    attention = Attention(
        lengths, cp, n_heads, n_kv_heads, width, batch=batch, causal=not full, packed=documents is not None, layout=layout,
        dtype=dtype, grad_dtype=grad_dtype or "",
    )  # fmt: skip
    topology = topology_for(machine, cp)
    check_output(output, "the plan")
    with progress(f"planning ({strategy})") as done:
        began = time.perf_counter()
        carrier = None if backend is None else parse_backend("--backend", backend)
        planned, predicted = parts(done, (RING_PLANNING_SHARE, 1.0 - RING_PLANNING_SHARE))
        plan = ring_plan(attention, topology, strategy, what, Options(ulysses, head_stride, carrier), planned)
        plan_s = time.perf_counter() - began
        costs, why = costs_of(topology.machine, calibration)
        found = ring_report(plan, costs, why, plan_s, predicted)
    rests_on = ""
    if costs is not None and found.predicted_s is not None:
        say_costs(topology.machine, costs)
        rests_on = calibration_text(plan, costs, costs_file(calibration))
    if output is not None:
        write_plan(plan, output)
    if json:
        print_json({**to_builtins(found), "calibration": rests_on})
        return
    title = f"attention over {format_count(cp, 'rank')}"
    print_facts(title, [*ring_facts(found), *([("costs from", rests_on)] if rests_on else [])])
    if output is not None:
        say(f"plan written to {output}")


def costs_of(machine: Machine, name: str | None) -> tuple[Calibration | None, str]:
    """The calibration that was named, or the machine's own; None, and why, where there is none and none was named."""
    try:
        return calibration_for(machine, name), ""
    except InputError as error:
        if name is not None:
            raise
        return None, str(error)


def _heads(model: str | None, heads: int | None, kv_heads: int | None, head_dim: int | None) -> tuple[int, int, int]:
    if model is not None:
        if heads is not None or kv_heads is not None or head_dim is not None:
            raise InputError("--model says how many heads there are and how wide; leave out --heads, --kv-heads and --head-dim")
        found = model_of(model)
        return found.n_heads, found.n_kv_heads, found.head_dim
    if heads is None or head_dim is None:
        raise InputError("no heads: give --model, or --heads with --head-dim (and --kv-heads where they are fewer)")
    return heads, heads if kv_heads is None else kv_heads, head_dim


def tokens_of(option: str, text: str, least: int = 1) -> int:
    """The tokens of a sequence. Raises InputError, led by the option, for another text and for fewer than `least`."""
    with about(option):
        found = tokens_in(text)
    if found < least:
        raise InputError(f"{option} {text}: expected {least} tokens or more")
    return found


def tokens_in(text: str) -> int:
    """The tokens that a text says. Raises InputError for another text, and for more than can be planned for."""
    found = parse_tokens(text)
    if found > MAX_TOKENS:
        raise InputError(f"{text!r} is more than can be planned for; expected at most 2^40 tokens")
    return found


def _lengths(seq: str | None, documents: str | None) -> tuple[int, ...]:
    if (seq is None) == (documents is None):
        raise InputError("give --seq, the tokens of a sequence, or --documents, those of each packed document; not both")
    if documents is None:
        assert seq is not None
        return (tokens_of("--seq", seq),)
    try:
        return tuple(tokens_in(n) for n in documents.split(","))
    except InputError as error:
        raise InputError(f"--documents {documents!r}: {error}; expected those of each document, such as 1000,3K,96") from None
