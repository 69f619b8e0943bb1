"""Source fragments against destination fragments: the pieces of a tensor, with who holds and who needs each.

Rule: pieces never overlap, and each lies whole inside or whole outside of every fragment on both sides. So what a rank needs
is a set of whole pieces, and a piece can come whole from any of its holders.

Worked example (8 x 8, rows over ranks 0 and 1 to columns over ranks 2 to 5): eight pieces of 4 x 2, two for each destination.
"""

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Fragments, Ints, Ranks, box_text, volumes
from shardroute.topologies.errors import InfeasibleError, InputError

# Cells that all edges may cut a tensor into, of some 20 bytes each. Meshes make thousands, strided shards up to MAX_RUNS.
MAX_CELLS: Final = 2**27


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Disjoint boxes of one tensor shape that must move, in row-major order of their lower corners.

    lo, hi    int64[n, n_dims]
    pattern   int32[n]   which (holders, needers) pair the piece has: an index into the two tuples
    holders   per pattern, the ranks that hold such a piece, ascending
    needers   per pattern, the ranks that need it, ascending
    """

    lo: Ints
    hi: Ints
    pattern: Ranks
    holders: tuple[Ranks, ...]
    needers: tuple[Ranks, ...]

    def __len__(self) -> int:
        return len(self.pattern)

    @property
    def n_elements(self) -> Ints:
        """Elements in each piece, int64[n]."""
        return volumes(self.lo, self.hi)


class _RankSets:
    """Sets of ranks numbered as they are met; set 0 is empty."""

    def __init__(self) -> None:
        self.sets: list[frozenset[int]] = [frozenset()]
        self._number: dict[frozenset[int], int] = {frozenset(): 0}

    def union(self, number: int, ranks: frozenset[int]) -> int:
        members = self.sets[number] | ranks
        if members not in self._number:
            self._number[members] = len(self.sets)
            self.sets.append(members)
        return self._number[members]


def _unique_boxes(fragments: Fragments) -> list[tuple[Ints, Ints, frozenset[int]]]:
    """Distinct boxes with the ranks that hold each, in order of first appearance by corner."""
    if not len(fragments):
        return []
    n_dims = len(fragments.shape)
    boxes = np.concatenate([fragments.lo, fragments.hi], axis=1)
    unique, inverse = np.unique(boxes, axis=0, return_inverse=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    ends = np.cumsum(np.bincount(inverse.ravel(), minlength=len(unique)))
    ranks = np.split(fragments.rank[order], ends[:-1])
    return [(box[:n_dims], box[n_dims:], frozenset(who.tolist())) for box, who in zip(unique, ranks, strict=True)]


def _paint(cuts: list[Ints], boxes: list[tuple[Ints, Ints, frozenset[int]]]) -> tuple[NDArray[np.int32], _RankSets]:
    """For each cell of the grid that `cuts` makes, the number of the set of ranks whose boxes cover it."""
    sets = _RankSets()
    grid = np.zeros([len(c) - 1 for c in cuts], dtype=np.int32)
    for lo, hi, ranks in boxes:
        inside = tuple(slice(*np.searchsorted(c, (a, b))) for c, a, b in zip(cuts, lo, hi, strict=True))
        block = grid[inside] if inside else grid.reshape(-1)  # a scalar's grid has no dims to slice
        for number in np.unique(block).tolist():
            block[block == number] = -1 - sets.union(number, ranks)
        np.subtract(-1, block, out=block)
    return grid, sets


def overlap(source: Fragments, target: Fragments) -> Pieces:
    """The pieces that `target` needs, each with its holders in `source`.

    Cuts the tensor at every fragment edge and keeps the cells that someone needs. Ranks may be on both sides.
    Raises InfeasibleError when some needed element is held by no rank, InputError above MAX_CELLS.
    """
    if source.shape != target.shape:
        raise InfeasibleError(f"source has shape {source.shape}, destination {target.shape}: they must be the same tensor")
    n_dims = len(source.shape)
    cuts = [
        np.unique(np.concatenate([s.lo[:, d] for s in (source, target)] + [s.hi[:, d] for s in (source, target)]))
        for d in range(n_dims)
    ]
    n_cells = math.prod(len(c) - 1 for c in cuts)
    if n_cells > MAX_CELLS:
        raise InputError(
            f"the edges of all fragments cut a tensor of shape {source.shape} into {n_cells} cells, above {MAX_CELLS}; "
            "describe it by fewer, larger fragments, or as several tensors"
        )
    if n_dims and any(len(c) < 2 for c in cuts):  # nothing held and nothing needed
        none = np.zeros((0, n_dims), dtype=np.int64)
        return Pieces(none, none, np.zeros(0, dtype=np.int32), (), ())
    held, holder_sets = _paint(cuts, _unique_boxes(source))
    needed, needer_sets = _paint(cuts, _unique_boxes(target))
    cells = np.argwhere(needed > 0)
    lo = np.stack([cuts[d][cells[:, d]] for d in range(n_dims)], axis=1) if n_dims else np.zeros((len(cells), 0), np.int64)
    hi = np.stack([cuts[d][cells[:, d] + 1] for d in range(n_dims)], axis=1) if n_dims else np.zeros((len(cells), 0), np.int64)
    pairs = np.stack([held[needed > 0], needed[needed > 0]], axis=1)
    lost = pairs[:, 0] == 0
    if lost.any():
        i = int(np.argmax(lost))
        who = min(needer_sets.sets[int(pairs[i, 1])])
        raise InfeasibleError(
            f"rank {who} needs {box_text(lo[i], hi[i])} of a tensor of shape {source.shape}, but no source rank holds it"
        )
    patterns, pattern = np.unique(pairs, axis=0, return_inverse=True)
    holders, needers = (_of_patterns(sets, patterns[:, i]) for i, sets in enumerate((holder_sets, needer_sets)))
    return Pieces(lo, hi, pattern.ravel().astype(np.int32), holders, needers)


def _of_patterns(sets: _RankSets, numbers: NDArray[np.integer]) -> tuple[Ranks, ...]:
    """The ranks of each set, one array a set however often it is named: patterns are many, sets are few."""
    found = {number: np.array(sorted(sets.sets[number]), dtype=np.int32) for number in np.unique(numbers).tolist()}
    return tuple(found[number] for number in numbers.tolist())


def split_large(pieces: Pieces, max_elements: int, unit: int = 1) -> Pieces:
    """The same pieces with every one above `max_elements` cut along its leading dims into nearly equal parts, as few as can be.

    A cut along the last dim lies at a multiple of `unit` elements where that many are allowed in a piece; any other is between
    whole rows.
    """
    rows: list[tuple[Ints, Ints, NDArray[np.int32]]] = []
    big = pieces.n_elements > max_elements
    for i in np.flatnonzero(big).tolist():
        lo, hi = _split_box(pieces.lo[i], pieces.hi[i], max_elements, unit if unit <= max_elements else 1)
        rows.append((lo, hi, np.full(len(lo), pieces.pattern[i], dtype=np.int32)))
    if not rows:
        return pieces
    keep = ~big
    lo = np.concatenate([pieces.lo[keep], *(r[0] for r in rows)])
    hi = np.concatenate([pieces.hi[keep], *(r[1] for r in rows)])
    pattern = np.concatenate([pieces.pattern[keep], *(r[2] for r in rows)])
    order = np.lexsort(lo.T[::-1])
    return Pieces(lo[order], hi[order], pattern[order], pieces.holders, pieces.needers)


def _split_box(lo: Ints, hi: Ints, max_elements: int, unit: int) -> tuple[Ints, Ints]:
    """Cut one box into parts of at most `max_elements` (at least 1), along the first dims first."""
    parts_lo, parts_hi = lo[None, :], hi[None, :]
    for dim in range(len(lo)):
        inner = int((hi - lo)[dim + 1 :].prod(dtype=np.int64))
        step = unit if dim == len(lo) - 1 else 1
        first, last = int(lo[dim]) // step, -(-int(hi[dim]) // step)  # in steps, from which the cuts are chosen
        n_parts = -(-(last - first) // max(1, max_elements // inner // step))
        edges = (first + (np.arange(n_parts + 1) * (last - first)) // n_parts) * step
        edges[0], edges[-1] = lo[dim], hi[dim]
        parts_lo = np.repeat(parts_lo, n_parts, axis=0)
        parts_hi = np.repeat(parts_hi, n_parts, axis=0)
        parts_lo[:, dim] = np.tile(edges[:-1], len(parts_lo) // n_parts)
        parts_hi[:, dim] = np.tile(edges[1:], len(parts_hi) // n_parts)
        if inner <= max_elements:
            break
    return parts_lo, parts_hi
