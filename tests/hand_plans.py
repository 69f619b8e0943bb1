"""Plans written step by step, for tests of what strategies don't produce."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.plans import SOURCE, TARGET, Backend, Boxes, Bundles, Lane, Op, Plan, Steps, queued
from shardroute.planner.problems import Problem
from shardroute.topologies import build_topology, load_machine

Box = Sequence[tuple[int, int]]  # (lo, hi) for each dim


@dataclass
class HandPlan:
    """Tensors first, then steps; `build` gives the plan. A piece is (tensor, box); staged ones get offsets in their order."""

    tensors: list[tuple[Tensor, Fragments, Fragments]] = field(default_factory=list)
    pieces: list[list[Box]] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    bundles: list[list[tuple[int, int, int]]] = field(default_factory=list)  # tensor, piece, offset
    groups: list[list[int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def tensor(self, shape: Sequence[int], source: Fragments, target: Fragments, dtype: str = "bf16") -> int:
        """Add a tensor; its number."""
        self.tensors.append((Tensor(f"t{len(self.tensors)}", tuple(shape), dtype), source, target))
        self.pieces.append([])
        return len(self.tensors) - 1

    def bundle(self, *pieces: tuple[int, Box], within: int | None = None) -> int:
        """Add a bundle; its number. Pieces lie in a slot one after the other, or where bundle `within` has them."""
        entries = []
        end = 0
        for tensor, box in pieces:
            if box not in self.pieces[tensor]:
                self.pieces[tensor].append(box)
            number = self.pieces[tensor].index(box)
            known = {} if within is None else {(t, p): offset for t, p, offset in self.bundles[within]}
            entries.append((tensor, number, known.get((tensor, number), end)))
            end += math.prod(hi - lo for lo, hi in box) * self.tensors[tensor][0].itemsize
        self.bundles.append(entries)
        return len(self.bundles) - 1

    def copy(
        self,
        bundle: int,
        src: int,
        dst: int,
        after: Sequence[int] = (),
        src_at: int = SOURCE,
        dst_at: int = TARGET,
        lane: Lane = Lane.INJECT,
        queue: int = 0,
    ) -> int:
        """Add a COPY; its number."""
        return self._step(Op.COPY, int(queued(np.array(lane), np.array(queue))), bundle, src, dst, -1, src_at, dst_at, after)

    def gather(self, bundle: int, group: Sequence[int], slot: int, after: Sequence[int] = ()) -> int:
        """Add an ALL_GATHER into a slot; its number."""
        return self._step(Op.ALL_GATHER, Lane.COLLECTIVE, bundle, -1, -1, self._group(group), SOURCE, slot, after)

    def broadcast(self, bundle: int, src: int, group: Sequence[int], src_at: int, dst_at: int, after: Sequence[int] = ()) -> int:
        """Add a BROADCAST; its number."""
        return self._step(Op.BROADCAST, Lane.COLLECTIVE, bundle, src, -1, self._group(group), src_at, dst_at, after)

    def barrier(self, group: Sequence[int], after: Sequence[int] = ()) -> int:
        """Add a BARRIER; its number."""
        return self._step(Op.BARRIER, Lane.COLLECTIVE, self.bundle(), -1, -1, self._group(group), SOURCE, TARGET, after)

    def _group(self, ranks: Sequence[int]) -> int:
        self.groups.append(list(ranks))
        return len(self.groups) - 1

    def _step(
        self, op: Op, lane: int, bundle: int, src: int, dst: int, group: int, src_at: int, dst_at: int, after: Sequence[int]
    ) -> int:
        self.rows.append((op, lane, Backend.PROCESSES, bundle, src, dst, group, src_at, dst_at))
        self.after.append(list(after))
        return len(self.rows) - 1

    def build(self, n_ranks: int) -> Plan:
        """The plan. Tensors must all be of different classes, as pieces are kept by class."""
        tensors, sources, targets = zip(*self.tensors, strict=True)
        names = tuple((t.name,) for t in tensors)
        problem = Problem(tensors, Layout(sources, names), Layout(targets, names), n_ranks)
        assert len(problem.classes) == len(tensors)
        boxes = tuple(
            Boxes(
                *(np.array([[d[k] for d in box] for box in pieces], np.int64).reshape(len(pieces), len(t.shape)) for k in (0, 1))
            )
            for t, pieces in zip(tensors, self.pieces, strict=True)
        )
        entries = np.array([e for b in self.bundles for e in b], np.int64).reshape(-1, 3)
        columns = np.array(self.rows, np.int64).reshape(-1, 9).T
        return Plan(
            strategy="by hand", topology=build_topology(load_machine("cpu-processes"), min_gpus=n_ranks),
            problem=problem, boxes=boxes,
            bundles=Bundles(np.cumsum([0, *map(len, self.bundles)]), *entries.T),
            steps=Steps(*columns, np.cumsum([0, *map(len, self.after)]), np.array([*chain(*self.after)], np.int64)),
            group_ptr=np.cumsum([0, *map(len, self.groups)]), group_ranks=np.array([r for g in self.groups for r in g], np.int32),
            slot_bytes=np.array(self.slots, np.int64),
        )  # fmt: skip


def row_shards(shape: Sequence[int], ranks: Sequence[int]) -> Fragments:
    """Rows split over ranks."""
    return place(shape, Mesh.of({"x": len(ranks)}, ranks), [Shard(0)])


def column_shards(shape: Sequence[int], ranks: Sequence[int]) -> Fragments:
    """Columns split over ranks."""
    return place(shape, Mesh.of({"x": len(ranks)}, ranks), [Shard(1)])


def rows_to_columns() -> Plan:
    """8 x 8, rows over ranks 0 and 1 to columns over ranks 2 to 5, by eight copies."""
    hand = HandPlan()
    t = hand.tensor((8, 8), row_shards((8, 8), [0, 1]), column_shards((8, 8), [2, 3, 4, 5]))
    for src in (0, 1):
        for k in range(4):
            hand.copy(hand.bundle((t, [(4 * src, 4 * src + 4), (2 * k, 2 * k + 2)])), src, 2 + k)
    return hand.build(6)


def relay_chain(n_ranks: int, n_elements: int = 1000, n_chunks: int = 1) -> Plan:
    """A vector from rank 0 to all others, each rank passing on what it received, chunk by chunk."""
    hand = HandPlan()
    shape = (n_chunks, n_elements)
    t = hand.tensor(shape, row_shards(shape, [0]), place(shape, Mesh.of({"x": n_ranks - 1}, range(1, n_ranks)), [Replicate()]))
    for chunk in range(n_chunks):
        bundle, before = hand.bundle((t, [(chunk, chunk + 1), (0, n_elements)])), None
        for rank in range(n_ranks - 1):
            before = hand.copy(
                bundle, rank, rank + 1, [] if before is None else [before], TARGET if rank else SOURCE, lane=Lane.RELAY
            )
    return hand.build(n_ranks)


def lane_ordered() -> Plan:
    """Steps that wait for what they need by their queue's order only: collectives that use one slot after each other.

    Ranks 0 and 1 gather into the slot; rank 0 broadcasts it to rank 2, rank 1 copies its part out; then they gather into it anew.
    """
    hand = HandPlan(slots=[64])
    for k in range(3):
        shape = (4, 6 + k)
        target = place(shape, Mesh.of({"x": 2}, [1, 2]), [Replicate()])
        t = hand.tensor(shape, row_shards(shape, [0, 1]), target)
        whole = hand.bundle(*((t, [(2 * r, 2 * r + 2), (0, shape[1])]) for r in (0, 1)))
        gather = hand.gather(whole, [0, 1], 0)
        sent = hand.broadcast(whole, 0, [0, 2], 0, 0)
        hand.copy(whole, 1, 1, [gather], 0, TARGET, Lane.LOCAL)
        hand.copy(whole, 2, 2, [sent], 0, TARGET, Lane.LOCAL)
    return hand.build(3)


def gathered(n_rounds: int = 3) -> Plan:
    """Rows over ranks 0 and 1 to columns over 2 and 3, by collectives through one slot a side that each round reuses."""
    hand = HandPlan(slots=[8 * (8 + n_rounds) * 2] * 2)
    copies: list[int] = []
    sent: list[int] = []
    for k in range(n_rounds):
        shape = (8, 8 + k)
        t, half = hand.tensor(shape, row_shards(shape, [0, 1]), column_shards(shape, [2, 3])), -(-shape[1] // 2)
        boxes: list[list[Box]] = [[[(4 * r, 4 * r + 4), columns] for r in (0, 1)] for columns in ((0, half), (half, shape[1]))]
        whole = hand.bundle(*((t, box) for side in boxes for box in side))
        gather = hand.gather(whole, [0, 1], 0, sent)
        sent = [hand.broadcast(whole, 0, [0, 2, 3], 0, 1, [gather, *copies])]
        parts = [hand.bundle(*((t, box) for box in side), within=whole) for side in boxes]
        copies = [hand.copy(part, rank, rank, sent, 1, TARGET, Lane.LOCAL) for part, rank in zip(parts, (2, 3), strict=True)]
    return hand.build(4)
