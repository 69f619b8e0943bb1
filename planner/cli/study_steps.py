"""`shardroute study ring-vs-seq` and `split`: training steps over the length of sequences, and the split of a cluster's GPUs."""

from dataclasses import replace
from typing import Annotated, Final

import typer

from shardroute.planner.cli.options import about, model_of, rates_of, spec_of
from shardroute.planner.cli.output import JsonFlag, progress
from shardroute.planner.cli.plan import CalibrationOption, OneMachineOption
from shardroute.planner.cli.plan_ring import tokens_in
from shardroute.planner.cli.requests import Asked, with_request_options
from shardroute.planner.cli.ring import check_batch
from shardroute.planner.cli.study import model_request, repeated, study
from shardroute.planner.cli.studying import MAX_COUNT, PageOption, StrategiesOption, check_page, listed, rows_of, setting, show
from shardroute.planner.layouts import model_names
from shardroute.planner.problems import Problem
from shardroute.planner.reporting.study_pictures import ring_sections, split_sections
from shardroute.planner.shares import Told
from shardroute.planner.steps import Carrier, Recompute, StepLayout, dense_model, network
from shardroute.planner.studies import Case, RingStudy, SplitStudy, ring_rows, split_row, splits_of, widened
from shardroute.topologies.errors import InputError
from shardroute.topologies.topologies import Topology
from shardroute.topologies.units import format_count

_SEQS: Final = "32768,65536,131072,262144,524288"
_RING_SHOWN: Final = ("carrier", "step", "gain", "TFLOP/s", "exposed", "hop", "SMs", "fits")
_SPLIT_SHOWN: Final = ("strategy", "refit", "train", "rollout", "in turn", "overlap", "idle", "fits")
# Tables of a calibration that hops rest on.
_RING_COSTS: Final = ("nvlink", "nic", "p2p", "put")
# Splits that are planned where more are possible.
_MOST_SPLITS: Final = 7


@study.command("ring-vs-seq")
def ring_vs_seq(
    model: Annotated[str, typer.Option("--model", help="A shipped dense model, or a config.json.", autocompletion=model_names)],
    machine: OneMachineOption,
    cp: Annotated[int, typer.Option("--cp", help="Context-parallel ranks: those of a ring.", min=2, max=MAX_COUNT)],
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.", min=1, max=MAX_COUNT)] = 1,
    fsdp: Annotated[int, typer.Option("--fsdp", help="Data-parallel ranks, which share the weights.", min=1, max=MAX_COUNT)] = 1,
    seqs: Annotated[str, typer.Option("--seqs", help="Tokens of a sequence, 65536,128K; K is 1024.")] = _SEQS,
    backend: Annotated[
        list[Carrier] | None, typer.Option("--backend", help="What carries hops; repeat it. Default: nccl and nvshmem.")
    ] = None,
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
    output: PageOption = None,
    json: JsonFlag = False,
) -> None:
    """Training steps with ring attention over the length of sequences, their hops by NCCL and by NVSHMEM.

    \b
    shardroute study ring-vs-seq --model llama-3-8b --cp 16 \\
      --machine gb200-nvl72
    """
    check_page(output)
    found = setting(machine, calibration)
    with about("--model"):
        dense = dense_model(model_of(model))
    n_gpus = cp * tp * fsdp
    with about("--machine"):
        found.topology(n_gpus)  # refuses a count of the machine that has too few
    lengths = listed("--seqs", seqs, tokens_in, _SEQS)
    carriers = [Carrier.NCCL, Carrier.NVSHMEM] if backend is None else list(dict.fromkeys(backend))
    step_rates = rates_of(found.machine, rates)
    check_batch(batch, max(lengths))
    asked = StepLayout(seq=lengths[0], cp=cp, tp=tp, fsdp=fsdp, batch=batch, recompute=recompute, overlapped=overlap)
    with progress("predicting training steps") as done:
        rows = ring_rows(dense, asked, lengths, carriers, step_rates, network(found.machine, found.costs, n_gpus), done)
    hidden = "beside attention" if overlap else "not hidden by attention, as measured under XLA"
    notes = [
        f"Batch: {batch:g} sequences a GPU. Hops are {hidden}. `gain` is how much faster a step is than with NCCL, `fits` "
        "whether a GPU has room for it; the time is predicted where it hasn't, too.",
        f"Rates of computing are those of {step_rates.source}. `shardroute validate --ring` holds steps against published ones; "
        "two published gains on GB200, of tp 2, are unexplained by the model.",
        *found.costs_notes(_RING_COSTS),
    ]
    made = RingStudy(
        study="ring-vs-seq", title=f"Training steps over the length of sequences on {found.machine.name}",
        trained=f"{dense.name} on {n_gpus} GPUs, cp {cp} x tp {tp} x fsdp {fsdp}", calibration=found.calibration,
        calibrated=found.caution is None, rates=step_rates.source, notes=notes, rows=rows,
    )  # fmt: skip
    reasons = [(f"{row.seq:,}, {row.carrier}", row.why_not) for row in rows if row.why_not]
    show(made, ring_sections(made), [("of", made.trained)], _RING_SHOWN, reasons, found=found, json=json, output=output)


@study.command("split")
@with_request_options
def split(
    machine: OneMachineOption,
    asked: Asked,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of the whole cluster.", min=2, max=MAX_COUNT)],
    train_gpu_s: Annotated[
        float | None, typer.Option("--train-gpu-s", help="GPU seconds that training takes for one step, as you measured.")
    ] = None,
    rollout_gpu_s: Annotated[
        float | None, typer.Option("--rollout-gpu-s", help="GPU seconds that the step's rollouts take, as you measured.")
    ] = None,
    strategy: StrategiesOption = None,
    calibration: CalibrationOption = None,
    output: PageOption = None,
    json: JsonFlag = False,
) -> None:
    """Refit, and a whole step of learning, over the split of GPUs between training and inference. For models.

    --from is the smallest training layout, which is widened by data parallelism; --to is that of one inference replica.

    \b
    shardroute study split --model qwen3-30b-a3b --from "PP2 x EP8" --to TP8 \\
      --gpus 64 --machine dgx-h100 --train-gpu-s 2000 --rollout-gpu-s 3000
    """
    check_page(output)
    found = setting(machine, calibration, strategy)
    for name, given in (("--train-gpu-s", train_gpu_s), ("--rollout-gpu-s", rollout_gpu_s)):
        if given is not None and not 0 < given < float("inf"):
            raise InputError(f"{name} {given:g}: expected GPU seconds above 0")
    if (train_gpu_s is None) != (rollout_gpu_s is None):
        raise InputError("--train-gpu-s and --rollout-gpu-s go together: a step of learning takes both")
    if asked.to_first_rank is not None:
        raise InputError("--to-first-rank: a split gives each GPU to one side; leave it out")
    one = model_request(asked)
    assert asked.from_spec is not None
    n_train, n_infer = len(one.problem.source.ranks), len(one.problem.target.ranks)
    spec = spec_of("--from", asked.from_spec)
    splits = splits_of(gpus, n_train, n_infer, _MOST_SPLITS)
    layouts = [str(widened(spec, n_train, each.times)) for each in splits]

    def case(i: int) -> Case:
        def make(done: Told) -> tuple[Problem, Topology]:
            problem = repeated(replace(asked, from_spec=layouts[i]), splits[i].replicas).request(done).problem
            n_source = len(problem.source.ranks)
            if n_source != splits[i].n_train:
                raise InputError(f"{layouts[i]} takes {n_source} GPUs, not {splits[i].n_train}: give --from with its DP")
            return problem, found.topology(gpus)

        return Case(f"{splits[i].n_train} + {splits[i].n_infer}", float(splits[i].n_train), make)

    refits = rows_of(found, [case(i) for i in range(len(splits))])
    at = [i // len(found.strategies) for i in range(len(refits))]
    rows = [split_row(splits[i], layouts[i], row, train_gpu_s, rollout_gpu_s) for i, row in zip(at, refits, strict=True)]
    n_possible = (gpus - n_infer) // n_train
    some = "" if n_possible == len(splits) else f" Shown are {len(splits)} of {n_possible} possible splits."
    timed = (
        "Which split is best depends on what training and rollouts take: give --train-gpu-s and --rollout-gpu-s."
        if train_gpu_s is None
        else f"Training takes {train_gpu_s:g} GPU seconds a step and rollouts {rollout_gpu_s:g}, as given, divided by the GPUs "
        "of each side without any loss. `in turn`: training, refit, rollouts; `overlap`: training beside the rollouts of the "
        "weights before, then refit."
    )
    notes = [
        f"The smallest training side is of {format_count(n_train, 'GPU')}, others are widened by data parallelism; an inference "
        f"replica is of {n_infer}.{some}",
        timed,
        *found.assumed,
    ]
    made = SplitStudy(
        study="split", title=f"{gpus} GPUs of {found.machine.name} split between training and inference", moved=one.title,
        n_gpus=gpus, calibration=found.calibration, calibrated=found.caution is None, notes=notes, rows=rows,
    )  # fmt: skip
    reasons = [(f"{row.refit.name}, {row.refit.strategy}", row.refit.why_not) for row in rows if row.refit.why_not]
    show(made, split_sections(made), [("moved", one.title)], _SPLIT_SHOWN, reasons, found=found, json=json, output=output)
