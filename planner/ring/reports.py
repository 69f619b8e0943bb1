"""What a plan of an attention call comes to, in numbers: traffic, memory, arithmetic, prediction."""

import msgspec
import numpy as np

from shardroute.planner.backends.computes import cpu_seconds, gpu_seconds
from shardroute.planner.plans import Op, Plan
from shardroute.planner.reports import traffic
from shardroute.planner.ring.tensors import Pass, describe
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import Prediction, predict
from shardroute.planner.stagings import staging_facts, staging_of
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.units import format_bytes, format_count, format_seconds

# The share of predicting in a report of a plan of GPUs; the rest adds up what ranks compute.
_PREDICTED = 0.65


class RingReport(msgspec.Struct, frozen=True):
    """A plan of an attention call in numbers; the field names are those of `plan-ring --json`, and stay.

    sent_bytes     the most that a rank sends, collectives as rings
    computed_s     the most seconds that a rank computes; exposed_s is what the predicted time has beyond them
    not_predicted  why there is no prediction
    """

    strategy: str
    attention: str
    what: str
    machine: str
    n_ranks: int
    n_steps: int
    n_computes: int
    n_bytes_moved: int
    n_bytes_cross_domain: int
    sent_bytes: int
    peak_staging_bytes: int
    peak_packing_bytes: int
    flops: float
    computed_s: float | None
    predicted_s: float | None
    exposed_s: float | None
    flops_per_rank_s: float | None
    not_predicted: str
    digest: str
    plan_s: float | None = None


def ring_report(
    plan: Plan,
    calibration: Calibration | None,
    why: str = "",
    plan_s: float | None = None,
    progress: Told | None = None,
) -> RingReport:
    """The plan in numbers; without a calibration, or where attention has no costs, what rests on a prediction is None.

    `why` says why there is no calibration. progress is told the share that is done.
    """
    attention = plan.attention
    assert attention is not None
    what = Pass(dict(plan.problem.about)["pass"])
    flops = sum(attention.flops(backward=backward) for backward in _passes(what))
    prediction: Prediction | None = None
    computed_s: float | None = None
    predicting, computing = parts(progress, (_PREDICTED, 1.0 - _PREDICTED))
    if calibration is not None:
        try:
            prediction = predict(plan, calibration, progress=predicting)
            computed_s = _computed_s(plan, calibration, computing)
            computing(1.0)
        except InputError as error:
            why = str(error)
    predicted_s = None if prediction is None else prediction.predicted_s
    moved = traffic(plan)
    return RingReport(
        strategy=plan.strategy,
        attention=describe(attention),
        what=what.value,
        machine=plan.topology.title,
        n_ranks=attention.n_ranks,
        n_steps=len(plan.steps),
        n_computes=len(plan.computes),
        n_bytes_moved=moved.n_bytes_moved,
        n_bytes_cross_domain=moved.n_bytes_cross_domain,
        sent_bytes=_most_sent(plan),
        peak_staging_bytes=plan.peak_staging_bytes,
        peak_packing_bytes=int(staging_of(plan).packing.max(initial=0)),
        flops=flops,
        computed_s=computed_s,
        predicted_s=predicted_s,
        exposed_s=None if predicted_s is None or computed_s is None else predicted_s - computed_s,
        flops_per_rank_s=flops / attention.n_ranks / predicted_s if predicted_s else None,
        not_predicted="" if prediction is not None else why,
        digest=plan.digest,
        plan_s=plan_s,
    )


def ring_facts(report: RingReport) -> list[tuple[str, str]]:
    """The lines that describe such a plan to a person."""
    facts = [
        ("attention", report.attention),
        ("pass", report.what),
        ("strategy", report.strategy),
        ("machine", f"{report.machine}, {format_count(report.n_ranks, 'rank')}"),
        ("steps", f"{report.n_steps:,}, {report.n_computes:,} of them compute"),
        ("moved between ranks", f"{format_bytes(report.n_bytes_moved)}, at most {format_bytes(report.sent_bytes)} sent by one"),
        ("into other domains", format_bytes(report.n_bytes_cross_domain)),
        *staging_facts(report.peak_staging_bytes, report.peak_packing_bytes),
        ("arithmetic", f"{report.flops:.4g} FLOP, masked pairs left out"),
    ]
    if report.predicted_s is None or report.exposed_s is None or report.flops_per_rank_s is None:
        facts.append(("predicted", report.not_predicted))
    else:
        facts.append(("predicted", format_seconds(report.predicted_s)))
        facts.append(("beyond computing", f"{format_seconds(max(report.exposed_s, 0.0))} (waits, copies, shared cores)"))
        facts.append(("rate", f"{report.flops_per_rank_s / 1e12:.3g} TFLOP/s a rank"))
    if report.plan_s is not None:
        facts.append(("planned in", format_seconds(report.plan_s)))
    return [*facts, ("digest", report.digest[:16])]


def _passes(what: Pass) -> tuple[bool, ...]:
    """Whether each pass that is computed is backward."""
    match what:
        case Pass.FORWARD:
            return (False,)
        case Pass.BACKWARD:
            return (True,)
        case Pass.RECOMPUTE:
            return (False, True)


def _computed_s(plan: Plan, calibration: Calibration, progress: Told) -> float:
    """The most seconds that a rank computes; progress is told the share that is done."""
    cpu = plan.topology.machine.kind is MachineKind.CPU
    seconds = cpu_seconds(plan, calibration, progress) if cpu else gpu_seconds(plan, plan.topology.machine, progress)
    rank = plan.group_ranks[plan.group_ptr[plan.steps.group[plan.computes.step]]]
    return float(np.bincount(rank, weights=seconds).max(initial=0.0))


def _most_sent(plan: Plan) -> int:
    """The most bytes that a rank sends; of a collective over n ranks each sends (n - 1) / n of the bundle."""
    steps = plan.steps
    sends = (steps.op == Op.COPY) & (steps.src != steps.dst)
    sent = np.zeros(plan.problem.n_ranks, dtype=np.int64)
    np.add.at(sent, steps.src[sends], plan.step_bytes[sends])
    for step in np.flatnonzero(np.isin(steps.op, (Op.ALL_GATHER, Op.REDUCE_SCATTER))).tolist():
        group = plan.group(int(steps.group[step]))
        sent[group] += int(plan.step_bytes[step]) * (len(group) - 1) // len(group)
    return int(sent.max(initial=0))
