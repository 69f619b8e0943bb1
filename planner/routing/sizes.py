"""How large messages and pieces are: from the latency of a hop, and from what the busiest rank takes in."""

import math
from collections.abc import Sequence

import numpy as np

from shardroute.planner.layouts.overlaps import Pieces, split_large
from shardroute.planner.problems import Problem
from shardroute.planner.routing.patterns import Patterns
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_bytes

# A message should be large against the latency of a hop (64 MiB at 50 GB/s take 1.3 ms, a hop some 20 us), and small against all
# that a rank takes in, so that the relays of a chain of domains overlap.
LARGEST_MESSAGE_BYTES = 64 * 2**20
SMALLEST_MESSAGE_BYTES = 2**20
MESSAGES_INTO_BUSIEST_RANK = 256
# The same over the busiest link, where the time that it takes at least is known: a chain hands on and stages message by message.
MESSAGES_OVER_BUSIEST_LINK = 640
# A chain of domains is filled after one message a domain: so deep that this takes 8 % of the whole, and at least 2 domains.
SHARE_OF_FILLING = 0.08
# Below this a piece is latency alone (64 KiB at 50 GB/s take 1.3 us), so cutting it finer balances nothing.
SMALLEST_PIECE_BYTES = 64 * 2**10


def bytes_into_busiest_rank(patterns: Patterns, n_ranks: int) -> int:
    """The most bytes that any rank needs, those included that it holds."""
    away = np.repeat(patterns.n_bytes, np.diff(patterns.needers[0][patterns.group_ptr]))
    held = np.repeat(patterns.n_bytes, np.diff(patterns.local[0]))
    needed = np.bincount(patterns.needers[1], weights=away, minlength=n_ranks)
    return int((needed + np.bincount(patterns.local[1], weights=held, minlength=n_ranks)).max(initial=0))


def message_bytes_for(into_busiest: int, link_bytes: float = math.inf) -> int:
    """The message size that suits a problem, from the constants above: by the bytes that its busiest rank takes in, and by those
    that a NIC carries in the time that the problem takes at least.
    """
    wanted = min(into_busiest / MESSAGES_INTO_BUSIEST_RANK, link_bytes / MESSAGES_OVER_BUSIEST_LINK)
    return int(min(max(wanted, SMALLEST_MESSAGE_BYTES), LARGEST_MESSAGE_BYTES))


# A GPU's widest loads and stores take 128 bits, at addresses that these divide.
ALIGNMENT = 16
# Pieces of all tensors together; each takes some 100 bytes while planning, so this is 2 GB.
MOST_PIECES = 20_000_000


def split_all(problem: Problem, pieces: Sequence[Pieces], most_bytes: int) -> list[Pieces]:
    """The pieces of each class with every one above `most_bytes` cut along its leading dims: between whole rows, else
    within a row at multiples of 16 bytes, where a piece may have as many.

    Raises InputError when that would be more than MOST_PIECES.
    """
    n_pieces = sum(
        int(np.ceil(p.n_elements * float(cls.itemsize) / most_bytes).sum()) * len(cls.members)
        for p, cls in zip(pieces, problem.classes, strict=True)
    )
    if n_pieces > MOST_PIECES:
        fits = format_bytes(int(most_bytes * n_pieces / MOST_PIECES) + 1)
        raise InputError(
            f"messages of at most {format_bytes(most_bytes)} would cut the tensors into {n_pieces:,} pieces, and "
            f"{MOST_PIECES:,} are the most that are planned; use a message size of some {fits} or more"
        )
    return [
        split_large(p, max(1, most_bytes // cls.itemsize), max(1, ALIGNMENT // cls.itemsize))
        for p, cls in zip(pieces, problem.classes, strict=True)
    ]


def depth_for(into_busiest: int, message_bytes: int) -> int:
    """How many domains deep a chain may be, by the share of the time that filling it takes."""
    return max(2, int(SHARE_OF_FILLING * into_busiest / message_bytes))
