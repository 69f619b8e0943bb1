"""Proof that a plan delivers its problem: every needed element once, from a rank that holds it, and nothing else.

The proof trusts nothing that planning worked out. Per class it shows that the plan's pieces are disjoint and that those inside
each needed box fill it (no overlap and equal volumes). Then it follows every step: each read must find the piece there, each
delivery must be needed and the only one, and staging memory must not be overwritten before it is read. Element data is never
touched; the cost grows with the number of bundle entries times the steps that carry them.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Fragments, Ints, box_text
from shardroute.planner.memories import check_memory
from shardroute.planner.plans import SOURCE, TARGET, Boxes, Op, Plan, ranges
from shardroute.planner.sums import check_places, summed_deliveries
from shardroute.topologies.errors import InputError, PlanError

# Pairs of a piece and a rank, each of which takes some 4 bytes to check. Plans for 16,384 GPUs have some hundred million.
MAX_TABLE: Final = 10**9
# Cells painted at once to see whether pieces overlap; more are taken in parts.
_MAX_CELLS: Final = 2**22
# How often pieces may be cut, over their number, for that: whatever is made of meshes stays below 2.
_MAX_CUT: Final = 64


@dataclass(frozen=True, slots=True)
class Proof:
    """What was proved: deliveries of a piece to a rank, and their bytes."""

    n_deliveries: int
    n_bytes: int


def check(plan: Plan) -> Proof:
    """Prove that the plan delivers, or computes its attention call. Raises PlanError naming the tensor, box, rank or step that is
    wrong.
    """
    if plan.attention is not None:
        from shardroute.planner.ring.proofs import check_attention  # which builds on this module

        return check_attention(plan)
    try:
        check_memory(plan.problem.tensors, plan.problem.target)
    except InputError as error:
        raise PlanError(str(error)) from error
    tables = PieceTables(plan)
    deliveries = _sums(plan, tables) if plan.problem.summed else _deliveries(plan, tables)
    if not plan.problem.summed:
        _check_relays(plan, tables, deliveries)
    check_waits(plan)
    _check_slots(plan)
    n_bytes = int(tables.piece_bytes[deliveries.piece].sum())
    return Proof(len(deliveries.step), n_bytes)


def class_containment(fragments: Fragments, boxes: Boxes, column: Ints, n_columns: int) -> NDArray[np.bool_]:
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """One row for each entry of each of some steps: the step, a rank, the global number of the (tensor, piece)."""

    step: Ints
    rank: Ints
    piece: Ints


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
                _check_disjoint(boxes, cls.shape)
                held.append(class_containment(cls.source, boxes, self.column, n_columns))
                needed.append(class_containment(cls.target, boxes, self.column, n_columns))
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


def _check_disjoint(boxes: Boxes, shape: tuple[int, ...]) -> None:
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


def _rows(plan: Plan, tables: PieceTables, steps: Ints, ranks: NDArray[np.integer]) -> _Rows:
    entry, owner = ranges(plan.bundles.ptr, plan.steps.bundle[steps])
    return _Rows(steps[owner], ranks[owner].astype(np.int64), tables.entry_piece[entry].astype(np.int64))


def _deliveries(plan: Plan, tables: PieceTables) -> _Rows:
    """All deliveries to destination weights, proved to be needed, complete and single."""
    steps = plan.steps
    from_source = np.flatnonzero((steps.src_at == SOURCE) & (steps.src >= 0))
    reads = _rows(plan, tables, from_source, steps.src[from_source])
    wrong = ~tables.held[tables.class_row[reads.piece], tables.column[reads.rank]]
    if wrong.any():
        i = int(np.argmax(wrong))
        raise PlanError(
            f"step {reads.step[i]}: rank {reads.rank[i]} sends {tables.name(plan, int(reads.piece[i]))}, which it doesn't hold"
        )
    for step in np.flatnonzero(steps.op == Op.ALL_GATHER).tolist():
        row = slice(plan.bundles.ptr[steps.bundle[step]], plan.bundles.ptr[steps.bundle[step] + 1])
        members = tables.column[plan.group(int(steps.group[step]))]
        held = tables.held[tables.class_row[tables.entry_piece[row]]][:, members].any(axis=1)
        if not held.all():
            piece = int(tables.entry_piece[row][np.argmin(held)])
            raise PlanError(f"step {step}: no rank of the all-gather holds {tables.name(plan, piece)}")
    if ((steps.dst_at == TARGET) & (steps.op != Op.COPY) & (steps.op != Op.BARRIER)).any():
        raise PlanError("a collective must deliver to a staging slot")

    arriving = np.flatnonzero((steps.dst_at == TARGET) & (steps.op == Op.COPY))
    return _single(plan, tables, _rows(plan, tables, arriving, steps.dst[arriving]))


def _sums(plan: Plan, tables: PieceTables) -> _Rows:
    """All sums that land in destination weights, proved to have every addend once, to be needed, complete and single."""
    check_places(plan)
    entry_piece = tables.entry_piece.astype(np.int64)
    entry_row = tables.class_row[entry_piece]
    return _single(
        plan, tables, _Rows(*summed_deliveries(plan, tables.held, tables.needed, tables.column, entry_row, entry_piece))
    )


def _single(plan: Plan, tables: PieceTables, found: _Rows) -> _Rows:
    """The deliveries by piece and rank, proved to be needed, complete and single."""
    order = np.lexsort((found.rank, found.piece))
    found = _Rows(found.step[order], found.rank[order], found.piece[order])
    wrong = ~tables.needed[tables.class_row[found.piece], tables.column[found.rank]]
    if wrong.any():
        i = int(np.argmax(wrong))
        raise PlanError(
            f"step {found.step[i]}: rank {found.rank[i]} gets {tables.name(plan, int(found.piece[i]))}, which it doesn't need"
        )
    twice = (np.diff(found.piece) == 0) & (np.diff(found.rank) == 0)
    if twice.any():
        i = int(np.argmax(twice))
        raise PlanError(
            f"steps {found.step[i]} and {found.step[i + 1]} both deliver {tables.name(plan, int(found.piece[i]))} "
            f"to rank {found.rank[i]}"
        )
    wanted = tables.needed.sum(axis=1)[tables.class_row]
    missing = wanted != np.bincount(found.piece, minlength=len(wanted))
    if missing.any():
        piece = int(np.argmax(missing))
        got = found.rank[found.piece == piece]
        needing = tables.needed[tables.class_row[piece]][tables.column]
        rank = next(r for r in np.flatnonzero(needing).tolist() if r not in got)
        raise PlanError(f"nothing delivers {tables.name(plan, piece)} to rank {rank}, which needs it")
    return found


def _check_relays(plan: Plan, tables: PieceTables, deliveries: _Rows) -> None:
    """A read of destination weights must wait for the delivery of that piece to that rank."""
    steps = plan.steps
    relaying = np.flatnonzero(steps.src_at == TARGET)
    reads = _rows(plan, tables, relaying, steps.src[relaying])
    n_ranks = plan.problem.n_ranks
    key = deliveries.piece * n_ranks + deliveries.rank
    wanted = reads.piece * n_ranks + reads.rank
    at = np.minimum(np.searchsorted(key, wanted), max(len(key) - 1, 0))
    if len(wanted) and (not len(key) or (key[at] != wanted).any()):
        i = int(np.argmax(key[at] != wanted)) if len(key) else 0
        raise PlanError(
            f"step {reads.step[i]}: rank {reads.rank[i]} relays {tables.name(plan, int(reads.piece[i]))}, which it never gets"
        )
    waits = np.repeat(np.arange(len(steps)), np.diff(steps.after_ptr)) * len(steps) + steps.after
    pairs = np.unique(reads.step * len(steps) + (deliveries.step[at] if len(at) else at))
    unordered = ~np.isin(pairs, waits)
    if unordered.any():
        step, delivery = divmod(int(pairs[np.argmax(unordered)]), len(steps))
        raise PlanError(f"step {step} relays what step {delivery} delivers, but doesn't wait for it")


def check_waits(plan: Plan) -> None:
    """Whoever drives a step must itself take part in the steps that it waits for, else it can't know that they are complete."""
    steps = plan.steps
    owner = np.repeat(np.arange(len(steps)), np.diff(steps.after_ptr))
    after = steps.after
    ours, theirs = steps.op[owner] == Op.COPY, steps.op[after] == Op.COPY
    blind = ours & theirs & (steps.src[after] != steps.src[owner]) & (steps.dst[after] != steps.src[owner])
    blind |= ours & ~theirs & ~_in_group(plan, steps.group[after], steps.src[owner])
    blind |= ~ours & theirs & ~(
        _in_group(plan, steps.group[owner], steps.src[after]) | _in_group(plan, steps.group[owner], steps.dst[after])
    )
    apart: dict[tuple[int, int], bool] = {}
    for i in np.flatnonzero(~ours & ~theirs).tolist():
        pair = int(steps.group[owner[i]]), int(steps.group[after[i]])
        if pair not in apart:
            apart[pair] = not len(np.intersect1d(plan.group(pair[0]), plan.group(pair[1])))
        blind[i] = apart[pair]
    if blind.any():
        i = int(np.argmax(blind))
        raise PlanError(f"step {owner[i]} waits for step {after[i]}, in which none of its driving ranks takes part")


def _in_group(plan: Plan, group: NDArray[np.int32], rank: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Whether each rank is in each group; False for group -1."""
    owner = np.repeat(np.arange(len(plan.group_ptr) - 1), np.diff(plan.group_ptr))
    n_ranks = plan.problem.n_ranks
    return np.isin(group.astype(np.int64) * n_ranks + rank, owner * n_ranks + plan.group_ranks)


@dataclass(slots=True)
class _Written:
    """Bytes lo to hi of a slot: the step that wrote them last, its bundle, and who has to be done before they are overwritten."""

    step: int
    bundle: int
    lo: int
    hi: int
    uses: list[int]


def _check_slots(plan: Plan) -> None:
    """Reads of a slot must find the piece where the last write put it; writes must wait for all use of what they overwrite.

    Steps may write different bytes of one slot independently of each other; the bytes of a step are those from the first of its
    bundle to the last.
    """
    steps = plan.steps
    staged = np.flatnonzero((steps.src_at >= 0) | (steps.dst_at >= 0))
    layouts = _Layouts(plan)
    slots: dict[tuple[int, int], list[_Written]] = defaultdict(list)
    for step in staged.tolist():
        after = set(steps.after[steps.after_ptr[step] : steps.after_ptr[step + 1]].tolist())
        bundle, src, src_at, dst_at = (int(c[step]) for c in (steps.bundle, steps.src, steps.src_at, steps.dst_at))
        lo, hi = layouts.span(bundle)
        if src_at >= 0:
            there = [w for w in slots[src, src_at] if w.lo < hi and lo < w.hi]
            written = [w for w in there if w.step in after]
            if not layouts.holds(tuple(w.bundle for w in written), bundle):
                if not written or layouts.holds(tuple(w.bundle for w in there), bundle):
                    raise PlanError(f"step {step} reads slot {src_at} of rank {src} without waiting for the step that fills it")
                by = " and ".join(str(w.step) for w in written)
                raise PlanError(f"step {step} reads pieces from slot {src_at} of rank {src} that step {by} didn't put there")
            for w in written:  # who waits for a reader waits for the writer too
                w.uses = [*(use for use in w.uses if use != w.step), step]
        if dst_at >= 0:
            _check_room(plan, step, bundle, dst_at)
            members = (
                [int(steps.dst[step])]
                if steps.op[step] == Op.COPY
                else [r for r in plan.group(int(steps.group[step])).tolist() if r != src]
            )
            for rank in members:
                held = slots[rank, dst_at]
                over = [w for w in held if w.lo < hi and lo < w.hi]
                if not layouts.known_done(after, [use for w in over for use in w.uses]):
                    raise PlanError(f"step {step} overwrites slot {dst_at} of rank {rank} without waiting for its last use")
                slots[rank, dst_at] = [*(w for w in held if w not in over), _Written(step, bundle, lo, hi, [step])]


class _Layouts:
    """Where the pieces of each bundle lie in a slot, and what steps wait for; each is worked out once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._spans: dict[int, tuple[int, int]] = {}
        self._layouts: dict[int, dict[tuple[int, int], int]] = {}
        self._holds: dict[tuple[tuple[int, ...], int], bool] = {}
        self._after: dict[int, frozenset[int]] = {}

    def span(self, bundle: int) -> tuple[int, int]:
        """The first byte of a bundle's pieces in a slot, and the end of the last; (0, 0) for an empty one."""
        if bundle not in self._spans:
            row = slice(self._plan.bundles.ptr[bundle], self._plan.bundles.ptr[bundle + 1])
            start = self._plan.bundles.offset[row]
            end = start + self._plan.entry_bytes[row]
            self._spans[bundle] = (int(start.min()), int(end.max())) if len(start) else (0, 0)
        return self._spans[bundle]

    def holds(self, written: tuple[int, ...], bundle: int) -> bool:
        """Whether the bundles that were written hold all pieces of the other, where it has them."""
        key = written, bundle
        if key not in self._holds:
            held = {k: v for one in written for k, v in self._layout(one).items()}
            self._holds[key] = all(held.get(piece) == offset for piece, offset in self._layout(bundle).items())
        return self._holds[key]

    def _layout(self, bundle: int) -> dict[tuple[int, int], int]:
        if bundle not in self._layouts:
            bundles = self._plan.bundles
            row = slice(bundles.ptr[bundle], bundles.ptr[bundle + 1])
            keys = zip(bundles.tensor[row].tolist(), bundles.piece[row].tolist(), strict=True)
            self._layouts[bundle] = dict(zip(keys, bundles.offset[row].tolist(), strict=True))
        return self._layouts[bundle]

    def known_done(self, after: set[int], uses: list[int]) -> bool:
        """Whether a step that waits for `after` waits for all `uses`: straight, or by a step of `after` that does (a credit, a
        barrier).
        """
        left = [use for use in uses if use not in after]
        if not left:
            return True
        steps = self._plan.steps
        for step in sorted(after):
            if step not in self._after:
                self._after[step] = frozenset(steps.after[steps.after_ptr[step] : steps.after_ptr[step + 1]].tolist())
            left = [use for use in left if use not in self._after[step]]
        return not left


def _check_room(plan: Plan, step: int, bundle: int, slot: int) -> None:
    row = slice(plan.bundles.ptr[bundle], plan.bundles.ptr[bundle + 1])
    order = np.argsort(plan.bundles.offset[row], kind="stable")
    start = plan.bundles.offset[row][order]
    end = start + plan.entry_bytes[row][order]
    if len(start) and (start[0] < 0 or end.max() > plan.slot_bytes[slot] or (end[:-1] > start[1:]).any()):
        raise PlanError(f"step {step}: pieces overlap in slot {slot}, or leave its {plan.slot_bytes[slot]} bytes")
