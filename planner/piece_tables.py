"""The pieces of a plan numbered through, proved to be disjoint and to fill what is needed; who holds and who needs each.

Rule: as in `check`, nothing that planning worked out is trusted.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Fragments, Ints, box_text
from shardroute.planner.plans import Boxes, Plan
from shardroute.topologies.errors import PlanError

# Pairs of a piece and a rank, each of which takes some 4 bytes to check. Plans for 16,384 GPUs have some hundred million.
MAX_TABLE: Final = 10**9
# Cells painted at once to see whether pieces overlap; more are taken in parts.
_MAX_CELLS: Final = 2**22
# How often pieces may be cut, over their number, for that: whatever is made of meshes stays below 2.
_MAX_CUT: Final = 64


class PieceTables:
    """Pieces of all tensors numbered through, with who holds and who needs each: `held` and `needed`, bool[n_rows, n_columns].

    A row is a piece of a class; `column` gives that of each rank, and those that neither side uses share the last.
    """

    def __init__(self, plan: Plan) -> None:
        problem = plan.problem
        used = np.union1d(problem.source.ranks, problem.target.ranks)
        self.column = np.full(problem.n_ranks, len(used), dtype=np.int64)
        self.column[used] = np.arange(len(used))
        n_columns = len(used) + 1
        n_rows = sum(len(b.lo) for b in plan.boxes)
        if n_rows * n_columns > MAX_TABLE:
            raise PlanError(f"{n_rows} pieces between {len(used)} ranks are more than can be checked ({MAX_TABLE} pairs)")
        n_pieces = np.array([len(b.lo) for b in plan.boxes], dtype=np.int64)[plan.tensor_class]
        self.first_piece = np.concatenate([[0], np.cumsum(n_pieces)])  # of each tensor
        self.class_first = np.cumsum([0, *(len(b.lo) for b in plan.boxes)])
        held, needed, sizes = (
            [np.zeros((0, n_columns), bool)],
            [np.zeros((0, n_columns), bool)],
            [np.zeros(0, np.int64)],
        )
        for cls, boxes in zip(problem.classes, plan.boxes, strict=True):
            name = problem.tensors[int(cls.members[0])].name
            try:
                check_disjoint(boxes, cls.shape)
                held.append(_containment(cls.source, boxes, self.column, n_columns))
                needed.append(_containment(cls.target, boxes, self.column, n_columns))
                _check_filled(cls.target, boxes)
            except PlanError as error:
                raise PlanError(f"tensor {name}: {error}") from error
            sizes.append(boxes.n_elements * cls.itemsize)
        self.held, self.needed, self.class_bytes = (
            np.concatenate(held),
            np.concatenate(needed),
            np.concatenate(sizes),
        )
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
    painted = np.zeros([len(c) - 1 for c in cuts], dtype=bool)
    first = [np.searchsorted(c, lo[:, d]) for d, c in enumerate(cuts)]
    last = [np.searchsorted(c, hi[:, d]) for d, c in enumerate(cuts)]
    for k in range(len(lo)):
        inside = tuple(slice(first[d][k], last[d][k]) for d in range(len(cuts)))
        cells = painted[inside] if inside else painted.reshape(-1)
        if cells.any():
            return k
        cells[...] = True
    return None


def _check_filled(target: Fragments, boxes: Boxes) -> None:
    corners = np.unique(np.concatenate([target.lo, target.hi], axis=1), axis=0)
    n_dims = len(target.shape)
    for corner in corners:
        lo, hi = corner[:n_dims], corner[n_dims:]
        inside = ((boxes.lo >= lo) & (boxes.hi <= hi)).all(axis=1)
        if boxes.n_elements[inside].sum() != (hi - lo).prod():
            raise PlanError(f"the plan's pieces don't fill the needed box {box_text(lo, hi)}")


def _containment(fragments: Fragments, boxes: Boxes, column: Ints, n_columns: int) -> NDArray[np.bool_]:
    """Which rank holds which box whole in a fragment, bool[n_boxes, n_columns]; `column` is each rank's.

    Raises PlanError when an edge cuts a box.
    """
    corners, inverse = np.unique(np.concatenate([fragments.lo, fragments.hi], axis=1), axis=0, return_inverse=True)
    n_dims = len(fragments.shape)
    inside = np.zeros((len(boxes.lo), n_columns), dtype=bool)
    for i, corner in enumerate(corners):
        lo, hi = corner[:n_dims], corner[n_dims:]
        whole = ((boxes.lo >= lo) & (boxes.hi <= hi)).all(axis=1)
        touches = ((boxes.lo < hi) & (boxes.hi > lo)).all(axis=1)
        if (touches & ~whole).any():
            k = int(np.argmax(touches & ~whole))
            raise PlanError(f"piece {box_text(boxes.lo[k], boxes.hi[k])} is cut by the edge of fragment {box_text(lo, hi)}")
        inside[np.ix_(whole, column[fragments.rank[inverse.ravel() == i]])] = True
    return inside
