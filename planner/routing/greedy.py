"""`greedy`: balances all tensors at once, without a solver: source replica, entry GPU, exit GPU, relays and hand-over, chunk by chunk.

See `balance` for how it decides. It spends a bounded effort, so it serves problems of any size.
"""

from collections.abc import Sequence

from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.plans import Backend, Boxes, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing.balance import balance, busiest_bound_s, chunks_of, routes_of
from shardroute.planner.routing.lowering import SLOT_ALIGNMENT, lower
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.patterns import entries_of, patterns_of
from shardroute.planner.routing.sizes import SMALLEST_PIECE_BYTES, bytes_into_busiest_rank, message_bytes_for, split_all
from shardroute.topologies.topologies import Topology

# A chunk is at most this share of what the busiest rank takes in, so that rounding to chunks costs a few percent of a link's load.
CHUNKS_INTO_BUSIEST_RANK = 100
# Balancing stops when the busiest link is this near to the bound.
GOOD_ENOUGH = 1.005


def plan(problem: Problem, whole: Sequence[Pieces], topology: Topology, backend: Backend, options: Options) -> Plan:
    """The plan of `greedy`. `whole` are the pieces of each class of the problem, uncut."""
    into = bytes_into_busiest_rank(problem, whole)
    message_bytes = message_bytes_for(into) if options.message_bytes is None else options.message_bytes
    chunk_bytes = max(min(SMALLEST_PIECE_BYTES, message_bytes), min(into // CHUNKS_INTO_BUSIEST_RANK, message_bytes))
    pieces = split_all(problem, whole, chunk_bytes)
    entries, holders, needers = entries_of(problem, pieces)
    patterns = patterns_of(entries, holders, needers, topology)
    chunks = chunks_of(entries, len(patterns), chunk_bytes)
    staging = options.staging_bytes >= int(entries.n_bytes.max(initial=0)) + SLOT_ALIGNMENT
    bound_s = busiest_bound_s(patterns, topology, problem.n_ranks)
    found = balance(patterns, chunks, topology, problem.n_ranks, bound_s, staging=staging, good_enough=GOOD_ENOUGH)
    boxes = tuple(Boxes(p.lo, p.hi) for p in pieces)
    return lower("greedy", problem, boxes, topology, backend, routes_of(entries, chunks, found), message_bytes, options)
