"""Which steps and links bound the end of a prediction: a chain from the last arrival back to the start, with reasons.

Rule: the chain reads what was simulated and knows nothing of costs. Every second of the prediction belongs to one link of the
chain, so the parts add up to the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.groups import Kind
from shardroute.planner.plans import Lane, Op, Plan, lane_of, ranges
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import Prediction

_NO_RESOURCE = "no link"
_LIBRARY = "its library's own rate"
# Seconds below this share of a task's time are rounding, not sharing.
_ROUNDING = 1e-9
# Links of a route from which what all links carry is added up at once: of rings, over hundreds of links, each of thousands of
# users, one by one took 70 s (gather-broadcast on 512 GPUs), at once 3 s.
_LONG_ROUTE = 16
# The share of laying out what links carried in following a path.
_LOADING = 0.5
# Microseconds that laying this out took by link of a route, on one core of a Xeon (2026-11-30).
_LINK_US = 0.1


class Reason(StrEnum):
    """Why a step did not begin earlier: what it follows on the chain."""

    START = "the start"  # nothing: it began at once
    NEEDS = "what it needs"  # a step that delivers to its rank, or that its rank ran in another queue
    QUEUE = "its queue"  # the step before it in its queue
    CREDIT = "a free staging slot"
    BARRIER = "a barrier"
    MEMBERS = "a member still busy"  # of a collective: one of its ranks was in the collective before
    GROUP = "its group"  # of NCCL, or the other end's: what another message in it waits for, or the group before on a rank


@dataclass(frozen=True, slots=True)
class Link:
    """One step of the chain. Seconds from begin_s to end_s: `startup_s` before its bytes move, `alone_s` that they would take
    with their links to themselves, `shared_s` longer because others use these too.

    resource  the link that held it up: the slowest of its route when alone, else the one that was fullest meanwhile
    """

    step: int
    reason: Reason
    begin_s: float
    end_s: float
    startup_s: float
    alone_s: float
    shared_s: float
    resource: str


class Part(msgspec.Struct, frozen=True):
    """What links of the chain that are alike come to together: seconds, and how many links."""

    what: str
    seconds: float
    n_steps: int


def critical_path(plan: Plan, prediction: Prediction, progress: Told | None = None) -> list[Link]:
    """The chain that ends with the last arrival, first step first; empty for a plan without steps. Ties go to the smallest task.
    progress is told the share that is done.
    """
    graph, result = prediction.tasks.graph, prediction.result
    if not graph.n_tasks:
        return []
    step_of, kind = prediction.tasks.step, prediction.tasks.kind
    loading, following = parts(progress, (_LOADING, 1.0 - _LOADING))
    loads = _Loads(prediction)
    loading(1.0)
    chain: list[Link] = []
    task = int(np.argmax(np.where(kind == Kind.HELD, -1.0, result.finish_s)))
    end_s = float(result.finish_s[task])
    # Packing is told with the message that began behind it, unpacking with the one that it followed.
    task = _ended(prediction, task)
    while True:
        arrived_s = float(result.finish_s[task])
        previous, begin_s = _begun(prediction, task)
        ready_s = float(result.ready_s[task])
        grouped = bool(kind[task] == Kind.MEMBER)
        reason = Reason.START if previous < 0 else _reason(plan, int(step_of[previous]), int(step_of[task]), grouped)
        startup_s = min(float(graph.delay_s[task]), arrived_s - ready_s)
        resource, alone_s = loads.slowest(task)
        alone_s = min(alone_s, arrived_s - ready_s - startup_s)
        shared_s = arrived_s - ready_s - startup_s - alone_s
        startup_s += (ready_s - begin_s) + (end_s - arrived_s)
        if shared_s > _ROUNDING * (end_s - begin_s):
            resource = loads.fullest(task)
        else:
            alone_s, shared_s = alone_s + shared_s, 0.0
        chain.append(Link(int(step_of[task]), reason, begin_s, end_s, startup_s, alone_s, shared_s, resource))
        if previous < 0:
            following(1.0)
            return chain[::-1]
        task, end_s = previous, begin_s
        following(1.0 - min(end_s / result.makespan_s, 1.0) if result.makespan_s else 0.0)


def following_us(prediction: Prediction) -> float:
    """About the microseconds that `critical_path` takes of the prediction, for shares: as long again as what links carried."""
    return _LINK_US * len(prediction.tasks.graph.route_links) / _LOADING


def _last_before(prediction: Prediction, task: int) -> int:
    """The task that released this one: the last to finish of those that it waits for; -1 for one that waits for none."""
    graph = prediction.tasks.graph
    before = graph.dep_tasks[graph.dep_ptr[task] : graph.dep_ptr[task + 1]]
    return int(before[np.argmax(prediction.result.finish_s[before])]) if len(before) else -1


def _ended(prediction: Prediction, task: int) -> int:
    """The step's task with which this one's chain ends: itself, or what the end of a group, or unpacking behind it, followed."""
    while prediction.tasks.kind[task] in (Kind.END, Kind.UNPACK):
        task = _last_before(prediction, task)
    return task


def _begun(prediction: Prediction, task: int) -> tuple[int, float]:
    """The step's task that this one followed, -1 for none, and when this one's part of the chain began: as its group packed."""
    begin_s = float(prediction.result.ready_s[task])
    previous = _last_before(prediction, task)
    while previous >= 0 and prediction.tasks.kind[previous] == Kind.BEGIN:
        begin_s = float(prediction.result.ready_s[previous])
        previous = _last_before(prediction, previous)
    return (previous if previous < 0 else _ended(prediction, previous)), begin_s


def summarise(plan: Plan, chain: Sequence[Link]) -> list[Part]:
    """The chain's seconds by what they were spent on, most first (ties by name): they add up to the prediction."""
    seconds: dict[str, float] = {}
    n_steps: dict[str, int] = {}

    def add(what: str, s: float) -> None:
        if s > 0:
            seconds[what] = seconds.get(what, 0.0) + s
            n_steps[what] = n_steps.get(what, 0) + 1

    for link in chain:
        if plan.steps.op[link.step] == Op.COMPUTE:  # seconds of cores or SMs, whose links carry no bytes
            add("computing", link.startup_s + link.alone_s)
        else:
            kind = "credits and barriers" if plan.step_pieces[link.step] == 0 else "starting copies"
            add(f"{kind}, latency", link.startup_s)
            add(f"bytes {'at' if link.resource == _LIBRARY else 'through'} {link.resource}", link.alone_s)
        add(f"sharing {link.resource} with others", link.shared_s)
    return [Part(what, seconds[what], n_steps[what]) for what in sorted(seconds, key=lambda w: (-seconds[w], w))]


def reasons(chain: Sequence[Link]) -> list[Part]:
    """What the chain's steps waited for before they began, most frequent first (ties by name); seconds are those of the steps."""
    found = {reason: [link for link in chain if link.reason is reason] for reason in Reason}
    parts = [Part(str(r), sum(link.end_s - link.begin_s for link in links), len(links)) for r, links in found.items() if links]
    return sorted(parts, key=lambda part: (-part.n_steps, part.what))


def _reason(plan: Plan, before: int, step: int, grouped: bool) -> Reason:
    steps = plan.steps
    if before == step:
        return Reason.NEEDS
    if steps.op[before] == Op.BARRIER:
        return Reason.BARRIER
    if lane_of(steps.lane[before : before + 1])[0] == Lane.CREDIT:
        return Reason.CREDIT
    if before in steps.after[steps.after_ptr[step] : steps.after_ptr[step + 1]]:
        return Reason.NEEDS
    if steps.op[step] != Op.COPY:
        return Reason.MEMBERS
    queue = ((steps.op[i], steps.src[i], steps.lane[i]) for i in (before, step))
    return Reason.GROUP if grouped and next(queue) != next(queue) else Reason.QUEUE


class _Loads:
    """What each link carried while a task ran. Rates of other tasks are taken as even over their own time."""

    def __init__(self, prediction: Prediction) -> None:
        graph = prediction.tasks.graph
        self._prediction = prediction
        self._owner = np.repeat(np.arange(graph.n_tasks), np.diff(graph.route_ptr))
        order = np.argsort(graph.route_links, kind="stable")
        self._by_link = self._owner[order]
        self._ptr = np.searchsorted(graph.route_links[order], np.arange(graph.n_links + 1))

    def slowest(self, task: int) -> tuple[str, float]:
        """The link of the task's route that lets the fewest bytes through, and the seconds that the task takes with it alone."""
        graph = self._prediction.tasks.graph
        route, amount, cap = self._route(task), float(graph.amount[task]), float(graph.cap[task])
        if amount == 0:
            return _NO_RESOURCE, 0.0
        capacity = graph.capacity[route]
        if not len(route) or cap < capacity.min():
            return _LIBRARY, amount / cap
        link = int(route[np.argmin(capacity)])
        return self._name(link), amount / float(capacity.min())

    def fullest(self, task: int) -> str:
        """The link of the task's route that carried most, of what it can, while the task's bytes moved."""
        graph, result = self._prediction.tasks.graph, self._prediction.result
        begin_s, end_s = float(result.start_s[task]), float(result.finish_s[task])
        route = np.unique(self._route(task))
        if not len(route):
            return _NO_RESOURCE
        if len(route) > _LONG_ROUTE:
            return self._name(int(route[np.argmax(self._shares(begin_s, end_s)[route])]))
        shares = []
        for link in route.tolist():
            users: NDArray[np.int64] = self._by_link[self._ptr[link] : self._ptr[link + 1]]
            shares.append(float(self._carried(users, begin_s, end_s).sum()) / float(graph.capacity[link]))
        return self._name(int(route[np.argmax(shares)]))

    def _shares(self, begin_s: float, end_s: float) -> NDArray[np.float64]:
        """What every link carries in this time, over what it can in a second; for many links at once."""
        graph, result = self._prediction.tasks.graph, self._prediction.result
        users = np.flatnonzero((result.start_s < end_s) & (result.finish_s > begin_s))
        at, user = ranges(graph.route_ptr, users)
        carried = np.bincount(graph.route_links[at], self._carried(users, begin_s, end_s)[user], graph.n_links)
        return np.asarray(carried / np.maximum(graph.capacity, np.finfo(np.float64).tiny))

    def _carried(self, users: NDArray[np.int64], begin_s: float, end_s: float) -> NDArray[np.float64]:
        """What each of these tasks moves in this time."""
        graph, result = self._prediction.tasks.graph, self._prediction.result
        start, finish = result.start_s[users], result.finish_s[users]
        overlap = np.minimum(finish, end_s) - np.maximum(start, begin_s)
        took = np.maximum(finish - start, np.finfo(np.float64).tiny)
        return np.asarray(graph.amount[users] * np.maximum(overlap, 0.0) / took)

    def _route(self, task: int) -> NDArray[np.int32]:
        graph = self._prediction.tasks.graph
        return graph.route_links[graph.route_ptr[task] : graph.route_ptr[task + 1]]

    def _name(self, link: int) -> str:
        return self._prediction.tasks.links.name(link)
