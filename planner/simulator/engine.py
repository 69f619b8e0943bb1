"""Simulates a task graph: sorts its flows into classes, runs the kernel compiled or plain, and gives times and loads."""

from dataclasses import dataclass
from types import ModuleType

import numpy as np

from shardroute.planner.compiling import compiled as compile_kernel
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator import kernel
from shardroute.planner.simulator.classes import binding_routes, sort_flows
from shardroute.planner.simulator.tasks import Floats, Ints, TaskGraph
from shardroute.topologies.errors import InputError

# Work (see kernel.advance) that a simulation does plain before it goes on compiled. The plain kernel does 300,000 units a
# second; to import Numba and load the cache took 0.5 s (2 cores, 2026-11), so this is where the two cost the same.
PLAIN_WORK = 150_000
# Two events a task, each with one class at least: a graph of more tasks than this has more work than that.
PLAIN_TASKS = PLAIN_WORK // (2 * (kernel.WORK_AN_EVENT + 1))
# A simulation that may go on with a tolerance (`may_relax`) does so when it is foreseen to take more work than MOST_EXACT, which
# is some three minutes: compiled, the kernel does 6 million units a second, and 1.5 million where classes are millions (2 cores
# of a Xeon, 2026-11-30). Nothing is foreseen before FORESEEN_FROM, some ten seconds: until then large plans only start, which
# says little of the rest (DeepSeek-V3 on 16,384 GPUs was foreseen at 20 million units to take half an hour, and took a minute).
MOST_EXACT = 1_000_000_000
FORESEEN_FROM = 50_000_000
EXACT_WORK_A_SECOND = 6e6
# Work between two calls of `progress`: about 0.03 s compiled, 2 s plain.
_WORK_A_REPORT = 500_000
# The share of making the kernel's columns in the whole: 0.5 us a task beside 3 to 9 us, plans of 0.2 to 1.5 million tasks.
_LOWERED = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class SimulationResult:
    """When each task was ready, started and finished, and what each link carried.

    Per task, in seconds: `ready_s` (all dependencies done and start_s reached), `start_s` (it has its resource, and its delay
    is over: its flow begins), `finish_s`. Per link: `link_amount` (units carried) and `link_busy_s` (seconds that it would
    take at full rate; 0 for a link of capacity 0). `n_events` counts rate solves. `reached_tolerance` is the largest share of
    its transfer time, or of the mean one if that is longer, by which a flow's start or end changed the rates too early or too
    late; 0 when exact. `tolerance` is what it went by at its end, and `foreseen_s` about how long it was foreseen to take when
    it went on with a tolerance (`may_relax`), 0 where it didn't.
    """

    ready_s: Floats
    start_s: Floats
    finish_s: Floats
    makespan_s: float
    link_busy_s: Floats
    link_amount: Floats
    n_events: int
    reached_tolerance: float
    tolerance: float = 0.0
    foreseen_s: float = 0.0


def simulate(
    graph: TaskGraph,
    *,
    tolerance: float = 0.0,
    may_relax: float = 0.0,
    progress: Told | None = None,
    compiled: bool | None = None,
) -> SimulationResult:
    """Times of every task when flows share links by max-min fairness.

    With tolerance 0 each rate is the exact max-min rate at each instant, to rounding. With a tolerance in (0, 1), starts and
    ends that lie close together change the rates at one instant between them, which is off each by at most tolerance * the
    time that this flow's transfer takes, or that transfers take on average; `reached_tolerance` says by how much. Where links
    are many and have few flows each, one may be over or under its capacity by a tenth of the tolerance. A flow keeps its own
    start and end, and moves its whole amount between them, so chains don't drift, and what lies apart is exact. docs/engine.md
    has the errors of finish times. Where a graph is chaotic, as windows of flows with dependencies are, neighbours in time may
    change places, and single flows be off by more.

    With `may_relax` an exact simulation that is foreseen to take minutes (MOST_EXACT) goes on with that tolerance from there.
    What is foreseen is counted in work, not in time, so equal graphs still give equal results everywhere.

    `progress` is told the share that is done, now and then. `compiled` chooses the compiled kernel or the plain
    one; by default large graphs are compiled where Numba is installed. Both give the same bits.

    Raises InputError for a tolerance outside [0, 1) and for compiled=True without Numba.
    """
    for name, share in (("tolerance", tolerance), ("may_relax", may_relax)):
        if not 0.0 <= share < 1.0:
            raise InputError(f"{name}: found {share!r}, expected a share in [0, 1)")
    tolerance, may_relax = float(tolerance), float(may_relax)  # an int would compile the kernel once more
    foreseen_s = 0.0
    lowered, run_through = parts(progress, (_LOWERED, 1.0 - _LOWERED))
    state = arrays = _lower(graph)
    lowered(1.0)
    done = False
    if compiled is None and graph.n_tasks <= PLAIN_TASKS:
        state = _as_lists(state)
        done = kernel.advance(state, tolerance, PLAIN_WORK)
    if not done:
        run = kernel if compiled is False else _compiled_kernel(required=compiled is True)
        state = _as_lists(state) if run is kernel else _as_arrays(state, arrays)
        while not done:
            run_through(int(state.counts[kernel.N_DONE]) / graph.n_tasks)
            done = run.advance(state, tolerance, _WORK_A_REPORT)
            if tolerance < may_relax and (foreseen := _foreseen_work(graph, state)) > MOST_EXACT:
                tolerance, foreseen_s = may_relax, foreseen / EXACT_WORK_A_SECOND
    run_through(1.0)
    assert state.counts[kernel.N_DONE] == graph.n_tasks, "the kernel stopped before its tasks did"
    return _result(graph, state, tolerance, foreseen_s)


def _foreseen_work(graph: TaskGraph, state: kernel.State) -> float:
    """Work until the end, were what is left of the tasks to cost what those done did; 0 while too little is done to say."""
    work, n_done = int(state.counts[kernel.N_WORK]), int(state.counts[kernel.N_DONE])
    return work * graph.n_tasks / max(n_done, 1) if work >= FORESEEN_FROM else 0.0


def _result(graph: TaskGraph, columns: kernel.State, tolerance: float, foreseen_s: float) -> SimulationResult:
    finish_s = np.array(columns.task_times[kernel.FINISH_S])
    owner = np.repeat(np.arange(graph.n_tasks), np.diff(graph.route_ptr))
    amount = np.array(columns.task_times[kernel.AMOUNT])
    link_amount = np.bincount(graph.route_links, amount[owner], graph.n_links).astype(np.float64)
    has_capacity = graph.capacity > 0
    return SimulationResult(
        ready_s=np.array(columns.task_times[kernel.READY_S]),
        start_s=np.array(columns.task_times[kernel.START_S]),
        finish_s=finish_s,
        makespan_s=float(finish_s.max(initial=0.0)),
        link_busy_s=np.divide(link_amount, graph.capacity, out=np.zeros(graph.n_links), where=has_capacity),
        link_amount=link_amount,
        n_events=int(columns.counts[kernel.N_SOLVES]),
        reached_tolerance=float(columns.numbers[kernel.REACHED]),
        tolerance=tolerance,
        foreseen_s=foreseen_s,
    )


def _lower(graph: TaskGraph) -> kernel.State:
    """The kernel's columns, as arrays, at time 0 with the tasks that wait for none made due."""
    n, m = graph.n_tasks, graph.n_links
    class_of, first = sort_flows(graph)
    k = len(first)
    route_ptr, route_link = binding_routes(graph, first)
    e = len(route_link)
    flows = class_of >= 0
    peak = np.full(n, np.inf)
    if e:
        peak[flows] = np.minimum.reduceat(graph.capacity[route_link], route_ptr[:-1])[class_of[flows]]
    next_ptr, next_tasks = _reversed(graph)
    n_missing = np.diff(graph.dep_ptr)
    n_leaves = 1 << max(k - 1, 0).bit_length()
    counts = np.zeros(15, np.int64)
    counts[kernel.N_TASKS], counts[kernel.N_LINKS], counts[kernel.N_LEAVES] = n, m, n_leaves

    task_times = np.zeros((9, n))
    task_times[kernel.DELAY_S] = graph.delay_s
    task_times[kernel.AMOUNT] = graph.amount
    task_times[kernel.ALONE_S] = graph.amount / np.minimum(peak, graph.cap)
    task_times[kernel.READY_S] = graph.start_s
    task_times[kernel.LATE] = graph.late_amount
    task_codes = np.zeros((10, n), np.int64)
    task_codes[kernel.CLASS] = class_of
    task_codes[kernel.N_MISSING] = n_missing
    task_codes[kernel.NEXT_FROM], task_codes[kernel.NEXT_TO] = next_ptr[:-1], next_ptr[1:]
    task_codes[kernel.RESOURCE] = graph.resource
    task_codes[kernel.BEHIND] = graph.behind
    due = np.flatnonzero(n_missing == 0)
    asks = graph.resource[due] >= 0
    due_s = graph.start_s[due] + np.where(asks, 0.0, graph.delay_s[due])
    due_code = due + np.where(asks, 2 * n, 0)
    order = np.lexsort((due_code, due_s))  # a sorted array is a heap
    counts[kernel.N_DUE] = len(due)
    task_times[kernel.DUE_S, : len(due)] = due_s[order]
    task_codes[kernel.DUE_CODE, : len(due)] = due_code[order]
    class_rates = np.zeros((k, kernel.WIDTH))
    class_rates[:, kernel.CAP], class_rates[:, kernel.WEIGHT] = graph.cap[first], graph.weight[first]
    class_codes = np.zeros((k, kernel.WIDTH), np.int32)
    class_codes[:, kernel.ROUTE_FROM], class_codes[:, kernel.ROUTE_TO] = route_ptr[:-1], route_ptr[1:]
    class_codes[:, kernel.QUEUE_FROM] = _starts(np.bincount(class_of[flows], minlength=k))
    class_codes[:, kernel.BOTTLENECK] = -1
    link_rates = np.zeros((7, m))
    link_rates[kernel.CAPACITY], link_rates[kernel.TOP] = graph.capacity, np.inf
    link_codes = np.zeros((8, m), np.int64)
    link_codes[kernel.MEMBERS_FROM] = _starts(np.bincount(route_link, minlength=m))
    slots = np.zeros((4, e), np.uint32)
    slots[kernel.LINK] = route_link
    resources = np.full((3, len(graph.n_slots)), -1)
    resources[kernel.N_FREE] = graph.n_slots
    ends, fill_level, fill_code = np.full(2 * n_leaves, np.inf), np.zeros(m + k), np.zeros(m + k, np.int64)
    return kernel.State(
        task_times, task_codes, class_rates.reshape(-1), class_codes.reshape(-1), np.zeros(k, np.int32),
        np.zeros((3, k + 1), np.uint32), link_rates, link_codes, slots, resources, next_tasks, ends, fill_level, fill_code,
        counts, np.zeros(4),
    )  # fmt: skip


def _starts(counts: Ints) -> Ints:
    """Where each of consecutive runs of these lengths begins."""
    return np.cumsum(counts) - counts


def _reversed(graph: TaskGraph) -> tuple[Ints, Ints]:
    """CSR of the tasks that wait for each task."""
    owner = np.repeat(np.arange(graph.n_tasks), np.diff(graph.dep_ptr))
    order = np.argsort(graph.dep_tasks, kind="stable")
    counts = np.bincount(graph.dep_tasks, minlength=graph.n_tasks)
    return np.concatenate([[0], np.cumsum(counts)]), owner[order]


def _as_lists(state: kernel.State) -> kernel.State:
    """The same columns as lists, which plain Python reads several times faster than arrays."""
    return kernel.State._make(np.asarray(column).tolist() for column in state)


def _as_arrays(state: kernel.State, like: kernel.State) -> kernel.State:
    """The same columns as arrays of the types and shapes of `like`, which an empty list doesn't show."""
    pairs = ((column, np.asarray(as_made)) for column, as_made in zip(state, like, strict=True))
    return kernel.State._make(np.asarray(column, as_made.dtype).reshape(as_made.shape) for column, as_made in pairs)


def _compiled_kernel(required: bool) -> ModuleType:
    """The kernel with its functions compiled; without Numba the plain kernel, or InputError where it is required."""
    found = compile_kernel(kernel)
    if required and found is kernel:
        raise InputError("compiled=True: Numba isn't installed or is off; mend that, or leave `compiled` out")
    return found
