"""Why a plan takes as long as it does, in sentences: what bounds it, what its end waits for, what other strategies would take.

Rule: every number of a sentence is a field of the explanation, so programs read the same as people.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from shardroute.planner.critical_paths import Part, Reason, critical_path, following_us, reasons, summarise
from shardroute.planner.plans import Plan
from shardroute.planner.reporting.rivals import Rival
from shardroute.planner.reports import Busiest, busiest_of, needs_of, reporting_us, traffic
from shardroute.planner.routing.bounds import Cut, cuts
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import Prediction
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.machines import Machine, MachineKind
from shardroute.topologies.topologies import Topology
from shardroute.topologies.units import format_bytes, format_count, format_seconds

# Parts of a critical path, and cuts, that sentences tell of; the fields hold them all.
_TOLD_PARTS, _TOLD_CUTS = 4, 2
# A rival within this share of the plan's time is called as fast: below it lies what predictions themselves are unsure of
# (bandwidth-bound collectives, median 1.5 %; docs/predictions.md).
_AS_FAST = 0.015


class Explanation(msgspec.Struct, frozen=True):
    """Why a plan is as it is; the field names are those of `explain --json`, and stay.

    bounds           what no plan can beat at nominal rates, tightest first; none for sums and attention
    reached_bound_s  the tightest at the rates that the calibration says are reached, None where there is none
    parts            the seconds of the critical path by what they were spent on, most first; they add up to the prediction
    waited_for       what its steps waited for before they began
    """

    digest: str
    strategy: str
    machine: str
    predicted_s: float
    bounds: list[Cut]
    ratio_to_bound: float | None
    reached_bound_s: float | None
    busiest: Busiest | None
    n_bytes_cross_domain: int
    n_path_steps: int
    parts: list[Part]
    waited_for: list[Part]
    rivals: list[Rival]
    sentences: list[str]


def explain(
    plan: Plan, prediction: Prediction, calibration: Calibration, rivals: Sequence[Rival], progress: Told | None = None
) -> Explanation:
    """The explanation of a plan by its prediction at these costs, beside what other strategies take; progress is told the share
    that is done.
    """
    bounding, following = parts(progress, (reporting_us(plan), following_us(prediction)))
    bounds, reached_s = _bounds(plan, calibration, bounding)
    bounding(1.0)
    chain = critical_path(plan, prediction, following)
    found = Explanation(
        digest=plan.digest,
        strategy=plan.strategy,
        machine=plan.topology.title,
        predicted_s=prediction.predicted_s,
        bounds=bounds,
        ratio_to_bound=prediction.predicted_s / bounds[0].seconds if bounds and bounds[0].seconds else None,
        reached_bound_s=reached_s,
        busiest=busiest_of(prediction),
        n_bytes_cross_domain=traffic(plan).n_bytes_cross_domain,
        n_path_steps=len(chain),
        parts=summarise(plan, chain),
        waited_for=reasons(chain),
        rivals=list(rivals),
        sentences=[],
    )
    return msgspec.structs.replace(found, sentences=[*_bound_sentences(found), *_path_sentences(found), *_rival_sentences(found)])


def reached(topology: Topology, calibration: Calibration) -> Topology:
    """The topology with the rates of NVLink and NICs that the calibration says are reached; as it is for CPU machines."""
    if topology.machine.kind is MachineKind.CPU or calibration.nvlink is None or calibration.nic is None:
        return topology
    nvlink, nic = calibration.nvlink.efficiency, calibration.nic.efficiency

    def slowed(machine: Machine) -> Machine:
        return replace(machine, nvlink_Bps=machine.nvlink_Bps * nvlink, nic_Bps=machine.nic_Bps * nic, figures=())

    return Topology(
        slowed(topology.machine),
        topology.n_gpus,
        tuple((gpu, nic_Bps * nic) for gpu, nic_Bps in topology.own_nic_Bps),
        tuple((slowed(machine), n) for machine, n in topology.more),
    )


def _bounds(plan: Plan, calibration: Calibration, progress: Told) -> tuple[list[Cut], float | None]:
    if plan.problem.summed or plan.attention is not None:
        return [], None
    needs = needs_of(plan, progress)  # once: for many ranks it takes seconds
    at_reached = cuts(needs, reached(plan.topology, calibration), calibration)
    return cuts(needs, plan.topology, calibration), at_reached[0].seconds if at_reached else None


def _bound_sentences(found: Explanation) -> list[str]:
    took = format_seconds(found.predicted_s)
    if not found.bounds:
        told = [f"The plan ({found.strategy}) is predicted to take {took}; no lower bound is worked out for what it does."]
        if not found.n_path_steps:
            told = ["The plan has no steps: nothing has to move."]
    else:
        first = found.bounds[0]
        assert found.ratio_to_bound is not None
        over = f"{found.ratio_to_bound:.2f} x the lower bound of {format_seconds(first.seconds)}"
        told = [
            f"The plan ({found.strategy}) is predicted to take {took}, {over}.",
            f"What bounds it: {_cut_text(first)} at nominal rates. No plan is faster than that.",
        ]
        others = [f"{cut.name} {format_seconds(cut.seconds)}" for cut in found.bounds[1 : 1 + _TOLD_CUTS]]
        if others:
            told.append(f"The next tightest: {', '.join(others)}.")
        if found.reached_bound_s is not None and found.reached_bound_s > first.seconds:
            share = found.predicted_s / found.reached_bound_s
            rest = ": the rest is latency, waiting and sharing" if share > 1 + _AS_FAST else ""
            told.append(
                f"At the rates that the calibration says are reached the bound is {format_seconds(found.reached_bound_s)}, and "
                f"the plan takes {share:.2f} x that{rest}."
            )
    if found.busiest is not None and found.predicted_s:
        busy = found.busiest
        share = busy.seconds / found.predicted_s
        told.append(
            f"The busiest resource is {busy.resource}: {format_bytes(busy.n_bytes)} keep it in use for "
            f"{format_seconds(busy.seconds)}, {share:.0%} of the time."
        )
    return told


def _cut_text(cut: Cut) -> str:
    if not cut.n_bytes:
        return f"{cut.name}, {format_seconds(cut.seconds)}"
    return f"{format_bytes(cut.n_bytes)} must cross {cut.name}, which takes {format_seconds(cut.seconds)}"


def _path_sentences(found: Explanation) -> list[str]:
    if not found.n_path_steps or not found.predicted_s:
        return []
    parts = found.parts[:_TOLD_PARTS]
    spent = "; ".join(f"{part.seconds / found.predicted_s:.0%} is {part.what}" for part in parts)
    rest = sum(part.seconds for part in found.parts[_TOLD_PARTS:]) / found.predicted_s
    n_lesser = len(found.parts) - len(parts)
    more = f"; {rest:.0%} is {format_count(n_lesser, 'lesser part')}" if n_lesser > 0 else ""
    held = ", ".join(f"{part.n_steps:,} by {part.what}" for part in found.waited_for if part.what != Reason.START)
    chain = format_count(found.n_path_steps, "step")
    return [
        f"The end waits for a chain of {chain}, one after the other. Of its time {spent}{more}.",
        *([f"Steps of the chain were held up: {held}."] if held else []),
    ]


def _rival_sentences(found: Explanation) -> list[str]:
    tried = [rival for rival in found.rivals if rival.predicted_s is not None]
    told = []
    if tried:
        faster = [r for r in tried if r.ratio is not None and r.ratio < 1 - _AS_FAST]
        told.append(
            f"Of {format_count(len(tried), 'other strategy', 'other strategies')} tried "
            + (f"{len(faster)} would be FASTER." if faster else "none is predicted to be faster.")
        )
    told += [_rival_text(rival, found) for rival in tried]
    return told + [f"{rival.strategy} was not tried: {rival.why_not}." for rival in found.rivals if rival.predicted_s is None]


def _rival_text(rival: Rival, found: Explanation) -> str:
    assert rival.predicted_s is not None
    text = f"{rival.strategy}: {format_seconds(rival.predicted_s)}"
    if rival.ratio is not None:
        same = abs(rival.ratio - 1) <= _AS_FAST
        text += ", about as long" if same else f", {rival.ratio:.2f} x as long"
    ours = found.n_bytes_cross_domain
    if rival.n_bytes_cross_domain is not None and ours and rival.n_bytes_cross_domain != ours:
        crossing = format_bytes(rival.n_bytes_cross_domain)
        text += f"; {crossing} into other domains, {rival.n_bytes_cross_domain / ours:.2f} x as much"
    if rival.busiest is not None and rival.predicted_s:
        share = rival.busiest.seconds / rival.predicted_s
        text += f"; busiest {rival.busiest.resource}, in use {share:.0%} of the time"
    return text + "."
