"""Strategy `pass-q`: queries travel, K and V stay; partial outputs go straight home and are merged there.

Meant for long caches and few new tokens, where queries are smaller than K and V (Yang et al. 2024, arXiv 2411.01783). Its
backward pass, which that paper has no use for, is the ring's with both sides exchanged: queries travel with dO, and dQ is summed
at home.
"""

from shardroute.planner.plans import SOURCE, TARGET, Kind, Lane
from shardroute.planner.ring.drafts import Draft, Load
from shardroute.planner.ring.exchanges import resident
from shardroute.planner.ring.rotations import NEEDED_US, SUMMED_US, Ring, Slots, need, rotate
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import LSE
from shardroute.planner.shares import Told, parts, untold


def add_pass_q(draft: Draft, progress: Told = untold) -> None:
    """Add all steps of the draft's pass; progress is told the share that is added."""
    weights = NEEDED_US, (draft.what is not Pass.BACKWARD) * SUMMED_US, (draft.what is not Pass.FORWARD) * SUMMED_US
    needing, attending, differing = parts(progress, weights)
    ranks = range(draft.attention.n_ranks)
    needed = need(draft, [[rank] for rank in ranks], keys_travel=False, progress=needing)
    if draft.what is not Pass.BACKWARD:
        forward = Ring(
            ranks,
            [[(resident(draft, ["k", "v"], rank), SOURCE)] for rank in ranks],
            [[] for _ in ranks],
            [(resident(draft, ["q"], rank), SOURCE) for rank in ranks],
            [(resident(draft, ["o", LSE], rank), TARGET) for rank in ranks],
        )
        rotate(draft, [forward], needed, Kind.ATTEND, Slots(), along=False, progress=attending)
    if draft.what is Pass.FORWARD:
        return
    wholes = [resident(draft, ["q", "o", LSE, "do"], rank) for rank in ranks]
    blocks = [(whole, SOURCE) for whole in wholes] if draft.what is Pass.BACKWARD else _together(draft, wholes)
    backward = Ring(
        ranks,
        [[(resident(draft, ["k", "v"], rank), SOURCE)] for rank in ranks],
        [[(resident(draft, ["dk", "dv"], rank), TARGET)] for rank in ranks],
        blocks,
        [(resident(draft, ["dq"], rank), TARGET) for rank in ranks],
    )
    rotate(draft, [backward], needed, Kind.GRAD, Slots(), along=False, progress=differing)


def _together(draft: Draft, wholes: list[Load]) -> list[tuple[Load, int]]:
    """What travels in the backward pass, copied together on each rank: q and dO were given, o and lse computed just now."""
    slot = draft.slot(wholes)
    for rank, whole in enumerate(wholes):
        for tensors, at in ((["q", "do"], SOURCE), (["o", LSE], TARGET)):
            part = draft.load(draft.entries(tensors, [rank], 0), whole)
            draft.copy(part, rank, rank, at, slot, Lane.LOCAL)
    return [(whole, slot) for whole in wholes]
