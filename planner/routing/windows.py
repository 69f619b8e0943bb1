"""Limits how many copies are in flight out of a rank and into it: libraries fail, or run out of memory, above some number.

Rule: a rank may wait only for steps that it drives or that deliver to it. So what leaves a rank waits for an earlier step of that
rank; what arrives from another rank than the one before waits for a *credit*, an empty copy by which the receiver says that an
earlier arrival is complete. Credits carry no bytes and don't count.
"""

from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.plans import SOURCE, TARGET, Bundles, Lane, Op, Steps, lane_of, places, queue_of, queued

_Integer = TypeVar("_Integer", bound=np.integer)


def limit_in_flight(steps: Steps, bundles: Bundles, most: int) -> tuple[Steps, Bundles]:
    """The same steps, at most `most` of which leave any rank at once, and arrive at any rank at once, with the credits for it.

    Only for plans of copies.
    """
    counts = lane_of(steps.lane) != Lane.CREDIT
    rows = np.flatnonzero(counts)
    leave = _pairs(rows, steps.src, most)
    moves = rows[steps.src[rows] != steps.dst[rows]]
    before, after = _pairs(moves, steps.dst, most)
    same = steps.src[before] == steps.src[after]
    n, others = len(steps), np.flatnonzero(~same)
    # A credit stands right behind the arrival that it tells of.
    told = before[others]
    position = np.concatenate([2 * np.arange(n), 2 * told + 1])
    order = np.lexsort((np.concatenate([np.arange(n), after[others]]), position))
    new = np.empty(len(order), dtype=np.int64)
    new[order] = np.arange(len(order))
    credit = n + np.arange(len(others))
    owner = np.concatenate([np.repeat(np.arange(n), np.diff(steps.after_ptr)), leave[1], after[same], credit, after[others]])
    dep = np.concatenate([steps.after, leave[0], before[same], told, credit])
    pairs = np.unique(np.stack([new[owner], new[dep]]), axis=1)
    if len(others):
        bundles = replace(bundles, ptr=np.append(bundles.ptr, bundles.ptr[-1]))

    def column(values: NDArray[_Integer], of_credits: NDArray[np.integer] | int) -> NDArray[_Integer]:
        both = np.concatenate([values, np.broadcast_to(np.asarray(of_credits), len(others))])
        return both[order].astype(values.dtype)

    n_queues = int(queue_of(steps.lane).max(initial=0)) + 1
    by_sender = _place(steps.dst[told])
    limited = Steps(
        op=column(steps.op, Op.COPY),
        lane=column(steps.lane, queued(np.full(len(others), Lane.CREDIT), by_sender % n_queues)),
        backend=column(steps.backend, steps.backend[told]),
        bundle=column(steps.bundle, len(bundles) - 1),
        src=column(steps.src, steps.dst[told]),
        dst=column(steps.dst, steps.src[after[others]]),
        group=column(steps.group, -1),
        src_at=column(steps.src_at, SOURCE),
        dst_at=column(steps.dst_at, TARGET),
        after_ptr=np.concatenate([[0], np.cumsum(np.bincount(pairs[0], minlength=len(order)))]),
        after=pairs[1],
    )
    return limited, bundles


def _pairs(rows: Ints, rank: Ranks, most: int) -> tuple[Ints, Ints]:
    """Rows that have the same rank and `most` - 1 others between them: the earlier, and the later that must wait for it."""
    order = rows[np.argsort(rank[rows], kind="stable")]
    before, after = order[: max(len(order) - most, 0)], order[most:]
    same = rank[before] == rank[after]
    return before[same], after[same]


def _place(key: Ranks) -> Ints:
    """Each row's place among those of its key."""
    order = np.argsort(key, kind="stable")
    place = np.empty(len(key), dtype=np.int64)
    place[order] = places(key[order])
    return place
