"""`greedy`: balances all tensors at once, without a solver: source replica, entry GPU, exit GPU, relays and hand-over, chunk by
chunk.

See `balance` for how it decides. It spends a bounded effort, so it serves problems of any size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import Backend, Boxes, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing.balance import Balanced, Chunks, balance, busiest_bound_s, chunks_of, routes_of
from shardroute.planner.routing.lowering import SLOT_ALIGNMENT, lower
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.patterns import Entries, Patterns, entries_of, patterns_of
from shardroute.planner.routing.sizes import (
    SMALLEST_PIECE_BYTES,
    bytes_into_busiest_rank,
    depth_for,
    message_bytes_for,
    split_all,
)
from shardroute.topologies.topologies import Topology

# A chunk is at most this share of what a NIC carries in the least time: rounding to chunks costs a percent of a link's load.
CHUNKS_OVER_BUSIEST_LINK = 200
# Balancing stops when the busiest link is this near to the bound.
GOOD_ENOUGH = 1.01


def plan(problem: Problem, whole: Sequence[Pieces], topology: Topology, backend: Backend, options: Options) -> Plan:
    """The plan of `greedy`. `whole` are the pieces of each class of the problem, uncut."""
    chunked = cut_into_chunks(problem, whole, topology, options)
    found = balance(
        chunked.patterns, chunked.chunks, topology, problem.n_ranks, chunked.bound_s, staging=chunked.staging,
        most_depth=chunked.most_depth, good_enough=GOOD_ENOUGH,
    )  # fmt: skip
    return lower_chunks("greedy", problem, topology, backend, options, chunked, found)


@dataclass(frozen=True, slots=True, eq=False)
class Chunked:
    """A problem cut into what is routed as one, with what routing and lowering must know of it.

    bound_s   seconds that the busiest link takes at least, at nominal rates
    staging   whether pieces may go through ranks that neither hold nor need them
    most_depth   how many domains deep a chain may be
    """

    pieces: tuple[Pieces, ...]
    entries: Entries
    patterns: Patterns
    chunks: Chunks
    bound_s: float
    message_bytes: int
    staging: bool
    most_depth: int


def cut_into_chunks(
    problem: Problem, whole: Sequence[Pieces], topology: Topology, options: Options, n_chunks: int = CHUNKS_OVER_BUSIEST_LINK
) -> Chunked:
    """The problem in chunks of 1 / `n_chunks` of what a NIC carries in `bound_s`, or of the busiest rank's intake if less."""
    into = bytes_into_busiest_rank(problem, whole)
    bound_s = busiest_bound_s(patterns_of(*entries_of(problem, whole), topology), topology, problem.n_ranks)
    nic = float(np.median(topology.nic_Bps[: problem.n_ranks]))
    crossing = len(np.unique(topology.domain[: problem.n_ranks])) > 1 and nic > 0
    link_bytes = bound_s * nic if crossing else float(into)
    message_bytes = options.message_bytes
    if message_bytes is None:
        message_bytes = message_bytes_for(into, link_bytes if crossing else math.inf)
    share = min(into, int(link_bytes)) // n_chunks
    chunk_bytes = max(min(SMALLEST_PIECE_BYTES, message_bytes), min(share, message_bytes))
    pieces = split_all(problem, whole, chunk_bytes)
    entries, holders, needers = entries_of(problem, pieces)
    patterns = patterns_of(entries, holders, needers, topology)
    largest = int(entries.n_bytes.max(initial=0))
    return Chunked(
        tuple(pieces), entries, patterns, chunks_of(entries, len(patterns), chunk_bytes), bound_s, max(message_bytes, largest),
        options.staging_bytes >= largest + SLOT_ALIGNMENT, depth_for(into, message_bytes),
    )  # fmt: skip


def lower_chunks(
    strategy: str, problem: Problem, topology: Topology, backend: Backend, options: Options, chunked: Chunked, found: Balanced
) -> Plan:
    """The plan that moves each chunk by its tree."""
    boxes = tuple(Boxes(p.lo, p.hi) for p in chunked.pieces)
    routes = routes_of(chunked.entries, chunked.chunks, found)
    return lower(strategy, problem, boxes, topology, backend, routes, chunked.message_bytes, options)
