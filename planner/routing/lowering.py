"""From routes to steps: bundles along trees, the order of steps, staging slots and the credits that free them.

Pieces that share a tree travel together in bundles of about `message_bytes`; each bundle walks its tree hop by hop, so that one
is passed on while the next arrives. A rank that stages a bundle for others has a few slots, used in turn: once its readers are
done, it tells the rank that writes to the slot next by a *credit*, a copy of an empty bundle.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.channels import Path
from shardroute.planner.compiling import compiled
from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.plans import SOURCE, TARGET, Backend, Boxes, Bundles, Lane, Op, Plan, Steps, places, queued, ranges
from shardroute.planner.problems import Problem
from shardroute.planner.routing import schedule_kernel
from shardroute.planner.routing.costs import Costs
from shardroute.planner.routing.links import busiest_of, link_rates
from shardroute.planner.routing.options import N_QUEUES, Options
from shardroute.planner.routing.routes import Routes
from shardroute.planner.routing.windows import limit_in_flight
from shardroute.topologies.topologies import Topology

# Pieces start at multiples of this in a slot, so that they can be copied by the widest loads and stores of a GPU (128 bits).
SLOT_ALIGNMENT = 16
# Slots are numbered by int16, and more of them than bundles under way at once don't help.
MOST_SLOTS = 64
# Rows from which ordering is compiled: plain, it does some 20,000 a second; Numba takes 0.5 s to import and load its cache.
COMPILE_ROWS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Arranged:
    """Routes in bundles and in order, before staging and credits: enough to tell how long it will take, at a fifth of the cost.

    ends_s     when the last step would end if every port carried one at a time, see `schedule_kernel`
    near, far  how the steps that stay in a domain are carried, and those that leave it
    """

    routes: Routes
    bundling: "_Bundling"
    walk: "_Walk"
    ends_s: float
    near: "_Carrier"
    far: "_Carrier"

    @property
    def n_rows(self) -> int:
        """Steps without credits."""
        return len(self.walk.bundle)

    def busiest_s(self, topology: Topology, n_ranks: int) -> float:
        """Seconds of the busiest link at nominal rates."""
        walk = self.walk
        return busiest_of(walk.src, walk.dst, walk.lane, self.bundling.n_bytes[walk.bundle], topology, n_ranks)

    def sent(self, n_ranks: int) -> NDArray[np.float64]:
        """Bytes that each rank sends over its NICs."""
        walk = self.walk
        far = walk.lane < Lane.HAND_OVER
        n_bytes = self.bundling.n_bytes[walk.bundle[far]]
        return np.bincount(walk.src[far], weights=n_bytes, minlength=n_ranks).astype(np.float64)


def arrange(
    routes: Routes, topology: Topology, message_bytes: int | Ints, options: Options, costs: Costs | None,
    carried_by: tuple[Backend, Backend] | None = None,
) -> Arranged:  # fmt: skip
    """Bundles of about `message_bytes` (for all trees, or of each) along each tree, in order; at most that if the options ask so.

    Bundles on trees that stage are small enough for `options.staging_bytes`, if their largest piece is. Without costs a message
    takes its bytes at nominal rates and nothing else. `carried_by` are the libraries on NVLink and on NICs; by default the
    cheapest that the options allow.
    """
    bundling = _bundle(routes, message_bytes, options.staging_bytes, strict=options.message_bytes is not None)
    walk, end_s = _walk(routes, bundling, topology)
    n_bytes = bundling.n_bytes[walk.bundle]
    near, far = (
        _carrier(path, rows, walk, n_bytes, end_s, topology, options if by is None else replace(options, backends=(by,)), costs)
        for (path, rows), by in zip(_by_path(walk.lane), carried_by or (None, None), strict=True)
    )
    return Arranged(routes, bundling, walk, max(near.ends_s, far.ends_s), near, far)


def finish(
    strategy: str,
    problem: Problem,
    boxes: tuple[Boxes, ...],
    topology: Topology,
    backend: Backend,
    arranged: Arranged,
    options: Options,
) -> Plan:
    """The plan of arranged routes."""
    slots = _assign_slots(arranged.routes, arranged.bundling, arranged.walk, options.staging_bytes)
    steps, bundles = _steps(arranged, slots, backend), slots.bundles
    if options.max_ops_in_flight is not None:
        steps, bundles = limit_in_flight(steps, bundles, options.max_ops_in_flight)
    return Plan(
        strategy=strategy,
        topology=topology,
        problem=problem,
        boxes=boxes,
        bundles=bundles,
        steps=steps,
        group_ptr=np.zeros(1, np.int64),
        group_ranks=np.zeros(0, np.int32),
        slot_bytes=np.full(slots.n_slots, slots.slot_bytes, dtype=np.int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Bundling:
    """Bundles, and of each its tree, its bytes, whether the tree stages, and its bytes in a slot."""

    bundles: Bundles
    tree: Ints
    n_bytes: Ints
    staged: NDArray[np.bool_]
    slot_bytes: Ints


def _bundle(routes: Routes, message_bytes: int | Ints, staging_bytes: int, *, strict: bool) -> _Bundling:
    """Entries cut into bundles of at most `message_bytes` along each tree; where it stages, a quarter of the staging memory."""
    stages = np.zeros(len(routes.tree_ptr) - 1, dtype=bool)
    stages[routes.hop_trees[routes.staged]] = True
    order = np.lexsort((routes.piece, routes.tensor, routes.tree))
    tree, n_bytes = routes.tree[order], routes.n_bytes[order]
    room = -(-n_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    largest = int(room[stages[tree]].max(initial=1))
    most = np.broadcast_to(message_bytes, len(stages))[tree]
    limit = np.where(stages[tree], np.maximum(largest, np.minimum(most, staging_bytes // 4)), most)
    taken = np.where(stages[tree], room, n_bytes)
    first_of_tree = np.flatnonzero(np.diff(tree, prepend=-1))
    n_entries = np.diff(np.append(first_of_tree, len(order)))
    ends = np.cumsum(taken)
    within = ends - np.repeat((ends - taken)[first_of_tree], n_entries)
    number = np.maximum(within - 1, 0) // limit
    if not strict:
        # Even parts, as many as come nearest to the limit: a remainder would be a message of its own.
        total = np.repeat(np.add.reduceat(taken, first_of_tree) if len(order) else taken, n_entries)
        parts = np.maximum(1, (total + limit // 2) // limit)
        even = np.minimum((within - taken // 2) * parts // np.maximum(total, 1), parts - 1)
        number = np.where(stages[tree], number, even)
    starts = np.flatnonzero((np.diff(tree, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0))
    bundle_tree = tree[starts]
    ptr = np.append(starts, len(order))
    before = ends - taken
    offset = np.where(stages[tree], before - np.repeat(before[starts] if len(starts) else before, np.diff(ptr)), -1)
    bundles = Bundles(ptr, routes.tensor[order].astype(np.int32), routes.piece[order].astype(np.int32), offset)
    sums = [np.concatenate([[0], np.cumsum(column)]) for column in (n_bytes, taken)]
    of_bundle, in_slot = (total[ptr[1:]] - total[ptr[:-1]] for total in sums)
    return _Bundling(bundles, bundle_tree, of_bundle, stages[bundle_tree], in_slot)


@dataclass(frozen=True, slots=True, eq=False)
class _Walk:
    """A row for each hop of each bundle. `parent`: the row of the hop before it (-1: none); `expected`: place in the order."""

    bundle: Ints
    src: Ranks
    dst: Ranks
    lane: NDArray[np.uint8]
    staged: NDArray[np.bool_]
    parent: Ints
    expected: Ints


def _walk(routes: Routes, bundling: _Bundling, topology: Topology) -> tuple[_Walk, NDArray[np.float64]]:
    """The rows in order, and when each would end."""
    depth = routes.depths()
    hop, bundle = ranges(routes.tree_ptr, bundling.tree)
    first = (np.cumsum(np.diff(routes.tree_ptr)[bundling.tree]) - np.diff(routes.tree_ptr)[bundling.tree])[bundle]
    src, dst, lane, parent = routes.src[hop], routes.dst[hop], routes.lane[hop], routes.parent[hop]
    parent = np.where(parent >= 0, first + parent, -1)
    tall = routes.heights(depth)[hop].astype(np.float64)
    seconds = _port_seconds(src, dst, lane, bundling.n_bytes[bundle], topology)
    start_s = _start_times(src, dst, lane, parent, tall, seconds, topology.n_gpus)
    order = np.lexsort((bundle, dst, src, depth[hop], start_s))
    expected = np.empty(len(order), dtype=np.int64)
    expected[order] = np.arange(len(order))
    return _Walk(bundle, src, dst, lane, routes.staged[hop], parent, expected), start_s + seconds


def _port_seconds(src: Ranks, dst: Ranks, lane: NDArray[np.uint8], n_bytes: Ints, topology: Topology) -> NDArray[np.float64]:
    """How long the bytes of each row keep its ports at nominal rates."""
    near = lane == Lane.HAND_OVER
    nic, nvlink = link_rates(topology)[[0, 2]]
    rate = np.where(near, np.minimum(nvlink[src], nvlink[dst]), np.minimum(nic[src], nic[dst]))
    return np.where(lane == Lane.LOCAL, 0.0, n_bytes / np.maximum(rate, 1.0))


def _by_path(lane: NDArray[np.uint8]) -> tuple[tuple[Path, Ints], tuple[Path, Ints]]:
    """The rows that go by NVLink, and those that go by NICs."""
    return (Path.NVLINK, np.flatnonzero(lane == Lane.HAND_OVER)), (Path.NIC, np.flatnonzero(lane < Lane.HAND_OVER))


@dataclass(frozen=True, slots=True)
class _Carrier:
    """How the steps of one path are carried: by which library, over how many queues, and until when."""

    backend: Backend
    n_queues: int
    ends_s: float


def _carrier(
    path: Path, rows: Ints, walk: _Walk, n_bytes: Ints, end_s: NDArray[np.float64], topology: Topology, options: Options,
    costs: Costs | None,
) -> _Carrier:  # fmt: skip
    """The cheapest way to carry the rows of a path: by each library that may, when the last would end at the rate that its queues
    of such messages reach, and the starts of the rank that has most, of which the queues overlap.
    """
    most = options.max_ops_in_flight
    if costs is None or not len(rows):
        n_queues = N_QUEUES if most is None else min(N_QUEUES, most)
        return _Carrier(options.backends[0], n_queues, float(end_s[rows].max(initial=0.0)))
    size, last_s = float(np.median(n_bytes[rows])), float(end_s[rows].max())
    nominal, link = topology.nvlink_Bps if path is Path.NVLINK else topology.nic_Bps, costs.link_Bps(path)
    n_starts = max(int(np.bincount(rank[rows]).max()) for rank in (walk.src, walk.dst))
    found = []
    for backend in [b for b in options.backends if b in costs.backends()] or options.backends[:1]:
        wanted = costs.queues(size, path, backend)
        n_queues = wanted if most is None else min(wanted, most)
        reached = min(link, n_queues * costs.rate_Bps(size, path, backend))
        slower = float(np.median(nominal[: costs.n_ranks])) / reached
        at_once = costs.starts_at_once(n_queues, path, backend)
        ends_s = last_s * slower + n_starts * costs.start_s(size, path, backend) / at_once
        found.append(_Carrier(backend, n_queues, ends_s))
    return min(found, key=lambda carrier: carrier.ends_s)


def _start_times(
    src: Ranks, dst: Ranks, lane: NDArray[np.uint8], parent: Ints, tall: NDArray[np.float64], seconds: NDArray[np.float64],
    n_gpus: int,
) -> NDArray[np.float64]:  # fmt: skip
    """When each row would start if every port carried one at a time, see `schedule_kernel`."""
    n = len(src)
    near = (lane == Lane.HAND_OVER).astype(np.int64)
    moves = lane != Lane.LOCAL
    out_port, in_port = src + near * n_gpus, dst + near * n_gpus
    pairs, pair_of = np.unique(out_port[moves] * 2 * n_gpus + in_port[moves], return_inverse=True)
    pair = np.full(n, -1, dtype=np.int64)
    pair[moves] = pair_of
    has_parent = parent >= 0
    by_parent = np.flatnonzero(has_parent)[np.argsort(parent[has_parent], kind="stable")]
    child_ptr = np.searchsorted(parent[by_parent], np.arange(n + 1))
    roots = np.flatnonzero(~has_parent)
    left = np.bincount(in_port[moves], weights=seconds[moves], minlength=2 * n_gpus)
    start = np.zeros(n)
    kernel = compiled(schedule_kernel) if n > COMPILE_ROWS else schedule_kernel
    n_ports = 2 * n_gpus
    pair_ptr, pair_in = np.searchsorted(pairs // n_ports, np.arange(n_ports + 1)), pairs % n_ports
    head, tail, after = np.full(len(pairs), -1), np.full(len(pairs), -1), np.full(n, -1)
    n_run = kernel.schedule(
        roots, child_ptr, by_parent, pair, out_port, seconds, tall, pair_ptr, pair_in, head, tail, after, np.zeros(n_ports),
        np.zeros(n_ports, dtype=np.int64), left, start,
    )  # fmt: skip
    assert n_run == n
    return start


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Slots of a plan: how many, of how many bytes; the bundles, with an empty one for credits at the end.

    at        int64[n rows of the walk]: the slot where the row lands, or TARGET
    expected  of each row, later where it waits for a slot
    filled, waiting   of each credit: the row that filled the slot, and the row that fills it next
    """

    n_slots: int
    slot_bytes: int
    bundles: Bundles
    at: Ints
    expected: Ints
    filled: Ints
    waiting: Ints


def _assign_slots(routes: Routes, bundling: _Bundling, walk: _Walk, staging_bytes: int) -> _Slots:
    """Give every row that stages a slot. Each rank uses its slots in turn, in one order of bundles that is the same everywhere.

    Because a bundle waits only for slots of bundles before it in that order, and else only for its own earlier hops, no cycle can
    arise, whatever is expected to run when.
    """
    at = np.full(len(walk.bundle), TARGET, dtype=np.int64)
    rows = np.flatnonzero(walk.staged)
    none = np.zeros(0, dtype=np.int64)
    if not len(rows):
        return _Slots(0, 0, bundling.bundles, at, walk.expected, none, none)
    slot_bytes = int(bundling.slot_bytes[bundling.staged].max())
    n_slots = int(np.clip(staging_bytes // slot_bytes, 1, MOST_SLOTS))
    first_staged = np.full(len(bundling.tree), np.iinfo(np.int64).max)
    np.minimum.at(first_staged, walk.bundle[rows], walk.expected[rows])
    rows = rows[np.lexsort((walk.bundle[rows], first_staged[walk.bundle[rows]], walk.dst[rows]))]
    number = places(walk.dst[rows])
    n_slots = min(n_slots, int(number.max()) + 1)
    at[rows] = number % n_slots
    again = np.flatnonzero(number >= n_slots)
    filled, waiting = rows[again - n_slots], rows[again]
    bundles = bundling.bundles
    if len(again):
        bundles = replace(bundles, ptr=np.append(bundles.ptr, bundles.ptr[-1]))
    return _Slots(n_slots, slot_bytes, bundles, at, _delayed(walk, filled, waiting), filled, waiting)


def _delayed(walk: _Walk, filled: Ints, waiting: Ints) -> Ints:
    """When rows are expected if a row that waits for a slot runs two messages after its last reader: the credit is between."""
    expected = walk.expected.copy()
    if not len(waiting):
        return expected
    affected = np.zeros(int(walk.bundle.max()) + 1, dtype=bool)
    affected[walk.bundle[walk.staged]] = True
    child = np.flatnonzero((walk.parent >= 0) & affected[walk.bundle])
    read = child[walk.staged[walk.parent[child]]]
    while True:
        before = expected.copy()
        np.maximum.at(expected, child, expected[walk.parent[child]] + 1)
        last_read = expected.copy()
        np.maximum.at(last_read, walk.parent[read], expected[read])
        expected[waiting] = np.maximum(expected[waiting], last_read[filled] + 2)
        if (before == expected).all():
            return expected


def _steps(arranged: Arranged, slots: _Slots, backend: Backend) -> Steps:
    """The rows of the walk and the credits between them, in the order in which they are expected."""
    walk, near, far = arranged.walk, arranged.near, arranged.far
    n, n_credits = len(walk.bundle), len(slots.waiting)
    has_parent = walk.parent >= 0
    readers = np.flatnonzero(has_parent & walk.staged[walk.parent])
    last_read = np.zeros(n, dtype=np.int64)
    np.maximum.at(last_read, walk.parent[readers], slots.expected[readers])
    bundle = np.concatenate([walk.bundle, np.full(n_credits, len(slots.bundles) - 1)])
    src = np.concatenate([walk.src, walk.dst[slots.filled]])
    dst = np.concatenate([walk.dst, walk.src[slots.waiting]])
    lane = np.concatenate([walk.lane, np.full(n_credits, Lane.CREDIT, dtype=np.uint8)])
    expected = np.concatenate([slots.expected, last_read[slots.filled] + 1])
    order = np.lexsort((bundle, dst, src, expected)) if n_credits else np.argsort(expected)
    new = np.empty(len(order), dtype=np.int64)
    new[order] = np.arange(len(order))
    src_at = np.concatenate([np.where(has_parent, slots.at[walk.parent], SOURCE), np.full(n_credits, SOURCE)])
    dst_at = np.concatenate([slots.at, np.full(n_credits, TARGET)])

    # Who waits for what: a row for its parent; a credit for the readers of the slot; a row that reuses a slot for the credit.
    by_slot = readers[np.argsort(walk.parent[readers], kind="stable")]
    reader_ptr = np.searchsorted(walk.parent[by_slot], np.arange(n + 1))
    item, credit = ranges(reader_ptr, slots.filled)
    owner = np.concatenate([np.flatnonzero(has_parent), n + credit, slots.waiting])
    dep = np.concatenate([walk.parent[has_parent], by_slot[item], n + np.arange(n_credits)])
    queue = _places(order, src, lane) % np.where(lane == Lane.HAND_OVER, near.n_queues, far.n_queues)
    owner, dep = new[owner], new[dep]
    by_owner = np.argsort(owner) if not n_credits else np.lexsort((dep, owner))
    counts = np.bincount(owner, minlength=len(order))
    total = len(order)
    carried_by = np.where(lane == Lane.HAND_OVER, near.backend, np.where(lane < Lane.HAND_OVER, far.backend, backend))
    if backend is Backend.PROCESSES:
        carried_by = np.full(total, backend)
    return Steps(
        op=np.full(total, Op.COPY, dtype=np.uint8),
        lane=queued(lane, queue)[order],
        backend=carried_by[order].astype(np.uint8),
        bundle=bundle[order].astype(np.int32),
        src=src[order],
        dst=dst[order],
        group=np.full(total, -1, dtype=np.int32),
        src_at=src_at[order].astype(np.int16),
        dst_at=dst_at[order].astype(np.int16),
        after_ptr=np.concatenate([[0], np.cumsum(counts)]),
        after=dep[by_owner].astype(np.int32),
    )


def _places(order: Ints, src: Ranks, lane: NDArray[np.uint8]) -> Ints:
    """Each row's place among those of its rank and lane, in the given order."""
    key = src.astype(np.int64) * len(Lane) + lane
    by_key = order[np.argsort(key[order], kind="stable")]
    place = np.empty(len(order), dtype=np.int64)
    place[by_key] = places(key[by_key])
    return place
