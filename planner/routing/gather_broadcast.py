"""`gather-broadcast`: all-gather whole tensors on the training side, broadcast them, let each rank keep its part. The baseline.

This is the usual way of RL frameworks, here as NeMo RL packs it: weights go in the order of their names through buffers; all
training ranks gather a buffer, the first of them broadcasts it to all inference ranks, and each copies out what it needs. Two
buffers are in flight, so that one is gathered while the one before it is broadcast.

Between NVLink domains the other training ranks join the broadcast, though they have what it brings: NCCL's rings then leave
through the NICs of all GPUs of a host, and not through the first rank's alone (NeMo RL since pull request 1264).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import SOURCE, TARGET, Backend, Lane, Op, Plan, classes_of, queued
from shardroute.planner.problems import Problem
from shardroute.planner.routing.drafts import Draft, Rows
from shardroute.planner.routing.sizes import split_all
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

# NeMo RL packs up to 2 % of a GPU's memory, 5 GB at most, into a buffer, and has two of them (docs/guides/refit.md of NeMo RL).
MEMORY_SHARE: Final = 0.02
MOST_BUFFER_BYTES: Final = 5 * 10**9
BUFFERS: Final = 2
# The share of planning that is over when the steps are written: roughly, as it is with DeepSeek-V3 from 256 to 256 GPUs.
_WRITTEN: Final = 0.85
# Gathering and broadcasting are queues of their own: each has its communicator and stream.
_GATHERING: Final = 0
_BROADCASTING: Final = 1
# Where the machine's memory isn't known: buffers so small that gathering and broadcasting overlap.
_SMALLEST_BUFFER_BYTES: Final = 2**20
_BUFFERS_OF_ALL: Final = 16


def plan(
    problem: Problem,
    pieces: Sequence[Pieces],
    topology: Topology,
    backend: Backend,
    buffer_bytes: int | None = None,
    *,
    root_alone: bool = False,
    told: Callable[[float], None] | None = None,
) -> Plan:
    """The baseline plan. Pieces above `buffer_bytes` are cut; None chooses that by the machine's memory.

    With root_alone no other training rank joins the broadcasts, as slime and miles do it. `told` is told the share that is done.
    """
    if buffer_bytes is None:
        buffer_bytes = buffer_bytes_for(problem, topology)
    cut = split_all(problem, pieces, buffer_bytes)
    draft, none = Draft(), np.zeros(0, np.int64)
    joining = problem.source.ranks[:1] if root_alone else broadcasters(problem, topology)
    writing = None if told is None else lambda share: told(_WRITTEN * share)
    write(draft, problem, cut, np.arange(len(problem.tensors), dtype=np.int64), buffer_bytes, none, joining, writing)
    return draft.plan("gather-broadcast", problem, cut, topology, backend)


def broadcasters(problem: Problem, topology: Topology) -> Ranks:
    """The training ranks that take part in a broadcast, its root first: all where it leaves an NVLink domain, else the root."""
    ranks = np.union1d(problem.source.ranks, problem.target.ranks)
    far = topology.machine.kind is MachineKind.GPU and len(np.unique(topology.domain[ranks])) > 1
    return problem.source.ranks if far else problem.source.ranks[:1]


def buffer_bytes_for(problem: Problem, topology: Topology) -> int:
    """Bytes of a buffer on this machine."""
    memory_bytes = topology.machine.memory_bytes
    if memory_bytes:
        return int(min(MEMORY_SHARE * memory_bytes, MOST_BUFFER_BYTES))
    return min(max(problem.n_bytes // _BUFFERS_OF_ALL, _SMALLEST_BUFFER_BYTES), MOST_BUFFER_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class _Entries:
    """Pieces in the order in which they are packed, with the bytes of each and its row of `needs`, bool[n, n_receivers]."""

    tensor: Ints
    piece: Ints
    n_bytes: Ints
    pattern: Ints
    needs: NDArray[np.bool_]


def write(
    draft: Draft,
    problem: Problem,
    pieces: Sequence[Pieces],
    tensors: Ints,
    buffer_bytes: int,
    before: Ints,
    joining: Ranks,
    told: Callable[[float], None] | None = None,
) -> None:
    """Append the steps that move these tensors, the first of which wait for `before`; no piece is above `buffer_bytes`.

    `joining` are the training ranks in the broadcasts, the root first. `told` is told the share that is written.
    """
    trainers, receivers = problem.source.ranks, problem.target.ranks
    entries = _entries(problem, pieces, tensors, receivers)
    if not len(entries.tensor):
        return
    root = int(joining[0])
    gathering = draft.group(trainers)
    members = np.union1d(joining, receivers)
    receiving = draft.group(np.concatenate([[root], members[members != root]]).astype(np.int32))
    starts = _buffers(entries.n_bytes, buffer_bytes)
    size = max(int(entries.n_bytes[a:b].sum()) for a, b in pairwise(starts))
    n_buffers = min(BUFFERS, len(starts) - 1)
    # Who joins has a buffer's content already, so that it may come to the same slot; else the inference ranks have their own.
    joined = len(joining) > 1
    slot = draft.slots([size] * (n_buffers if joined else 2 * n_buffers))
    none = np.zeros(0, np.int64)
    # Of each buffer: its collectives, and copies on ranks that broadcast; all its copies and its broadcast.
    done: list[tuple[Ints, Ints]] = []
    for number, (a, b) in enumerate(pairwise(starts)):
        n_bytes = entries.n_bytes[a:b]
        offset = np.cumsum(n_bytes) - n_bytes
        bundle = draft.bundle(entries.tensor[a:b], entries.piece[a:b], offset)
        gathered = slot + number % n_buffers
        received = gathered if joined else gathered + n_buffers
        here, elsewhere = done[number - n_buffers] if number >= n_buffers else (before, none)
        gather = draft.collective(Op.ALL_GATHER, bundle, -1, gathering, SOURCE, gathered, here, _GATHERING)
        send = draft.collective(
            Op.BROADCAST, bundle, root, receiving, gathered, received, np.concatenate([[gather], elsewhere]), _BROADCASTING
        )
        who, kind = _copied_out(draft, entries, slice(a, b), offset)
        rank = receivers[who]
        of_root = rank == root
        n = len(who)
        first = draft.steps(
            Rows(
                np.full(n, Op.COPY), queued(np.full(n, Lane.LOCAL), np.zeros(n, np.int64)), kind, rank, rank, np.full(n, -1),
                np.where(of_root, gathered, received), np.full(n, TARGET),
            ),
            np.arange(n), np.where(of_root, gather, send),
        )  # fmt: skip
        copies = first + np.arange(n)
        if told is not None:
            told((number + 1) / (len(starts) - 1))
        done.append((np.concatenate([[gather, send], copies[np.isin(rank, joining)]]), np.concatenate([[send], copies])))


def _copied_out(draft: Draft, entries: _Entries, rows: slice, offset: Ints) -> tuple[Ints, Ints]:
    """Which receivers (by place) copy something out of a buffer, and the bundle of each; those that need the same share one."""
    found, row = np.unique(entries.pattern[rows], return_inverse=True)
    needs = entries.needs[found]
    bundles: dict[bytes, int] = {}  # by what is needed, one bit a pattern
    of_receiver = []
    for i, kind in enumerate(map(bytes, np.packbits(needs, axis=0).T)):
        if kind not in bundles:
            wanted = needs[row, i]
            some = bool(wanted.any())
            bundles[kind] = (
                draft.bundle(entries.tensor[rows][wanted], entries.piece[rows][wanted], offset[wanted]) if some else -1
            )
        of_receiver.append(bundles[kind])
    bundle = np.array(of_receiver, dtype=np.int64)
    who = np.flatnonzero(bundle >= 0)
    return who, bundle[who]


def _entries(problem: Problem, pieces: Sequence[Pieces], tensors: Ints, receivers: Ranks) -> _Entries:
    n_patterns = [len(p.needers) for p in pieces]
    first_pattern = np.cumsum([0, *n_patterns])
    needs = np.zeros((int(first_pattern[-1]), len(receivers)), dtype=bool)
    for first, of_class in zip(first_pattern, pieces, strict=False):
        for i, needers in enumerate(of_class.needers):
            needs[first + i, np.searchsorted(receivers, needers)] = True
    classes = classes_of(problem)[tensors].tolist()
    none = np.zeros(0, np.int64)
    n_bytes = [p.n_elements * cls.itemsize for p, cls in zip(pieces, problem.classes, strict=True)]
    return _Entries(
        np.repeat(tensors, [len(pieces[c]) for c in classes]),
        np.concatenate([none, *(np.arange(len(pieces[c])) for c in classes)]),
        np.concatenate([none, *(n_bytes[c] for c in classes)]),
        np.concatenate([none, *(pieces[c].pattern + first_pattern[c] for c in classes)]),
        needs,
    )


def _buffers(n_bytes: Ints, buffer_bytes: int) -> list[int]:
    """Where each buffer begins, and the end: as many entries as fit, in their order."""
    ends = np.cumsum(n_bytes)
    starts = [0]
    while starts[-1] < len(n_bytes):
        before = int(ends[starts[-1] - 1]) if starts[-1] else 0
        starts.append(max(starts[-1] + 1, int(np.searchsorted(ends, before + buffer_bytes, side="right"))))
    return starts
