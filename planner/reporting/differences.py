"""How two plans differ, and how two timelines do: numbers side by side, and which tensors go another way.

Rule: a tensor's *way* is which ranks send how much of it to which, by which kind of step; order, bundles and queues are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Backend, Op, Plan, ranges
from shardroute.planner.problems import Problem
from shardroute.planner.reports import PlanReport
from shardroute.planner.shares import Told, parts
from shardroute.planner.timelines import Timeline

# Steps that a difference of timelines names: a screenful.
_MOST_STEPS: Final = 10
# Microseconds that adding up who sends what took, by piece that a step carries, on one core of a Xeon (2026-11-30); and laying
# the sums of a tensor side by side.
_ENTRY_US: Final = 0.4
_TOGETHER_US: Final = 10.0


class TextRow(msgspec.Struct, frozen=True):
    """A word of both sides."""

    name: str
    first: str
    second: str


class NumberRow(msgspec.Struct, frozen=True):
    """A number of both sides, None where there is none; `ratio` is second / first, None where the first is 0 or one is None."""

    name: str
    unit: str
    first: float | int | None
    second: float | int | None
    ratio: float | None


class TensorWay(msgspec.Struct, frozen=True):
    """A tensor that goes another way: bytes that go between ranks as only the first plan sends them, and as only the second."""

    name: str
    n_bytes: int
    n_bytes_first: int
    n_bytes_second: int


class PlanDifference(msgspec.Struct, frozen=True):
    """What differs between two plans; the field names are those of `diff --json`, and stay.

    same           the digests are equal: the plans are one
    same_problem   tensors and both layouts are equal
    only_first, only_second   tensors that the other plan's problem doesn't have
    relaid         tensors of both that differ in shape, dtype or layout
    other_way      tensors of both that go another way, most bytes first
    n_tensors      tensors of both
    """

    same: bool
    same_problem: bool
    texts: list[TextRow]
    numbers: list[NumberRow]
    only_first: list[str]
    only_second: list[str]
    relaid: list[str]
    other_way: list[TensorWay]
    n_tensors: int


class StepShift(msgspec.Struct, frozen=True):
    """A step that took longer or shorter in the second timeline, in seconds."""

    step: int
    first_s: float
    second_s: float


class TimelineDifference(msgspec.Struct, frozen=True):
    """What differs between two timelines; the field names are those of `diff --json`, and stay.

    same_plan   the digests are equal, so steps can be laid side by side; else `shifts` is empty and the shares are None
    n_longer, n_shorter   steps that took over a tenth longer or shorter
    shifts      steps whose time changed most
    """

    same_plan: bool
    texts: list[TextRow]
    numbers: list[NumberRow]
    n_longer: int | None
    n_shorter: int | None
    shifts: list[StepShift]


def comparing_us(plan: Plan) -> float:
    """About the microseconds that `difference` takes of each of two plans, for shares."""
    return _ENTRY_US * int(plan.step_pieces.sum())


def difference(
    first: Plan, second: Plan, first_report: PlanReport, second_report: PlanReport, progress: Told | None = None
) -> PlanDifference:
    """How two plans differ. The reports are theirs; predictions in them are compared as they are. progress is told the share that
    is done.
    """
    names = [{tensor.name: i for i, tensor in enumerate(plan.problem.tensors)} for plan in (first, second)]
    shared = [name for name in names[0] if name in names[1]]
    relaid = [name for name in shared if _laid(first.problem, names[0][name]) != _laid(second.problem, names[1][name])]
    only_first = [name for name in names[0] if name not in names[1]]
    only_second = [name for name in names[1] if name not in names[0]]
    same_problem = not (only_first or only_second or relaid)
    return PlanDifference(
        same=first_report.digest == second_report.digest,
        same_problem=same_problem and first.problem.summed == second.problem.summed,
        texts=_texts(first_report, second_report),
        numbers=_numbers(first, second, first_report, second_report),
        only_first=only_first,
        only_second=only_second,
        relaid=relaid,
        other_way=_other_ways(first, second, shared, names, progress),
        n_tensors=len(shared),
    )


def timeline_difference(first: Timeline, second: Timeline) -> TimelineDifference:
    """How two timelines differ: in total, in how their steps' ends spread, and step by step where they are of one plan."""
    same = first.digest == second.digest and len(first.end_s) == len(second.end_s)
    texts = [
        TextRow("kind", first.kind, second.kind),
        TextRow("by", first.source, second.source),
        TextRow("plan", first.digest, second.digest),
    ]
    numbers = [_number("total", "s", first.total_s, second.total_s), _number("steps", "", len(first.end_s), len(second.end_s))]
    if len(first.end_s) and len(second.end_s):
        for share, name in ((0.25, "a quarter of the steps done"), (0.5, "half of them"), (0.75, "three quarters")):
            numbers.append(_number(name, "s", float(np.quantile(first.end_s, share)), float(np.quantile(second.end_s, share))))
    if first.verified is not None or second.verified is not None:
        wrong = [None if t.verified is None else t.verified.mismatches for t in (first, second)]
        numbers.append(_number("wrong bytes", "B", wrong[0], wrong[1]))
    if not same:
        return TimelineDifference(False, texts, numbers, None, None, [])
    took = [t.end_s - t.start_s for t in (first, second)]
    change = took[1] - took[0]
    order = np.argsort(-np.abs(change), kind="stable")[:_MOST_STEPS]
    shifts = [StepShift(i, float(took[0][i]), float(took[1][i])) for i in order.tolist() if change[i]]
    tenth = 0.1 * took[0]
    return TimelineDifference(True, texts, numbers, int((change > tenth).sum()), int((change < -tenth).sum()), shifts)


def _laid(problem: Problem, tensor: int) -> tuple[object, ...]:
    found = problem.tensors[tensor]
    return found.shape, found.dtype, problem.source.fragments[tensor], problem.target.fragments[tensor]


def _texts(first: PlanReport, second: PlanReport) -> list[TextRow]:
    return [
        TextRow("digest", first.digest, second.digest),
        TextRow("strategy", first.strategy, second.strategy),
        TextRow("machine", first.machine, second.machine),
        TextRow("bound", first.bound, second.bound),
        TextRow("costs from", first.calibration, second.calibration),
        TextRow(
            "busiest",
            "" if first.busiest is None else first.busiest.resource,
            "" if second.busiest is None else second.busiest.resource,
        ),
    ]


def _numbers(first: Plan, second: Plan, a: PlanReport, b: PlanReport) -> list[NumberRow]:
    rows = [
        _number("predicted", "s", a.predicted_s, b.predicted_s),
        _number("lower bound", "s", a.lower_bound_s, b.lower_bound_s),
        _number("times the bound", "", a.ratio_to_bound, b.ratio_to_bound),
        _number("tensors", "", a.n_tensors, b.n_tensors),
        _number("bytes of tensors", "B", a.n_tensor_bytes, b.n_tensor_bytes),
        _number("source ranks", "", a.n_src_gpus, b.n_src_gpus),
        _number("destination ranks", "", a.n_dst_gpus, b.n_dst_gpus),
        _number("steps", "", a.n_steps, b.n_steps),
        _number(
            "within domains", "B", a.n_bytes_moved - a.n_bytes_cross_domain, b.n_bytes_moved - b.n_bytes_cross_domain
        ),
        _number("into other domains", "B", a.n_bytes_cross_domain, b.n_bytes_cross_domain),
        _number("copied within a rank", "B", a.n_bytes_local, b.n_bytes_local),
        _number("staging, peak a rank", "B", a.peak_staging_bytes, b.peak_staging_bytes),
        _number("packing, peak a rank", "B", a.peak_packing_bytes, b.peak_packing_bytes),
    ]  # fmt: skip
    for op in Op:
        counts = [int((plan.steps.op == op).sum()) for plan in (first, second)]
        if any(counts):
            rows.append(_number(f"{op.name.lower().replace('_', '-')} steps", "", counts[0], counts[1]))
    for backend in Backend:
        carried = [
            int(plan.step_bytes[(plan.steps.backend == backend) & ~_stays(plan)].sum()) for plan in (first, second)
        ]  # fmt: skip
        if any(carried):
            rows.append(_number(f"carried by {backend.label}", "B", carried[0], carried[1]))
    return rows


def _stays(plan: Plan) -> NDArray[np.bool_]:
    """Which steps copy within a rank, as packing does."""
    return np.asarray((plan.steps.op == Op.COPY) & (plan.steps.src == plan.steps.dst))


def _number(name: str, unit: str, first: float | int | None, second: float | int | None) -> NumberRow:
    ratio = second / first if first and second is not None else None
    return NumberRow(name, unit, first, second, ratio)


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """Bytes of each tensor by way: one row a pair, ascending by tensor, then way."""

    tensor: Ints
    way: Ints
    n_bytes: Ints


def _other_ways(
    first: Plan, second: Plan, shared: Sequence[str], names: Sequence[dict[str, int]], progress: Told | None
) -> list[TensorWay]:
    *added, compared = parts(progress, (comparing_us(first), comparing_us(second), _TOGETHER_US * len(shared)))
    groups: dict[tuple[int, ...], int] = {}
    ways = []
    for plan, of, done in zip((first, second), names, added, strict=True):
        number = np.full(len(plan.problem.tensors), -1, dtype=np.int64)
        number[[of[name] for name in shared]] = np.arange(len(shared))
        ways.append(_ways(plan, number, groups))
        done(1.0)
    tensor = np.concatenate([ways[0].tensor, ways[1].tensor])
    way = np.concatenate([ways[0].way, ways[1].way])
    change = _summed(tensor, way, np.concatenate([ways[0].n_bytes, -ways[1].n_bytes]))
    more, less = np.zeros(len(shared), dtype=np.int64), np.zeros(len(shared), dtype=np.int64)
    np.add.at(more, change.tensor, np.maximum(change.n_bytes, 0))
    np.add.at(less, change.tensor, np.maximum(-change.n_bytes, 0))
    compared(1.0)
    differ = np.flatnonzero(more + less)
    tensors = first.problem.tensors
    found = [
        TensorWay(shared[i], tensors[names[0][shared[i]]].n_bytes, int(more[i]), int(less[i])) for i in differ.tolist()
    ]  # fmt: skip
    return sorted(found, key=lambda row: (-(row.n_bytes_first + row.n_bytes_second), row.name))


def _ways(plan: Plan, number: NDArray[np.int64], groups: dict[tuple[int, ...], int]) -> _Ways:
    """The ways of the tensors that have a number; `groups` numbers what copies between two ranks are not, and grows."""
    steps = plan.steps
    way = np.empty(len(steps), dtype=np.int64)
    copy = steps.op == Op.COPY
    # Ranks are below 2^31, so a pair of them is a number that no group's, which is negative, can be.
    way[copy] = steps.src[copy].astype(np.int64) << 31 | steps.dst[copy]
    for step in np.flatnonzero(~copy).tolist():
        key = (int(steps.op[step]), int(steps.src[step]), *plan.group(int(steps.group[step])).tolist())
        way[step] = -1 - groups.setdefault(key, len(groups))
    entry, owner = ranges(plan.bundles.ptr, steps.bundle)
    tensor = number[plan.bundles.tensor[entry]]
    known = (tensor >= 0) & ~_stays(plan)[owner]
    return _summed(tensor[known], way[owner[known]], plan.entry_bytes[entry[known]])


def _summed(tensor: Ints, way: Ints, n_bytes: Ints) -> _Ways:
    """The bytes of each pair of a tensor and a way, once each."""
    if not len(tensor):
        return _Ways(tensor, way, n_bytes)
    order = np.lexsort((way, tensor))
    tensor, way = tensor[order], way[order]
    first = np.flatnonzero((np.diff(tensor, prepend=-1) != 0) | (np.diff(way, prepend=way[0]) != 0))
    return _Ways(tensor[first], way[first], np.add.reduceat(n_bytes[order], first))
