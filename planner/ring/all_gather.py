"""Strategy `all-gather`: every rank gathers K and V of all ranks, a few heads at a time, and attends to all of them.

The gather of the next heads runs while attention is computed on these. The backward pass gathers again, then reduces dK and dV to
their homes (as Llama 3 was trained, Grattafiori et al. 2024, arXiv 2407.21783, section 3.3.2; the head stride is that of
zhuzilin/ring-flash-attention).
"""

from collections.abc import Iterator

from shardroute.planner.plans import SOURCE, TARGET, Kind, Mode
from shardroute.planner.ring.drafts import Draft, Load, Operand, reading, writing
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import LSE
from shardroute.planner.shares import Told, parts, untold

# A gather runs beside the compute that uses the one before it.
_BUFFERS = 2
# Microseconds that a group of heads takes on a rank, forward and backward: of 8 on 256 ranks of a Xeon.
_FORWARD_US, _BACKWARD_US = 60.0, 80.0


def add_all_gather(draft: Draft, progress: Told = untold) -> None:
    """Add all steps of the draft's pass; the draft's head groups are what is gathered at a time. progress is told the share
    that is added.
    """
    ranks = range(draft.attention.n_ranks)
    groups = range(draft.heads.kv_groups)
    keys = [draft.load(draft.entries(["k", "v"], ranks, g)) for g in groups]
    buffers = [draft.slot(keys) for _ in range(min(_BUFFERS, len(keys)))]
    weights = (draft.what is not Pass.BACKWARD) * _FORWARD_US, (draft.what is not Pass.FORWARD) * _BACKWARD_US
    attending, differing = parts(progress, weights)
    if draft.what is not Pass.BACKWARD:
        _forward(draft, keys, buffers, attending)
    if draft.what is not Pass.FORWARD:
        _backward(draft, keys, buffers, differing)


def _forward(draft: Draft, keys: list[Load], buffers: list[int], progress: Told) -> None:
    ranks = range(draft.attention.n_ranks)
    for g, load in _gathered(draft, keys, buffers):
        for rank in ranks:
            progress((g * len(ranks) + rank) / (len(keys) * len(ranks)))
            sums = draft.load(draft.entries(["o", LSE], [rank], g))
            q = draft.load(draft.entries(["q"], [rank], g))
            operands = reading((q, SOURCE), (load, buffers[g % len(buffers)]))
            draft.compute(Kind.ATTEND, rank, [*operands, writing(Operand(sums, TARGET), fresh=True)])


def _backward(draft: Draft, keys: list[Load], buffers: list[int], progress: Told) -> None:
    ranks = range(draft.attention.n_ranks)
    saved = SOURCE if draft.what is Pass.BACKWARD else TARGET
    grads = [draft.load(draft.entries(["dk", "dv"], ranks, g)) for g in range(len(keys))]
    partial = [draft.slot(grads) for _ in buffers]
    for g, load in _gathered(draft, keys, buffers):
        for rank in ranks:
            progress((g * len(ranks) + rank) / (len(keys) * len(ranks)))
            given = draft.load(draft.entries(["q", "do"], [rank], g))
            kept = draft.load(draft.entries(["o", LSE], [rank], g))
            dq = draft.load(draft.entries(["dq"], [rank], g))
            operands = reading((given, SOURCE), (kept, saved), (load, buffers[g % len(buffers)]))
            operands += [Operand(dq, TARGET, Mode.WRITE), Operand(grads[g], partial[g % len(partial)], Mode.WRITE)]
            draft.compute(Kind.GRAD, rank, operands)
        draft.reduce_scatter(grads[g], ranks, partial[g % len(partial)])


def _gathered(draft: Draft, keys: list[Load], buffers: list[int]) -> Iterator[tuple[int, Load]]:
    """Each group of heads once it has been asked for; the next one is asked for before."""
    ranks = list(range(draft.attention.n_ranks))
    for g, load in enumerate(keys):
        if g == 0:
            draft.gather(load, ranks, buffers[0])
        if g + 1 < len(keys):
            draft.gather(keys[g + 1], ranks, buffers[(g + 1) % len(buffers)])
        yield g, load
