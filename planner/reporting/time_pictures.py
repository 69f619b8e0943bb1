"""The report's pictures of time: what each GPU and each link does when, and what the end waits for."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.critical_paths import Link, reasons
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Lane, Op, Plan, lane_of, ranges
from shardroute.planner.reporting.charts import Value, bars, gantt, strips
from shardroute.planner.reporting.sections import Cell, Section, count, seconds, share, size, table
from shardroute.planner.simulator.refit import Prediction
from shardroute.planner.timelines import Timeline
from shardroute.planner.traces import fullness
from shardroute.topologies.machines import MachineKind

# Rows that a picture of time has: a screenful.
_MOST_RANKS: Final = 24
_MOST_LINKS: Final = 24
# A page shows no gap narrower than this share of its time; spans that lie closer are drawn as one.
_GAP: Final = 1 / 400
_N_BINS: Final = 100
_ROUNDING: Final = 1e-9  # shares of the time below it are left out
_RECEIVES: Final = "receives"
_CLASSES: Final = {
    "NIC": "wire (NICs)", "uplink": "wire (NICs)", "downlink": "wire (NICs)", "NVLink": "NVLink",
    "memory": "memory (packing, local copies)", "its": "at its library's own rate", "SMs": "SMs",
}  # fmt: skip


def gpu_section(plan: Plan, timeline: Timeline) -> Section:
    """When each GPU sends, relays, receives and computes: of the timeline, predicted or measured."""
    ranks = _busiest_ranks(plan, timeline)
    device = "rank" if plan.topology.machine.kind is MachineKind.CPU else "GPU"
    total_s = timeline.total_s
    spans: list[dict[str, Value]] = []
    rows = []
    step, rank, word = _doings(plan)
    for r in ranks:
        mine = rank == r
        for w in np.unique(word[mine]).tolist():
            chosen = step[mine & (word == w)]
            begin, end = united(timeline.start_s[chosen], timeline.end_s[chosen], total_s * _GAP)
            what = _RECEIVES if w == len(Lane) else Lane(w).name.lower().replace("_", " ")
            spans += [
                {"name": f"{device} {r}", "what": what, "begin": a, "end": b}
                for a, b in zip(begin.round(9).tolist(), end.round(9).tolist(), strict=True)
            ]
            exact_begin, exact_end = united(timeline.start_s[chosen], timeline.end_s[chosen], 0.0)
            busy_s = float((exact_end - exact_begin).sum())
            rows.append([
                Cell(f"{device} {r}, {what}"), count(len(chosen)), size(int(plan.step_bytes[chosen].sum())),
                seconds(float(begin[0])), seconds(float(end[-1])), seconds(busy_s), share(busy_s / total_s if total_s else None),
            ])  # fmt: skip
    n_used = len(np.unique(rank))
    words = [f"{timeline.kind.capitalize()}, by {timeline.source}. Spans with next to no gap between them are drawn as one."]
    if len(ranks) < n_used:
        words.append(f"{len(ranks)} of {n_used:,} are shown: that of the last arrival, then those with most bytes.")
    names = [f"{device} {r}" for r in ranks]
    chart = gantt(spans, names, "what") if spans and total_s else None
    about = f"for each {device} a bar from begin to end of what it does: sends, relays, receives, computes"
    columns = ("what", "steps", "bytes", "from", "to", "busy", "of the time")
    name = "gpus" if timeline.kind == "predicted" else "gpus-measured"
    title = f"Time line by {device}, {timeline.kind}"
    return Section(name, title, tuple(words), chart, about, table(columns, rows))


def link_section(plan: Plan, prediction: Prediction) -> Section:
    """How full the busiest links are over time. A flow's rate is taken as even over its own time."""
    graph, result, total_s = prediction.tasks.graph, prediction.result, prediction.predicted_s
    used = np.flatnonzero(result.link_amount > 0)
    links = used[np.argsort(-result.link_busy_s[used], kind="stable")][:_MOST_LINKS]
    cells: list[dict[str, Value]] = []
    rows, names = [], []
    edges = np.linspace(0.0, total_s, _N_BINS + 1)
    owner = np.repeat(np.arange(graph.n_tasks), np.diff(graph.route_ptr))
    for link in links.tolist() if total_s else []:
        name = prediction.tasks.links.name(link)
        names.append(name)
        task = owner[graph.route_links == link]
        full = fullness(result.start_s[task], result.finish_s[task], graph.amount[task], edges) / graph.capacity[link]
        cells += [
            {"name": name, "begin": round(a, 9), "end": round(b, 9), "share": round(min(v, 1.0), 3)}
            for a, b, v in zip(edges[:-1].tolist(), edges[1:].tolist(), full.tolist(), strict=True)
            if v > 0.0005
        ]
        rows.append([
            Cell(name), count(len(task)), seconds(float(result.link_busy_s[link])), share(float(full.mean())),
            share(float(full.max())), seconds(float(result.start_s[task].min())), seconds(float(result.finish_s[task].max())),
        ])  # fmt: skip
    words = [f"The busiest links, {len(links)} of {len(used):,} that carry bytes, in {_N_BINS} parts of the predicted time."]
    columns = ("link", "flows", "busy", "full on average", "at most", "from", "to")
    about = "for each of the busiest links how full it is over time"
    chart = strips(cells, names, "full") if cells else None
    return Section("links", "Time line by link", tuple(words), chart, about, table(columns, rows))


def path_section(plan: Plan, prediction: Prediction, chain: Sequence[Link]) -> Section:
    """Where the time goes: the seconds of the critical path by kind; they add up to the prediction."""
    spent: dict[str, float] = {}
    for link in chain:
        for what, s in _kinds(plan, link):
            spent[what] = spent.get(what, 0.0) + s
    total_s = prediction.predicted_s
    ordered = sorted(((what, s) for what, s in spent.items() if s > _ROUNDING * total_s), key=lambda pair: (-pair[1], pair[0]))
    rows = [[Cell(what), seconds(s), share(s / total_s)] for what, s in ordered]
    values: list[dict[str, Value]] = [{"name": what, "s": s, "text": f"{s / total_s:.1%}"} for what, s in ordered]
    held = ", ".join(f"{part.n_steps:,} by {part.what}" for part in reasons(chain))
    words = [f"Steps one after the other that the last arrival waits for: {len(chain):,}. Their seconds add up to all the time."]
    if held:
        words.append(f"What its steps followed: {held}.")
    chart = bars(values) if values else None
    about = "seconds of the critical path, by what they were spent on"
    return Section("time", "Where the time goes", tuple(words), chart, about, table(("what", "seconds", "of the time"), rows))


def _kinds(plan: Plan, link: Link) -> list[tuple[str, float]]:
    kind = _CLASSES.get(link.resource.split(" ")[0], link.resource)
    if plan.steps.op[link.step] == Op.COMPUTE:
        return [("computing", link.startup_s + link.alone_s), (f"computing, {kind} shared with others", link.shared_s)]
    start = "signals: credits and barriers" if plan.step_pieces[link.step] == 0 else "launch and latency"
    return [(start, link.startup_s), (f"{kind}, alone", link.alone_s), (f"{kind}, shared with others", link.shared_s)]


def _doings(plan: Plan) -> tuple[Ints, Ints, Ints]:
    """One row a step and rank that takes part: step, rank, and the number of its lane, or len(Lane) where it receives."""
    steps, lane = plan.steps, lane_of(plan.steps.lane).astype(np.int64)
    copies, away = np.flatnonzero(steps.op == Op.COPY), np.flatnonzero((steps.op == Op.COPY) & (steps.src != steps.dst))
    groups = np.flatnonzero(steps.op != Op.COPY)
    member, owner = ranges(plan.group_ptr, steps.group[groups])
    step = np.concatenate([copies, away, groups[owner]])
    rank = np.concatenate([steps.src[copies], steps.dst[away], plan.group_ranks[member]]).astype(np.int64)
    word = np.concatenate([lane[copies], np.full(len(away), len(Lane)), lane[groups][owner]])
    return step, rank, word


def _busiest_ranks(plan: Plan, timeline: Timeline) -> list[int]:
    """The rank of the last arrival, then those with most bytes, ascending."""
    if not len(plan.steps):
        return []
    step, rank, _ = _doings(plan)
    weight = np.bincount(rank, weights=plan.step_bytes[step], minlength=plan.problem.n_ranks).astype(np.float64)
    weight[rank[step == int(np.argmax(timeline.end_s))]] = np.inf
    order = np.lexsort((np.arange(len(weight)), -weight))[:_MOST_RANKS]
    taking_part = np.bincount(rank, minlength=len(weight)) > 0
    return sorted(order[taking_part[order]].tolist())


def united(
    begin: NDArray[np.float64], end: NDArray[np.float64], gap: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The union of spans as disjoint spans, ascending; those no further apart than `gap` are one."""
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], np.maximum.accumulate(end[order])
    new = np.concatenate([[True], begin[1:] > end[:-1] + gap])
    last = np.concatenate([np.flatnonzero(new)[1:] - 1, [len(begin) - 1]])
    return begin[new], end[last]
