"""A calibration from a run of a plan of ours: the rate of what bound it, so that the plan is predicted to take what it took.

One run tells one number. Which one, the base calibration's own prediction says: the rate of the busiest resource.
"""

from collections.abc import Sequence
from typing import Final

from shardroute.planner.measurements.calibrate import Fitted, kept_figures
from shardroute.planner.plans import Plan
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import predict
from shardroute.planner.timelines import Timeline
from shardroute.topologies.calibrations import Calibration, calibration_figure, calibration_from_figures
from shardroute.topologies.errors import InputError

# What a resource's rate is called in a calibration, by how `Links` names it; a domain's uplink is a share of its NICs.
_KEYS: Final = {
    "NIC": "nic.efficiency",
    "NVLink": "nvlink.efficiency",
    "uplink": "nic.efficiency",
    "downlink": "nic.efficiency",
    "memory": "memory.efficiency",
    "cores": "cpu.copy_bandwidth",
}
_ROUNDS: Final = 16
_CLOSE: Final = 1e-3
_SPAN: Final = 16.0  # the rate lies within this factor of the base's, or the base is of another machine
_MOST_ERROR: Final = 0.5  # a run that is still off by more at the best rate was bound by something else


def calibrate_from_timelines(
    timelines: Sequence[tuple[str, Timeline]],
    plan: Plan,
    base: Calibration,
    progress: Told | None = None,
) -> Fitted:
    """The base calibration with the rate changed that bound the plan, so that it takes the runs' mean time; progress is told the
    share of the rounds that there may be.

    timelines: (file, measured timeline of the plan). Raises InputError for one of another plan or one that was predicted, for a
    plan that moves nothing, for a base without the rate, and when no rate within a factor of 16 comes near the measured time.
    """
    for file, timeline in timelines:
        if timeline.kind != "measured":
            raise InputError(f"{file}: a {timeline.kind} timeline; expected one that `run -o` wrote")
        if timeline.digest != plan.digest:
            raise InputError(f"{file}: a timeline of plan {timeline.digest[:16]}, but --plan is {plan.digest[:16]}")
    measured_s = sum(timeline.total_s for _, timeline in timelines) / len(timelines)
    told = parts(progress, [1.0] * (_ROUNDS + 1))
    first = predict(plan, base, progress=told[0])
    if not first.resources or measured_s <= 0:
        raise InputError("the plan moves nothing, so that its run says nothing about rates")
    key = _KEYS[first.resources[0].name.split()[0]]
    rates = {figure.key: figure.value for figure in kept_figures(base)}
    if key not in rates:
        raise InputError(
            f"{first.resources[0].name} binds the plan, but the calibration of {base.machine} ({base.library}) has no {key} "
            "to fit; start from one that has it (--base)"
        )
    value = rates[key]
    low, high = value / _SPAN, value * _SPAN if key.endswith("bandwidth") else 1.0
    found, found_s = value, first.predicted_s
    for n_rounds in range(_ROUNDS):
        if abs(found_s / measured_s - 1) < _CLOSE:
            break
        low, high = (low, found) if found_s < measured_s else (found, high)
        found = (low * high) ** 0.5
        found_s = predict(plan, _with(base, key, found, "trial"), progress=told[n_rounds + 1]).predicted_s
    told[-1](1.0)
    files = ", ".join(file for file, _ in timelines)
    error = found_s / measured_s - 1
    if abs(error) > _MOST_ERROR:
        raise InputError(
            f"{files}: {measured_s:.3g} s measured, but the plan takes {found_s:.3g} s at the best {key} of {found:.3g}; "
            "the base calibration is of another kind of machine, or the run waited for something else"
        )
    runs = f"{len(timelines)} run{'s' if len(timelines) > 1 else ''} of plan {plan.digest[:16]} ({files})"
    source = f"{runs}, mean {measured_s:.4g} s; predicted with it {error:+.1%}"
    return Fitted(_with(base, key, found, source), (key,), ())


def _with(base: Calibration, key: str, value: float, source: str) -> Calibration:
    figures = [figure for figure in kept_figures(base) if figure.key != key]
    at = next(i for i, figure in enumerate(base.figures) if figure.key == key)
    figures.insert(at, calibration_figure(key, value, source))
    return calibration_from_figures(
        base.machine, base.library, "from runs of plans; what they don't say is kept", base.versions, figures, base.curves
    )
