"""One rank's part in a collective: what it receives and passes on along each ring, and what it makes of it.

Rule: an origin's bytes are what it would pack for any other rank of the group, which is the same for all since collectives end in
slots; they are cut into as many equal parts as there are rings.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardroute.executors.emulation.wirings import Wiring, hops_of
from shardroute.executors.interpreting.interpret import Programs
from shardroute.planner.plans import Op


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes `first` to `end` of an origin's, which come along a ring (from `source`, -1: they are this rank's own) and go on to
    `to` (-1: no further).
    """

    ring: int
    origin: int
    first: int
    end: int
    source: int
    to: int


class Pieces:
    """Which rows of the blocks an origin has for a rank in a step."""

    def __init__(self, programs: Programs) -> None:
        actions = programs.actions
        self._blocks, self._ptr = programs.blocks, actions.block_ptr
        rank = np.repeat(np.arange(programs.n_drivers), np.diff(actions.ptr))
        self._action = {key: at for at, key in enumerate(zip(actions.step.tolist(), rank.tolist(), strict=True))}

    def action(self, step: int, rank: int) -> int | None:
        """The rank's action in a step, if it has one."""
        return self._action.get((step, rank))

    def between(self, step: int, origin: int, to: int) -> tuple[int, int]:
        """First and last row; equal where there are none."""
        action = self._action.get((step, origin))
        if action is None:
            return 0, 0
        first, last = int(self._ptr[action]), int(self._ptr[action + 1])
        of = self._blocks.to[first:last]
        return first + int(np.searchsorted(of, to)), first + int(np.searchsorted(of, to, side="right"))

    def n_bytes(self, step: int, origin: int, to: int) -> int:
        """Bytes of these rows."""
        first, last = self.between(step, origin, to)
        return int(self._blocks.n_bytes[first:last].sum())


def parts_of(step: int, rank: int, wiring: Wiring, rows: Pieces) -> Iterator[Part]:
    """What a rank sends and receives in a collective, ring by ring, in the order in which it comes and goes."""
    op = int(wiring.op[step])
    rings = wiring.rings(step)
    for number, order in enumerate(rings):
        hops = hops_of(order, op)
        to = dict(hops).get(rank, -1)
        source = {b: a for a, b in hops}.get(rank, -1)
        at = order.index(rank)
        origins = [order[(at - k) % len(order)] for k in range(len(order))] if op == Op.ALL_GATHER else order[:1]
        for origin in origins:
            some = next(other for other in (rank, *order) if other != origin) if len(order) > 1 else -1
            n = rows.n_bytes(step, origin, some) if some >= 0 else 0
            first, end = n * number // len(rings), n * (number + 1) // len(rings)
            if first < end:
                # An all-gather's part goes round until the rank before its origin.
                yield Part(
                    number, origin, first, end, -1 if origin == rank else source, -1 if to == origin else to
                )

