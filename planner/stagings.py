"""The memory that a plan declares beside its weights: what each rank may allocate to run it, whatever the transport.

Rule: it follows from the plan alone, so that `show` prints what executors obey. Slots are taken on every transport. Where ranks
share no memory and send and receive, two more things are: windows, in which what lies apart is packed and unpacked, and slots in
which the partial sums of attention arrive.
"""

from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.fragments import Fragments, Ints
from shardroute.planner.plans import Op, Plan, ranges
from shardroute.topologies.errors import PlanError
from shardroute.topologies.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """Bytes of each rank.

    slots      int64[n_ranks]      its staging slots
    landings   int64[n_ranks]      slots for partial sums of a REDUCE_SCATTER of attention, which go round a ring
    windows    int64[n_ranks, 2]   the most that it packs in: what it sends, and what it receives
    """

    slots: Ints
    landings: Ints
    windows: Ints

    @property
    def packing(self) -> Ints:
        """What a rank takes beside its slots where ranks send and receive, int64[n_ranks]."""
        found: Ints = self.landings + self.windows.sum(axis=1)
        return found

    @property
    def n_bytes(self) -> Ints:
        """All of it, int64[n_ranks]."""
        return self.slots + self.packing


def staging_of(plan: Plan) -> Staging:
    """What the plan declares. A rank's windows are as large as `plan.window_bytes`, and no larger than all that it sends to other
    ranks and all that it gets from them.
    """
    n_ranks, users = plan.problem.n_ranks, plan.slot_users
    slots = np.zeros(n_ranks, dtype=np.int64)
    np.add.at(slots, users[:, 0], plan.slot_bytes[users[:, 1]])
    return Staging(slots, _landings(plan), np.minimum(_carried(plan), plan.window_bytes))


def staging_facts(staging_bytes: int, packing_bytes: int) -> list[tuple[str, str]]:
    """The lines that describe a plan's memory to a person: the most that a rank takes in slots, and beside them."""
    packs = f"{format_bytes(packing_bytes)}, where ranks send and receive" if packing_bytes else "none"
    return [("staging, peak a rank", format_bytes(staging_bytes)), ("packing, peak a rank", packs)]


def check_staging(staging: Staging, most: str) -> None:
    """Raise PlanError where a rank may take more than `most` ("512MiB") beside its weights, naming the rank that takes most."""
    most_bytes = parse_bytes(most)
    total = staging.n_bytes
    if (total > most_bytes).any():
        rank = int(total.argmax())
        raise PlanError(
            f"rank {rank} takes {format_bytes(int(total[rank]))} beside its weights, {format_bytes(int(staging.slots[rank]))} of "
            f"it in staging slots, and {most} are allowed; plan anew with `plan --max-staging {most}` by direct, domain-relay, "
            "greedy or optimal (other strategies take the slots that they need)"
        )


def _carried(plan: Plan) -> Ints:
    """The most bytes that a rank sends to others, and gets from others, int64[n_ranks, 2], counted up to `window_bytes`.

    In floats, which don't wrap: collectives among many ranks may come to more than int64 holds.
    """
    steps, n_ranks = plan.steps, plan.problem.n_ranks
    lands = np.array([_most_fragments(cls.target) for cls in plan.problem.classes], dtype=np.float64)
    entry = plan.entry_bytes * lands[plan.tensor_class[plan.bundles.tensor]]  # a piece is sent once for each place where it lands
    total = np.concatenate([[0.0], np.cumsum(entry)])
    n_bytes = (total[plan.bundles.ptr[1:]] - total[plan.bundles.ptr[:-1]])[steps.bundle]
    found = np.zeros((2, n_ranks))
    copies = np.flatnonzero((steps.op == Op.COPY) & (steps.src != steps.dst))
    for side, rank in ((0, steps.src[copies]), (1, steps.dst[copies])):
        found[side] += np.bincount(rank, weights=n_bytes[copies], minlength=n_ranks)
    together = np.flatnonzero((steps.op != Op.COPY) & (n_bytes > 0))
    member, owner = ranges(plan.group_ptr, steps.group[together])
    rank, others = plan.group_ranks[member], np.diff(plan.group_ptr)[steps.group[together]]
    weights = (n_bytes[together] * others)[owner]
    for side in (0, 1):
        found[side] += np.bincount(rank, weights=weights, minlength=n_ranks)
    roots = np.flatnonzero(steps.op == Op.BROADCAST)  # who may stand outside of the group
    found[0] += np.bincount(
        steps.src[roots], weights=n_bytes[roots] * np.diff(plan.group_ptr)[steps.group[roots]], minlength=n_ranks
    )
    carried: Ints = np.ceil(np.minimum(found, float(plan.window_bytes))).astype(np.int64).T
    return carried


def _most_fragments(fragments: Fragments) -> int:
    """The most fragments that one rank has of a tensor, 1 at least: a piece can lie in no more of them."""
    return max(1, int(np.bincount(fragments.rank).max(initial=0)))


def _landings(plan: Plan) -> Ints:
    found = np.zeros(plan.problem.n_ranks, dtype=np.int64)
    if plan.attention is None:
        return found
    largest: dict[bytes, int] = {}
    for step in np.flatnonzero(plan.steps.op == Op.REDUCE_SCATTER).tolist():
        group = plan.group(int(plan.steps.group[step]))
        if len(group) > 1:
            slot = int(plan.slot_bytes[plan.steps.src_at[step]])
            largest[group.tobytes()] = max(slot, largest.get(group.tobytes(), 0))
    for members, n_bytes in largest.items():
        found[np.frombuffer(members, plan.group_ranks.dtype)] += n_bytes
    return found
