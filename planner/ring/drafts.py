"""A plan while it is written: steps in order, each saying what it reads and writes; what each must wait for follows from that.

Rule: a step waits for whoever wrote what it reads, and for all use of what it overwrites. A rank can only wait for steps that it
drives or receives, so where a writer can't see that a slot's readers are done, their rank tells it by a *credit*, an empty copy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardroute.planner.plans import (
    SOURCE,
    TARGET,
    Backend,
    Boxes,
    Bundles,
    Computes,
    Kind,
    Lane,
    Mode,
    Op,
    Plan,
    Steps,
    queued,
)
from shardroute.planner.problems import Problem
from shardroute.planner.ring.chunks import Chunks, chunks_of
from shardroute.planner.ring.tensors import Heads, Pass, boxes_of, problem_of
from shardroute.planner.ring.workloads import Attention
from shardroute.topologies.topologies import Topology

# Pieces in a slot begin on whole cache lines.
_ALIGNMENT = 64
# A lane byte has room for 5 bits of queue (plans.queued).
_QUEUES = 32

Entry = tuple[int, int]  # tensor, piece
_Key = tuple[int, int, int, int]  # rank, place, and at TARGET tensor and piece; 0 and 0 in slots


@dataclass(frozen=True, slots=True)
class Load:
    """A bundle: its number, what is in it, and the bytes of a slot from the first of it to the end of its last piece."""

    number: int
    entries: tuple[Entry, ...]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Operand:
    """A bundle at a place, and what a COMPUTE does to it."""

    load: Load
    at: int
    mode: Mode = Mode.READ


@dataclass(slots=True, eq=False)
class _Live:
    """Bytes of a slot, or a piece at TARGET, with the step that wrote it and those that have read it since."""

    first: int
    end: int
    writer: int
    load: int = -1  # the bundle that it is, whole and as it was sent; -1 once a COMPUTE has written there
    readers: list[int] = field(default_factory=list)

    @property
    def uses(self) -> list[int]:
        """Steps that must be complete before it may be overwritten; a reader has waited for the writer."""
        return self.readers or [self.writer]


@dataclass(frozen=True, slots=True)
class _Row:
    op: Op
    lane: int
    bundle: int
    src: int
    dst: int
    group: int
    src_at: int
    dst_at: int
    after: tuple[int, ...]
    members: frozenset[int]  # the ranks that see when it is complete


class Draft:
    """Steps of a plan for one attention call. Builders add steps; `plan` gives the result."""

    def __init__(self, attention: Attention, what: Pass, heads: Heads, topology: Topology) -> None:
        self.attention, self.what, self.heads, self.topology = attention, what, heads, topology
        self.chunks: Chunks = chunks_of(attention)
        self._chunks_of: list[list[int]] = [self.chunks.of(rank).tolist() for rank in range(attention.n_ranks)]
        self.problem: Problem = problem_of(attention, self.chunks, what, heads)
        self._tensor = {tensor.name: i for i, tensor in enumerate(self.problem.tensors)}
        self._given = {i for name, i in self._tensor.items() if name in what.inputs}
        self._boxes: dict[str, Boxes] = {name: boxes_of(attention, self.chunks, name, heads) for name in self._tensor}
        self._bytes = [
            (self._boxes[t.name].n_elements * t.itemsize).tolist() for t in self.problem.tensors
        ]  # of each tensor's pieces
        self._loads: dict[tuple[tuple[int, int, int], ...], Load] = {}
        self._offsets: list[dict[Entry, int]] = []
        self._rows: list[_Row] = []
        self._computes: list[tuple[int, Kind, tuple[Operand, ...]]] = []
        self._groups: dict[tuple[int, ...], int] = {}
        self._slots: list[int] = []
        self._live: dict[_Key, list[_Live]] = {}
        self._credits: dict[tuple[int, int, tuple[int, ...]], int] = {}

    def entries(self, tensors: Sequence[str], ranks: Iterable[int], group: int) -> tuple[Entry, ...]:
        """The pieces of these tensors in the chunks of these ranks, of one group of heads; by rank, tensor and chunk."""
        return tuple(
            (self._tensor[name], chunk * self.heads.groups(name) + group)
            for rank in ranks
            for name in tensors
            for chunk in self._chunks_of[rank]
        )

    def load(self, entries: Sequence[Entry], within: Load | None = None) -> Load:
        """The bundle of these pieces: in a slot one after the other, or where `within` has them."""
        offsets: dict[Entry, int] = {}
        end = 0
        known = {} if within is None else self._offsets[within.number]
        for tensor, piece in entries:
            at = known[tensor, piece] if within is not None else -(-end // _ALIGNMENT) * _ALIGNMENT
            offsets[tensor, piece] = at
            end = max(end, at + self._bytes[tensor][piece])
        key = tuple((tensor, piece, at) for (tensor, piece), at in offsets.items())
        if key not in self._loads:
            self._loads[key] = Load(len(self._loads), tuple(entries), min(offsets.values(), default=0), end)
            self._offsets.append(offsets)
        return self._loads[key]

    def slot(self, loads: Iterable[Load]) -> int:
        """A new staging slot with room for each of these bundles, one at a time."""
        self._slots.append(max((load.end for load in loads), default=0))
        return len(self._slots) - 1

    def grow(self, slot: int, load: Load) -> None:
        """Make sure that a bundle fits a slot."""
        self._slots[slot] = max(self._slots[slot], load.end)

    def copy(self, load: Load, src: int, dst: int, src_at: int, dst_at: int, lane: Lane, queue: int = 0) -> None:
        """Add a COPY, unless what it would put into a slot is there already."""
        if self._holds(dst, dst_at, load):
            return
        waits = self._waits(src, src_at, load, Mode.READ) | self._waits(dst, dst_at, load, Mode.WRITE)
        blind = tuple(sorted(w for w in waits if src not in self._rows[w].members))
        if blind:
            waits = waits.difference(blind) | {self._credit(dst, src, blind)}
        step = self._add(Op.COPY, lane, queue, load.number, src, dst, -1, src_at, dst_at, waits, {src, dst})
        self._note(step, src, src_at, load, Mode.READ)
        self._note(step, dst, dst_at, load, Mode.WRITE, load.number)

    def compute(self, kind: Kind, rank: int, operands: Sequence[Operand]) -> None:
        """Add a COMPUTE."""
        waits: set[int] = set()
        for operand in operands:
            waits |= self._waits(rank, operand.at, operand.load, operand.mode)
        nothing, group = self.load(()).number, self._group((rank,))
        step = self._add(Op.COMPUTE, Lane.COMPUTE, 0, nothing, -1, -1, group, SOURCE, TARGET, waits, {rank})
        self._computes.append((step, kind, tuple(operands)))
        for operand in operands:
            self._note(step, rank, operand.at, operand.load, operand.mode)

    def gather(self, load: Load, ranks: Sequence[int], slot: int) -> None:
        """Add an ALL_GATHER from the source weights into a slot of all ranks, unless it is there already."""
        if all(self._holds(rank, slot, load) for rank in ranks):
            return
        waits = set[int]().union(*(self._waits(rank, slot, load, Mode.WRITE) for rank in ranks))
        step = self._collective(Op.ALL_GATHER, load, ranks, SOURCE, slot, waits)
        for rank in ranks:
            self._note(step, rank, slot, load, Mode.WRITE, load.number)

    def reduce_scatter(self, load: Load, ranks: Sequence[int], slot: int) -> None:
        """Add a REDUCE_SCATTER from a slot of all ranks into the destination weights."""
        waits = set[int]().union(*(self._waits(rank, slot, load, Mode.READ) for rank in ranks))
        step = self._collective(Op.REDUCE_SCATTER, load, ranks, slot, TARGET, waits)
        for rank in ranks:
            self._note(step, rank, slot, load, Mode.READ)

    def plan(self, strategy: str, backend: Backend) -> Plan:
        """The plan of all that was added; the backend is meant to carry it."""
        rows, operands = self._rows, [operand for _, _, found in self._computes for operand in found]
        entries = [(t, p, at) for offsets in self._offsets for (t, p), at in offsets.items()]
        table = np.array(entries, dtype=np.int64).reshape(-1, 3)
        by_class = [self._boxes[self.problem.tensors[int(cls.members[0])].name] for cls in self.problem.classes]
        steps = Steps(
            np.array([row.op for row in rows], np.uint8), np.array([row.lane for row in rows], np.uint8),
            np.full(len(rows), backend, np.uint8),
            np.array([row.bundle for row in rows], np.int32), np.array([row.src for row in rows], np.int32),
            np.array([row.dst for row in rows], np.int32), np.array([row.group for row in rows], np.int32),
            np.array([row.src_at for row in rows], np.int16), np.array([row.dst_at for row in rows], np.int16),
            np.cumsum([0, *(len(row.after) for row in rows)]), np.array([w for row in rows for w in row.after], np.int32),
        )  # fmt: skip
        computes = Computes(
            np.array([step for step, _, _ in self._computes], np.int32), np.array([k for _, k, _ in self._computes], np.uint8),
            np.cumsum([0, *(len(found) for _, _, found in self._computes)]),
            np.array([o.load.number for o in operands], np.int32), np.array([o.at for o in operands], np.int16),
            np.array([o.mode for o in operands], np.uint8),
        )  # fmt: skip
        return Plan(
            strategy=strategy, topology=self.topology, problem=self.problem, boxes=tuple(by_class),
            bundles=Bundles(np.cumsum([0, *map(len, self._offsets)]), *table.T), steps=steps,
            group_ptr=np.cumsum([0, *map(len, self._groups)]),
            group_ranks=np.array([rank for group in self._groups for rank in group], np.int32),
            slot_bytes=np.array(self._slots, np.int64), attention=self.attention, computes=computes,
        )  # fmt: skip

    def _collective(self, op: Op, load: Load, ranks: Sequence[int], src_at: int, dst_at: int, waits: set[int]) -> int:
        group, members = self._group(tuple(ranks)), set(ranks)
        return self._add(op, Lane.COLLECTIVE, 0, load.number, -1, -1, group, src_at, dst_at, waits, members)

    def _add(
        self, op: Op, lane: Lane, queue: int, bundle: int, src: int, dst: int, group: int, src_at: int, dst_at: int,
        after: set[int], members: set[int],
    ) -> int:  # fmt: skip
        packed = int(queued(np.array([lane]), np.array([queue % _QUEUES]))[0])
        row = _Row(op, packed, bundle, src, dst, group, src_at, dst_at, tuple(sorted(after)), frozenset(members))
        self._rows.append(row)
        return len(self._rows) - 1

    def _group(self, ranks: tuple[int, ...]) -> int:
        return self._groups.setdefault(ranks, len(self._groups))

    def _credit(self, src: int, dst: int, done: tuple[int, ...]) -> int:
        """The empty copy by which `src` tells `dst` that these steps are complete."""
        key = (src, dst, done)
        if key not in self._credits:
            nothing = self.load(()).number
            self._credits[key] = self._add(
                Op.COPY, Lane.CREDIT, 0, nothing, src, dst, -1, SOURCE, TARGET, set(done), {src, dst}
            )
        return self._credits[key]

    def _spans(self, rank: int, at: int, load: Load) -> list[tuple[_Key, int, int]]:
        """What the bundle takes at a place, as keys and ranges: bytes of a slot, or pieces at TARGET, each whole."""
        if at >= 0:
            return [((rank, at, 0, 0), load.first, load.end)] if load.entries else []
        if at == SOURCE:
            return []
        return [((rank, at, tensor, piece), 0, 1) for tensor, piece in load.entries]

    def _waits(self, rank: int, at: int, load: Load, mode: Mode) -> set[int]:
        waits: set[int] = set()
        for key, first, end in self._spans(rank, at, load):
            met = [live for live in self._live.get(key, []) if live.first < end and first < live.end]
            assert met or mode is Mode.WRITE, f"rank {rank} reads what nobody wrote at place {at}"
            for live in met:
                waits.update([live.writer] if mode is Mode.READ else live.uses)
        return waits

    def _holds(self, rank: int, at: int, load: Load) -> bool:
        """Whether a slot holds this bundle, all of it given before the call and so always the same, as it was last sent there."""
        given = self._given.issuperset(tensor for tensor, _ in load.entries)
        return at >= 0 and given and any(live.load == load.number for live in self._live.get((rank, at, 0, 0), []))

    def _note(self, step: int, rank: int, at: int, load: Load, mode: Mode, sent: int = -1) -> None:
        for key, first, end in self._spans(rank, at, load):
            lives = self._live.setdefault(key, [])
            met = [live for live in lives if live.first < end and first < live.end]
            if mode is Mode.READ:
                for live in met:
                    live.readers.append(step)
                continue
            lives[:] = [live for live in lives if live not in met]
            if mode is Mode.UPDATE:
                first, end = min([first, *(live.first for live in met)]), max([end, *(live.end for live in met)])
            lives.append(_Live(first, end, step, sent))


def reading(*operands: tuple[Load, int]) -> list[Operand]:
    """Operands that are only read."""
    return [Operand(load, at) for load, at in operands]


def writing(operand: Operand, *, fresh: bool) -> Operand:
    """The operand as one that a COMPUTE begins anew, or adds to."""
    return replace(operand, mode=Mode.WRITE if fresh else Mode.UPDATE)
