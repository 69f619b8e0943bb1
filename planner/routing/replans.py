"""Replanning after a change: what still holds of a plan is kept, the rest is routed anew.

The change is said by the new problem and the new topology: ranks gone from a layout or new in it, NICs slower or down, more
domains. A piece keeps its way if it is a piece of the new problem too, the first senders of its tree still hold it, its receivers
are exactly those that need it, and no NIC on its way is down. If a link is then busier than it must be, pieces that cross it give
way, no more of them than must.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import SOURCE, Boxes, Op, Plan, lane_of, ranges
from shardroute.planner.problems import Problem
from shardroute.planner.routing.balance import ROUNDING, Balanced, Chunks, balance, chunks_of, link_loads, routes_of
from shardroute.planner.routing.balance_kernel import HAND_OVER, LOCAL, STAGED
from shardroute.planner.routing.chunked import cut_into_chunks, look_at
from shardroute.planner.routing.costs import costs_of
from shardroute.planner.routing.greedy import CHUNKS_OVER_BUSIEST_LINK, GOOD_ENOUGH
from shardroute.planner.routing.lowering import SLOT_ALIGNMENT, arrange, finish
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.patterns import Entries, entries_of
from shardroute.planner.routing.sizes import split_all
from shardroute.planner.routing.strategies import backend_for, pieces_of, with_windows
from shardroute.planner.shares import parts
from shardroute.topologies.errors import InputError
from shardroute.topologies.topologies import Topology

# How much longer a plan may take, by the estimate, so that fewer pieces change their way.
WORTH = 1.05

Tree = tuple[tuple[int, int, int, int], ...]  # hops: src, dst, the hop before it in the tree (-1: src holds), lane (+ 8: stages)

# Shares of planning that are over when the old plan's trees are compared, new ones balanced, steps arranged: roughly, as it is
# with DeepSeek-V3 between 256 and 256 GPUs. For those who wait.
_COMPARED, _BALANCED, _ARRANGED = 0.4, 0.55, 0.9
# The share of cutting pieces in comparing trees, and the pairs of a bundle and a pattern between two shares: some 20 ms.
_CUT, _A_SHARE = 0.2, 4096


@dataclass(frozen=True, slots=True, eq=False)
class Replanned:
    """The new plan; bytes of pieces (each counted once) whose way was kept, and of those routed anew."""

    plan: Plan
    n_bytes_kept: int
    n_bytes_anew: int


def replan(plan: Plan, problem: Problem, topology: Topology, options: Options | None = None) -> Replanned:
    """The plan for the changed problem on the changed topology. Raises InputError for a plan with collectives."""
    if (plan.steps.op != Op.COPY).any():
        raise InputError(f"a plan of {plan.strategy} can't be replanned: it has collectives; plan the changed problem anew")
    options = Options() if options is None else options
    cutting, comparing = parts(options.part(0.0, _COMPARED).told, (_CUT, 1.0 - _CUT))
    whole = pieces_of(problem, cutting)
    seen = look_at(problem, whole, topology)
    sizes, patterns = cut_into_chunks(seen, options, CHUNKS_OVER_BUSIEST_LINK), seen.patterns  # which cutting leaves as they are
    # Cut by the largest piece that the plan has, every piece that is still whole is cut where it was.
    pieces = split_all(problem, whole, int(plan.entry_bytes.max(initial=1)))
    entries, holders, needers = entries_of(problem, pieces)
    bundle = _old_bundles(plan, problem, pieces, entries)
    trees = _trees(plan)
    pairs, of_entry = np.unique(np.stack([bundle, entries.pattern]), axis=1, return_inverse=True)
    keeps = np.zeros(pairs.shape[1], dtype=bool)
    for i, (b, k) in enumerate(pairs.T.tolist()):
        if i % _A_SHARE == 0:
            comparing(i / len(keeps))
        keeps[i] = b >= 0 and _holds(trees[b], frozenset(holders[k].tolist()), frozenset(needers[k].tolist()), topology)
    kept = keeps[of_entry.ravel()] if len(entries.tensor) else np.zeros(0, dtype=bool)
    options.tell(_COMPARED)
    chunks, start = _start(entries, kept, bundle, trees, len(patterns), int(entries.n_bytes.max(initial=1)))
    largest = int(entries.n_bytes.max(initial=0))
    found = balance(
        patterns, chunks, topology, problem.n_ranks, seen.bound_s, staging=options.staging_bytes >= largest + SLOT_ALIGNMENT,
        most_depth=sizes.most_depth, good_enough=GOOD_ENOUGH, start=start,
    )  # fmt: skip
    options.tell(_BALANCED)
    fewer = _put_back(start, found, chunks, topology, problem.n_ranks, max(found.busiest_s, GOOD_ENOUGH * seen.bound_s))
    costs, message_bytes = costs_of(topology, problem.n_ranks, options), max(sizes.message_bytes, largest)
    arranged, other = (
        arrange(routes_of(entries, chunks, trees), topology, message_bytes, options, costs) for trees in (fewer, found)
    )
    options.tell(_ARRANGED)
    if arranged.ends_s > WORTH * other.ends_s:
        arranged, fewer = other, found
    same = _same(start, fewer)
    boxes = tuple(Boxes(p.lo, p.hi) for p in pieces)
    lowered = finish(plan.strategy, problem, boxes, topology, backend_for(problem, topology), arranged, options)
    return Replanned(with_windows(lowered, options), int(chunks.n_bytes[same].sum()), int(chunks.n_bytes[~same].sum()))


def _old_bundles(plan: Plan, problem: Problem, pieces: Sequence[Pieces], entries: Entries) -> Ints:
    """The bundle of the plan that carries each entry's piece, -1 where it has no such piece or carries it in several."""
    first = np.concatenate([[0], np.cumsum([len(plan.boxes[c].lo) for c in plan.tensor_class.tolist()])]).astype(np.int64)
    of_piece = np.full(int(first[-1]), -1, dtype=np.int64)
    at = first[plan.bundles.tensor] + plan.bundles.piece
    of_piece[at] = np.repeat(np.arange(len(plan.bundles)), np.diff(plan.bundles.ptr))
    of_piece[np.bincount(at, minlength=len(of_piece)) != 1] = -1
    old_tensor = {t: i for i, t in enumerate(plan.problem.tensors)}
    found = np.full(len(entries.tensor), -1, dtype=np.int64)
    boxes_of = [{key: i for i, key in enumerate(_keys(b.lo, b.hi))} for b in plan.boxes]
    start = 0
    for cls, of_class in zip(problem.classes, pieces, strict=True):
        keys = _keys(of_class.lo, of_class.hi)
        for member in cls.members.tolist():
            rows = slice(start, start + len(of_class))
            start += len(of_class)
            old = old_tensor.get(problem.tensors[member])
            if old is None:
                continue
            known = boxes_of[int(plan.tensor_class[old])]
            piece = np.array([known.get(key, -1) for key in keys], dtype=np.int64)
            found[rows] = np.where(piece >= 0, of_piece[first[old] + np.maximum(piece, 0)], -1)
    return found


def _keys(lo: Ints, hi: Ints) -> list[bytes]:
    rows = np.ascontiguousarray(np.concatenate([lo, hi], axis=1))
    return [row.tobytes() for row in rows]


def _trees(plan: Plan) -> list[Tree]:
    """The tree that each bundle travels by; empty for a bundle that no step carries."""
    steps = plan.steps
    trees: list[list[tuple[int, int, int, int]]] = [[] for _ in range(len(plan.bundles))]
    brought: list[dict[int, int]] = [{} for _ in trees]
    kind = lane_of(steps.lane).astype(np.int64) + STAGED * (steps.dst_at >= 0)
    held = steps.src_at == SOURCE
    for bundle, src, dst, source, of in zip(
        steps.bundle.tolist(), steps.src.tolist(), steps.dst.tolist(), held.tolist(), kind.tolist(), strict=True
    ):
        tree = trees[bundle]
        parent = -1 if source else brought[bundle].get(src, -1)
        if dst != src:
            brought[bundle][dst] = len(tree)
        tree.append((src, dst, parent, of))
    empty = np.diff(plan.bundles.ptr) == 0  # what credits carry
    return [() if empty[b] else tuple(tree) for b, tree in enumerate(trees)]


def _holds(tree: Tree, holders: frozenset[int], needers: frozenset[int], topology: Topology) -> bool:
    """Whether a tree serves these needers from these holders on the topology."""
    if not tree or any(rank >= topology.n_gpus for src, dst, _, _ in tree for rank in (src, dst)):
        return False
    arrive = sorted(dst for _, dst, _, kind in tree if kind < STAGED)
    if arrive != sorted(needers) or any(parent < 0 and src not in holders for src, _, parent, _ in tree):
        return False
    for src, dst, _, kind in tree:
        near = topology.domain[src] == topology.domain[dst]
        lane = kind % STAGED
        if lane == LOCAL:
            continue
        if near != (lane == HAND_OVER) or (not near and (topology.nic_Bps[src] == 0 or topology.nic_Bps[dst] == 0)):
            return False
    return True


def _start(
    entries: Entries, kept: NDArray[np.bool_], bundle: Ints, trees: Sequence[Tree], n_patterns: int, chunk_bytes: int
) -> tuple[Chunks, Balanced]:
    """Chunks of what is kept (by bundle and pattern) with their trees, then those of the rest without."""
    rest = np.flatnonzero(~kept)
    others = chunks_of(
        Entries(entries.tensor[rest], entries.piece[rest], entries.n_bytes[rest], entries.pattern[rest]), n_patterns, chunk_bytes
    )
    held = np.flatnonzero(kept)
    pairs, number = np.unique(np.stack([bundle[held], entries.pattern[held]]), axis=1, return_inverse=True)
    number = number.ravel()
    n_kept = pairs.shape[1]
    of_entry = np.empty(len(entries.tensor), dtype=np.int64)
    of_entry[held], of_entry[rest] = number, n_kept + others.of_entry
    chunks = Chunks(
        of_entry,
        np.concatenate([pairs[1], others.pattern]).astype(np.int64),
        np.concatenate([np.bincount(number, weights=entries.n_bytes[held], minlength=n_kept).astype(np.int64), others.n_bytes]),
    )
    rows = [hop for b in pairs[0].tolist() for hop in trees[b]]
    count = np.array([len(trees[b]) for b in pairs[0].tolist()] + [0] * len(others.pattern), dtype=np.int64)
    table = np.array(rows, dtype=np.int32).reshape(-1, 4)
    src, dst, parent, kind = (np.ascontiguousarray(column) for column in table.T)
    return chunks, Balanced(np.cumsum(count) - count, count, src, dst, parent, kind.astype(np.uint8), 0.0)


def _put_back(
    first: Balanced, found: Balanced, chunks: Chunks, topology: Topology, n_ranks: int, most_s: float
) -> Balanced:
    """The trees found, but those that chunks had at first wherever no link then gets busier than `most_s`; largest chunks first.

    Balancing routes all that crosses a busy link anew, more than is needed to relieve it.
    """
    changed = np.flatnonzero((first.count > 0) & ~_same(first, found))
    columns = [np.concatenate([a, b]) for a, b in zip(_columns(first), _columns(found), strict=True)]
    link, hop, share = link_loads(np.stack(columns, axis=1).astype(np.int32), topology, n_ranks, 1.0)
    by_hop = np.argsort(hop, kind="stable")
    link, share = link[by_hop], share[by_hop]
    ptr = np.searchsorted(hop[by_hop], np.arange(len(columns[0]) + 1))
    n_first = len(first.src)
    begin, count = found.first + n_first, found.count.copy()
    carried = np.zeros(len(columns[0]))  # bytes on each hop, 0 on those that are not in use
    hop_at, of_chunk = ranges(np.stack([begin, begin + count], axis=1).ravel(), 2 * np.arange(len(count)))
    carried[hop_at] = chunks.n_bytes[of_chunk]
    load = np.bincount(link, weights=share * carried[hop[by_hop]])
    for c in changed[np.argsort(-chunks.n_bytes[changed], kind="stable")].tolist():
        new = slice(int(ptr[begin[c]]), int(ptr[begin[c] + count[c]]))
        old = slice(int(ptr[first.first[c]]), int(ptr[first.first[c] + first.count[c]]))
        np.add.at(load, link[new], -share[new] * chunks.n_bytes[c])
        np.add.at(load, link[old], share[old] * chunks.n_bytes[c])
        if (load[link[old]] <= most_s * (1 + ROUNDING)).all():
            begin[c], count[c] = first.first[c], first.count[c]
        else:
            np.add.at(load, link[old], -share[old] * chunks.n_bytes[c])
            np.add.at(load, link[new], share[new] * chunks.n_bytes[c])
    src, dst, parent, kind = columns
    return Balanced(begin, count, src, dst, parent, kind.astype(np.uint8), most_s)


def _columns(trees: Balanced) -> tuple[NDArray[np.integer], ...]:
    return trees.src, trees.dst, trees.parent, trees.kind


def _same(first: Balanced, second: Balanced) -> NDArray[np.bool_]:
    """Which chunks have the same tree in both."""
    same = (first.count == second.count) & (first.count > 0)
    for c in np.flatnonzero(same).tolist():
        ours, theirs = (slice(b.first[c], b.first[c] + b.count[c]) for b in (first, second))
        same[c] = bool(
            np.array_equal(first.src[ours], second.src[theirs])
            and np.array_equal(first.dst[ours], second.dst[theirs])
            and np.array_equal(first.parent[ours], second.parent[theirs])
        )
    return np.asarray(same)
