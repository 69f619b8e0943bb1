"""The steps of one tensor by M2N's PACK, from packing to unpacking: a template that every tensor of the class copies."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.plans import SOURCE, TARGET, Lane, Op, queued
from shardroute.planner.routing.drafts import Rows
from shardroute.planner.routing.m2n_calls import PACKED, RECEIVE, Call, Flow

# A kernel's puts are all under way at once; queues run one step at a time, so each stream has many. But what a leader sends on
# goes through its NIC in the order in which it was posted, whichever stream it is of: there both streams have the same queues.
QUEUES: Final = 16
_COLUMNS: Final = {lane: queued(np.full(QUEUES, lane), np.arange(QUEUES)).tolist() for lane in Lane}


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Steps to wait for before parts of slots are overwritten, one a row.

    key     which slot of which rank
    step    its last use
    layout  how bytes lie there, by number; end   where they end
    full    whether no byte before `end` is free
    """

    key: Ints
    step: Ints
    layout: Ints
    end: Ints
    full: NDArray[np.bool_]

    def moved(self, steps: int) -> "Uses":
        """The same uses, their steps numbered from `steps`."""
        return replace(self, step=self.step + steps)

    def overwritten(self, by: "Uses", n_keys: int) -> tuple[NDArray[np.bool_], "Uses"]:
        """Which uses are of slots that `by` writes to; and what is left to wait for behind `by`: its own uses, and older ones of
        bytes that it may have left alone.
        """
        covers, layout = np.full(n_keys, -1), np.full(n_keys, -1)
        covers[by.key], layout[by.key] = np.where(by.full, by.end, 0), by.layout
        keep = (self.end > covers[self.key]) & (self.layout != layout[self.key])
        left = Uses(*(np.concatenate([getattr(self, f)[keep], getattr(by, f)]) for f in Uses.__dataclass_fields__))
        return covers[self.key] >= 0, left


_NONE = np.zeros(0, np.int64)
NO_USES = Uses(_NONE, _NONE, _NONE, _NONE, np.zeros(0, bool))


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """The steps of a class, numbered from the first, with bundles likewise; queues and slots are those of stream 0.

    stage       the ranks that hold the class: one pipeline stage
    group       ranks of the communicator: those of the stage, then all receivers
    owner, dep  which step waits for which
    packs       steps that pack
    enters, leaves   the first barrier and the last, -1 where nothing crosses
    received, sent   what it leaves to wait for, see _Stream; `sent` by block and rank
    local       copies within a rank of what it holds itself
    """

    stage: tuple[int, ...]
    group: Ranks
    rows: Rows
    owner: Ints
    dep: Ints
    counts: Ints
    piece: Ints
    offset: Ints
    packs: Ints
    enters: int
    leaves: int
    received: Uses
    sent: Uses
    block: Ints
    local: Ints


def template_of(call: Call, number: int) -> Template:
    """The steps of a call; `number` tells its layout of slots from those of others."""
    writer = _Writer(call.room, call.cell_bytes)
    for rank, pieces in call.keeps:
        writer.local(rank, pieces)
    writer.move(call.flows, split=call.split)
    return writer.template(call, number)


class _Writer:
    """Writes the steps of one class. `room` is what each piece takes in a slot, a cell is of `cell_bytes`."""

    def __init__(self, room: Ints, cell_bytes: int) -> None:
        self._room, self._cell_bytes = room, cell_bytes
        self._rows: list[tuple[int, int, int, int, int, int, int]] = []  # Rows without the group
        self._pairs: list[tuple[int, int]] = []
        self._bundles: list[tuple[Ints, Ints]] = []
        self._packs: list[int] = []
        self._tail: list[int] = []
        self._local: list[int] = []
        self._enters = self._leaves = -1

    def local(self, rank: int, pieces: Ints) -> None:
        """A rank keeps what it holds."""
        bundle = self._bundle([(pieces, np.full(len(pieces), -1))])
        self._local.append(self._copy(Lane.LOCAL, 0, bundle, rank, rank, SOURCE, TARGET, []))

    def move(self, flows: Sequence[Flow], *, split: bool) -> None:
        """All steps of the flows, from packing to unpacking."""
        if not flows:
            return
        packed = self._pack(flows)
        self._enters = self._barrier([*packed.values()])
        arrived: dict[int, list[int]] = {}  # who writes to each rank's receive slot
        injects = [self._inject(flow, i, packed, arrived) for i, flow in enumerate(flows)]
        between = [self._enters]
        if split:
            between.append(self._barrier([step for steps in injects for step in steps]))
        forwards: list[int] = []
        for i, (flow, steps) in enumerate(zip(flows, injects, strict=True)):
            forwards += self._forward(flow, i, steps, between, arrived)
        self._leaves = self._barrier([step for steps in injects for step in steps] + forwards)
        self._tail = forwards + self._unpack(flows, arrived)

    def _pack(self, flows: Sequence[Flow]) -> dict[tuple[int, int], int]:
        """The step that packs each block of each source."""
        blocks: dict[tuple[int, int], list[tuple[Ints, Ints]]] = {}
        for flow in flows:
            for i, (source, pieces) in enumerate(flow.parts):
                blocks.setdefault((source, flow.blocks[i]), []).append((pieces, self._offsets(pieces, flow.cells[i])))
        packed = {}
        for (source, block), parts in sorted(blocks.items()):
            bundle = self._bundle(parts)
            packed[source, block] = self._copy(Lane.LOCAL, 0, bundle, source, source, SOURCE, PACKED + block, [])
        self._packs = [*packed.values()]
        return packed

    def _inject(
        self, flow: Flow, number: int, packed: dict[tuple[int, int], int], arrived: dict[int, list[int]]
    ) -> list[int]:
        steps = []
        for i, (source, pieces) in enumerate(flow.parts):
            bundle = self._bundle([(pieces, self._offsets(pieces, flow.cells[i]))])
            after = [self._enters, packed[source, flow.blocks[i]]]
            at = PACKED + flow.blocks[i]
            steps.append(self._copy(Lane.INJECT, number, bundle, source, flow.leaders[0], at, RECEIVE, after))
        arrived.setdefault(flow.leaders[0], []).extend(steps)
        return steps

    def _forward(
        self, flow: Flow, number: int, came: list[int], between: list[int], arrived: dict[int, list[int]]
    ) -> list[int]:
        """The steps that pass a flow on: in each domain to the next leader and to the ranks beside this one, part by part."""
        steps: list[int] = []
        if len(flow.receivers) == 1:
            return steps
        bundles = [self._bundle([(p, self._offsets(p, c))]) for (_, p), c in zip(flow.parts, flow.cells, strict=True)]
        for k, (node, leader) in enumerate(zip(flow.nodes, flow.leaders, strict=True)):
            hops = [(Lane.RELAY, flow.leaders[k + 1])] if k + 1 < len(flow.nodes) else []
            hops += [(Lane.HAND_OVER, rank) for rank in node if rank != leader]
            passed = [
                [self._copy(lane, number, bundle, leader, rank, RECEIVE, RECEIVE, [step, *between]) for lane, rank in hops]
                for bundle, step in zip(bundles, came, strict=True)
            ]
            for i, (_, rank) in enumerate(hops):
                arrived.setdefault(rank, []).extend(part[i] for part in passed)
            steps += [step for part in passed for step in part]
            came = [part[0] for part in passed if part]
        return steps

    def _unpack(self, flows: Sequence[Flow], arrived: dict[int, list[int]]) -> list[int]:
        of_rank: dict[int, list[int]] = {}
        for i, flow in enumerate(flows):
            for rank in flow.receivers:
                of_rank.setdefault(rank, []).append(i)
        bundles: dict[tuple[int, ...], int] = {}
        steps = []
        for rank, which in sorted(of_rank.items()):
            key = tuple(which)
            if key not in bundles:
                bundles[key] = self._bundle(
                    [(p, self._offsets(p, c)) for i in which for (_, p), c in zip(flows[i].parts, flows[i].cells, strict=True)]
                )
            after = [self._leaves, *arrived[rank]]
            steps.append(self._copy(Lane.LOCAL, 0, bundles[key], rank, rank, RECEIVE, TARGET, after))
        return steps

    def _offsets(self, pieces: Ints, cell: int) -> Ints:
        room = self._room[pieces]
        return np.cumsum(room) - room + cell * self._cell_bytes

    def _bundle(self, parts: Sequence[tuple[Ints, Ints]]) -> int:
        pieces, offsets = (np.concatenate([p[i] for p in parts]) for i in range(2))
        self._bundles.append((pieces, offsets))
        return len(self._bundles) - 1

    def _copy(self, lane: Lane, queue: int, bundle: int, src: int, dst: int, src_at: int, dst_at: int, after: list[int]) -> int:
        self._rows.append((Op.COPY, _COLUMNS[lane][queue % QUEUES], bundle, src, dst, src_at, dst_at))
        return self._waits(after)

    def _barrier(self, after: list[int]) -> int:
        self._rows.append((Op.BARRIER, Lane.COLLECTIVE, -1, -1, -1, SOURCE, TARGET))
        return self._waits(after)

    def _waits(self, after: list[int]) -> int:
        number = len(self._rows) - 1
        self._pairs += [(number, step) for step in after]
        return number

    def template(self, call: Call, number: int) -> Template:
        """What was written."""
        table: NDArray[np.int64] = np.array(self._rows, dtype=np.int64).reshape(-1, 7)
        op, lane, bundle, src, dst, src_at, dst_at = table.T
        pairs = np.array(self._pairs, dtype=np.int64).reshape(-1, 2)
        none = np.zeros(0, np.int64)
        tail, packs = np.array(self._tail, dtype=np.int64), np.array(self._packs, dtype=np.int64)
        reader = src[tail].tolist()
        received = Uses(
            src[tail], tail, np.full(len(tail), number),
            np.array([call.n_cells[r] * call.cell_bytes for r in reader], dtype=np.int64),
            np.array([call.even and r not in call.gaps for r in reader], dtype=bool),
        )  # fmt: skip
        first = [int(self._bundles[b][1].min()) for b in bundle[packs].tolist()]
        ends = [int((self._bundles[b][1] + self._room[self._bundles[b][0]]).max()) for b in bundle[packs].tolist()]
        sent = Uses(
            packs, np.full(len(packs), self._leaves), np.full(len(packs), number), np.array(ends, dtype=np.int64),
            np.array(first, dtype=np.int64) == 0,
        )  # fmt: skip
        return Template(
            call.stage, call.group, Rows(op, lane, bundle, src, dst, np.full(len(op), -1), src_at, dst_at), pairs[:, 0],
            pairs[:, 1],
            np.array([len(b[0]) for b in self._bundles], dtype=np.int64),
            np.concatenate([none, *(b[0] for b in self._bundles)]), np.concatenate([none, *(b[1] for b in self._bundles)]),
            packs, self._enters, self._leaves, received, sent, dst_at[packs] - PACKED, np.array(self._local, dtype=np.int64),
        )  # fmt: skip
