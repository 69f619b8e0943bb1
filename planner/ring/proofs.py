"""Proof that a plan computes its attention call: every query sees every key that its mask lets it see, once, and no other.

The proof follows the steps in order and keeps, for each piece at each place, which parts it is the sum of: for o and dq the keys
that these queries have met, for dk and dv the queries. A sum that meets a part twice, a read of what isn't there or may not have
arrived, and a slot that is overwritten while it may still be read are refused. Element data is never touched, and masks are
worked out from the tokens themselves, not as planning does.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from shardroute.planner.check import Proof, check_waits
from shardroute.planner.layouts.fragments import box_text
from shardroute.planner.memories import check_memory
from shardroute.planner.piece_tables import PieceTables
from shardroute.planner.plans import SOURCE, TARGET, Kind, Mode, Op, Plan
from shardroute.planner.ring.workloads import KEY_SIDE, LSE, Attention
from shardroute.planner.shares import Told, heard, part
from shardroute.planner.slots import known_by, tells
from shardroute.topologies.errors import InputError, PlanError

# The share of laying out tiles and pieces in a proof, and the steps between two shares that are told: some 20 ms.
_TABLED: Final = 0.25
_A_SHARE: Final = 1024

_READS = {
    Kind.ATTEND: {"q", "k", "v"},
    Kind.GRAD: {"q", "k", "v", "o", LSE, "do"},
}
_CHANGES = {
    Kind.ATTEND: {"o", LSE},
    Kind.GRAD: {"dq", "dk", "dv"},
    Kind.ADD: {"dq", "dk", "dv"},
    Kind.MERGE: {"o", LSE},
}


def check_attention(plan: Plan, progress: Told | None = None) -> Proof:
    """Prove that the plan computes its call; progress is told the share that is done.

    Raises PlanError naming the tensor, box, rank or step that is wrong.
    """
    done = heard(progress)
    try:
        check_memory(plan.problem.tensors, plan.problem.target)
    except InputError as error:
        raise PlanError(str(error)) from error
    check_waits(plan)
    walk = _Walk(plan)
    return walk.proof(part(done, _TABLED, 1.0))


@dataclass(slots=True, eq=False)
class _Held:
    """A piece at a place: who wrote it, who has read it since, its bytes in a slot, and what it is the sum of (None: given)."""

    piece: int
    writer: int
    parts: int | None
    first: int = 0
    end: int = 0
    readers: list[int] = field(default_factory=list)


class _Tiles:
    """Pieces numbered through all tensors, and which pairs of a piece of queries and a piece of keys have anything to compute.

    of[p]     the tile of piece p: pieces of one side with the same tokens and heads are one tile
    all_parts[p]   bits of the tiles that a sum in piece p must have met
    """

    def __init__(self, plan: Plan) -> None:
        problem, attention = plan.problem, plan.attention
        assert attention is not None
        self.plan = plan
        n_pieces = np.array([len(b.lo) for b in plan.boxes], dtype=np.int64)[plan.tensor_class]
        self.first = np.cumsum([0, *n_pieces.tolist()]).tolist()
        self.tensor = np.repeat(np.arange(len(n_pieces)), n_pieces).tolist()
        self.names = [t.name for t in problem.tensors]
        self.of: list[int] = []
        numbers: tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]] = ({}, {})
        for i, name in enumerate(self.names):
            boxes = plan.boxes[int(plan.tensor_class[i])]
            n_dims = len(attention.seq_shape()) + 2
            for lo, hi in zip(boxes.lo.tolist(), boxes.hi.tolist(), strict=True):
                if lo[0] != 0 or hi[0] != attention.batch or (name != LSE and hi[-1] - lo[-1] != attention.head_dim):
                    raise PlanError(f"tensor {name}: a piece must take the whole batch and the whole width of its heads")
                side = numbers[name in KEY_SIDE]
                self.of.append(side.setdefault((*lo[1:n_dims], *hi[1:n_dims]), len(side)))
        queries, keys = (_Side(attention, side) for side in numbers)
        self.met_by_query, self.met_by_key = [0] * len(numbers[0]), [0] * len(numbers[1])
        for document in range(len(attention.lengths)):
            for q in queries.of_document[document]:
                for k in keys.of_document[document]:
                    if queries.meets(q, keys, k):
                        self.met_by_query[q] |= 1 << k
                        self.met_by_key[k] |= 1 << q

    def is_key(self, piece: int) -> bool:
        """Whether the piece is of the KV side."""
        return self.names[self.tensor[piece]] in KEY_SIDE

    def all_parts(self, piece: int) -> int:
        """Bits of the tiles of the other side that a sum in this piece must have met."""
        return (self.met_by_key if self.is_key(piece) else self.met_by_query)[self.of[piece]]

    def text(self, piece: int) -> str:
        """`k [0:1, 0:64, 0:2, 0:16]`."""
        tensor = self.tensor[piece]
        boxes, row = self.plan.boxes[int(self.plan.tensor_class[tensor])], piece - self.first[tensor]
        return f"{self.names[tensor]} {box_text(boxes.lo[row], boxes.hi[row])}"


class _Side:
    """Tiles of one side: which heads each has, and from which to which position of each document its rows go."""

    def __init__(self, attention: Attention, tiles: Iterable[tuple[int, ...]]) -> None:
        self._attention = attention
        real = np.concatenate([np.arange(n) < m for n, m in zip(attention.padded, attention.lengths, strict=True)])
        document = np.repeat(np.arange(len(attention.lengths)), attention.padded)
        position = np.concatenate([np.arange(n) for n in attention.padded])
        shape = attention.seq_shape()
        token = np.arange(attention.n_tokens).reshape(shape)
        self.heads: list[tuple[int, int]] = []
        self.reach: list[dict[int, tuple[int, int]]] = []
        self.of_document: list[list[int]] = [[] for _ in attention.lengths]
        for number, tile in enumerate(tiles):
            n = len(tile) // 2
            lo, hi = tile[:n], tile[n:]
            rows = token[tuple(slice(a, b) for a, b in zip(lo[:-1], hi[:-1], strict=True))].ravel()
            rows = rows[real[rows]]
            reach = {}
            for d in np.unique(document[rows]).tolist():
                at = position[rows[document[rows] == d]]
                reach[d] = (int(at.min()), int(at.max()))
                self.of_document[d].append(number)
            self.heads.append((lo[-1], hi[-1]))
            self.reach.append(reach)

    def meets(self, query: int, keys: "_Side", key: int) -> bool:
        """Whether any row of this tile of queries sees any row of a tile of keys."""
        served = self._attention.n_heads // self._attention.n_kv_heads
        (a, b), (c, d) = self.heads[query], keys.heads[key]
        if a >= d * served or c * served >= b:
            return False
        found = keys.reach[key]
        return any(
            document in found and (not self._attention.causal or last >= found[document][0])
            for document, (_, last) in self.reach[query].items()
        )


class _Walk:
    """All steps, in order."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._tiles = plan, _Tiles(plan)
        _check_sides(plan)
        tables = PieceTables(plan)
        self._source, self._target = (side.rows(tables.class_row)[:, tables.column] for side in (tables.held, tables.needed))
        self._there: dict[tuple[int, int, int], _Held] = {}  # rank, place, piece
        self._slots: dict[tuple[int, int], list[tuple[int, int]]] = {}  # rank, slot -> (first byte, piece), ascending
        bundles = plan.bundles
        first = np.array(self._tiles.first)
        pieces = (first[bundles.tensor] + bundles.piece).tolist()
        rows = list(zip(pieces, bundles.offset.tolist(), plan.entry_bytes.tolist(), strict=True))
        ptr = bundles.ptr.tolist()
        self._bundles = [rows[a:b] for a, b in pairwise(ptr)]
        after, after_ptr = plan.steps.after.tolist(), plan.steps.after_ptr.tolist()
        self._after = [after[a:b] for a, b in pairwise(after_ptr)]
        self._tells: list[bool] = tells(plan).tolist()
        self._waits: set[int] = set()
        self._done: set[int] = set()

    def proof(self, progress: Told) -> Proof:
        """Follow all steps, then look at what lies in the destination; progress is told the share of the steps that is done."""
        plan = self._plan
        steps, computes = plan.steps, iter(range(len(plan.computes)))
        columns = (steps.op, steps.bundle, steps.src, steps.dst, steps.group, steps.src_at, steps.dst_at)
        for step, (op, bundle, src, dst, group, src_at, dst_at) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            if step % _A_SHARE == 0:
                progress(step / len(steps))
            self._waits = {*self._after[step]}
            # Who waits for a step waits for what that step waited for.
            self._done = self._waits.union(*(self._after[wait] for wait in self._waits if self._tells[wait]))
            members = plan.group(group).tolist() if group >= 0 else []
            match Op(op):
                case Op.COPY:
                    self._move(step, bundle, src, src_at, [dst], dst_at)
                case Op.BROADCAST:
                    self._move(step, bundle, src, src_at, [rank for rank in members if rank != src], dst_at)
                case Op.ALL_GATHER:
                    self._gather(step, bundle, members, dst_at)
                case Op.REDUCE_SCATTER:
                    self._reduce(step, bundle, members, src_at)
                case Op.COMPUTE:
                    self._compute(step, next(computes), members[0])
                case Op.BARRIER:
                    pass
        progress(1.0)
        return self._delivered()

    def _move(self, step: int, bundle: int, src: int, src_at: int, to: list[int], dst_at: int) -> None:
        found = [self._read(step, src, src_at, *entry) for entry in self._bundles[bundle]]
        for rank in to:
            for (piece, offset, n_bytes), parts in zip(self._bundles[bundle], found, strict=True):
                self._write(step, rank, dst_at, piece, offset, n_bytes, parts)

    def _gather(self, step: int, bundle: int, members: list[int], slot: int) -> None:
        for piece, offset, n_bytes in self._bundles[bundle]:
            if not self._source[piece, members].any():
                raise PlanError(f"step {step}: no rank of the all-gather holds {self._tiles.text(piece)}")
            for rank in members:
                self._write(step, rank, slot, piece, offset, n_bytes, None)

    def _reduce(self, step: int, bundle: int, members: list[int], slot: int) -> None:
        for piece, offset, n_bytes in self._bundles[bundle]:
            total = 0
            for rank in members:
                parts = self._read(step, rank, slot, piece, offset, n_bytes)
                total = self._sum(step, rank, piece, total, parts)
            homes = [rank for rank in members if self._target[piece, rank]]
            if not homes:
                raise PlanError(f"step {step}: no rank of the reduce-scatter needs {self._tiles.text(piece)}")
            for rank in homes:
                self._write(step, rank, TARGET, piece, offset, n_bytes, total)

    def _compute(self, step: int, row: int, rank: int) -> None:
        computes = self._plan.computes
        kind = Kind(int(computes.kind[row]))
        inputs: dict[int, list[int | None]] = {}
        outputs: dict[int, int] = {}
        places: dict[int, tuple[int, int, int, bool]] = {}
        for operand in range(int(computes.ptr[row]), int(computes.ptr[row + 1])):
            at, mode = int(computes.at[operand]), Mode(int(computes.mode[operand]))
            for piece, offset, n_bytes in self._bundles[int(computes.bundle[operand])]:
                if mode is Mode.READ:
                    inputs.setdefault(piece, []).append(self._read(step, rank, at, piece, offset, n_bytes))
                    continue
                if piece in outputs:
                    raise PlanError(f"step {step} changes {self._tiles.text(piece)} at two places")
                parts = self._read(step, rank, at, piece, offset, n_bytes) if mode is Mode.UPDATE else 0
                if parts is None:
                    raise PlanError(f"step {step} adds to {self._tiles.text(piece)}, which was given and is no sum")
                outputs[piece], places[piece] = parts, (at, offset, n_bytes, mode is Mode.UPDATE)
                if mode is Mode.UPDATE:
                    self._forget_read(step, rank, at, piece)
        names = {self._tiles.names[self._tiles.tensor[piece]] for piece in outputs}
        if names != _CHANGES[kind] and not (kind is Kind.ADD and names and names < _CHANGES[kind]):
            raise PlanError(f"step {step}: {kind.name} changes {_listed(_CHANGES[kind])}, found {_listed(names)}")
        if kind in (Kind.ADD, Kind.MERGE):
            for piece, found in inputs.items():
                if piece not in outputs:
                    raise PlanError(f"step {step} adds up {self._tiles.text(piece)}, but keeps no sum of it")
                for parts in found:
                    outputs[piece] = self._sum(step, rank, piece, outputs[piece], parts)
        else:
            self._attend(step, rank, kind, inputs, outputs)
        for piece, parts in outputs.items():
            at, offset, n_bytes, adds = places[piece]
            self._write(step, rank, at, piece, offset, n_bytes, parts, adds=adds)

    def _attend(self, step: int, rank: int, kind: Kind, inputs: dict[int, list[int | None]], outputs: dict[int, int]) -> None:
        """Add to the outputs the tiles that these inputs let them meet."""
        tiles = self._tiles
        held: dict[str, set[int]] = {name: set() for name in _READS[kind] | _CHANGES[kind]}
        for piece in [*inputs, *outputs]:
            name = tiles.names[tiles.tensor[piece]]
            if name not in held:
                raise PlanError(f"step {step}: {kind.name} reads {_listed(_READS[kind])}, found {name}")
            if tiles.of[piece] in held[name]:
                raise PlanError(f"step {step} has {tiles.text(piece)} twice")
            held[name].add(tiles.of[piece])
        for piece, found in inputs.items():
            if len(found) > 1:
                raise PlanError(f"step {step} has {tiles.text(piece)} twice")
            if found[0] is not None and found[0] != tiles.all_parts(piece):
                raise PlanError(f"step {step} reads {tiles.text(piece)} of rank {rank} before it is complete")
        queries, keys = held["q"], held["k"]
        for name, tensors in held.items():
            if tensors != (keys if name in KEY_SIDE else queries):
                raise PlanError(f"step {step}: the pieces of {name} aren't of the same tokens and heads as those of q or k")
        some = False
        all_queries, all_keys = (sum(1 << tile for tile in side) for side in (queries, keys))
        for piece in outputs:
            met = tiles.all_parts(piece) & (all_queries if tiles.is_key(piece) else all_keys)
            some |= bool(met)
            outputs[piece] = self._sum(step, rank, piece, outputs[piece], met)
        if not some and any(outputs.values()):
            raise PlanError(f"step {step}: no query on rank {rank} sees any of these keys")

    def _sum(self, step: int, rank: int, piece: int, total: int, parts: int | None) -> int:
        if parts is None:
            raise PlanError(f"step {step} adds up {self._tiles.text(piece)}, which was given and is no sum")
        if total & parts:
            raise PlanError(f"step {step} counts the same part of {self._tiles.text(piece)} twice on rank {rank}")
        return total | parts

    def _read(self, step: int, rank: int, at: int, piece: int, offset: int, n_bytes: int) -> int | None:
        text = self._tiles.text
        if at == SOURCE:
            if not self._source[piece, rank]:
                raise PlanError(f"step {step}: rank {rank} reads {text(piece)} from its source weights, which don't hold it")
            return None
        held = self._there.get((rank, at, piece))
        if held is None or (at >= 0 and held.first != offset):
            raise PlanError(f"step {step}: rank {rank} reads {text(piece)} from {_place(at)}, where nobody has put it")
        if held.writer not in self._waits and not known_by(self._plan, rank, held.writer, self._waits):
            raise PlanError(f"step {step}: rank {rank} reads {text(piece)} without waiting for step {held.writer} to write it")
        held.readers.append(step)
        return held.parts

    def _forget_read(self, step: int, rank: int, at: int, piece: int) -> None:
        """Reading what a step itself then overwrites is no use that it has to wait for."""
        self._there[rank, at, piece].readers.remove(step)

    def _write(
        self, step: int, rank: int, at: int, piece: int, offset: int, n_bytes: int, parts: int | None, *, adds: bool = False
    ) -> None:
        key = (rank, at, piece)
        if at == TARGET:
            if not self._target[piece, rank]:
                raise PlanError(f"step {step}: rank {rank} gets {self._tiles.text(piece)}, which it doesn't need")
            before = self._there.get(key)
            if before is not None:
                if not adds:
                    raise PlanError(f"steps {before.writer} and {step} both deliver {self._tiles.text(piece)} to rank {rank}")
                self._check_free(step, rank, at, before)
            self._there[key] = _Held(piece, step, parts)
            return
        if offset < 0 or offset + n_bytes > int(self._plan.slot_bytes[at]):
            raise PlanError(f"step {step}: {self._tiles.text(piece)} leaves the {self._plan.slot_bytes[at]} bytes of slot {at}")
        slot = self._slots.setdefault((rank, at), [])
        i = bisect_left(slot, (offset, -1))
        while i > 0 and self._there[rank, at, slot[i - 1][1]].end > offset:
            i -= 1
        while i < len(slot) and slot[i][0] < offset + n_bytes:
            over = self._there[rank, at, slot[i][1]]
            if over.writer == step:
                raise PlanError(f"step {step}: pieces overlap in slot {at}")
            self._check_free(step, rank, at, over)
            del self._there[rank, at, slot[i][1]]
            del slot[i]
        if key in self._there:  # elsewhere in the slot
            raise PlanError(f"step {step} puts {self._tiles.text(piece)} into slot {at} of rank {rank} twice")
        self._there[key] = _Held(piece, step, parts, offset, offset + n_bytes)
        insort(slot, (offset, piece))

    def _check_free(self, step: int, rank: int, at: int, held: _Held) -> None:
        read = self._done.issuperset(held.readers)
        if not read or not (held.readers or known_by(self._plan, rank, held.writer, self._waits)):
            raise PlanError(f"step {step} overwrites {_place(at)} of rank {rank} without waiting for its last use")

    def _delivered(self) -> Proof:
        tiles, n_bytes, sizes = self._tiles, 0, self._plan.problem.tensors
        needed = np.argwhere(self._target).tolist()
        for piece, rank in needed:
            held = self._there.get((rank, TARGET, piece))
            if held is None:
                raise PlanError(f"nothing computes {tiles.text(piece)} on rank {rank}, which needs it")
            if held.parts != tiles.all_parts(piece):
                other = "queries" if tiles.is_key(piece) else "keys"
                raise PlanError(f"{tiles.text(piece)} on rank {rank} lacks some of the {other} that its mask lets it meet")
            tensor = tiles.tensor[piece]
            boxes, row = self._plan.boxes[int(self._plan.tensor_class[tensor])], piece - tiles.first[tensor]
            n_bytes += int(boxes.n_elements[row]) * sizes[tensor].itemsize
        return Proof(len(needed), n_bytes)


def _check_sides(plan: Plan) -> None:
    """The pieces of each tensor must make up the whole of it, else a sum over all of them could lack some."""
    for cls, boxes in zip(plan.problem.classes, plan.boxes, strict=True):
        name = plan.problem.tensors[int(cls.members[0])].name
        whole = int(np.prod(cls.shape, dtype=np.int64))
        if int(boxes.n_elements.sum()) != whole:
            raise PlanError(f"tensor {name}: its pieces have {int(boxes.n_elements.sum())} elements, the tensor {whole}")


def _place(at: int) -> str:
    return "the destination weights" if at == TARGET else f"slot {at}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
