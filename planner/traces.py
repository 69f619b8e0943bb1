"""A plan's timeline as a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing.

The format is Chrome's trace events as JSON ("Trace Event Format", Google): a process a GPU, a thread a queue of a lane, a slice
a step on each rank that drives it, an arrow a wait of one step for another, and for predictions a counter a busy link. A file of
millions of steps opens in no browser, so only so many slices are written, whole ranks at a time; the trace says what it left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Lane, Op, Plan, ranges
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import Prediction
from shardroute.planner.timelines import Timeline
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import write_file
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.units import format_bytes

# Slices that a trace holds unless told otherwise: up to some 50 MB with their arrows, and what a browser still scrolls with ease.
MOST_SLICES: Final = 50_000
# Links that get a counter, busiest first, and the points of each.
_COUNTERS, _POINTS = 16, 200
_LANE_BITS = 3
# Microseconds that parts of a trace took on one core of a Xeon (2026-11-30): its rows and where each ends, by step; events, by
# slice; counters, by link of a route.
_SLICED_US, _DRAWN_US, _WRITTEN_US, _COUNTED_US = 0.2, 0.3, 5.0, 0.1


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One trace event; `ts` and `dur` are microseconds. Fields are named as the format has them."""

    ph: Literal["M", "X", "s", "f", "C"]
    name: str
    pid: int
    tid: int
    ts: float | None = None
    dur: float | None = None
    cat: str | None = None
    id: int | None = None
    bp: Literal["e"] | None = None
    args: dict[str, str | int | float] | None = None


class _File(msgspec.Struct, frozen=True):
    """A trace file; its fields are named as the format has them."""

    traceEvents: list[Event]
    displayTimeUnit: str
    otherData: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Events in an order that viewers read, and what the file says of itself; `note` tells what was left out, or is empty."""

    events: list[Event]
    about: dict[str, str]
    note: str

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON."""
        file = _File(self.events, "ms", self.about)
        write_file(path, msgspec.json.encode(file) + b"\n", "the trace")


@dataclass(frozen=True, slots=True, eq=False)
class _Slices:
    """One row a step and rank that drives it, ordered by step, then rank. `first` (CSR by step) are its rows."""

    step: Ints
    rank: Ints
    first: Ints


def trace(
    plan: Plan,
    timeline: Timeline,
    prediction: Prediction | None = None,
    *,
    ranks: Sequence[int] | None = None,
    most_slices: int = MOST_SLICES,
    progress: Told | None = None,
) -> Trace:
    """The trace of a timeline of the plan; the prediction that it is of adds counters. progress is told the share that is done.

    Of more slices than `most_slices`, whole ranks are left out: those stay that are named, or else the rank of the last arrival,
    then those with most bytes sent and received. Raises InputError when the timeline is of another plan, for a rank that the plan
    doesn't have, and when the ranks that are named have too many slices.
    """
    if timeline.digest != plan.digest or len(timeline.end_s) != len(plan.steps):
        raise InputError(
            f"the timeline is of another plan: digests {timeline.digest[:16]} and {plan.digest[:16]}; simulate or run this plan"
        )
    n_steps, n_shown = len(plan.steps), min(len(plan.steps), most_slices)
    n_routes = 0 if prediction is None else len(prediction.tasks.graph.route_links)
    sliced, drawn, written, tied, counted = parts(
        progress,
        [_SLICED_US * n_steps, _DRAWN_US * n_steps, _WRITTEN_US * n_shown, _WRITTEN_US * n_shown, _COUNTED_US * n_routes],
    )
    slices = _slices(plan)
    kept, note = _kept_ranks(plan, timeline, slices, ranks, most_slices)
    shown = np.flatnonzero(kept[slices.rank])
    sliced(1.0)
    ends_s = _drawn_ends(plan, timeline, slices)
    drawn(1.0)
    events = _names(plan, slices, shown)
    events += _slice_events(plan, timeline, slices, shown, ends_s)
    written(1.0)
    events += _arrows(plan, timeline, slices, kept, ends_s)
    tied(1.0)
    if prediction is not None:
        events += _counters(plan, prediction)
    counted(1.0)
    about = {"plan": plan.digest, "strategy": plan.strategy, "timeline": f"{timeline.kind}: {timeline.source}"}
    if note:
        about["left out"] = note
    return Trace(events, about, note)


def _slices(plan: Plan) -> _Slices:
    steps = plan.steps
    copies, groups = np.flatnonzero(steps.op == Op.COPY), np.flatnonzero(steps.op != Op.COPY)
    member, owner = ranges(plan.group_ptr, steps.group[groups])
    step = np.concatenate([copies, groups[owner]])
    rank = np.concatenate([steps.src[copies], plan.group_ranks[member]]).astype(np.int64)
    order = np.lexsort((rank, step))
    return _Slices(step[order], rank[order], np.searchsorted(step[order], np.arange(len(steps) + 1)))


def _kept_ranks(
    plan: Plan, timeline: Timeline, slices: _Slices, ranks: Sequence[int] | None, most_slices: int
) -> tuple[NDArray[np.bool_], str]:
    """Which ranks are shown, bool[n_ranks], and what to say of the others."""
    n_ranks = plan.problem.n_ranks
    of_rank = np.bincount(slices.rank, minlength=n_ranks)
    kept = np.zeros(n_ranks, dtype=bool)
    if ranks is not None:
        wrong = [rank for rank in ranks if not 0 <= rank < n_ranks]
        if wrong:
            raise InputError(f"rank {wrong[0]} isn't one of the plan's: these are 0 to {n_ranks - 1}")
        kept[list(ranks)] = True
        if int(of_rank[kept].sum()) > most_slices:
            raise InputError(
                f"ranks {min(ranks)} to {max(ranks)} have {int(of_rank[kept].sum()):,} slices, and a trace holds "
                f"{most_slices:,}; name fewer ranks"
            )
    elif len(slices.step) <= most_slices:
        kept[:] = True
    else:
        last = int(np.argmax(timeline.end_s))
        weight = _bytes_of_ranks(plan)
        weight[slices.rank[slices.first[last] : slices.first[last + 1]]] = np.inf
        order = np.lexsort((np.arange(n_ranks), -weight))
        kept[order[np.cumsum(of_rank[order]) <= most_slices]] = True
    hidden = int((~kept & (of_rank > 0)).sum())
    if not hidden:
        return kept, ""
    slices_text = f"{int(of_rank[kept].sum()):,} of {len(slices.step):,} slices"
    return kept, f"{int((kept & (of_rank > 0)).sum())} of {int((of_rank > 0).sum())} ranks are shown, {slices_text}"


def _bytes_of_ranks(plan: Plan) -> NDArray[np.float64]:
    """Bytes that each rank sends and receives by copies."""
    steps = plan.steps
    moves = np.flatnonzero((steps.op == Op.COPY) & (steps.src != steps.dst))
    ends = np.concatenate([steps.src[moves], steps.dst[moves]])
    return np.bincount(ends, weights=np.tile(plan.step_bytes[moves], 2), minlength=plan.problem.n_ranks).astype(np.float64)


def _names(plan: Plan, slices: _Slices, shown: Ints) -> list[Event]:
    """Names and order of the processes and threads that have slices."""
    topology = plan.topology
    cpu = topology.machine.kind is MachineKind.CPU
    events = []
    for rank in np.unique(slices.rank[shown]).tolist():
        where = "" if cpu else f" (host {topology.host[rank]}, domain {topology.domain[rank]})"
        name = f"{'rank' if cpu else 'GPU'} {rank}{where}"
        events.append(Event("M", "process_name", rank, 0, args={"name": name}))
        events.append(Event("M", "process_sort_index", rank, 0, args={"sort_index": rank}))
    lanes = plan.steps.lane[slices.step[shown]].astype(np.int64)
    for key in np.unique(slices.rank[shown] << 8 | lanes).tolist():
        rank, column = key >> 8, key & 0xFF
        lane, queue = Lane(column & ((1 << _LANE_BITS) - 1)), column >> _LANE_BITS
        events.append(Event("M", "thread_name", rank, column, args={"name": f"{_word(lane)} {queue}"}))
        events.append(Event("M", "thread_sort_index", rank, column, args={"sort_index": lane << 8 | queue}))
    return events


def _word(of: Lane | Op) -> str:
    return of.name.lower().replace("_", "-")


def _slice_events(
    plan: Plan, timeline: Timeline, slices: _Slices, shown: Ints, ends_s: NDArray[np.float64]
) -> list[Event]:
    """A slice a row that is shown; ends_s are those of `_drawn_ends`."""
    steps = plan.steps
    step = slices.step[shown]
    begin, end = _microseconds(timeline.start_s[step]), _microseconds(ends_s[shown])
    events = []
    for i, rank, lane, op, src, dst, n_bytes, n_pieces, ts, dur in zip(
        step.tolist(), slices.rank[shown].tolist(), steps.lane[step].tolist(), steps.op[step].tolist(), steps.src[step].tolist(),
        steps.dst[step].tolist(), plan.step_bytes[step].tolist(), plan.step_pieces[step].tolist(), begin.tolist(),
        np.round(end - begin, 3).tolist(), strict=True,
    ):  # fmt: skip
        kind, lane_word = Op(op), _word(Lane(lane & ((1 << _LANE_BITS) - 1)))
        args: dict[str, str | int | float] = {"step": i, "bytes": n_bytes, "pieces": n_pieces}
        if kind is Op.COPY:
            name = f"{'to ' + str(dst) if src != dst else 'copy'}, {format_bytes(n_bytes)}" if n_pieces else f"credit to {dst}"
            args |= {"from": src, "to": dst}
        else:
            name = f"{_word(kind)}, {format_bytes(n_bytes)}" if n_pieces else _word(kind)
        events.append(Event("X", name, rank, lane, ts, dur, lane_word, args=args))
    return events


def _drawn_ends(plan: Plan, timeline: Timeline, slices: _Slices) -> NDArray[np.float64]:
    """Where each slice ends, in seconds: with its step, or where the next of its queue begins beside what came being unpacked."""
    thread = slices.rank << 8 | plan.steps.lane[slices.step]
    start_s, end_s = timeline.start_s[slices.step], timeline.end_s[slices.step].copy()
    order = np.lexsort((slices.step, end_s, start_s, thread))
    this, following = order[:-1], order[1:]
    follows = thread[this] == thread[following]
    end_s[this[follows]] = np.minimum(end_s[this], start_s[following])[follows]
    return end_s


def _microseconds(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Microseconds, to the nanosecond: both ends of a slice are rounded alike, so that slices of a queue don't overlap."""
    return np.round(seconds * 1e6, 3)


def _arrows(
    plan: Plan, timeline: Timeline, slices: _Slices, kept: NDArray[np.bool_], ends_s: NDArray[np.float64]
) -> list[Event]:
    """An arrow for each wait between steps that are both shown: on the rank that both share where they do."""
    steps = plan.steps
    rows = np.flatnonzero(kept[slices.rank])
    anchor, drawn_s = np.full(len(steps), -1), np.zeros(len(steps))
    anchor[slices.step[rows][::-1]] = slices.rank[rows][::-1]
    drawn_s[slices.step[rows][::-1]] = ends_s[rows][::-1]
    owner = np.repeat(np.arange(len(steps)), np.diff(steps.after_ptr))
    dep = steps.after.astype(np.int64)
    both = np.flatnonzero((anchor[owner] >= 0) & (anchor[dep] >= 0))
    owner, dep = owner[both], dep[both]
    leaves = _microseconds(drawn_s[dep])
    # An arrow leaves from within the slice, else a viewer may tie it to the one after.
    leaves = np.maximum(_microseconds(timeline.start_s[dep]), leaves - 0.001)
    arrives = np.maximum(_microseconds(timeline.start_s[owner]), leaves)
    events = []
    for i, (src, src_tid, dst, dst_tid, out, into) in enumerate(
        zip(
            anchor[dep].tolist(), steps.lane[dep].tolist(), anchor[owner].tolist(), steps.lane[owner].tolist(),
            np.round(leaves, 3).tolist(), np.round(arrives, 3).tolist(), strict=True,
        )
    ):  # fmt: skip
        events.append(Event("s", "waits", src, src_tid, out, cat="waits", id=i))
        events.append(Event("f", "waits", dst, dst_tid, into, cat="waits", id=i, bp="e"))
    return events


def _counters(plan: Plan, prediction: Prediction) -> list[Event]:
    """How full the busiest links are over time, in percent. A flow's rate is taken as even over its own time."""
    graph, result = prediction.tasks.graph, prediction.result
    total_s = prediction.predicted_s
    used = np.flatnonzero(result.link_amount > 0)
    links = used[np.argsort(-result.link_busy_s[used], kind="stable")][:_COUNTERS]
    if not total_s or not len(links):
        return []
    pid = plan.problem.n_ranks
    events = [
        Event("M", "process_name", pid, 0, args={"name": "links"}),
        Event("M", "process_sort_index", pid, 0, args={"sort_index": -1}),
    ]
    owner = np.repeat(np.arange(graph.n_tasks), np.diff(graph.route_ptr))
    edges = np.linspace(0.0, total_s, _POINTS + 1)
    for link in links.tolist():
        task = owner[graph.route_links == link]
        share = fullness(result.start_s[task], result.finish_s[task], graph.amount[task], edges) / graph.capacity[link]
        name = prediction.tasks.links.name(link)
        events += [
            Event("C", name, pid, 0, ts, args={"percent": round(100 * value, 2)})
            for ts, value in zip(_microseconds(edges).tolist(), [*share.tolist(), 0.0], strict=True)
        ]
    return events


def fullness(
    begin: NDArray[np.float64], end: NDArray[np.float64], amount: NDArray[np.float64], edges: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Amounts a second that flow in each part of time, if each flows evenly over its own span."""
    took = np.maximum(end - begin, np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):  # a flow that takes no time is all there from its moment on
        carried = np.array([(amount * np.clip((edge - begin) / took, 0.0, 1.0)).sum() for edge in edges.tolist()])
    return np.diff(carried) / np.diff(edges)
