"""What a plan comes to, in numbers: traffic, bound, prediction. One value for tables and for `--json`."""

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from shardroute.planner.plans import SOURCE, TARGET, Op, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing.bounds import Cut, Demand, cuts, demand
from shardroute.planner.routing.strategies import pieces_of
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import Prediction
from shardroute.planner.stagings import staging_of
from shardroute.topologies.calibrations import Calibration, calibration_names
from shardroute.topologies.machines import Machine
from shardroute.topologies.topologies import Topology

# Microseconds that parts of a report took on one core of a Xeon (2026-11-30): cutting pieces by fragment of either side (2 to 6),
# adding up what crosses by the same (2 to 3), and the plan's figures by step (DeepSeek-V3, 0.2 to 1.9 million steps).
_CUT_US: Final = 3.0
_ADDED_US: Final = 2.0
_COUNTED_US: Final = 0.2


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a plan's steps carry from GPU to GPU, those of them that enter another NVLink domain, and those that ranks copy
    from their own source weights to their destination weights.
    """

    n_bytes_moved: int
    n_bytes_cross_domain: int
    n_bytes_local: int


def traffic(plan: Plan) -> Traffic:
    """The plan's traffic. A collective counts what each member receives; across domains, one copy into each (rings and trees
    do so).
    """
    steps, domain = plan.steps, plan.topology.domain
    copy = (steps.op == Op.COPY) & (steps.src != steps.dst)
    far = np.zeros(len(steps), dtype=bool)
    far[copy] = domain[steps.src[copy]] != domain[steps.dst[copy]]
    moved, crossed = int(plan.step_bytes[copy].sum()), int(plan.step_bytes[far].sum())
    for step in np.flatnonzero((steps.op != Op.COPY) & (plan.step_bytes > 0)).tolist():
        group, n_bytes = plan.group(int(steps.group[step])), int(plan.step_bytes[step])
        n_domains = len(np.unique(domain[group]))
        # Each piece, or sum, starts at one member, so all ranks and all domains of the group but one take it in; an ALL_REDUCE
        # by rings takes in addends, then sums.
        times = 2 if steps.op[step] == Op.ALL_REDUCE else 1
        moved += times * n_bytes * (len(group) - 1)
        crossed += times * n_bytes * (n_domains - 1)
    local = (steps.op == Op.COPY) & (steps.src == steps.dst) & (steps.src_at == SOURCE) & (steps.dst_at == TARGET)
    return Traffic(moved, crossed, int(plan.step_bytes[local].sum()))


class Busiest(msgspec.Struct, frozen=True):
    """The resource that is in use longest: bytes through it, and the seconds that these take at its full rate."""

    resource: str
    n_bytes: int
    seconds: float


class PlanReport(msgspec.Struct, frozen=True):
    """A plan in numbers; the field names are those of `plan --json` and `show --json`, and stay."""

    strategy: str
    machine: str
    calibration: str
    n_tensors: int
    n_tensor_bytes: int
    n_steps: int
    n_bytes_moved: int
    n_bytes_cross_domain: int
    n_bytes_local: int
    least_bytes_cross_domain: int
    lower_bound_s: float
    bound: str
    predicted_s: float | None
    ratio_to_bound: float | None
    busiest: Busiest | None
    n_src_gpus: int
    n_dst_gpus: int
    peak_staging_bytes: int
    peak_packing_bytes: int
    digest: str
    plan_s: float | None = None


def busiest_of(prediction: Prediction) -> Busiest | None:
    """The resource that is in use longest; None where nothing is used."""
    if not prediction.resources:
        return None
    first = prediction.resources[0]
    return Busiest(first.name, first.n_bytes, first.busy_s)


def needs_of(plan: Plan, progress: Told | None = None) -> Demand:
    """What the plan's problem needs moved on the plan's topology; progress is told the share that is done."""
    return needs_on(plan.problem, plan.topology, progress)


def needs_on(problem: Problem, topology: Topology, progress: Told | None = None) -> Demand:
    """What a problem needs moved on a topology; progress is told the share that is done."""
    cut, added = parts(progress, (_CUT_US, _ADDED_US))
    found = demand(problem, pieces_of(problem, cut), topology)
    added(1.0)
    return found


def bounds_of(plan: Plan, calibration: Calibration, progress: Told | None = None) -> list[Cut]:
    """The lower bounds of the plan's problem on its topology, tightest first; none are worked out for sums and attention.

    progress is told the share that is done.
    """
    if plan.problem.summed or plan.attention is not None:
        return []
    return cuts(needs_of(plan, progress), plan.topology, calibration)


def report(
    plan: Plan,
    prediction: Prediction | None,
    calibration: Calibration,
    plan_s: float | None = None,
    costs_file: str = "",
    progress: Told | None = None,
) -> PlanReport:
    """The plan in numbers, on its own topology; without a prediction, what rests on one is None.

    `plan_s` is how long planning took, when that was measured; `costs_file` is where the calibration was read from, if it doesn't
    ship. progress is told the share that is done.
    """
    unbounded = "sums" if plan.problem.summed else "" if plan.attention is None else "attention"
    needing, counting = parts(progress, _weights(plan))
    needs = None if unbounded else needs_of(plan, needing)  # once: for many ranks it takes seconds
    needing(1.0)
    bounds = [] if needs is None else cuts(needs, plan.topology, calibration)
    bound_s = bounds[0].seconds if bounds else 0.0
    predicted_s = None if prediction is None else prediction.predicted_s
    found = traffic(plan)
    figures = PlanReport(
        strategy=plan.strategy,
        machine=plan.topology.title,
        calibration=calibration_text(plan, calibration, costs_file),
        n_tensors=len(plan.problem.tensors),
        n_tensor_bytes=plan.problem.n_bytes,
        n_steps=len(plan.steps),
        n_bytes_moved=found.n_bytes_moved,
        n_bytes_cross_domain=found.n_bytes_cross_domain,
        n_bytes_local=found.n_bytes_local,
        least_bytes_cross_domain=0 if needs is None else needs.n_bytes_cross_domain,
        lower_bound_s=bound_s,
        bound=f"none is worked out for {unbounded}" if needs is None else bounds[0].name if bounds else "nothing has to move",
        predicted_s=predicted_s,
        ratio_to_bound=predicted_s / bound_s if bound_s and predicted_s is not None else None,
        busiest=None if prediction is None else busiest_of(prediction),
        n_src_gpus=len(plan.problem.source.ranks),
        n_dst_gpus=len(plan.problem.target.ranks),
        peak_staging_bytes=plan.peak_staging_bytes,
        peak_packing_bytes=int(staging_of(plan).packing.max(initial=0)),
        digest=plan.digest,
        plan_s=plan_s,
    )
    counting(1.0)
    return figures


def reporting_us(plan: Plan) -> float:
    """About the microseconds that `report` takes of the plan, for shares."""
    return sum(_weights(plan))


def _weights(plan: Plan) -> tuple[float, float]:
    """What the needs are foreseen to take, and the rest of a report."""
    n_fragments = sum(len(cls.source) + len(cls.target) for cls in plan.problem.classes)
    needs_us = 0.0 if plan.problem.summed or plan.attention is not None else (_CUT_US + _ADDED_US) * n_fragments
    return needs_us, _COUNTED_US * len(plan.steps)


def calibration_warning(machine: Machine, calibration: Calibration) -> str | None:
    """What must be said aloud of a prediction for the machine at these costs: that nothing in them was measured, or that they are
    another machine's; None when they are its own.
    """
    if _is_assumed(calibration):
        return (
            f"NOT CALIBRATED: these are nominal rates of {machine.name} without latency or launch costs, which no run reaches; "
            "measure with `shardroute calibrate`, or give --calibration FILE"
        )
    if calibration.machine != machine.name:
        return f"CALIBRATED FOR ANOTHER MACHINE: the costs were measured on {calibration.machine}, the plan is for {machine.name}"
    return None


def calibration_text(plan: Plan, calibration: Calibration, file: str = "") -> str:
    """Where the costs come from, the file if they don't ship, and whether that is another machine than the plan's."""
    others = [machine.name for machine, _ in plan.topology.parts if machine.name != calibration.machine]
    if _is_assumed(calibration):
        return f"NOTHING MEASURED: nominal rates of {calibration.machine}"
    foreign = f", which is not {' or '.join(others)}" if others else ""
    return f"{calibration.library} on {calibration.machine}{foreign}{costs_place(calibration, file)}"


def costs_place(calibration: Calibration, file: str) -> str:
    """Where to look the costs up, in parentheses: their file, or the command that shows shipped ones; empty where neither is."""
    if file or calibration.machine not in calibration_names():
        return f" ({file})" if file else ""
    return f" (`shardroute machines show {calibration.machine}`)"


def _is_assumed(calibration: Calibration) -> bool:
    """Whether none of the costs was measured."""
    return all(figure.source.startswith("assumption") for figure in calibration.figures)
