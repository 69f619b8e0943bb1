"""Balances a whole problem over a machine's links: every chunk of every pattern gets a tree, so that no link is busier than it must be.

Chunks are routed one after the other, largest first, each by the links that are cheapest at that moment; then those that cross the
busiest links are routed anew until the busiest link stops falling. No solver; the same input gives the same routes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.routing import balance_kernel
from shardroute.planner.routing.bounds import cuts, demand_of
from shardroute.planner.routing.compiling import compiled
from shardroute.planner.routing.links import link_rates, uplink_rates
from shardroute.planner.routing.patterns import Entries, Patterns
from shardroute.planner.routing.routes import Routes
from shardroute.topologies.calibrations import nominal_calibration
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

# Sweeps in which the busiest link may stop falling before we stop, and how little counts as falling.
PATIENCE = 3
LEAST_GAIN = 0.001
MOST_SWEEPS = 24
# A sweep routes anew what crosses a link within this share of the busiest.
BUSY = (0.98, 0.95, 0.9)
# Hops from which the kernel is compiled: it routes some 30,000 hops a second plain; Numba takes 0.5 s to import and load its cache.
COMPILE_HOPS = 15_000


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Entries grouped into what is routed as one. `of_entry`: the chunk of each entry; `pattern`, `n_bytes`: of each chunk."""

    of_entry: Ints
    pattern: Ints
    n_bytes: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """Trees of all chunks, CSR with gaps: the hops of chunk c are first[c] to first[c] + count[c]; `busiest_s` at nominal rates."""

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
    patterns: Patterns, chunks: Chunks, topology: Topology, n_ranks: int, bound_s: float, *, staging: bool, good_enough: float = 1.0
) -> Balanced:
    """Trees for all chunks. Stops early when the busiest link is within `good_enough` of `bound_s`.

    Only GPUs 0 to n_ranks - 1 take part. Without `staging` a piece goes only through ranks that hold or need it.
    """
    rates = link_rates(topology)
    reference = bound_s if bound_s > 0 else 1.0
    # A link without bandwidth must stay out of every route that has another way: it costs as if a million times slower than any.
    slowest = rates[rates > 0].min() if (rates > 0).any() else 1.0
    inv = 1.0 / (np.where(rates > 0, rates, slowest * 1e-6) * reference)
    inv_up = 1.0 / (uplink_rates(topology, n_ranks) * reference)
    load, up = np.zeros_like(inv), np.zeros_like(inv_up)
    member = np.arange(n_ranks, dtype=np.int32)
    member_ptr = np.concatenate([[0], np.cumsum(np.bincount(topology.domain[:n_ranks], minlength=topology.n_domains))]).astype(np.int64)
    members = member[np.argsort(topology.domain[:n_ranks], kind="stable")]

    n_local, n_needers = np.diff(patterns.local[0]), _by_pattern(patterns, np.diff(patterns.needers[0]))
    n_away = _by_pattern(patterns, (~patterns.home).astype(np.int64))
    n_groups = np.diff(patterns.group_ptr)
    most = (n_local + n_needers + 2 * n_away)[chunks.pattern]
    first_hop = np.concatenate([[0], np.cumsum(most)]).astype(np.int64)
    hops = [np.zeros(int(first_hop[-1]), dtype=kind) for kind in (np.int32, np.int32, np.int32, np.uint8)]
    n_hops = np.zeros(len(chunks.pattern), dtype=np.int64)
    n_has = int((_by_pattern(patterns, np.diff(patterns.holders[0])) + n_needers + n_groups * (n_groups + 1)).max(initial=1))
    widest = int(n_groups.max(initial=1))
    scratch = (
        *(np.zeros(n_has, dtype=np.int64) for _ in range(3)), *(np.zeros(widest, dtype=np.int64) for _ in range(3)),
        np.zeros(widest), np.zeros(widest, dtype=np.int64),
    )  # fmt: skip
    kernel = compiled(balance_kernel) if first_hop[-1] > COMPILE_HOPS else balance_kernel
    order = np.lexsort((np.arange(len(n_hops)), -chunks.n_bytes))
    n_bytes = chunks.n_bytes.astype(np.float64)

    def sweep(above: float, stage: bool) -> float:
        kernel.sweep(
            order, above, chunks.pattern, n_bytes, first_hop, n_hops, load, inv, up, inv_up, topology.domain, member_ptr, members,
            *patterns.local, patterns.group_ptr, patterns.domain, patterns.home, *patterns.holders, *patterns.needers, int(stage),
            *hops, *scratch,
        )  # fmt: skip
        return float(kernel.busiest(load, up))

    # Staging costs memory and a second hop, so it comes in only where routes without it leave a link too busy.
    best, kept = sweep(0.0, False), None
    for stage in (False, True) if staging else (False,):
        calm = 0
        for turn in range(MOST_SWEEPS):
            if best <= good_enough or calm >= PATIENCE:
                break
            if kept is None:
                kept = [column.copy() for column in hops], n_hops.copy()
            found = sweep(BUSY[turn % len(BUSY)] * float(kernel.busiest(load, up)), stage)
            calm = 0 if found < best * (1 - LEAST_GAIN) else calm + 1
            if found < best:
                best, kept = found, None
    if kept is None:
        kept = hops, n_hops
    (src, dst, parent, kind), count = kept
    return Balanced(first_hop[:-1], count, src, dst, parent, kind, best * reference)


def routes_of(entries: Entries, chunks: Chunks, found: Balanced) -> Routes:
    """The routes of all entries; chunks whose trees are alike share one, so that their pieces can travel together."""
    position = np.arange(int(found.count.sum())) - np.repeat(np.cumsum(found.count) - found.count, found.count)
    hop = np.repeat(found.first, found.count) + position
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


def _by_pattern(patterns: Patterns, of_group: Ints) -> Ints:
    """Sums over the groups of each pattern."""
    sums = np.concatenate([[0], np.cumsum(of_group)])
    return np.asarray(sums[patterns.group_ptr[1:]] - sums[patterns.group_ptr[:-1]])


def busiest_bound_s(patterns: Patterns, topology: Topology, n_ranks: int) -> float:
    """The seconds that the busiest link takes at least, at nominal rates; 0 when nothing moves (or on CPUs, which have no links)."""
    needs = demand_of(patterns, n_ranks, topology.n_domains)
    if topology.machine.kind is MachineKind.CPU:
        return float(needs.into_rank.max(initial=0))  # the rates of link_rates are 1
    found = cuts(needs, topology, nominal_calibration(topology.machine))
    return found[0].seconds if found else 0.0
