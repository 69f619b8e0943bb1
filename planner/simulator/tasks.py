"""Task graphs: the columns that the engine simulates, checked once when made, and the builders of their dependencies.

What a graph can say: tasks with dependencies and start times; ordered lanes (`in_order`: each task after the one before it
in its lane); links, shared by max-min fairness with weights, rate caps and latencies; exclusive resources of one or more
slots, given out first come, first served.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardroute.topologies.errors import InputError, PlanError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SmallInts = NDArray[np.int32]
Csr = tuple[Ints, SmallInts]

# Filling subtracts what heavy flows take from a link before the light ones share the rest: each factor of 10 between weights
# costs a digit of the light flows' rates, of the 16 that there are.
_WEIGHT_RANGE = 1e6

_DTYPES: dict[str, type[np.generic]] = {
    "route_ptr": np.int64,
    "route_links": np.int32,
    "dep_ptr": np.int64,
    "dep_tasks": np.int32,
    "resource": np.int64,
    "behind": np.int64,
    "n_slots": np.int64,
}


@dataclass(frozen=True, slots=True, eq=False)
class TaskGraph:
    """n tasks over m links; row i of each column belongs to task i. Made valid or not at all.

    A task is ready when `start_s` is reached and every task of `dep_tasks[dep_ptr[i]:dep_ptr[i + 1]]` has finished. It
    then waits `delay_s` without using a link, and then moves `amount` units over all links of
    `route_links[route_ptr[i]:route_ptr[i + 1]]` at one rate: its max-min fair share, where rate / `weight` is what is
    equalised, and never over `cap`. Weights span a factor of 10^6 at most. A link that a route names twice is used twice.
    Dependencies name smaller indices only, so that no cycle can be written. Columns are copied to contiguous, read-only arrays.

    A task without a route moves its amount at `cap`; one with amount 0 finishes when its delay is over.

    A task with a `resource` (-1: none; left out: none has one) holds one of that resource's `n_slots` from before its delay to
    its finish, alone. Slots go to tasks in the order in which these became ready; of those ready at once, to the smaller index.

    A task moves `late_amount` more (left out: 0) if it became ready later than when task `behind` was done, one of those that it
    waits for (-1: if it waits for any): what it costs to go on after a wait, where `behind` is the task before it in its lane.

    Raises InputError for columns of wrong shape, range or order (naming column and row), PlanError for a task that could
    never finish: an amount to move over a link of capacity 0, or at an unlimited rate without a route.
    """

    start_s: Floats
    delay_s: Floats
    amount: Floats
    cap: Floats
    weight: Floats
    route_ptr: Ints
    route_links: SmallInts
    dep_ptr: Ints
    dep_tasks: SmallInts
    capacity: Floats
    resource: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    n_slots: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    late_amount: Floats = field(default_factory=lambda: np.zeros(0))
    behind: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        for each in fields(self):
            column = _column(each.name, getattr(self, each.name))
            object.__setattr__(self, each.name, column)
        n = len(self.start_s)
        for name, value in (("resource", -1), ("late_amount", 0.0), ("behind", -1)):
            if not len(getattr(self, name)):
                object.__setattr__(self, name, _column(name, np.full(n, value)))
        for name in ("delay_s", "amount", "cap", "weight", "resource", "late_amount", "behind"):
            _check_length(name, len(getattr(self, name)), n, "one row a task, as start_s has")
        for name in ("start_s", "delay_s", "amount", "late_amount", "capacity"):
            _check_rows(name, getattr(self, name), lambda x: (x >= 0) & np.isfinite(x), "finite and >= 0")
        _check_rows("cap", self.cap, lambda x: x > 0, "> 0 (inf for none)")
        _check_rows("weight", self.weight, lambda x: (x > 0) & np.isfinite(x), "finite and > 0")
        if n and self.weight.max() > _WEIGHT_RANGE * self.weight.min():
            raise InputError(
                f"weight: found {self.weight.min():g} to {self.weight.max():g}, expected at most a factor {_WEIGHT_RANGE:g}"
            )
        _check_csr("route", self.route_ptr, self.route_links, n)
        _check_csr("dep", self.dep_ptr, self.dep_tasks, n)
        n_links = len(self.capacity)
        _check_rows("route_links", self.route_links, lambda x: (x >= 0) & (x < n_links), f"a link in 0..{n_links - 1}")
        owner = np.repeat(np.arange(n), np.diff(self.dep_ptr))
        n_resources = len(self.n_slots)
        _check_rows("resource", self.resource, lambda x: (x >= -1) & (x < n_resources), f"-1 (none) or one of {n_resources}")
        _check_rows("n_slots", self.n_slots, lambda x: x > 0, "> 0")
        _check_rows("dep_tasks", self.dep_tasks, lambda x: (x >= 0) & (x < owner), "a task before its own index")
        _check_rows("behind", self.behind, lambda x: (x >= -1) & (x < np.arange(n)), "-1 (none) or a task before its own index")
        _check_rows("late_amount", self.late_amount, lambda x: (x == 0) | (self.amount > 0), "0 where amount is 0")
        self._check_can_finish()

    def _check_can_finish(self) -> None:
        moves = self.amount > 0
        unlimited = moves & (np.diff(self.route_ptr) == 0) & np.isinf(self.cap)
        if unlimited.any():
            task = int(unlimited.argmax())
            raise PlanError(
                f"task {task} can never be timed: it moves {self.amount[task]:g} without a route or a cap; "
                "give it a route, a finite cap, or amount 0"
            )
        dead = self.capacity[self.route_links] == 0
        owner = np.repeat(np.arange(self.n_tasks), np.diff(self.route_ptr))
        stuck = dead & moves[owner]
        if stuck.any():
            at = int(stuck.argmax())
            raise PlanError(
                f"task {owner[at]} can never finish: it moves {self.amount[owner[at]]:g} over link "
                f"{self.route_links[at]}, whose capacity is 0"
            )

    @property
    def n_tasks(self) -> int:
        """Number of tasks."""
        return len(self.start_s)

    @property
    def n_links(self) -> int:
        """Number of links."""
        return len(self.capacity)


def in_order(lane: ArrayLike) -> Csr:
    """Dependencies (dep_ptr, dep_tasks) that make each task wait for the previous task of its lane; lane -1 is no lane.

    `lane` holds one integer a task, in index order: lanes [0, 1, 0, -1, 1] give task 2 the dependency 0 and task 4 the
    dependency 1.
    """
    lanes = np.asarray(lane)
    if lanes.ndim != 1 or (lanes.size and not np.issubdtype(lanes.dtype, np.integer)):
        raise InputError(f"lane: found {lanes.dtype} of shape {lanes.shape}, expected one integer a task")
    if lanes.size and lanes.min() < -1:
        raise InputError(f"lane[{int(lanes.argmin())}]: found {lanes.min()}, expected -1 (no lane) or a lane number >= 0")
    order = np.argsort(lanes, kind="stable")
    follows = (lanes[order[1:]] == lanes[order[:-1]]) & (lanes[order[1:]] >= 0)
    before = np.full(len(lanes), -1, np.int32)
    before[order[1:][follows]] = order[:-1][follows]
    has = before >= 0
    return _pointers(has.astype(np.int64)), before[has]


def merge_dependencies(*sets: Csr) -> Csr:
    """One set of dependencies that holds those of every set given, sorted by task, each pair once.

    Every set is (dep_ptr, dep_tasks) over the same tasks.
    """
    if not sets:
        raise InputError("merge_dependencies: found no sets, expected at least one (dep_ptr, dep_tasks)")
    n = len(sets[0][0]) - 1
    pairs = []
    for ptr, tasks in sets:
        _check_length("dep_ptr", len(ptr), n + 1, "every set over the same tasks")
        owner = np.repeat(np.arange(n, dtype=np.int64), np.diff(ptr))
        pairs.append(owner * n + tasks)
    # Sorted, not np.unique, which hashes and takes several times as long for millions of pairs (NumPy 2.3).
    merged = np.sort(np.concatenate(pairs))
    merged = merged[np.diff(merged, prepend=-1) != 0]
    owner, tasks = np.divmod(merged, max(n, 1))
    return _pointers(np.bincount(owner, minlength=n)), tasks.astype(np.int32)


def _pointers(counts: NDArray[np.integer]) -> Ints:
    """CSR row pointers of rows with these lengths."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def _column(name: str, values: ArrayLike) -> NDArray[np.generic]:
    found = np.asarray(values)
    dtype = _DTYPES.get(name, np.float64)
    if found.ndim != 1:
        raise InputError(f"{name}: found shape {found.shape}, expected one dim")
    if np.issubdtype(dtype, np.integer) and found.size and not np.issubdtype(found.dtype, np.integer):
        raise InputError(f"{name}: found {found.dtype}, expected integers")
    if not (np.issubdtype(found.dtype, np.number) or found.dtype == np.bool_):
        raise InputError(f"{name}: found {found.dtype}, expected numbers")
    if dtype is np.int32 and found.size and max(found.max(), -found.min()) > np.iinfo(np.int32).max:
        raise InputError(f"{name}: found {found.min()} to {found.max()}, expected numbers of 32 bits")
    column = np.array(found, dtype=dtype)
    column.setflags(write=False)
    return column


def _check_length(name: str, found: int, expected: int, why: str) -> None:
    if found != expected:
        raise InputError(f"{name}: found {found} rows, expected {expected} ({why})")


def _check_rows(
    name: str, column: NDArray[np.generic], is_good: Callable[[NDArray[Any]], NDArray[np.bool_]], expected: str
) -> None:
    bad = ~is_good(column)
    if bad.any():
        row = int(bad.argmax())
        raise InputError(f"{name}[{row}]: found {column[row]}, expected {expected}")


def _check_csr(name: str, ptr: Ints, values: SmallInts, n: int) -> None:
    _check_length(f"{name}_ptr", len(ptr), n + 1, "one row a task and the end")
    if ptr[0] != 0 or ptr[-1] != len(values) or (np.diff(ptr) < 0).any():
        raise InputError(f"{name}_ptr: found {ptr[0]}..{ptr[-1]}, expected to rise from 0 to {len(values)}, never falling")
