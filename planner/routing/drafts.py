"""Plans while they are being written: blocks of steps and bundles are appended, and numbers given out.

Rule: whoever writes a block gets back the number of its first step or bundle, so that later blocks can name it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import SOURCE, TARGET, Backend, Boxes, Bundles, Lane, Op, Plan, Steps, queued
from shardroute.planner.problems import Problem
from shardroute.topologies.topologies import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Columns of steps as Steps has them, `after` apart; `bundle` numbers the draft's bundles."""

    op: NDArray[np.integer]
    lane: NDArray[np.integer]
    bundle: NDArray[np.integer]
    src: NDArray[np.integer]
    dst: NDArray[np.integer]
    group: NDArray[np.integer]
    src_at: NDArray[np.integer]
    dst_at: NDArray[np.integer]


@dataclass(slots=True)
class Draft:
    """A plan that grows. `n_steps` and `n_bundles` count what has been written."""

    n_steps: int = 0
    n_bundles: int = 0
    _rows: list[Rows] = field(default_factory=list)
    _after: list[tuple[Ints, Ints]] = field(default_factory=list)
    _entries: list[tuple[Ints, Ints, Ints, Ints]] = field(default_factory=list)
    _groups: dict[bytes, int] = field(default_factory=dict)
    _group_ranks: list[Ranks] = field(default_factory=list)
    _slots: list[int] = field(default_factory=list)
    _empty: int | None = None

    def bundles(self, counts: Ints, tensor: Ints, piece: Ints, offset: Ints) -> int:
        """Append bundles of `counts` entries each; the number of the first."""
        first = self.n_bundles
        self._entries.append((counts, tensor, piece, offset))
        self.n_bundles += len(counts)
        return first

    def bundle(self, tensor: Ints, piece: Ints, offset: Ints) -> int:
        """Append one bundle; its number."""
        return self.bundles(np.array([len(tensor)]), tensor, piece, offset)

    def empty_bundle(self) -> int:
        """The number of the bundle without pieces, appended when it is first asked for."""
        if self._empty is None:
            none = np.zeros(0, np.int64)
            self._empty = self.bundle(none, none, none)
        return self._empty

    def group(self, ranks: Ranks) -> int:
        """The number of the group of these ranks in this order; a new one for ranks that have none yet."""
        ranks = np.asarray(ranks, dtype=np.int32)
        key = ranks.tobytes()
        if key not in self._groups:
            self._groups[key] = len(self._group_ranks)
            self._group_ranks.append(ranks)
        return self._groups[key]

    def slots(self, n_bytes: Sequence[int]) -> int:
        """Append staging slots of these sizes; the number of the first."""
        first = len(self._slots)
        self._slots += n_bytes
        return first

    def steps(self, rows: Rows, owner: Ints, dep: Ints) -> int:
        """Append steps; the number of the first. Step `owner` of these waits for step `dep` of the draft; pairs may repeat."""
        first = self.n_steps
        self._rows.append(rows)
        self._after.append((owner + first, dep))
        self.n_steps += len(rows.op)
        return first

    def collective(self, op: Op, bundle: int, src: int, group: int, src_at: int, dst_at: int, after: Ints, queue: int = 0) -> int:
        """Append a collective step; its number."""
        lane = queued(np.array([Lane.COLLECTIVE]), np.array([queue]))
        columns = (np.array([v]) for v in (bundle, src, -1, group, src_at, dst_at))
        return self.steps(Rows(np.array([op]), lane, *columns), np.zeros(len(after), np.int64), after)

    def barrier(self, group: int, after: Ints, queue: int = 0) -> int:
        """Append a BARRIER; its number."""
        return self.collective(Op.BARRIER, self.empty_bundle(), -1, group, SOURCE, TARGET, after, queue)

    def plan(self, strategy: str, problem: Problem, pieces: Sequence[Pieces], topology: Topology, backend: Backend) -> Plan:
        """The plan that was written; `pieces` are those of each class, which its bundles number."""
        none = np.zeros(0, np.int64)
        counts, tensor, piece, offset = (np.concatenate([none, *(e[i] for e in self._entries)]) for i in range(4))
        columns = {name: np.concatenate([none, *(getattr(r, name) for r in self._rows)]) for name in Rows.__dataclass_fields__}
        owner, dep = (np.concatenate([none, *(a[i] for a in self._after)]) for i in range(2))
        # Sorted, not np.unique, which hashes and takes several times as long for millions of pairs (NumPy 2.3).
        pairs = np.sort(owner * max(self.n_steps, 1) + dep)
        pairs = pairs[np.diff(pairs, prepend=-1) != 0]
        owner, dep = np.divmod(pairs, max(self.n_steps, 1))
        steps = Steps(
            **columns, backend=np.full(self.n_steps, backend), after=dep,
            after_ptr=np.searchsorted(owner, np.arange(self.n_steps + 1)),
        )  # fmt: skip
        bundles = Bundles(np.concatenate([[0], np.cumsum(counts)]), tensor, piece, offset)
        boxes = tuple(Boxes(p.lo, p.hi) for p in pieces)
        ranks = [np.zeros(0, np.int32), *self._group_ranks]
        return Plan(
            strategy, topology, problem, boxes, bundles, steps, np.cumsum([len(r) for r in ranks]), np.concatenate(ranks),
            np.array(self._slots, dtype=np.int64),
        )  # fmt: skip
