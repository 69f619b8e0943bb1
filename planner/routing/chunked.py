"""A problem cut into what is routed as one: the sizes of chunks and messages, and what routing must know beside."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import Boxes
from shardroute.planner.problems import Problem
from shardroute.planner.routing.balance import Chunks, busiest_bound_s, chunks_of
from shardroute.planner.routing.lowering import SLOT_ALIGNMENT
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.patterns import Entries, Patterns, entries_of, patterns_of
from shardroute.planner.routing.sizes import (
    LARGEST_MESSAGE_BYTES,
    SMALLEST_PIECE_BYTES,
    bytes_into_busiest_rank,
    depth_for,
    message_bytes_for,
    split_all,
)
from shardroute.topologies.topologies import Topology


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A problem before it is cut: its pieces by class, its patterns, and the least that its links must do.

    bound_s     seconds that the busiest link takes at least, at nominal rates
    into        bytes that the busiest rank needs
    link_bytes  what a NIC carries in `bound_s`, or `into` where nothing leaves a domain
    crosses     whether ranks lie in several domains
    """

    problem: Problem
    pieces: tuple[Pieces, ...]
    patterns: Patterns
    bound_s: float
    into: int
    link_bytes: float
    crosses: bool


@dataclass(frozen=True, slots=True, eq=False)
class Chunked:
    """A problem in chunks of one size.

    staging      whether pieces may go through ranks that neither hold nor need them
    most_depth   how many domains deep a chain may be
    """

    whole: Whole
    pieces: tuple[Pieces, ...]
    entries: Entries
    patterns: Patterns
    chunks: Chunks
    message_bytes: int
    staging: bool
    most_depth: int

    @property
    def bound_s(self) -> float:
        """Seconds that the busiest link takes at least, at nominal rates."""
        return self.whole.bound_s

    @property
    def boxes(self) -> tuple[Boxes, ...]:
        """The pieces of each class, for a plan."""
        return tuple(Boxes(p.lo, p.hi) for p in self.pieces)

    @property
    def n_hops(self) -> int:
        """Hops of all chunks, without staging."""
        needers, local = self.patterns.needers[0][self.patterns.group_ptr], self.patterns.local[0]
        return int((np.diff(needers) + np.diff(local))[self.chunks.pattern].sum())


def look_at(problem: Problem, pieces: Sequence[Pieces], topology: Topology) -> Whole:
    """What routing must know of a problem, whatever the size of its chunks."""
    n = problem.n_ranks
    patterns = patterns_of(*entries_of(problem, pieces), topology)
    into = bytes_into_busiest_rank(patterns, n)
    bound_s = busiest_bound_s(patterns, topology, n)
    nic = float(np.median(topology.nic_Bps[:n])) if n else 0.0
    crosses = len(np.unique(topology.domain[:n])) > 1 and nic > 0
    return Whole(problem, tuple(pieces), patterns, bound_s, into, bound_s * nic if crosses else float(into), crosses)


def cut_into_chunks(whole: Whole, options: Options, n_chunks: float, larger: float = 1.0) -> Chunked:
    """The problem in chunks of 1 / `n_chunks` of what a NIC carries in `bound_s`, or of the busiest rank's intake if less.

    `larger` is how much larger messages are than `message_bytes_for` says; they are no larger where the user says how large.
    """
    message_bytes = options.message_bytes
    if message_bytes is None:
        message_bytes = message_bytes_for(whole.into, whole.link_bytes if whole.crosses else math.inf)
        message_bytes = min(int(message_bytes * larger), LARGEST_MESSAGE_BYTES)
    share = int(min(whole.into, whole.link_bytes) / n_chunks)
    chunk_bytes = max(min(SMALLEST_PIECE_BYTES, message_bytes), min(share, message_bytes))
    pieces = split_all(whole.problem, whole.pieces, chunk_bytes)
    entries = entries_of(whole.problem, pieces)[0]
    largest = int(entries.n_bytes.max(initial=0))
    return Chunked(
        whole, tuple(pieces), entries, whole.patterns, chunks_of(entries, len(whole.patterns), chunk_bytes),
        max(message_bytes, largest), options.staging_bytes >= largest + SLOT_ALIGNMENT, depth_for(whole.into, message_bytes),
    )  # fmt: skip
