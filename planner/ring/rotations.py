"""Blocks that travel round rings of ranks while attention is computed on those that have arrived.

Rule: what travels and what stays is given. In ring attention K and V travel and queries stay; in pass-Q it is the other way.
Round j finds block (i - j) mod n at place i of a ring of n. A rank passes a block on before it computes with it, into one of two
slots of its neighbour, so that copies run while attention does. A block stops where no rank further along needs it.

Sums for a travelling block (dK and dV; o and lse under pass-Q) come home in one of two ways: *along* the ring one hop behind the
block, each rank adding its part to what arrives, or *straight* from each rank to the block's home, which adds up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.plans import Kind, Lane, Mode
from shardroute.planner.ring.chunks import seen
from shardroute.planner.ring.drafts import Draft, Load, Operand, reading, writing
from shardroute.planner.shares import Told, untold

# Queues of lane INJECT (hops of blocks) and RELAY (hops of sums): each kind in an order of its own.
_BLOCKS, _SUMS = 0, 1
# Microseconds that a pair of places takes in `need`, and a block in a rotation without sums for blocks and with some: of rings of
# 128 and pass-q on a Xeon.
NEEDED_US, SUMLESS_US, SUMMED_US = 22.0, 56.0, 112.0


@dataclass(frozen=True, slots=True)
class Ring:
    """One ring: for each of its places the rank, what stays there and what travels from there.

    stays     operands that are read
    kept      operands that are added to, over all rounds
    blocks    the travelling bundle, and where it lies at home
    sums      the bundle of sums for the block and its place at home; none where nothing is summed for blocks
    """

    ranks: Sequence[int]
    stays: Sequence[Sequence[tuple[Load, int]]]
    kept: Sequence[Sequence[tuple[Load, int]]]
    blocks: Sequence[tuple[Load, int]]
    sums: Sequence[tuple[Load, int]] = ()


@dataclass(slots=True)
class Slots:
    """Slots of a rotation, made when first needed and used again by the next rotation over the same blocks."""

    blocks: list[int] = field(default_factory=list)


def need(
    draft: Draft, ranks: Sequence[Sequence[int]], *, keys_travel: bool, progress: Told = untold
) -> NDArray[np.bool_]:
    """Whether what stays at place i and the block from place c have anything to compute, bool[n, n].

    `ranks` are for each place those whose chunks are there. A place always meets its own block. progress is told the share of
    the places that is done.
    """
    rows = [draft.chunks.rows.take(np.concatenate([draft.chunks.of(rank) for rank in members])) for members in ranks]
    table = np.empty((len(rows), len(rows)), dtype=bool)
    for i, queries in enumerate(rows):
        table[i] = [seen(draft.attention, queries, keys).any() for keys in rows]
        progress((i + 1) / len(rows))
    return (table if keys_travel else table.T) | np.eye(len(ranks), dtype=bool)


def rotate(
    draft: Draft,
    rings: Sequence[Ring],
    needed: NDArray[np.bool_],
    kind: Kind,
    slots: Slots,
    *,
    along: bool = True,
    progress: Told = untold,
) -> None:
    """Add the steps of all rounds, round by round over all rings. `needed` is the same for all rings, see `need`.
    progress is told the share of the blocks that are computed with.
    """
    n = len(needed)
    n_blocks, n_done = int(needed.sum()) * len(rings), 0
    # The last round in which each block is computed with; it is passed on in all rounds before.
    last = [max(j for j in range(n) if needed[(block + j) % n, block]) for block in range(n)]
    while len(slots.blocks) < min(max(last, default=0), 2):
        slots.blocks.append(draft.slot(load for ring in rings for load, _ in ring.blocks))
    sums = _Sums(draft, rings, last, kind, along) if rings and rings[0].sums else None
    at = [[home for _, home in ring.blocks] for ring in rings]  # where the block of this round lies, by ring and place
    for j in range(n):
        onward = [list(places) for places in at]
        for ring, here, there in zip(rings, at, onward, strict=True):
            for i, block in _of_round(n, j):
                if j < last[block]:
                    to = (i + 1) % n
                    there[to] = slots.blocks[j % 2]
                    draft.copy(ring.blocks[block][0], ring.ranks[i], ring.ranks[to], here[i], there[to], Lane.INJECT, _BLOCKS)
        for k, (ring, here) in enumerate(zip(rings, at, strict=True)):
            for i, block in _of_round(n, j):
                if not needed[i, block]:
                    if sums is not None and j <= last[block]:
                        sums.pass_by(k, i, block, j)
                    continue
                n_done += 1
                operands = reading((ring.blocks[block][0], here[i]), *ring.stays[i])
                operands += [writing(Operand(*kept), fresh=j == 0) for kept in ring.kept[i]]
                if sums is None:
                    draft.compute(kind, ring.ranks[i], operands)
                else:
                    sums.compute(k, i, block, j, operands)
            progress(n_done / n_blocks)
        at = onward


def _of_round(n: int, j: int) -> list[tuple[int, int]]:
    """Each place of a ring with the block that is there in round j."""
    return [(i, (i - j) % n) for i in range(n)]


class _Sums:
    """The sums for travelling blocks: computed where a block is, brought home along the ring or straight."""

    def __init__(self, draft: Draft, rings: Sequence[Ring], last: Sequence[int], kind: Kind, along: bool) -> None:
        self._draft, self._rings, self._last, self._kind, self._along = draft, rings, last, kind, along
        self._adds = Kind.MERGE if kind is Kind.ATTEND else Kind.ADD
        travels = max(last, default=0)
        loads = [load for ring in rings for load, _ in ring.sums]
        self._own = [draft.slot(loads) for _ in range(min(travels + 1, 2))] if travels else []
        self._arriving = [draft.slot(loads) for _ in range(min(travels, 2))]
        self._at: dict[tuple[int, int], int] = {}  # where the sum of a (ring, block) lies now, at the place where its block is

    def compute(self, k: int, i: int, block: int, j: int, operands: list[Operand]) -> None:
        """Compute with a block at place i in round j, and send what comes of it on its way."""
        ring, draft = self._rings[k], self._draft
        load, home = ring.sums[block]
        stays_home = j == 0 and (self._last[block] == 0 or not self._along)
        own = home if stays_home else self._own[j % 2]
        draft.compute(self._kind, ring.ranks[i], [*operands, Operand(load, own, Mode.WRITE)])
        if stays_home:
            return
        if self._along:
            arrived = self._at.get((k, block))
            if arrived is not None:
                self._add(ring.ranks[i], load, arrived, own)
            self._pass(k, i, block, j, own if arrived is None else arrived)
            return
        to = self._arriving[(j - 1) % 2]
        draft.copy(load, ring.ranks[i], ring.ranks[block], own, to, Lane.RELAY, _SUMS)
        self._add(ring.ranks[block], load, home, to)

    def pass_by(self, k: int, i: int, block: int, j: int) -> None:
        """Pass on what has arrived at a place that has nothing to add."""
        if self._along:
            self._pass(k, i, block, j, self._at[k, block])

    def _add(self, rank: int, load: Load, to: int, part: int) -> None:
        self._draft.compute(self._adds, rank, [Operand(load, to, Mode.UPDATE), Operand(load, part)])

    def _pass(self, k: int, i: int, block: int, j: int, at: int) -> None:
        """Send the sum on: to the next place, or home when this was the last."""
        ring, n = self._rings[k], len(self._last)
        load, home = ring.sums[block]
        going_home = j == self._last[block]
        to, there = (block, home) if going_home else ((i + 1) % n, self._arriving[j % 2])
        self._draft.copy(load, ring.ranks[i], ring.ranks[to], at, there, Lane.RELAY, _SUMS)
        self._at[k, block] = there
