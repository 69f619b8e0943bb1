"""Which box contains a box, among many of both: a search in each dim instead of a comparison of all with all.

Along a dim the containers' distinct intervals are dealt to *layers*, so that those of a layer don't meet. Containers whose
intervals lie in the same layers are a *grid*: a box lies in one cell of it at most, which is looked up. Shards are one grid,
beside replicas two; there are never more grids than containers.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Boxes


def first_containing(lo: Ints, hi: Ints, boxes: Boxes) -> Ints:
    """The first row of the containers `lo`, `hi` (int64[n, n_dims] each, half open, none empty) in which each box lies whole,
    int64[n_boxes]; -1 for a box that lies in none.
    """
    n, n_dims = lo.shape
    found = np.full(len(boxes.lo), n, dtype=np.int64)
    layers = np.zeros((n, n_dims), dtype=np.int64)
    for dim in range(n_dims):
        layers[:, dim] = _layers(lo[:, dim], hi[:, dim])
    grids = np.unique(layers, axis=0, return_inverse=True)[1].ravel() if n_dims else np.zeros(n, dtype=np.int64)
    order = np.argsort(grids, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(grids[order])) + 1) if n else ():
        at = _cells(lo[rows], hi[rows], boxes)
        found = np.minimum(found, np.where(at >= 0, rows[at], n))
    return np.where(found < n, found, -1)


def _layers(lo: Ints, hi: Ints) -> Ints:
    """A number for each interval, such that intervals with one number are equal or don't meet; the fewest numbers."""
    intervals, which = np.unique(np.stack([lo, hi], axis=1), axis=0, return_inverse=True)
    layers = np.zeros(len(intervals), dtype=np.int64)
    ends: list[tuple[int, int]] = []  # where the last interval of a layer ends, and the layer
    for k, (start, end) in enumerate(intervals.tolist()):
        layer = heapq.heappop(ends)[1] if ends and ends[0][0] <= start else len(ends)
        layers[k] = layer
        heapq.heappush(ends, (end, layer))
    return layers[which.ravel()]


def _cells(lo: Ints, hi: Ints, boxes: Boxes) -> Ints:
    """The first container of a grid in which each box lies, -1 for none."""
    mine, theirs = np.zeros(len(lo), dtype=np.int64), np.zeros(len(boxes.lo), dtype=np.int64)
    inside = np.ones(len(boxes.lo), dtype=bool)
    for dim in range(lo.shape[1]):
        starts, row, place = np.unique(lo[:, dim], return_index=True, return_inverse=True)
        at = np.searchsorted(starts, boxes.lo[:, dim], side="right") - 1
        inside &= (at >= 0) & (boxes.hi[:, dim] <= hi[row, dim][at])
        # Renumbered after each dim, so that numbers stay below the square of how many containers there are.
        known, mine = np.unique(mine * len(starts) + place.ravel(), return_inverse=True)
        theirs, among = _numbered(known, theirs * len(starts) + at)
        inside &= among
    rows = np.unique(mine, return_index=True)[1]
    return np.where(inside, rows[np.where(inside, theirs, 0)], -1)


def _numbered(known: Ints, values: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """Where each value stands among the known ones, which ascend, and whether it does."""
    at = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return at, known[at] == values
