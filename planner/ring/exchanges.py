"""All-to-all among neighbouring ranks: from each rank's own chunks of all heads to all their chunks of some heads, and back.

Rule: ranks i * split to (i + 1) * split - 1 exchange among themselves; afterwards the rank at place u among them works on group u
of the heads. Each pair is one copy; in shift s every rank sends to the one s places on, so that nobody is sent to twice at once.
"""

from collections.abc import Sequence

from shardroute.planner.plans import SOURCE, TARGET, Kind, Lane, Mode
from shardroute.planner.ring.drafts import Draft, Load, Operand
from shardroute.planner.routing.options import N_QUEUES
from shardroute.planner.shares import Told, untold

# Microseconds that a send takes to add, by `ulysses` over 128 ranks on a Xeon.
SENT_US = 20.0


def resident(draft: Draft, tensors: Sequence[str], rank: int) -> Load:
    """The bundle of what a rank works on: the chunks of all its neighbours, its own group of heads."""
    return draft.load(draft.entries(tensors, neighbours(draft, rank), _group(draft, tensors, rank)))


def neighbours(draft: Draft, rank: int) -> range:
    """The ranks that a rank exchanges with, itself included."""
    split = draft.heads.split
    return range(rank // split * split, rank // split * split + split)


def spread(draft: Draft, tensors: Sequence[str], slot: int, progress: Told = untold) -> None:
    """From the source weights of every rank into a slot of those that work on its chunks; progress is told the share done."""
    wholes = [resident(draft, tensors, rank) for rank in range(draft.attention.n_ranks)]
    for shift in range(draft.heads.split):
        for src in range(draft.attention.n_ranks):
            dst = _shifted(draft, src, shift)
            part = draft.load(draft.entries(tensors, [src], _group(draft, tensors, dst)), wholes[dst])
            _send(draft, part, src, dst, SOURCE, slot, shift)
        progress((shift + 1) / draft.heads.split)


def collect(draft: Draft, tensors: Sequence[str], slot: int, progress: Told = untold) -> None:
    """From a slot of every rank back into the destination weights of those whose chunks it worked on.

    Where several ranks worked on one KV head (more places than KV heads), each sends its part and the home adds them up. progress
    is told the share of shifts.
    """
    split = draft.heads.split
    replicas = split // draft.heads.groups(tensors[0])
    landing = [draft.slot([]) for _ in range(split)] if replicas > 1 else []
    wholes = [resident(draft, tensors, rank) for rank in range(draft.attention.n_ranks)]
    for shift in range(split):
        for src in range(draft.attention.n_ranks):
            dst = _shifted(draft, src, shift)
            part = draft.load(draft.entries(tensors, [dst], _group(draft, tensors, src)), wholes[src])
            if landing:
                draft.grow(landing[src % split], part)
            _send(draft, part, src, dst, slot, landing[src % split] if landing else TARGET, shift)
        progress((shift + 1) / split)
    if not landing:
        return
    for rank in range(draft.attention.n_ranks):
        for first in range(0, split, replicas):
            home = draft.load(draft.entries(tensors, [rank], draft.heads.group_of(tensors[0], first)))
            parts = [
                Operand(draft.load(home.entries, wholes[neighbours(draft, rank)[place]]), landing[place])
                for place in range(first, first + replicas)
            ]
            draft.compute(Kind.ADD, rank, [Operand(home, TARGET, Mode.WRITE), *parts])


def _group(draft: Draft, tensors: Sequence[str], rank: int) -> int:
    """The group of heads of these tensors that a rank works on."""
    return draft.heads.group_of(tensors[0], rank % draft.heads.split)


def _shifted(draft: Draft, rank: int, shift: int) -> int:
    members = neighbours(draft, rank)
    return members[(rank - members[0] + shift) % len(members)]


def _send(draft: Draft, load: Load, src: int, dst: int, src_at: int, dst_at: int, shift: int) -> None:
    lane, queue = (Lane.LOCAL, 0) if src == dst else (Lane.HAND_OVER, (shift - 1) % N_QUEUES)
    draft.copy(load, src, dst, src_at, dst_at, lane, queue)
