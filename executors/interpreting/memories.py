"""Where everything lies on each rank: one arena a rank, with its source buffers, its target buffers, then its slots.

Rule: an address is a byte offset in the arena of its rank, so no pointer appears here, and a transport may put an arena
where it likes (a shared file, a symmetric heap). All lookups take and return columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.adding import CODES, COPIES
from shardroute.planner.layouts.fragments import Fragments, Ints, dense_strides
from shardroute.planner.layouts.tensors import DTYPES, Layout
from shardroute.planner.plans import Plan, ranges
from shardroute.planner.shares import Told
from shardroute.topologies.errors import InputError, PlanError

# A cache line on x86 (64) and on Apple's Arm cores (128): buffers of two ranks never share one.
ALIGNMENT = 128
# As many bytes as are filled, or compared, in the time that a fragment takes besides: 20 to 25 us against 0.55 to 0.8 ns a byte
# (a core of a Xeon, 2026-12-01).
_ROW_BYTES: Final = 35_000


class Part(IntEnum):
    """What a buffer of an arena is, in the order in which arenas hold them."""

    SOURCE = 0
    TARGET = 1
    SLOT = 2


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """The buffers of all arenas, ordered by rank, then part, then id; buffers of one part lie in that order, aligned.

    part      uint8[n]   a Part
    id        int64[n]   index into `names`; for a slot its number in the plan
    offset    int64[n]   where it begins in its rank's arena
    n_bytes   int64[n]
    target_at, slots_at, arena_bytes   int64[n_ranks]: where the target part and the slots begin, and the arena's end
    """

    names: tuple[str, ...]
    rank: NDArray[np.int32]
    part: NDArray[np.uint8]
    id: Ints
    offset: Ints
    n_bytes: Ints
    target_at: Ints
    slots_at: Ints
    arena_bytes: Ints

    def begins(self, rank: NDArray[np.integer], address: Ints) -> NDArray[np.bool_]:
        """Whether each address of a rank's arena is where one of its buffers begins."""
        base = np.cumsum(self.arena_bytes) - self.arena_bytes  # arenas laid end to end
        found: NDArray[np.bool_] = np.isin(base[rank] + address, base[self.rank] + self.offset)
        return found

    def describe(self, rank: int, address: int) -> str:
        """The buffer that holds a byte of the rank's arena, as words."""
        row = int(np.flatnonzero((self.rank == rank) & (self.offset <= address))[-1])
        name = f"slot {self.id[row]}" if self.part[row] == Part.SLOT else f"buffer {self.names[int(self.id[row])]}"
        return f"byte {address - self.offset[row]} of {name} on rank {rank}"


@dataclass(frozen=True, slots=True, eq=False)
class Holdings:
    """Every fragment of every tensor on every rank, ordered by rank, then side, then tensor.

    ptr        int64[n_ranks + 1]   rank r has rows ptr[r] to ptr[r + 1]
    target     bool[n]              on the target side
    tensor     int32[n]
    address    int64[n]             of the fragment's first element
    box        int64[n]             row of the columns that follow, which tensors of one class share
    lo, extent, stride   int64[n_boxes, n_dims]: the box, and the bytes from neighbour to neighbour; leading dims that a tensor
                         lacks have extent 1
    index_stride         int64[n_boxes, n_dims]: row-major strides of the whole tensor, in elements
    itemsize   int64[n_boxes]
    adds       uint8[n_boxes]   the code of `adding` of the dtype as which source fragments are added up; COPIES where they aren't
    """

    ptr: Ints
    target: NDArray[np.bool_]
    tensor: NDArray[np.int32]
    address: Ints
    box: Ints
    lo: Ints
    extent: Ints
    stride: Ints
    index_stride: Ints
    itemsize: Ints
    adds: NDArray[np.uint8]

    def rows(self, rank: int, *, target: bool) -> list[int]:
        """The rows of a rank on one side."""
        first, last = int(self.ptr[rank]), int(self.ptr[rank + 1])
        found: list[int] = (np.flatnonzero(self.target[first:last] == target) + first).tolist()
        return found

    def each(self, rank: int, told: Told, *, target: bool) -> Iterator[int]:
        """The same one by one; as the next is asked for, tells the share of the work that those before it are."""
        rows = self.rows(rank, target=target)
        boxes = self.box[rows]
        n_bytes = self.extent[boxes].prod(axis=1) * self.itemsize[boxes]
        done = np.cumsum(n_bytes + _ROW_BYTES)
        for row, share in zip(rows, (done / done[-1:]).tolist(), strict=True):
            yield row
            told(share)


class Memory:
    """Buffers, holdings and pieces of a plan, with the lookups that turn a place into addresses.

    Boxes are numbered through: `box_rank` and the columns of Holdings say what each is. A piece number here counts through
    all classes: `piece_number(tensor, piece)`.
    """

    def __init__(self, plan: Plan) -> None:
        problem = plan.problem
        self.plan = plan
        self.n_dims = max([2, *(len(c.shape) for c in problem.classes)])
        self.itemsize: Ints = np.array([DTYPES[t.dtype] for t in problem.tensors], dtype=np.int64)
        self.class_itemsize: Ints = np.array([c.itemsize for c in problem.classes], dtype=np.int64)
        self._member: Ints = np.zeros(len(problem.tensors), dtype=np.int64)
        for cls in problem.classes:
            self._member[cls.members] = np.arange(len(cls.members))
        self._pieces()
        self._number_boxes()
        self._place_buffers()

    def _pieces(self) -> None:
        plan, n_dims = self.plan, self.n_dims
        counts = [len(b.lo) for b in plan.boxes]
        self.piece_base: Ints = np.cumsum([0, *counts], dtype=np.int64)
        self.piece_lo = np.zeros((int(self.piece_base[-1]), n_dims), dtype=np.int64)
        self.piece_extent = np.ones_like(self.piece_lo)
        for i, (boxes, cls) in enumerate(zip(plan.boxes, plan.problem.classes, strict=True)):
            n, shape = len(boxes.lo), np.array(cls.shape, dtype=np.int64)
            if boxes.lo.shape != (n, len(shape)) or boxes.hi.shape != boxes.lo.shape:
                raise PlanError(f"pieces of class {i}: boxes of shape {boxes.lo.shape}, the tensors have {len(shape)} dims")
            if ((boxes.lo < 0) | (boxes.lo > boxes.hi) | (boxes.hi > shape)).any():
                raise PlanError(f"pieces of class {i}: a box leaves the tensor of shape {cls.shape} or ends before it begins")
            rows = slice(int(self.piece_base[i]), int(self.piece_base[i + 1]))
            self.piece_lo[rows, n_dims - len(shape) :] = boxes.lo
            self.piece_extent[rows, n_dims - len(shape) :] = boxes.hi - boxes.lo

    def _number_boxes(self) -> None:
        """Number the fragments of all classes: first those of the source side, then those of the target side."""
        sides: list[Fragments] = [c.source for c in self.plan.problem.classes] + [c.target for c in self.plan.problem.classes]
        n_dims = self.n_dims
        self._n_boxes: Ints = np.array([len(f) for f in sides], dtype=np.int64)
        self._box_base: Ints = np.cumsum([0, *self._n_boxes], dtype=np.int64)
        n = int(self._box_base[-1])
        self.box_rank = np.concatenate([np.zeros(0, np.int32), *(f.rank for f in sides)])
        self.box_lo, self.box_strides = np.zeros((n, n_dims), dtype=np.int64), np.zeros((n, n_dims), dtype=np.int64)
        self.box_extent = np.ones((n, n_dims), dtype=np.int64)
        for i, fragments in enumerate(sides):
            rows = slice(int(self._box_base[i]), int(self._box_base[i + 1]))
            dims = slice(n_dims - len(fragments.shape), None)
            self.box_lo[rows, dims], self.box_extent[rows, dims] = fragments.lo, fragments.extent
            self.box_strides[rows, dims] = fragments.strides

    def _place_buffers(self) -> None:
        plan, problem = self.plan, self.plan.problem
        names: dict[str, int] = {}
        ids = [_buffer_ids(layout, names) for layout in (problem.source, problem.target)]
        n_ids = max(len(names), len(plan.slot_bytes), 1)
        n_classes = len(problem.classes)
        empty = np.zeros(0, dtype=np.int64)
        keys, sizes, tensors, boxes, offsets = [empty], [empty], [empty], [empty], [empty]
        for k in range(2 * n_classes):
            side, cls = (Part.SOURCE, problem.classes[k]) if k < n_classes else (Part.TARGET, problem.classes[k - n_classes])
            fragments = cls.target if side else cls.source
            ptr, flat = ids[side]
            n_members, n_boxes = len(cls.members), len(fragments)
            name = flat[np.repeat(ptr[cls.members], n_boxes) + np.tile(fragments.buffer, n_members)]
            keys.append((np.tile(fragments.rank, n_members) * np.int64(len(Part)) + side) * n_ids + name)
            sizes.append(np.tile(fragments.buffer_size, n_members) * cls.itemsize)
            offsets.append(np.tile(fragments.offset, n_members) * cls.itemsize)
            tensors.append(np.repeat(cls.members, n_boxes))
            boxes.append(np.tile(np.arange(n_boxes) + self._box_base[k], n_members))
        self._row_base: Ints = np.cumsum([0, *(len(rows) for rows in keys[1:])], dtype=np.int64)
        n_rows = int(self._row_base[-1])
        users = plan.slot_users
        keys.append((users[:, 0] * len(Part) + Part.SLOT) * n_ids + users[:, 1])
        sizes.append(plan.slot_bytes[users[:, 1]])
        key, size = np.concatenate(keys), np.concatenate(sizes)

        unique, inverse = np.unique(key, return_inverse=True)
        inverse = inverse.ravel()
        n_bytes = np.zeros(len(unique), dtype=np.int64)
        n_bytes[inverse] = size
        if (n_bytes[inverse] != size).any():
            i = int(np.argmax(n_bytes[inverse] != size))
            rank, name_id = int(key[i] // n_ids // len(Part)), int(key[i] % n_ids)
            raise InputError(
                f"buffer {list(names)[name_id]} on rank {rank}: one tensor says that it has {size[i]} bytes, another "
                f"{n_bytes[inverse[i]]}; tensors that share a buffer must agree on its size"
            )
        if len(n_bytes) and n_bytes.astype(np.float64).sum() > 2**62:
            raise PlanError("the buffers of this plan together exceed 2^62 bytes")
        rank_part, which = unique // n_ids, unique % n_ids
        ranks = rank_part // len(Part)
        taken = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        end = np.concatenate([[0], np.cumsum(taken)])
        starts = np.searchsorted(rank_part, np.arange(problem.n_ranks * len(Part) + 1))
        bounds = end[starts]  # where each (rank, part) begins if all arenas followed each other
        arena = bounds[:: len(Part)]
        self._key, self._n_ids = unique, n_ids
        self.buffers = Buffers(
            tuple(names), ranks.astype(np.int32), (rank_part % len(Part)).astype(np.uint8), which,
            end[:-1] - arena[ranks], n_bytes,
            bounds[1 :: len(Part)] - arena[:-1], bounds[2 :: len(Part)] - arena[:-1], np.diff(arena),
        )  # fmt: skip
        self._address = self.buffers.offset[inverse[:n_rows]] + np.concatenate(offsets)
        self._row_tensor, self._row_box = np.concatenate(tensors), np.concatenate(boxes)

    def holdings(self) -> Holdings:
        """All fragments with their addresses, rank by rank: what a rank fills and verifies."""
        rank = self.box_rank[self._row_box]
        target = self._row_box >= self._box_base[len(self.plan.problem.classes)]
        order = np.lexsort((self._row_tensor, target, rank))
        classes = self.plan.problem.classes
        shape = np.ones((2 * len(classes), self.n_dims), dtype=np.int64)
        for i, cls in enumerate(classes * 2):
            shape[i, self.n_dims - len(cls.shape) :] = cls.shape
        group = np.repeat(np.arange(2 * len(classes)), self._n_boxes)
        itemsize = np.tile(self.class_itemsize, 2)[group]
        codes = [CODES.get(cls.dtype, COPIES) if self.plan.problem.summed else COPIES for cls in classes * 2]
        return Holdings(
            np.searchsorted(rank[order], np.arange(self.plan.problem.n_ranks + 1)), target[order],
            self._row_tensor[order].astype(np.int32), self._address[order], self._row_box[order],
            self.box_lo, self.box_extent, self.box_strides * itemsize[:, None], dense_strides(shape)[group], itemsize,
            np.array(codes, dtype=np.uint8)[group],
        )  # fmt: skip

    def piece_number(self, tensor: NDArray[np.integer], piece: NDArray[np.integer]) -> Ints:
        """The number of each piece among those of all classes."""
        number: Ints = self.piece_base[self.plan.tensor_class[tensor]] + piece
        return number

    def slot_address(self, rank: NDArray[np.int64], slot: NDArray[np.int64]) -> Ints:
        """Where each slot begins; every (rank, slot) asked for must be in the plan's slot_users."""
        key = (rank * len(Part) + Part.SLOT) * self._n_ids + slot
        return self.buffers.offset[np.searchsorted(self._key, key)]

    def locate(self, part: Part, rank: Ints, tensor: NDArray[np.integer], piece: NDArray[np.integer]) -> tuple[Ints, Ints, Ints]:
        """The fragments that contain each (rank, tensor, piece in its class): row asked for, address of the piece, box.

        One row of answers a fragment, ordered by the row asked for, then by fragment; none where nothing contains the piece.
        """
        classes = self.plan.tensor_class[tensor]
        order = np.argsort(classes, kind="stable")
        first = np.searchsorted(classes[order], np.arange(len(self.plan.boxes) + 1))
        rows, boxes = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for cls in np.flatnonzero(np.diff(first)).tolist():
            asked = order[first[cls] : first[cls + 1]]
            row, box = self._locate_in_class(part, cls, rank[asked], piece[asked])
            rows.append(asked[row])
            boxes.append(box)
        row, box = np.concatenate(rows), np.concatenate(boxes)
        order = np.lexsort((box, row))
        row, box = row[order], box[order]
        group = classes[row] + part * len(self.plan.boxes)
        held = self._row_base[group] + self._member[tensor[row]] * self._n_boxes[group] + box - self._box_base[group]
        inside = self.piece_lo[self.piece_base[classes[row]] + piece[row]] - self.box_lo[box]
        return row, self._address[held] + (inside * self.box_strides[box]).sum(axis=1) * self.itemsize[tensor[row]], box

    def _locate_in_class(self, part: Part, cls: int, rank: Ints, piece: NDArray[np.integer]) -> tuple[Ints, Ints]:
        group = cls + part * len(self.plan.boxes)
        boxes = np.arange(self._box_base[group], self._box_base[group + 1])
        by_rank = boxes[np.argsort(self.box_rank[boxes], kind="stable")]
        n_pieces = int(self.piece_base[cls + 1] - self.piece_base[cls])
        unique, inverse = np.unique(rank * n_pieces + piece, return_inverse=True)
        asked_rank, asked_piece = unique // n_pieces, unique % n_pieces + self.piece_base[cls]
        ptr = np.searchsorted(self.box_rank[by_rank], np.arange(self.plan.problem.n_ranks + 1))
        flat, owner = ranges(ptr, asked_rank)
        box, lo = by_rank[flat], self.piece_lo[asked_piece[owner]]
        end = lo + self.piece_extent[asked_piece[owner]]
        inside = ((self.box_lo[box] <= lo) & (end <= self.box_lo[box] + self.box_extent[box])).all(axis=1)
        found, owner = box[inside], owner[inside]
        answers, row = ranges(np.searchsorted(owner, np.arange(len(unique) + 1)), inverse.ravel())
        return row, found[answers]


def _buffer_ids(layout: Layout, names: dict[str, int]) -> tuple[Ints, Ints]:
    """CSR: for each tensor, the numbers of the buffers that it names; new names are added to `names`."""
    flat = [names.setdefault(name, len(names)) for buffers in layout.buffers for name in buffers]
    ptr = np.cumsum([0, *(len(buffers) for buffers in layout.buffers)], dtype=np.int64)
    return ptr, np.array(flat, dtype=np.int64)
