"""Balances a whole problem over a machine's links: every chunk of every pattern gets a tree, so that no link is busier than it
must be.

Chunks are routed one after the other, largest first, each by the links that are cheapest at that moment; then those that cross
the busiest links are routed anew until the busiest link stops falling. Then senders that don't bind are levelled. No solver; the
same input gives the same routes.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.compiling import compiled
from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.routing import balance_kernel
from shardroute.planner.routing.bounds import cuts, demand_of
from shardroute.planner.routing.links import busiest_of, link_rates, uplink_rates
from shardroute.planner.routing.patterns import Entries, Patterns, by_pattern
from shardroute.planner.routing.routes import Routes
from shardroute.topologies.calibrations import nominal_calibration
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

# Sweeps in which the busiest link may stop falling before we stop, and how little counts as falling.
PATIENCE = 3
LEAST_GAIN = 0.001
MOST_SWEEPS = 24
# A sweep routes anew what crosses a link that is busier than the bound by more than this share of the busiest link's excess: now
# the worst alone, now most of it.
EXCESS = (0.75, 0.5, 0.25)
# Senders are level when the busiest one is this near to their mean. What they send on the whole falls to this share at most: the
# rest would be for others to pass on, who then are in the way.
LEVEL = 1.005
LEAST_SENT = 0.8
# Below the bound by this much a source should send what it holds itself: prices would have it hand over to its neighbours, each
# a little, which leaves senders uneven and saves nothing.
EASE = 1.1
# Sums of the same loads in another order differ by less than this, relatively.
ROUNDING = 1e-9
# How much dearer than an idle link the dearest one is when trees are priced.
PRICE_OVER_IDLE = 1e4
# Hops from which the kernel is compiled: plain, it routes some 30,000 a second; Numba takes 0.5 s to import and load its cache.
COMPILE_HOPS = 15_000


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Entries grouped into what is routed as one. `of_entry`: the chunk of each entry; `pattern`, `n_bytes`: of each chunk."""

    of_entry: Ints
    pattern: Ints
    n_bytes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """Trees of all chunks, CSR with gaps: the hops of chunk c are first[c] to first[c] + count[c]; `busiest_s` at nominal rates.
    """

    first: Ints
    count: Ints
    src: Ranks
    dst: Ranks
    parent: Ranks
    kind: NDArray[np.uint8]
    busiest_s: float


def chunks_of(entries: Entries, n_patterns: int, chunk_bytes: int) -> Chunks:
    """Each pattern's entries in order of tensor and piece, cut into as few chunks of nearly `chunk_bytes` as hold them."""
    order = np.lexsort((entries.piece, entries.tensor, entries.pattern))
    pattern, n_bytes = entries.pattern[order], entries.n_bytes[order]
    total = np.bincount(pattern, weights=n_bytes, minlength=n_patterns).astype(np.int64)
    n_chunks = np.maximum(1, -(-total // chunk_bytes))
    ends = np.cumsum(n_bytes)
    before = np.concatenate([[0], np.cumsum(total)])[:-1]
    middle = ends - n_bytes // 2 - before[pattern]
    number = np.minimum(middle * n_chunks[pattern] // np.maximum(total[pattern], 1), n_chunks[pattern] - 1)
    change = (np.diff(pattern, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0)
    chunk = np.cumsum(change) - 1
    of_entry = np.empty(len(order), dtype=np.int64)
    of_entry[order] = chunk
    starts = np.flatnonzero(change)
    return Chunks(of_entry, pattern[starts], np.bincount(chunk, weights=n_bytes, minlength=len(starts)).astype(np.int64))


def balance(
    patterns: Patterns, chunks: Chunks, topology: Topology, n_ranks: int, bound_s: float, *, staging: bool, most_depth: int,
    good_enough: float = 1.0, start: Balanced | None = None, eased: Ranks | None = None,
) -> Balanced:
    """Trees for all chunks. Stops early when the busiest link is within `good_enough` of `bound_s`.

    Only GPUs 0 to n_ranks - 1 take part. Without `staging` a piece goes only through ranks that hold or need it. Chunks that have
    a tree in `start` keep it, unless it crosses a link that stays too busy. The NICs of `eased` ranks are taken for faster than
    they are, by EASE.
    """
    reference = bound_s if bound_s > 0 else 1.0
    inv, inv_up = link_shares(topology, n_ranks, reference)
    if eased is not None:
        inv[0, eased] /= EASE
    load, up = np.zeros_like(inv), np.zeros_like(inv_up)
    work = _Work(patterns, chunks, topology, n_ranks, inv, inv_up, most_depth)
    order = _largest_first(chunks)
    if start is not None:
        work.take(start, load, up)

    def sweep(above: float, stage: bool) -> float:
        work.sweep(order, above, load, up, stage)
        return float(work.kernel.busiest(load, up))

    # Staging costs memory and a second hop, so it comes in only where routes without it leave a link too busy.
    best, kept = sweep(np.inf, False), None
    for stage in (False, True) if staging else (False,):
        calm = 0
        for turn in range(MOST_SWEEPS):
            if best <= good_enough or calm >= PATIENCE:
                break
            if kept is None:
                kept = work.trees()
            found = sweep(1.0 + EXCESS[turn % len(EXCESS)] * (float(work.kernel.busiest(load, up)) - 1.0), stage)
            calm = 0 if found < best * (1 - LEAST_GAIN) else calm + 1
            if found < best:
                best, kept = found, None
    result = work.trees() if kept is None else kept
    if eased is not None:
        return with_busiest(result, chunks, topology, n_ranks)
    return replace(result, busiest_s=best * reference)


def level(
    given: Balanced, senders: Ranks, patterns: Patterns, chunks: Chunks, topology: Topology, n_ranks: int, bound_s: float, *,
    staging: bool, most_depth: int, most_s: float,
) -> Balanced:  # fmt: skip
    """The trees changed until no NIC of `senders` sends for longer than they do on average, as far as that goes while no link is
    busy for more than `most_s`; those given where nothing better is found.

    Rule: the senders' NICs are taken for so slow that the mean one is at the bound, the other ranks' for so slow that the busiest
    of them is: so these don't take over. Then what crosses too busy links is routed anew.
    """
    reference = bound_s if bound_s > 0 else 1.0
    most_s *= 1 + ROUNDING
    inv, inv_up = link_shares(topology, n_ranks, reference)
    work = _Work(patterns, chunks, topology, n_ranks, inv, inv_up, most_depth)
    load, up = np.zeros_like(inv), np.zeros_like(inv_up)
    work.take(given, load, up)
    order = _largest_first(chunks)
    kept, kept_s = given, given.busiest_s
    best = np.inf if given.busiest_s > most_s else unevenness(load[0, senders])
    slower = np.full(inv.shape[1], 1.0 / (float(np.delete(load[0], senders).max(initial=0.0)) or 1.0))
    mean = float(load[0, senders].mean())
    least, calm = LEAST_SENT * mean, 0
    for _ in range(MOST_SWEEPS):
        if mean <= 0.0 or best <= LEVEL or calm >= PATIENCE:
            break
        slower[senders] = 1.0 / max(mean, least)
        above = max(1.0 + EXCESS[1] * (float((load[0] * slower)[senders].max()) - 1.0), 1.0 + LEAST_GAIN)
        for row in (inv[0], load[0]):
            row *= slower
        work.sweep(order, above, load, up, staging)
        for row in (inv[0], load[0]):
            row /= slower
        found, busiest_s = unevenness(load[0, senders]), float(work.kernel.busiest(load, up)) * reference
        mean = float(load[0, senders].mean())
        calm = 0 if found < best * (1 - LEAST_GAIN) else calm + 1
        if found < best and busiest_s <= most_s:
            best, kept, kept_s = found, work.trees(), busiest_s
    return replace(kept, busiest_s=kept_s)


def unevenness(load: NDArray[np.float64]) -> float:
    """Maximum over mean of what ranks send; 1 where they send nothing."""
    mean = float(load.mean()) if len(load) else 0.0
    return float(load.max()) / mean if mean > 0 else 1.0


def _largest_first(chunks: Chunks) -> Ints:
    return np.lexsort((np.arange(len(chunks.pattern)), -chunks.n_bytes))


def price_trees(
    patterns: Patterns, topology: Topology, n_ranks: int, price: NDArray[np.float64], *, staging: bool, most_depth: int
) -> Balanced:
    """For each pattern, a tree whose links cost little by `price` (one a link, numbered as `link_loads` does)."""
    n = len(patterns)
    inv, inv_up = link_shares(topology, n_ranks, 1.0)
    # The kernel's price is the 16th power of a load beside IDLE_PRICE, so loads are set to make it proportional to the prices
    # given.
    scaled = price / max(float(price.max(initial=0.0)), 1e-30) * PRICE_OVER_IDLE
    load = (scaled[: 4 * topology.n_gpus] ** (1 / 16)).reshape(4, topology.n_gpus)
    up = scaled[4 * topology.n_gpus :] ** (1 / 16)
    bit = np.full(n, 1e-9 / max(float(inv.max()), 1e-30))  # so few bytes that they change no load
    chunks = Chunks(np.zeros(0, np.int64), np.arange(n), bit.astype(np.float64))
    work = _Work(patterns, chunks, topology, n_ranks, inv, inv_up, most_depth)
    work.sweep(np.arange(n), 0.0, load, up, staging)
    return work.trees()


class _Work:
    """What the kernel works on: the problem's columns, the trees so far, scratch memory."""

    def __init__(
        self, patterns: Patterns, chunks: Chunks, topology: Topology, n_ranks: int, inv: NDArray[np.float64],
        inv_up: NDArray[np.float64], most_depth: int,
    ) -> None:  # fmt: skip
        n_local, n_needers = np.diff(patterns.local[0]), by_pattern(patterns, np.diff(patterns.needers[0]))
        n_away = by_pattern(patterns, (~patterns.home).astype(np.int64))
        n_groups = np.diff(patterns.group_ptr)
        most = (n_local + n_needers + 2 * n_away)[chunks.pattern]
        first = np.concatenate([[0], np.cumsum(most)]).astype(np.int64)
        self._ends = [np.zeros(int(first[-1]), dtype=np.int32) for _ in ("src", "dst", "parent")]
        self._kind = np.zeros(int(first[-1]), dtype=np.uint8)
        self._first, self._count = first[:-1], np.zeros(len(most), dtype=np.int64)
        n_has = int((by_pattern(patterns, np.diff(patterns.holders[0])) + n_needers + n_groups * (n_groups + 1)).max(initial=1))
        widest = int(n_groups.max(initial=1))
        self._scratch = (
            *(np.zeros(n_has, dtype=np.int64) for _ in range(3)), *(np.zeros(widest, dtype=np.int64) for _ in range(3)),
            np.zeros(widest), *(np.zeros(widest, dtype=np.int64) for _ in range(2)),
        )  # fmt: skip
        of_domain = topology.domain[:n_ranks]
        member_ptr = np.concatenate([[0], np.cumsum(np.bincount(of_domain, minlength=topology.n_domains))]).astype(np.int64)
        members = np.argsort(of_domain, kind="stable").astype(np.int32)
        self._links = (inv, inv_up)
        self._sizes = (chunks.pattern, chunks.n_bytes.astype(np.float64))
        self._table = (
            topology.domain, member_ptr, members, *patterns.local, patterns.group_ptr, patterns.domain, patterns.home,
            *patterns.holders, *patterns.needers,
        )  # fmt: skip
        self._most_depth = most_depth
        self._least_inv = float(inv[0].min())
        self.kernel = compiled(balance_kernel) if first[-1] > COMPILE_HOPS else balance_kernel

    def sweep(
        self, order: Ints, above: float, load: NDArray[np.float64], up: NDArray[np.float64], staging: bool
    ) -> None:
        """Route chunks, or route them anew; changes the trees here and the loads given."""
        inv, inv_up = self._links
        self.kernel.sweep(
            order, above, *self._sizes, self._first, self._count, load, inv, up, inv_up, *self._table, int(staging),
            self._most_depth, self._least_inv, *self._ends, self._kind, *self._scratch,
        )  # fmt: skip

    def take(self, given: Balanced, load: NDArray[np.float64], up: NDArray[np.float64]) -> None:
        """Begin with these trees, where a chunk has one; adds their loads to those given."""
        inv, inv_up = self._links
        hop, chunk = _hops(given)
        at = self._first[chunk] + hop - given.first[chunk]
        for mine, theirs in zip(self._ends, (given.src, given.dst, given.parent), strict=True):
            mine[at] = theirs[hop]
        self._kind[at] = given.kind[hop]
        self._count[:] = given.count
        lane = given.kind[hop] % balance_kernel.STAGED
        n_bytes = self._sizes[1][chunk]
        src, dst = given.src[hop], given.dst[hop]
        for rows, out_row, in_row in (
            (lane == balance_kernel.HAND_OVER, 2, 3),
            (lane < balance_kernel.HAND_OVER, 0, 1),
        ):
            np.add.at(load[out_row], src[rows], n_bytes[rows] * inv[out_row, src[rows]])
            np.add.at(load[in_row], dst[rows], n_bytes[rows] * inv[in_row, dst[rows]])
        far = lane < balance_kernel.HAND_OVER
        of_domain = self._table[0][src[far]]
        np.add.at(up, of_domain, n_bytes[far] * inv_up[of_domain])

    def trees(self) -> Balanced:
        """A copy of the trees as they are."""
        src, dst, parent = (column.copy() for column in self._ends)
        return Balanced(self._first, self._count.copy(), src, dst, parent, self._kind.copy(), 0.0)


def _hops(given: Balanced) -> tuple[Ints, Ints]:
    """The positions of all hops, and the chunk of each."""
    chunk = np.repeat(np.arange(len(given.count)), given.count)
    return given.first[chunk] + np.arange(len(chunk)) - (np.cumsum(given.count) - given.count)[chunk], chunk


def with_busiest(given: Balanced, chunks: Chunks, topology: Topology, n_ranks: int) -> Balanced:
    """The same trees, with the seconds of their busiest link at nominal rates."""
    hop, chunk = _hops(given)
    lane = given.kind[hop] % np.uint8(balance_kernel.STAGED)
    busiest_s = busiest_of(given.src[hop], given.dst[hop], lane, chunks.n_bytes[chunk], topology, n_ranks)
    return replace(given, busiest_s=busiest_s)


def sent_by(given: Balanced, chunks: Chunks, n_ranks: int) -> NDArray[np.float64]:
    """Bytes that each rank sends over its NICs."""
    hop, chunk = _hops(given)
    far = given.kind[hop] % np.uint8(balance_kernel.STAGED) < balance_kernel.HAND_OVER
    return np.bincount(given.src[hop[far]], weights=chunks.n_bytes[chunk[far]], minlength=n_ranks).astype(np.float64)


def link_loads(
    hops: NDArray[np.int32], topology: Topology, n_ranks: int, reference_s: float
) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """The links that hops (rows of src, dst, parent, kind) use: link, hop, share of the reference time that a byte takes.

    Links are numbered: NIC out, NIC in, NVLink out and NVLink in of every GPU, then the uplinks of domains.
    """
    inv, inv_up = link_shares(topology, n_ranks, reference_s)
    lane, n = hops[:, 3] % balance_kernel.STAGED, topology.n_gpus
    near, far = np.flatnonzero(lane == balance_kernel.HAND_OVER), np.flatnonzero(lane < balance_kernel.HAND_OVER)
    src, dst = hops[:, 0].astype(np.int64), hops[:, 1].astype(np.int64)
    up = topology.domain[src[far]].astype(np.int64)
    link = np.concatenate([2 * n + src[near], 3 * n + dst[near], src[far], n + dst[far], 4 * n + up])
    share = np.concatenate([inv.ravel()[link[: len(link) - len(far)]], inv_up[up]])
    return link, np.concatenate([near, near, far, far, far]), share


def link_shares(topology: Topology, n_ranks: int, reference_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The share of `reference_s` that one byte takes on each GPU's links, float64[4, n_gpus], and on each domain's uplink."""
    rates = link_rates(topology)
    # A link without bandwidth must stay out of every route that has another way: it costs as if a million times slower than any.
    slowest = rates[rates > 0].min() if (rates > 0).any() else 1.0
    inv = 1.0 / (np.where(rates > 0, rates, slowest * 1e-6) * reference_s)
    return inv, 1.0 / (uplink_rates(topology, n_ranks) * reference_s)


def routes_of(entries: Entries, chunks: Chunks, found: Balanced) -> Routes:
    """The routes of all entries; chunks whose trees are alike share one, so that their pieces can travel together."""
    hop, _ = _hops(found)
    rows = np.stack([found.src[hop], found.dst[hop], found.parent[hop], found.kind[hop].astype(np.int32)], axis=1)
    data, ends = rows.tobytes(), np.cumsum(found.count) * rows.itemsize * 4
    known: dict[bytes, int] = {}
    kept: list[int] = []
    tree_of_chunk = np.zeros(len(found.count), dtype=np.int64)
    start = 0
    for c, end in enumerate(ends.tolist()):
        tree = known.setdefault(data[start:end], len(kept))
        if tree == len(kept):
            kept.append(c)
        tree_of_chunk[c] = tree
        start = end
    lengths = found.count[kept]
    at = np.repeat((np.cumsum(found.count) - found.count)[kept], lengths)
    at += np.arange(len(at)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    src, dst, parent, kind = rows[at].T
    return Routes(
        tree_ptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        src=np.ascontiguousarray(src), dst=np.ascontiguousarray(dst), lane=(kind % balance_kernel.STAGED).astype(np.uint8),
        parent=parent.astype(np.int64), staged=kind >= balance_kernel.STAGED,
        tensor=entries.tensor, piece=entries.piece, n_bytes=entries.n_bytes, tree=tree_of_chunk[chunks.of_entry],
    )  # fmt: skip


def busiest_bound_s(patterns: Patterns, topology: Topology, n_ranks: int) -> float:
    """The seconds that the busiest link takes at least, at nominal rates; 0 when nothing moves (or on CPUs, which have no links).
    """
    needs = demand_of(patterns, n_ranks, topology.n_domains, into_needers=False)
    if topology.machine.kind is MachineKind.CPU:
        return float(needs.into_rank.max(initial=0))  # the rates of link_rates are 1
    found = cuts(needs, topology, nominal_calibration(topology.machine))
    return found[0].seconds if found else 0.0
