"""The pieces of a plan numbered through, proved to be disjoint and to fill what is needed; who holds and who needs each.

Rule: as in `check`, nothing that planning worked out is trusted.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Fragments, Ints, Ranks, box_text
from shardroute.planner.plans import Boxes, Plan, ranges
from shardroute.planner.shares import Told, parts
from shardroute.topologies.errors import PlanError

# Pairs of a piece and a rank that hold or need, of all classes: 4 bytes each, and some 16 while they are sorted.
MAX_PAIRS: Final = 10**9
# Pairs of a piece of one class and any rank: 2**23 of them are looked at in some 20 ms, so a minute at most.
MAX_TABLE: Final = 2**34
# Cells painted at once to see whether pieces overlap; more are taken in parts.
_MAX_CELLS: Final = 2**22
# How often pieces may be cut, over their number, for that: whatever is made of meshes stays below 2.
_MAX_CUT: Final = 64


@dataclass(frozen=True, slots=True)
class Members:
    """The columns that are members of each row, CSR: those of row r are column[ptr[r]:ptr[r + 1]], ascending."""

    ptr: Ints
    column: Ranks
    n_columns: int

    def of(self, row: int) -> Ranks:
        """The members of a row."""
        return self.column[self.ptr[row] : self.ptr[row + 1]]

    def rows(self, rows: Ints) -> NDArray[np.bool_]:
        """These rows with a cell for each column, bool[n, n_columns]."""
        cells = np.zeros((len(rows), self.n_columns), dtype=bool)
        member, row = ranges(self.ptr, rows)
        cells[row, self.column[member]] = True
        return cells


class PieceTables:
    """Pieces of all tensors numbered through, with who holds and who needs each: `held` and `needed`.

    A row is a piece of a class; `column` gives that of each rank, and those that neither side uses share the last. progress is
    told the share of the classes that is done.
    """

    def __init__(self, plan: Plan, progress: Told | None = None) -> None:
        problem = plan.problem
        used = np.union1d(problem.source.ranks, problem.target.ranks)
        self.column = np.full(problem.n_ranks, len(used), dtype=np.int64)
        self.column[used] = np.arange(len(used))
        n_columns = len(used) + 1
        if (n_rows := max((len(b.lo) for b in plan.boxes), default=0)) * n_columns > MAX_TABLE:
            raise PlanError(f"{n_rows} pieces between {len(used)} ranks are more than can be checked ({MAX_TABLE} pairs)")
        n_pieces = np.array([len(b.lo) for b in plan.boxes], dtype=np.int64)[plan.tensor_class]
        self.first_piece = np.concatenate([[0], np.cumsum(n_pieces)])  # of each tensor
        self.class_first = np.cumsum([0, *(len(b.lo) for b in plan.boxes)])
        held, needed, sizes = [], [], [np.zeros(0, np.int64)]
        n_left = MAX_PAIRS
        classes = list(zip(problem.classes, plan.boxes, strict=True))
        told = parts(progress, [len(c.source) + len(c.target) + len(boxes.lo) for c, boxes in classes])
        for (cls, boxes), done in zip(classes, told, strict=True):
            name = problem.tensors[int(cls.members[0])].name
            try:
                check_disjoint(boxes, cls.shape)
                near = _ByEdge(boxes)
                held.append(_containment(cls.source, boxes, near, self.column, n_left))
                needed.append(_containment(cls.target, boxes, near, self.column, n_left - len(held[-1][0])))
                _check_filled(cls.target, boxes, near)
            except PlanError as error:
                raise PlanError(f"tensor {name}: {error}") from error
            n_left -= len(held[-1][0]) + len(needed[-1][0])
            sizes.append(boxes.n_elements * cls.itemsize)
            done(1.0)
        self.held, self.needed = (_members(side, self.class_first, n_columns) for side in (held, needed))
        self.class_bytes = np.concatenate(sizes)
        self.tensor_of = np.repeat(np.arange(len(n_pieces)), n_pieces)
        self.class_row = (
            self.class_first[plan.tensor_class[self.tensor_of]]
            + np.arange(self.first_piece[-1])
            - self.first_piece[self.tensor_of]
        )
        self.piece_bytes = self.class_bytes[self.class_row]
        self.entry_piece = self.first_piece[plan.bundles.tensor] + plan.bundles.piece

    def name(self, plan: Plan, piece: int) -> str:
        """`TENSOR [0:4, 2:6]` for a global piece number."""
        tensor = int(self.tensor_of[piece])
        boxes, k = plan.boxes[plan.tensor_class[tensor]], piece - int(self.first_piece[tensor])
        return f"{plan.problem.tensors[tensor].name} {box_text(boxes.lo[k], boxes.hi[k])}"


def check_disjoint(boxes: Boxes, shape: tuple[int, ...]) -> None:
    """Raise PlanError unless the boxes lie in a tensor of this shape and none overlaps another."""
    if not len(boxes.lo):
        return
    if ((boxes.lo < 0) | (boxes.hi > np.array(shape)) | (boxes.lo >= boxes.hi)).any():
        raise PlanError("a piece is empty or leaves the tensor")
    todo = [(np.arange(len(boxes.lo)), boxes.lo, boxes.hi)]
    n_seen = 0
    while todo:
        row, lo, hi = todo.pop()
        n_seen += len(row)
        if n_seen > _MAX_CUT * (len(boxes.lo) + _MAX_CUT):
            raise PlanError(f"{len(boxes.lo)} pieces lie too scattered to prove that they don't overlap")
        cuts = [np.unique(np.concatenate([lo[:, d], hi[:, d]])) for d in range(len(shape))]
        n_cells = math.prod(len(c) - 1 for c in cuts)
        if n_cells <= _MAX_CELLS:
            found = _painted_twice(lo, hi, cuts)
            if found is not None:
                k = int(row[found])
                raise PlanError(f"piece {box_text(boxes.lo[k], boxes.hi[k])} overlaps another piece")
            continue
        dim = max(range(len(shape)), key=lambda d: len(cuts[d]))
        middle = cuts[dim][len(cuts[dim]) // 2]
        below, above = lo[:, dim] < middle, hi[:, dim] > middle
        lower, upper = hi[below].copy(), lo[above].copy()
        lower[:, dim], upper[:, dim] = np.minimum(lower[:, dim], middle), np.maximum(upper[:, dim], middle)
        todo += [(row[below], lo[below], lower), (row[above], upper, hi[above])]


def _painted_twice(lo: Ints, hi: Ints, cuts: Sequence[Ints]) -> int | None:
    """The first box that overlaps one before it: on the grid of all edges it paints a cell that is painted already."""
    first = [np.searchsorted(c, lo[:, d]) for d, c in enumerate(cuts)]
    last = [np.searchsorted(c, hi[:, d]) for d, c in enumerate(cuts)]
    if cuts and not _overlaps(first, last, [len(c) for c in cuts]):
        return None
    painted = np.zeros([len(c) - 1 for c in cuts], dtype=bool)
    for k in range(len(lo)):
        inside = tuple(slice(first[d][k], last[d][k]) for d in range(len(cuts)))
        cells = painted[inside] if inside else painted.reshape(-1)
        if cells.any():
            return k
        cells[...] = True
    return None


def _overlaps(first: Sequence[Ints], last: Sequence[Ints], sizes: Sequence[int]) -> bool:
    """Whether a cell of the grid lies in two boxes: signs at their corners add up to how many each cell lies in."""
    layers = np.zeros(sizes, dtype=np.int32)
    for ends in itertools.product((0, 1), repeat=len(sizes)):
        corner = tuple(last[d] if end else first[d] for d, end in enumerate(ends))
        np.add.at(layers, corner, -1 if sum(ends) % 2 else 1)
    for d in range(len(sizes)):
        np.cumsum(layers, axis=d, out=layers)
    return bool((layers > 1).any())


class _ByEdge:
    """Boxes in order along the dim that cuts them most, so that those near another box are found without looking at all."""

    def __init__(self, boxes: Boxes) -> None:
        n_dims = boxes.lo.shape[1]
        self._dim = max(range(n_dims), key=lambda d: len(distinct(boxes.lo[:, d])), default=None)
        if self._dim is None:
            self._rows = np.arange(len(boxes.lo))
            return
        self._rows = np.argsort(boxes.lo[:, self._dim], kind="stable")
        self._lo = boxes.lo[self._rows, self._dim]
        self._reach = np.maximum.accumulate(boxes.hi[self._rows, self._dim])

    def rows(self, lo: Ints, hi: Ints) -> Ints:
        """The boxes that may touch this one, ascending: all that do are among them."""
        if self._dim is None:
            return self._rows
        first = np.searchsorted(self._reach, lo[self._dim], side="right")
        return np.sort(self._rows[first : np.searchsorted(self._lo, hi[self._dim])])


def _check_filled(target: Fragments, boxes: Boxes, near: _ByEdge) -> None:
    corners = np.unique(np.concatenate([target.lo, target.hi], axis=1), axis=0)
    n_dims = len(target.shape)
    n_elements = boxes.n_elements
    for corner in corners:
        lo, hi = corner[:n_dims], corner[n_dims:]
        rows = near.rows(lo, hi)
        inside = ((boxes.lo[rows] >= lo) & (boxes.hi[rows] <= hi)).all(axis=1)
        if n_elements[rows[inside]].sum() != (hi - lo).prod():
            raise PlanError(f"the plan's pieces don't fill the needed box {box_text(lo, hi)}")


def _containment(fragments: Fragments, boxes: Boxes, near: _ByEdge, column: Ints, most: int) -> tuple[Ints, Ranks]:
    """Which rank holds which box whole in a fragment: boxes, ascending, and columns, each pair once; `column` is each rank's.

    Raises PlanError when an edge cuts a box, and for more than `most` pairs.
    """
    corners, inverse = np.unique(np.concatenate([fragments.lo, fragments.hi], axis=1), axis=0, return_inverse=True)
    n_dims, width = len(fragments.shape), int(column.max(initial=0)) + 1
    of_corner = np.argsort(inverse.ravel(), kind="stable")
    starts = np.searchsorted(inverse.ravel()[of_corner], np.arange(len(corners) + 1))
    found = [np.zeros(0, np.int64)]
    for i, corner in enumerate(corners):
        lo, hi = corner[:n_dims], corner[n_dims:]
        rows = near.rows(lo, hi)
        whole = ((boxes.lo[rows] >= lo) & (boxes.hi[rows] <= hi)).all(axis=1)
        touches = ((boxes.lo[rows] < hi) & (boxes.hi[rows] > lo)).all(axis=1)
        if (touches & ~whole).any():
            k = int(rows[np.argmax(touches & ~whole)])
            raise PlanError(f"piece {box_text(boxes.lo[k], boxes.hi[k])} is cut by the edge of fragment {box_text(lo, hi)}")
        columns = np.unique(column[fragments.rank[of_corner[starts[i] : starts[i + 1]]]])
        most -= int(np.count_nonzero(whole)) * len(columns)
        if most < 0:
            raise PlanError(f"ranks hold and need pieces more than {MAX_PAIRS} times, which is more than can be checked")
        found.append((rows[whole][:, None] * width + columns).ravel())
    box, member = np.divmod(distinct(np.concatenate(found)), width)
    return box, member.astype(np.int32)


def distinct(values: Ints) -> Ints:
    """The values, none below 0, ascending, each once."""
    # NumPy's `unique` hashes from 2.3 on: 93 million deliveries took it 10 s where sorting takes one.
    ordered = np.sort(values)
    found: Ints = ordered[np.diff(ordered, prepend=-1) != 0]
    return found


def _members(by_class: Sequence[tuple[Ints, Ranks]], first: Ints, n_columns: int) -> Members:
    """The pairs of all classes as one; row `first[k]` is the first of class k."""
    row = np.concatenate([np.zeros(0, np.int64), *(box + start for (box, _), start in zip(by_class, first, strict=False))])
    column = np.concatenate([np.zeros(0, np.int32), *(member for _, member in by_class)])
    return Members(np.searchsorted(row, np.arange(int(first[-1]) + 1)), column, n_columns)
