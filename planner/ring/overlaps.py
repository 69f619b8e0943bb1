"""How much of a plan's copying runs beside attention, in a timeline, predicted or measured."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Op, Plan, ranges
from shardroute.planner.timelines import Timeline

Floats = NDArray[np.float64]


class Overlap(msgspec.Struct, frozen=True):
    """Seconds, summed over ranks: in which a rank computes, in which it drives copies or collectives, and both at once."""

    computing_s: float
    copying_s: float
    both_s: float

    def __str__(self) -> str:
        share = f" ({self.both_s / self.copying_s:.0%})" if self.copying_s > 0 else ""
        return f"{self.both_s * 1e3:.3g} of {self.copying_s * 1e3:.3g} ms{share}, over all ranks"


def overlap_of(plan: Plan, timeline: Timeline) -> Overlap:
    """The overlap of a plan's COMPUTE steps with its steps that carry bytes, rank by rank."""
    steps = plan.steps
    copies = np.flatnonzero((steps.op == Op.COPY) & (plan.step_bytes > 0))
    groups = np.flatnonzero((steps.op != Op.COPY) & (plan.step_bytes > 0))
    member, owner = ranges(plan.group_ptr, steps.group[groups])
    moving = np.concatenate([copies, groups[owner]])
    mover = np.concatenate([steps.src[copies], plan.group_ranks[member]])
    computing = plan.computes.step.astype(np.int64)
    computer = plan.group_ranks[plan.group_ptr[steps.group[computing]]]
    totals = np.zeros(3)
    for rank in range(plan.problem.n_ranks):
        first, second = (_union(timeline, s[r == rank]) for s, r in ((computing, computer), (moving, mover)))
        totals += [_length(first), _length(second), _length(first) + _length(second) - _length(_joined(first, second))]
    return Overlap(*totals.tolist())


def overlap_facts(plan: Plan, timeline: Timeline) -> list[tuple[str, str]]:
    """A line for people about a plan that computes attention; none about any other."""
    return [] if plan.attention is None else [("copies beside attention", str(overlap_of(plan, timeline)))]


def _union(timeline: Timeline, steps: Ints) -> Floats:
    """The times of these steps as disjoint spans, ascending, float64[n, 2]."""
    return _merged(np.stack([timeline.start_s[steps], timeline.end_s[steps]], axis=1))


def _joined(first: Floats, second: Floats) -> Floats:
    return _merged(np.concatenate([first, second]))


def _merged(spans: Floats) -> Floats:
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate([[True], spans[1:, 0] > reach[:-1]]))
    return np.stack([spans[first, 0], np.append(reach[first[1:] - 1], reach[-1])], axis=1)


def _length(spans: Floats) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum())
