"""A plan's bundles as block copies between arenas: few, large, and the same whatever library carries them.

Rule: a block reads one place of its driving rank and writes one place of one rank; its form (extents and strides) has been
reduced as far as it goes, so that what is contiguous on both sides is one run of bytes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.adding import CODES, COPIES
from shardroute.executors.interpreting.memories import Buffers, Memory, Part
from shardroute.executors.interpreting.strides import coalesce
from shardroute.planner.layouts.fragments import Ints, box_text, dense_strides
from shardroute.planner.ownership import reduced_to
from shardroute.planner.plans import SOURCE, TARGET, Op, Plan, ranges
from shardroute.topologies.errors import PlanError

LINEAR = -1  # the form of a block that is one run of bytes


@dataclass(frozen=True, slots=True, eq=False)
class Forms:
    """How strided blocks lie: for each form a run of contiguous bytes, repeated along dims (outermost first, padded with 1).

    run      int64[n]           bytes that lie together on both sides
    count    int64[n, n_dims]   how often, along each dim
    src_stride, dst_stride   int64[n, n_dims]: bytes between neighbours
    """

    run: Ints
    count: Ints
    src_stride: Ints
    dst_stride: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Block copies. src is an address on the driving rank, dst one on rank `to`; form LINEAR means n_bytes in one run.

    sums is COPIES, or (see `adding`) the dtype as whose numbers the bytes are added up at dst: what the lowest rank of a step
    brings is written there, what the others bring is added to it in ascending order of ranks.
    """

    src: Ints
    dst: Ints
    to: NDArray[np.int32]
    n_bytes: Ints
    form: NDArray[np.int32]
    sums: NDArray[np.uint8]

    def take(self, rows: Ints) -> "Blocks":
        """These rows of all columns."""
        return Blocks(self.src[rows], self.dst[rows], self.to[rows], self.n_bytes[rows], self.form[rows], self.sums[rows])


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """One row for each bundle entry and rank that receives it."""

    step: Ints
    entry: Ints
    src: Ints
    dst: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """The blocks of a plan before any are joined, each with its step, its driving rank, and the bundle entry that it carries."""

    step: Ints
    rank: Ints
    entry: Ints
    blocks: Blocks
    forms: Forms


def lay_blocks(plan: Plan, memory: Memory) -> tuple[Ints, Ints, Blocks, Forms]:
    """The step and driving rank of each block, the blocks, their forms; in order of rank, step, receiver and place in the bundle.

    Raises PlanError when a step reads or delivers a piece where no fragment contains it, or leaves its slot.
    """
    laid = lay_pieces(plan, memory)
    kept, blocks = _merge(laid.step, laid.rank, laid.blocks, memory.buffers)
    step, rank = laid.step[kept], laid.rank[kept]
    _check_reach(step, rank, blocks, laid.forms, memory.buffers.arena_bytes)
    return step, rank, blocks, laid.forms


def lay_pieces(plan: Plan, memory: Memory) -> Laid:
    """A block for each piece of a step, place that it is read from and fragment where it lands; orders, raises as lay_blocks."""
    moves = _moves(plan, memory)
    steps, bundles = plan.steps, plan.bundles
    offset = bundles.offset[moves.entry]
    src_at, dst_at = steps.src_at[moves.step].astype(np.int64), steps.dst_at[moves.step].astype(np.int64)
    _check_slots(
        plan, moves, offset, (src_at >= 0) | (dst_at >= 0), np.minimum(_slot_room(plan, src_at), _slot_room(plan, dst_at))
    )
    row, src, src_box = _resolve(plan, memory, moves.src, src_at, moves.entry, offset)
    first = np.flatnonzero(np.diff(row, prepend=-1))
    _check_found(plan, moves, row, "reads", "holds", src_at, np.ones(len(src_at), dtype=bool))
    src, src_box = src[first], src_box[first]
    row, dst, dst_box = _resolve(plan, memory, moves.dst, dst_at, moves.entry, offset)
    _check_found(plan, moves, row, "delivers", "needs", dst_at, steps.op[moves.step] == Op.COPY)

    piece = memory.piece_number(bundles.tensor, bundles.piece)[moves.entry[row]]
    forms, form, n_bytes = _forms(memory, plan, piece, src_box[row], dst_box)
    step, rank = moves.step[row], moves.src[row]
    keep = np.flatnonzero((n_bytes > 0) & ~((rank == moves.dst[row]) & (src[row] == dst)))
    keep = keep[np.lexsort((moves.dst[row[keep]], step[keep], rank[keep]))]
    sums = _sums(plan, moves.step[row], bundles.tensor[moves.entry[row]])
    blocks = Blocks(src[row], dst, moves.dst[row].astype(np.int32), n_bytes, form, sums).take(keep)
    return Laid(step[keep], rank[keep], moves.entry[row[keep]], blocks, forms)


def _moves(plan: Plan, memory: Memory) -> _Moves:
    steps, bundles = plan.steps, plan.bundles
    copies = np.flatnonzero(steps.op == Op.COPY)
    entry, owner = ranges(bundles.ptr, steps.bundle[copies])
    parts = [_Moves(copies[owner], entry, steps.src[copies][owner].astype(np.int64), steps.dst[copies][owner].astype(np.int64))]

    broadcasts = np.flatnonzero(steps.op == Op.BROADCAST)
    member, owner = ranges(plan.group_ptr, steps.group[broadcasts])
    step, to = broadcasts[owner], plan.group_ranks[member].astype(np.int64)
    step, to = step[to != steps.src[step]], to[to != steps.src[step]]
    entry, owner = ranges(bundles.ptr, steps.bundle[step])
    parts.append(_Moves(step[owner], entry, steps.src[step[owner]].astype(np.int64), to[owner]))

    gathers = np.flatnonzero((steps.op == Op.ALL_GATHER) & (steps.src_at == SOURCE))
    entry, owner = ranges(bundles.ptr, steps.bundle[gathers])
    step = gathers[owner]
    holder = _first_holders(plan, memory, step, entry)
    member, owner = ranges(plan.group_ptr, steps.group[step])
    parts.append(_Moves(step[owner], entry[owner], holder[owner], plan.group_ranks[member].astype(np.int64)))
    if plan.problem.summed:
        parts += [_summing(plan, int(i)) for i in np.flatnonzero(np.isin(steps.op, _SUMMING) | (steps.src_at == TARGET))]
    return _Moves(*(np.concatenate([getattr(p, name) for p in parts]) for name in ("step", "entry", "src", "dst")))


_SUMMING = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)


def _summing(plan: Plan, step: int) -> _Moves:
    """What a step that adds up, or gathers sums, moves: from each rank of its group to each that gets the piece."""
    steps, bundles = plan.steps, plan.bundles
    members = plan.group(int(steps.group[step])).astype(np.int64)
    entries = np.arange(bundles.ptr[steps.bundle[step]], bundles.ptr[steps.bundle[step] + 1])
    entry, src, dst = (x.ravel() for x in np.meshgrid(np.arange(len(entries)), members, members, indexing="ij"))
    if steps.op[step] != Op.ALL_REDUCE:
        owner = members[reduced_to(plan, step)][entry]
        rows = np.flatnonzero((dst if steps.op[step] == Op.REDUCE_SCATTER else src) == owner)
        entry, src, dst = entry[rows], src[rows], dst[rows]
    return _Moves(np.full(len(entry), step), entries[entry], src, dst)


def _sums(plan: Plan, step: Ints, tensor: NDArray[np.int32]) -> NDArray[np.uint8]:
    code = np.array([CODES.get(t.dtype, COPIES) for t in plan.problem.tensors], dtype=np.uint8)
    adds = np.isin(plan.steps.op[step], _SUMMING)
    return np.where(adds, code[tensor], np.uint8(COPIES)) if len(code) else np.zeros(len(step), np.uint8)


def _first_holders(plan: Plan, memory: Memory, step: Ints, entry: Ints) -> Ints:
    """For each entry of an ALL_GATHER, the first rank in group order that holds the piece in its source weights."""
    member, owner = ranges(plan.group_ptr, plan.steps.group[step])
    rank = plan.group_ranks[member].astype(np.int64)
    row, _, _ = memory.locate(Part.SOURCE, rank, plan.bundles.tensor[entry[owner]], plan.bundles.piece[entry[owner]])
    found, first = np.unique(owner[row], return_index=True)
    if len(found) < len(step):
        i = int(np.setdiff1d(np.arange(len(step)), found)[0])
        raise PlanError(f"step {step[i]}: no rank of the all-gather holds {piece_text(plan, int(entry[i]))}")
    return rank[row[first]]


def _resolve(plan: Plan, memory: Memory, rank: Ints, at: Ints, entry: Ints, offset: Ints) -> tuple[Ints, Ints, Ints]:
    """Where each (rank, place, entry) lies: row asked for, address, box (-1 = dense in a slot); ordered by row."""
    tensor, piece = plan.bundles.tensor[entry], plan.bundles.piece[entry]
    staged = np.flatnonzero(at >= 0)
    rows, addresses, boxes = (
        [staged],
        [memory.slot_address(rank[staged], at[staged]) + offset[staged]],
        [np.full(len(staged), -1)],
    )
    for place, part in ((SOURCE, Part.SOURCE), (TARGET, Part.TARGET)):
        asked = np.flatnonzero(at == place)
        row, address, box = memory.locate(part, rank[asked], tensor[asked], piece[asked])
        rows.append(asked[row])
        addresses.append(address)
        boxes.append(box)
    row = np.concatenate(rows)
    order = np.argsort(row, kind="stable")
    return row[order], np.concatenate(addresses)[order], np.concatenate(boxes)[order]


def _slot_room(plan: Plan, at: Ints) -> Ints:
    return np.where(at >= 0, np.append(plan.slot_bytes, 0)[np.maximum(at, -1)], np.iinfo(np.int64).max)


def _check_slots(plan: Plan, moves: _Moves, offset: Ints, staged: NDArray[np.bool_], room: Ints) -> None:
    n_bytes = plan.entry_bytes[moves.entry]
    bad = staged & ((offset < 0) | (n_bytes > room) | (offset > room - n_bytes))
    if bad.any():
        i = int(np.argmax(bad))
        raise PlanError(
            f"step {moves.step[i]}: {piece_text(plan, int(moves.entry[i]))} lies at bytes {offset[i]} to "
            f"{offset[i] + n_bytes[i]} of a slot of {room[i]} bytes"
        )


def _check_found(plan: Plan, moves: _Moves, row: Ints, does: str, has: str, at: Ints, must: NDArray[np.bool_]) -> None:
    lost = must & (np.bincount(row, minlength=len(at)) == 0)
    if lost.any():
        i = int(np.argmax(lost))
        rank = int((moves.src if does == "reads" else moves.dst)[i])
        side = "source" if at[i] == SOURCE else "destination"
        raise PlanError(
            f"step {moves.step[i]} {does} {piece_text(plan, int(moves.entry[i]))} in the {side} weights of rank {rank}, "
            f"which {has} no fragment that contains it"
        )


def piece_text(plan: Plan, entry: int) -> str:
    """The piece of a bundle entry in words: `piece [0:4, 2:6] of w`."""
    tensor, piece = int(plan.bundles.tensor[entry]), int(plan.bundles.piece[entry])
    boxes = plan.boxes[int(plan.tensor_class[tensor])]
    return f"piece {box_text(boxes.lo[piece], boxes.hi[piece])} of {plan.problem.tensors[tensor].name}"


def _forms(memory: Memory, plan: Plan, piece: Ints, src_box: Ints, dst_box: Ints) -> tuple[Forms, NDArray[np.int32], Ints]:
    """The forms, which each row has, and its bytes. Rows of one piece and pair of boxes (-1 = dense) lie alike."""
    n_boxes = len(memory.box_rank) + 1
    pair, of_row = np.unique(piece * n_boxes + src_box + 1, return_inverse=True)
    kind, of_row = np.unique(of_row.ravel() * n_boxes + dst_box + 1, return_inverse=True)
    pair_of, dst = pair[kind // n_boxes], kind % n_boxes - 1
    piece_of, src = pair_of // n_boxes, pair_of % n_boxes - 1
    extent = memory.piece_extent[piece_of]
    dense = dense_strides(extent)
    strides = np.concatenate([memory.box_strides, np.zeros((1, memory.n_dims), dtype=np.int64)])
    src_strides = np.where(src[:, None] >= 0, strides[src], dense)
    dst_strides = np.where(dst[:, None] >= 0, strides[dst], dense)
    class_of = np.searchsorted(memory.piece_base, piece_of, side="right") - 1
    itemsize = memory.class_itemsize[class_of]
    count, a, b = coalesce(extent, src_strides, dst_strides)
    runs = (count[:, -1] == 1) | ((a[:, -1] == 1) & (b[:, -1] == 1))
    run = np.where(runs, count[:, -1], 1) * itemsize
    count[runs, -1] = 1
    n_bytes = extent.prod(axis=1, dtype=np.int64) * itemsize
    strided = (count > 1).any(axis=1)
    table = np.concatenate([run[:, None], count, a * itemsize[:, None], b * itemsize[:, None]], axis=1)[strided]
    table, inverse = np.unique(table, axis=0, return_inverse=True)
    form = np.full(len(kind), LINEAR, dtype=np.int32)
    form[strided] = inverse.ravel()
    n = memory.n_dims
    forms = Forms(table[:, 0].copy(), *(table[:, 1 + i * n : 1 + (i + 1) * n].copy() for i in range(3)))
    return forms, form[of_row.ravel()], n_bytes[of_row.ravel()]


def _check_reach(step: Ints, rank: Ints, blocks: Blocks, forms: Forms, arena_bytes: Ints) -> None:
    """Raise PlanError for a block that reads or writes outside of its arena: memory of other ranks, or nobody's."""
    row = np.where(blocks.form == LINEAR, len(forms.run), blocks.form)
    run = np.where(blocks.form == LINEAR, blocks.n_bytes, np.append(forms.run, 0)[row])
    sides = (("reads", blocks.src, rank, forms.src_stride), ("writes", blocks.dst, blocks.to, forms.dst_stride))
    for does, at, on, stride in sides:
        reach = np.concatenate([(forms.count - 1) * stride, np.zeros((1, stride.shape[1]), np.int64)])
        first, last = at + np.minimum(reach, 0).sum(axis=1)[row], at + np.maximum(reach, 0).sum(axis=1)[row] + run
        bad = (first < 0) | (last > arena_bytes[on])
        if bad.any():
            i = int(np.argmax(bad))
            has = int(arena_bytes[on[i]])
            raise PlanError(f"step {step[i]} {does} bytes {first[i]} to {last[i]} on rank {on[i]}, which has {has}")


def _merge(step: Ints, rank: Ints, blocks: Blocks, buffers: Buffers) -> tuple[Ints, Blocks]:
    """Join linear blocks of one step that continue each other in one buffer on both sides; the rows kept, and the blocks."""
    if not len(step):
        return step, blocks
    linear = blocks.form == LINEAR
    joins = np.zeros(len(step), dtype=bool)
    joins[1:] = blocks.sums[1:] == blocks.sums[:-1]
    joins[1:] &= linear[1:] & linear[:-1] & (step[1:] == step[:-1]) & (rank[1:] == rank[:-1]) & (blocks.to[1:] == blocks.to[:-1])
    joins[1:] &= (blocks.src[:-1] + blocks.n_bytes[:-1] == blocks.src[1:]) & (
        blocks.dst[:-1] + blocks.n_bytes[:-1] == blocks.dst[1:]
    )
    rows = np.flatnonzero(joins)
    joins[rows] = ~buffers.begins(rank[rows], blocks.src[rows]) & ~buffers.begins(blocks.to[rows], blocks.dst[rows])
    kept = np.flatnonzero(~joins)
    merged = blocks.take(kept)
    return kept, Blocks(merged.src, merged.dst, merged.to, np.add.reduceat(blocks.n_bytes, kept), merged.form, merged.sums)
