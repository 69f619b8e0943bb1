"""`shardroute ring`: training steps with a long context, laid over GPUs every way that fits, best first."""

from enum import StrEnum
from typing import Annotated

import msgspec
import typer

from shardroute.planner.cli.cautions import say_costs
from shardroute.planner.cli.options import about, machine_of, model_of, rates_of
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress
from shardroute.planner.cli.plan import CalibrationOption, OneMachineOption, calibration_for
from shardroute.planner.cli.plan_ring import SEQ_HELP, tokens_of
from shardroute.planner.cli.program import app
from shardroute.planner.layouts import model_names
from shardroute.planner.ring.workloads import MAX_TOKENS
from shardroute.planner.steps import (
    Carrier,
    Recompute,
    Scheme,
    StepLayout,
    StepPrediction,
    Wanted,
    batch_that_fits,
    dense_model,
    network,
    search,
    why,
)
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import MAX_GPUS, build_topology
from shardroute.topologies.units import format_bytes, format_count, format_seconds

_SHOWN = 12


class _Backend(StrEnum):
    NCCL = Carrier.NCCL
    NCCL_PUT = Carrier.NCCL_PUT
    NVSHMEM = Carrier.NVSHMEM


class StepRow(msgspec.Struct, frozen=True):
    """One layout; the field names are those of `ring --json`, and stay. Bytes are on one GPU."""

    cp: int
    tp: int
    fsdp: int
    strategy: str
    ulysses: int
    head_stride: int | None
    backend: str
    step_s: float
    tflops_per_gpu: float
    compute_s: float
    exposed_comm_s: float
    hop_s: float
    hop_sms: int
    kv_bytes: float
    activation_bytes: float
    weight_bytes: float
    optimizer_bytes: float
    memory_bytes: float
    fits: bool


def step_row(prediction: StepPrediction) -> StepRow:
    """A prediction as a row for people and programs."""
    layout, memory = prediction.layout, prediction.memory
    return StepRow(
        cp=layout.cp, tp=layout.tp, fsdp=layout.fsdp, strategy=layout.scheme if layout.cp > 1 else "none",
        ulysses=layout.ulysses, head_stride=layout.head_stride, backend=layout.carrier, step_s=prediction.step_s,
        tflops_per_gpu=prediction.tflops_per_gpu, compute_s=prediction.compute_s, exposed_comm_s=prediction.exposed_s,
        hop_s=prediction.hop_s, hop_sms=prediction.n_sms,
        kv_bytes=memory.kv, activation_bytes=memory.activations, weight_bytes=memory.weights, optimizer_bytes=memory.optimizer,
        memory_bytes=memory.total, fits=memory.fits,
    )  # fmt: skip


@app.command("ring", rich_help_panel="Plan and predict")
def ring_command(
    model: Annotated[
        str, typer.Option("--model", help="A shipped dense model, or a config.json.", autocompletion=model_names)
    ],
    seq: Annotated[str, typer.Option("--seq", metavar="TOKENS", help=SEQ_HELP)],
    machine: OneMachineOption,
    gpus: Annotated[
        int | None, typer.Option("--gpus", help="GPUs of the job. Default: cp x tp x fsdp.", min=1, max=MAX_GPUS)
    ] = None,
    cp: Annotated[int | None, typer.Option("--cp", help="Context-parallel ranks; searched unless given.", min=1)] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor-parallel ranks; searched unless given.", min=1)] = None,
    fsdp: Annotated[int | None, typer.Option("--fsdp", help="Data-parallel ranks, which share the weights.", min=1)] = None,
    strategy: Annotated[
        Scheme | None,
        typer.Option(
            "--strategy",
            help="How ranks get the others' keys and values; by pass-q queries travel. Default: ring with --cp, else all.",
        ),
    ] = None,
    ulysses: Annotated[
        int | None, typer.Option("--ulysses", help="Ranks that exchange heads, in a hybrid; rings go across.", min=1)
    ] = None,
    head_stride: Annotated[
        int | None,
        typer.Option("--head-stride", help="KV heads that an all-gather takes at a time; searched unless given.", min=1),
    ] = None,
    backend: Annotated[_Backend | None, typer.Option("--backend", help="What carries the ring's hops. Default: all.")] = None,
    batch: Annotated[float, typer.Option("--batch", help="Sequences a GPU; 0.25 is one on 4 GPUs.")] = 1,
    recompute: Annotated[
        Recompute, typer.Option("--recompute", help="What the backward pass computes again: whole layers, or nothing.")
    ] = Recompute.FULL,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Hops run beside attention. Measured under XLA: they don't, the default.")
    ] = False,
    rates: Annotated[
        str | None, typer.Option("--rates", help="Rates of computation: a machine that has some, or a .toml file.")
    ] = None,
    calibration: CalibrationOption = None,
    json: JsonFlag = False,
) -> None:
    """Lay a training step with a long context over GPUs: step time, TFLOP/s, exposed communication and memory, best first.

    shardroute ring --model llama-3-8b --seq 262144 --gpus 32 --machine gb200-nvl72
    """
    n_tokens = tokens_of("--seq", seq, 2)
    found, count = machine_of(machine)
    if found.kind is not MachineKind.GPU:
        raise InputError(f"machine {found.name} has no GPUs; a training step is predicted for GPU machines")
    n_gpus = _n_gpus(gpus, cp, tp, fsdp)
    with about("--machine"):
        build_topology(found, count, n_gpus)  # refuses a count of the machine that has too few
    with about("--model"):
        dense = dense_model(model_of(model))
    scheme = strategy
    if strategy is None and cp is not None:
        scheme = Scheme.HYBRID if ulysses is not None and 1 < ulysses < cp else Scheme.RING
        scheme = scheme if head_stride is None else Scheme.ALL_GATHER
    wanted = Wanted(cp, tp, fsdp, scheme, ulysses, head_stride, None if backend is None else Carrier(backend))
    check_batch(batch, n_tokens)
    asked = StepLayout(seq=n_tokens, cp=1, batch=batch, recompute=recompute, overlapped=overlap)
    costs = calibration_for(found, calibration)
    net = network(found, costs, n_gpus)
    step_rates = rates_of(found, rates)
    with progress("predicting training steps") as done:
        best, *others = search(dense, asked, wanted, step_rates, net, progress=done)
    fits = best.memory.fits
    reason = why(best, others)
    say_costs(found, costs)
    if json:
        top = msgspec.to_builtins(step_row(best))
        print_json({
            "model": dense.name, "machine": found.name, "n_gpus": n_gpus, "seq": n_tokens, "batch_per_gpu": batch,
            "recompute": recompute, "overlapped": overlap, **top, "why": reason, "rates": step_rates.source,
            "calibration": f"{costs.library} on {costs.machine}", "layouts": [step_row(p) for p in [best, *others]],
        })  # fmt: skip
        return
    print_facts(
        f"{dense.name}, {n_tokens:,} tokens, {format_count(n_gpus, 'GPU')} of {found.name}",
        [
            ("batch", f"{batch:g} {'sequence' if batch == 1 else 'sequences'} a GPU, {batch * n_gpus:g} in all"),
            *(
                [("best", _best_text(best)), ("why", reason or "it is the only layout asked for")]
                if fits
                else [
                    ("best", f"none fits: a tenth of a GPU's {format_bytes(found.memory_bytes)} must stay free"),
                    ("of these", _unfit_text(best, batch_that_fits(dense, asked, wanted, net))),
                ]
            ),
            ("hops", "beside attention" if overlap else "not hidden by attention, as measured under XLA"),
            ("rates from", step_rates.source),
            ("costs from", f"{costs.library} on {costs.machine}"),
        ],
    )
    _print_rows(_told_apart([step_row(p) for p in [best, *others]]))


def check_batch(batch: float, n_tokens: int) -> None:
    """Raise InputError for sequences a GPU that aren't above 0, or whose tokens, so many each, are too many to plan for."""
    if not 0 < batch < float("inf"):
        raise InputError(f"--batch {batch:g}: expected sequences a GPU, above 0")
    if batch * n_tokens > MAX_TOKENS:
        raise InputError(f"--batch {batch:g}: of {n_tokens:,} tokens each, and a GPU has at most 2^40; give fewer")


def _n_gpus(gpus: int | None, cp: int | None, tp: int | None, fsdp: int | None) -> int:
    if gpus is not None:
        return gpus
    if cp is None:
        raise InputError("how many GPUs? give --gpus N, or the degrees --cp, --tp and --fsdp")
    return cp * (1 if tp is None else tp) * (1 if fsdp is None else fsdp)


def _best_text(best: StepPrediction) -> str:
    row = step_row(best)
    name = f"cp {row.cp} x tp {row.tp} x fsdp {row.fsdp}, {row.strategy}"
    if row.ulysses > 1:
        name += f" (ulysses {row.ulysses})"
    if row.head_stride is not None:
        name += f" (head stride {row.head_stride})"
    return f"{name}, {row.backend}: {format_seconds(row.step_s)} a step, {row.tflops_per_gpu:.1f} TFLOP/s a GPU"


def _unfit_text(best: StepPrediction, batch: float | None) -> str:
    """What the fastest layout that doesn't fit would need, and what to ask for instead."""
    row = step_row(best)
    fewer = "fewer sequences don't help: take more GPUs, or shorter sequences"
    instead = fewer if batch is None else f"with --batch {batch:g} one fits"
    return (
        f"the fastest, cp {row.cp} x tp {row.tp} x fsdp {row.fsdp}, needs {format_bytes(int(row.memory_bytes))} a GPU, "
        f"{format_bytes(int(row.activation_bytes))} of it for activations; {instead}"
    )


def _told_apart(rows: list[StepRow]) -> list[StepRow]:
    """Without those that differ from a better one by their head stride only, unless it decides whether they fit."""
    found: dict[object, StepRow] = {}
    for row in rows:
        found.setdefault((row.cp, row.tp, row.fsdp, row.strategy, row.ulysses, row.backend, row.fits), row)
    return list(found.values())


def _print_rows(rows: list[StepRow]) -> None:
    which = f"the best {_SHOWN} of {len(rows):,}" if len(rows) > _SHOWN else "best first"
    print_table(
        ["layout", "attention", "step", "TFLOP/s", "exposed", "GB", "fits"],
        [
            [
                f"{row.cp} x {row.tp} x {row.fsdp}", _attention_text(row), format_seconds(row.step_s),
                f"{row.tflops_per_gpu:.1f}", format_seconds(row.exposed_comm_s), _memory_text(row), "yes" if row.fits else "no",
            ]
            for row in rows[:_SHOWN]
        ],
        right=["layout", "attention", "step", "TFLOP/s", "exposed", "GB"],
        title=f"\nLayouts (cp x tp x fsdp), {which}; GB a GPU: keys and values + activations + weights + optimizer",
    )  # fmt: skip


def _attention_text(row: StepRow) -> str:
    match row.strategy:
        case Scheme.RING | Scheme.PASS_Q:
            return f"{row.strategy} {row.backend}"
        case Scheme.ALL_GATHER if row.head_stride is not None:
            return f"all-gather by {row.head_stride}"
        case Scheme.HYBRID:
            return f"hybrid {row.ulysses} {row.backend}"
        case other:
            return other


def _memory_text(row: StepRow) -> str:
    parts = (row.kv_bytes, row.activation_bytes, row.weight_bytes, row.optimizer_bytes)
    return "+".join(f"{n / 1e9:.0f}" if n >= 1e10 else f"{n / 1e9:.1f}" for n in parts)
