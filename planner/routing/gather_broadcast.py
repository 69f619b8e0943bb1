"""`gather-broadcast`: all-gather whole tensors on the training side, broadcast them, let each rank keep its part. The baseline.

This is the usual way of RL frameworks (NeMo RL, verl, slime): tensors go through staging memory in buckets; every training rank
gathers a bucket, the first training rank broadcasts it to all inference ranks, and each copies out what it needs. Two
buckets are in flight, so that one is gathered while the one before it is broadcast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import SOURCE, TARGET, Backend, Boxes, Bundles, Lane, Op, Plan, Steps
from shardroute.planner.problems import Problem
from shardroute.topologies.topologies import Topology

# NeMo RL packs up to 2 % of a GPU's memory, 5 GB at most, into a broadcast (docs/guides/refit.md of NeMo RL); half of that here,
# twice. A small model is cut into several buckets all the same, so that gathering and broadcasting overlap.
LARGEST_BUCKET_BYTES = 2 * 2**30
SMALLEST_BUCKET_BYTES = 2**20
BUCKETS = 16
_GATHERED, _RECEIVED = (0, 1), (2, 3)  # slots: two on training ranks, two on inference ranks


@dataclass(slots=True)
class _Draft:
    """Steps and bundles as they are written."""

    rows: list[tuple[int, int, int, int, int, int, int, int]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    bundles: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)
    bucket_bytes: list[int] = field(default_factory=list)

    def step(self, op: Op, lane: Lane, src: int, dst: int, group: int, src_at: int, dst_at: int, after: list[int]) -> int:
        """Add a step that carries the newest bundle; its number."""
        self.rows.append((op, lane, len(self.bundles) - 1, src, dst, group, src_at, dst_at))
        self.after.append(sorted(set(after)))
        return len(self.rows) - 1


def plan(
    problem: Problem,
    pieces: Sequence[Pieces],
    topology: Topology,
    backend: Backend,
    bucket_bytes: int | None = None,
) -> Plan:
    """The baseline plan. A tensor larger than `bucket_bytes` makes a bucket of its own; None chooses by the constants above."""
    if bucket_bytes is None:
        bucket_bytes = min(max(problem.n_bytes // BUCKETS, SMALLEST_BUCKET_BYTES), LARGEST_BUCKET_BYTES)
    trainers, receivers = problem.source.ranks, problem.target.ranks
    root = int(trainers[0]) if len(trainers) else -1
    groups = [trainers, np.concatenate([[root], receivers[receivers != root]])] if len(trainers) else []
    needs = [_needs(p, receivers) for p in pieces]
    of_tensor = np.zeros(len(problem.tensors), dtype=np.int64)
    for i, cls in enumerate(problem.classes):
        of_tensor[cls.members] = i
    draft = _Draft()
    gathers: list[int] = []
    sends: list[int] = []
    copies: list[list[int]] = []
    for tensors in _buckets(problem, bucket_bytes):
        number = len(gathers)
        classes = of_tensor[tensors]
        tensor = np.repeat(tensors, [len(pieces[c]) for c in classes])
        piece = np.concatenate([np.arange(len(pieces[c])) for c in classes])
        n_bytes = np.concatenate([pieces[c].n_elements * problem.classes[c].itemsize for c in classes])
        if not len(piece):
            continue
        offset = np.cumsum(n_bytes) - n_bytes
        slot = number % 2
        earlier = [gathers[number - 2], sends[number - 2]] if number >= 2 else []
        draft.bundles.append((tensor, piece, offset))
        draft.bucket_bytes.append(int(n_bytes.sum()))
        gathers.append(
            draft.step(
                Op.ALL_GATHER,
                Lane.COLLECTIVE,
                -1,
                -1,
                0,
                SOURCE,
                _GATHERED[slot],
                earlier + _at(copies, number - 2, root, draft),
            )
        )
        held_back = [sends[number - 2], *copies[number - 2]] if number >= 2 else []
        sends.append(
            draft.step(
                Op.BROADCAST,
                Lane.COLLECTIVE,
                root,
                -1,
                1,
                _GATHERED[slot],
                _RECEIVED[slot],
                [gathers[-1], *held_back],
            )
        )
        copies.append(
            _copy_out(
                draft,
                (tensor, piece, offset),
                np.concatenate([needs[c] for c in classes]),
                receivers,
                root,
                slot,
                gathers[-1],
                sends[-1],
            )
        )
    return _finish(draft, problem, pieces, topology, backend, groups)


def _at(copies: list[list[int]], number: int, rank: int, draft: _Draft) -> list[int]:
    """The local copies of bucket `number` on `rank`."""
    return [s for s in copies[number] if draft.rows[s][3] == rank] if number >= 0 else []


def _needs(pieces: Pieces, receivers: Ranks) -> NDArray[np.bool_]:
    """Which receiver needs which piece, bool[n_pieces, n_receivers]."""
    by_pattern = np.zeros((len(pieces.needers), len(receivers)), dtype=bool)
    for i, needers in enumerate(pieces.needers):
        by_pattern[i, np.searchsorted(receivers, needers)] = True
    return by_pattern[pieces.pattern]


def _buckets(problem: Problem, bucket_bytes: int) -> list[Ints]:
    """Tensors in their order, cut so that a bucket stays within `bucket_bytes` where it can."""
    buckets: list[list[int]] = []
    room = -1
    for i, tensor in enumerate(problem.tensors):
        if tensor.n_bytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(i)
        room -= tensor.n_bytes
    return [np.array(b, dtype=np.int64) for b in buckets]


def _copy_out(
    draft: _Draft,
    entries: tuple[Ints, Ints, Ints],
    needs: NDArray[np.bool_],
    receivers: Ranks,
    root: int,
    slot: int,
    gather: int,
    send: int,
) -> list[int]:
    """Local copies out of the slot, one a receiver; receivers that need the same share a bundle."""
    kinds: dict[bytes, list[int]] = {}
    for i in range(len(receivers)):
        kinds.setdefault(needs[:, i].tobytes(), []).append(i)
    steps = []
    for who in kinds.values():
        wanted = needs[:, who[0]]
        if not wanted.any():
            continue
        draft.bundles.append((entries[0][wanted], entries[1][wanted], entries[2][wanted]))
        for i in who:
            rank = int(receivers[i])
            at, after = (_GATHERED[slot], gather) if rank == root else (_RECEIVED[slot], send)
            steps.append(draft.step(Op.COPY, Lane.LOCAL, rank, rank, -1, at, TARGET, [after]))
    return steps


def _finish(
    draft: _Draft,
    problem: Problem,
    pieces: Sequence[Pieces],
    topology: Topology,
    backend: Backend,
    groups: list[Ranks],
) -> Plan:
    none = np.zeros(0, np.int64)
    tensor, piece, offset = (np.concatenate([none, *(b[i] for b in draft.bundles)]) for i in range(3))
    ptr = np.cumsum([0, *(len(b[0]) for b in draft.bundles)])
    bundles = Bundles(ptr, tensor.astype(np.int32), piece.astype(np.int32), offset)
    rows = np.array(draft.rows, dtype=np.int32).reshape(-1, 8)
    op, lane, bundle, src, dst, group, src_at, dst_at = rows.T
    steps = Steps(
        op=op.astype(np.uint8),
        lane=lane.astype(np.uint8),
        backend=np.full(len(rows), backend, dtype=np.uint8),
        bundle=bundle,
        src=src,
        dst=dst,
        group=group,
        src_at=src_at.astype(np.int16),
        dst_at=dst_at.astype(np.int16),
        after_ptr=np.cumsum([0, *(len(a) for a in draft.after)]),
        after=np.array([step for after in draft.after for step in after], dtype=np.int32),
    )
    largest = [max(draft.bucket_bytes[slot::2], default=0) for slot in (0, 1)]
    return Plan(
        "gather-broadcast", topology, problem, tuple(Boxes(p.lo, p.hi) for p in pieces), bundles, steps,
        np.cumsum([0, *map(len, groups)]), np.array([r for g in groups for r in g.tolist()], dtype=np.int32),
        np.array(largest * 2, dtype=np.int64),
    )  # fmt: skip
