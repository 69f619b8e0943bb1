"""Refit as NCCL M2N does it through windows that its caller registers (`ncclReshardWithWindow`): tensor by tensor, unpacked.

A tensor is one call: all ranks of its communicator, which are its sources and all destination ranks, meet at a barrier, bytes
are put straight into the buffers of those that need them, and another barrier ends it. Calls of one communicator follow each
other on a stream of its own, and streams go side by side. Two ways: RING sends one copy to a leader of a domain, which passes on
chunk by chunk, to the next domain's leader and over NVLink to the ranks beside it; DIRECT puts to every needing rank.

Beside the PACK path (`m2n_pack`) nothing is split in two phases, and a domain is as many ranks as the topology's domains have.
From nccl-extensions as first published (nccl_m2n/src/reshard_user_window.cu, reshard_prepare.cc, reshard_loadbalance.cc).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import SOURCE, TARGET, Backend, Lane, Op, Plan, classes_of, queued
from shardroute.planner.problems import Problem
from shardroute.planner.routing.drafts import Draft, Rows
from shardroute.planner.routing.m2n_rules import by_domains, by_replicas, leaders
from shardroute.topologies.topologies import Topology

# Queues of a lane, as many as its column can tell apart: what a kernel puts is under way at once, and what a leader sends on is
# posted as it comes, whichever stream it is of.
_QUEUES: Final = 32
_COLUMNS: Final = {lane: queued(np.full(_QUEUES, lane), np.arange(_QUEUES)).tolist() for lane in Lane}


class Way(StrEnum):
    """How a call moves a tensor: M2N's algorithms."""

    RING = "ring"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The steps of a tensor of a class between its two barriers, numbered from 0; each carries one piece.

    owner, dep  which step waits for which; `first` are those that wait for the first barrier alone
    """

    group: Ranks
    lane: Ints
    piece: Ints
    src: Ints
    dst: Ints
    src_at: Ints
    owner: Ints
    dep: Ints
    first: Ints


def plan(problem: Problem, pieces: Sequence[Pieces], topology: Topology, backend: Backend, way: Way) -> Plan:
    """The plan that moves every tensor by M2N's window path, stage by stage in the order of the tensors.

    A stage is the ranks that hold a tensor. By RING a piece is what is passed on at once: cut large ones before.
    """
    of_tensor = classes_of(problem)
    stages: dict[bytes, int] = {}
    stage_of: dict[int, int] = {}
    for i, one in enumerate(pieces):
        if len(one):
            held = np.unique(np.concatenate(one.holders))
            stage_of[i] = stages.setdefault(held.tobytes(), len(stages))
    receivers = problem.target.ranks
    calls = {i: _call(pieces[i], receivers, topology, way, stage, len(stages)) for i, stage in stage_of.items()}
    draft = Draft()
    left: dict[int, Ints] = {}
    for tensor in range(len(problem.tensors)):
        found = int(of_tensor[tensor])
        if found in calls:
            stage = stage_of[found]
            left[stage] = _append(draft, calls[found], tensor, stage, left.get(stage, np.zeros(0, np.int64)))
    return draft.plan(f"m2n-window, {way}", problem, pieces, topology, backend)


def _call(pieces: Pieces, receivers: Ranks, topology: Topology, way: Way, stage: int, n_stages: int) -> _Call:
    writer = _Writer(stage, n_stages)
    shards: dict[tuple[int, ...], list[int]] = {}
    for i, ranks in enumerate(pieces.needers):
        shards.setdefault(tuple(ranks.tolist()), []).append(i)
    puts: dict[int, list[tuple[int, list[int]]]] = {}
    members = [np.flatnonzero(pieces.pattern == i).tolist() for i in range(len(pieces.holders))]
    for needers, sources in sorted(shards.items()):
        sources.sort(key=lambda i: (int(pieces.holders[i][0]), i))
        n_holders = min(len(pieces.holders[i]) for i in sources)
        chains = by_domains(n_holders, needers, topology) if way is Way.RING else by_replicas(n_holders, needers, topology)
        for chain in chains:
            parts = [(int(pieces.holders[i][chain.replica]), members[i]) for i in sources]
            if way is Way.DIRECT:
                for source, which in parts:
                    puts.setdefault(source, []).extend((rank, which) for node in chain.nodes for rank in node)
            else:
                for dealt, lead in leaders(chain, len(sources)):
                    writer.ring([parts[i] for i in dealt], chain.nodes, lead)
    writer.direct(puts)
    stage_ranks = np.unique(np.concatenate(pieces.holders))
    return writer.call(np.concatenate([stage_ranks, np.setdiff1d(receivers, stage_ranks)]).astype(np.int32))


class _Writer:
    """Writes the copies of one call. The queues of ranks that many streams come to are shared out over the streams."""

    def __init__(self, stage: int, n_stages: int) -> None:
        self._rows: list[tuple[int, int, int, int, int]] = []  # lane with its queue, piece, src, dst, src_at
        self._pairs: list[tuple[int, int]] = []
        self._each = max(1, _QUEUES // n_stages)
        self._base = stage * self._each % _QUEUES
        self._sent: dict[int, int] = {}  # targets of each source so far

    def direct(self, puts: dict[int, list[tuple[int, list[int]]]]) -> None:
        """What each source puts to whom. A NIC serves all of a source's puts at once; as there are fewer queues than there may be
        targets, sources begin at different ones, else all of them would fill the same half of the targets first.
        """
        for number, (source, targets) in enumerate(sorted(puts.items())):
            first = number * _QUEUES % len(targets)
            for i, (rank, pieces) in enumerate(targets[first:] + targets[:first]):
                for piece in pieces:
                    self._copy(Lane.INJECT, i % _QUEUES, piece, source, rank, SOURCE)

    def ring(self, parts: Sequence[tuple[int, list[int]]], nodes: Sequence[Sequence[int]], lead: Sequence[int]) -> None:
        """What enters by one leader: part by part from the sources, then on from leader to leader, and to the ranks beside it."""
        for number, (source, pieces) in enumerate(parts):
            queue = self._next(source)
            for piece in pieces:
                came = self._copy(Lane.INJECT, queue, piece, source, lead[0], SOURCE)
                for k, (node, leader) in enumerate(zip(nodes, lead, strict=True)):
                    after = came
                    if k + 1 < len(nodes):
                        came = self._pass_on(Lane.RELAY, number, piece, leader, lead[k + 1], after)
                    for i, rank in enumerate(r for r in node if r != leader):
                        self._pass_on(Lane.HAND_OVER, i, piece, leader, rank, after)

    def _next(self, source: int) -> int:
        self._sent[source] = self._sent.get(source, -1) + 1
        return self._sent[source] % _QUEUES

    def _pass_on(self, lane: Lane, number: int, piece: int, src: int, dst: int, after: int) -> int:
        step = self._copy(lane, self._base + number % self._each, piece, src, dst, TARGET)
        self._pairs.append((step, after))
        return step

    def _copy(self, lane: Lane, queue: int, piece: int, src: int, dst: int, src_at: int) -> int:
        self._rows.append((_COLUMNS[lane][queue], piece, src, dst, src_at))
        return len(self._rows) - 1

    def call(self, group: Ranks) -> _Call:
        """What was written."""
        lane, piece, src, dst, src_at = np.array(self._rows, dtype=np.int64).reshape(-1, 5).T
        owner, dep = np.array(self._pairs, dtype=np.int64).reshape(-1, 2).T
        first = np.setdiff1d(np.arange(len(piece), dtype=np.int64), owner)
        return _Call(group, lane, piece, src, dst, src_at, owner, dep, first)


def _append(draft: Draft, call: _Call, tensor: int, stage: int, before: Ints) -> Ints:
    """Append a tensor's call behind the one before it on its stream, whose last barrier is `before`; its own last barrier."""
    n = len(call.piece)
    group, queue = draft.group(call.group), stage % _QUEUES
    enters = draft.barrier(group, before, queue)
    bundle = draft.bundles(np.ones(n, np.int64), np.full(n, tensor), call.piece, np.full(n, -1))
    first = draft.n_steps
    draft.steps(
        Rows(
            np.full(n, Op.COPY), call.lane, bundle + np.arange(n), call.src, call.dst, np.full(n, -1), call.src_at,
            np.full(n, TARGET),
        ),
        np.concatenate([call.owner, call.first]), np.concatenate([call.dep + first, np.full(len(call.first), enters)]),
    )  # fmt: skip
    return np.array([draft.barrier(group, first + np.arange(n, dtype=np.int64), queue)])
