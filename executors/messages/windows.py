"""What messages take of the windows that a plan declares, and in which rounds a collective goes that brings more than fits.

Rule: computed alike on all ranks, before any of them has taken memory, so that all take what the plan declares or all refuse.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Op, Plan
from shardroute.planner.stagings import staging_of
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_bytes


def window_bytes_of(plan: Plan, step: Ints, ranks: tuple[Ints, Ints], packs: Sequence[Ints]) -> Ints:
    """What each rank takes to pack what it sends and what it receives, int64[n_ranks, 2]: room for all of it, or as declared.

    Raises InputError where a message doesn't fit that.
    """
    declared = staging_of(plan).windows
    everything, largest = np.zeros_like(declared), np.zeros_like(declared)
    for side, (rank, n_bytes) in enumerate(zip(ranks, packs, strict=True)):
        np.add.at(everything[:, side], rank, n_bytes)
        np.maximum.at(largest[:, side], rank, n_bytes)
    taken: Ints = np.minimum(everything, declared)
    if (largest > taken).any():
        worst, side = (int(x[0]) for x in np.nonzero(largest > taken))
        row = int(np.flatnonzero((ranks[side] == worst) & (packs[side] > taken[worst, side]))[0])
        raise InputError(
            f"step {step[row]}: rank {worst} packs {format_bytes(int(packs[side][row]))} that lie apart or are added up, and "
            f"the plan declares {format_bytes(int(taken[worst, side]))} for it; plan with a larger --max-staging, or run it "
            "where ranks share memory (processes)"
        )
    return taken


def rounds_of_messages(
    plan: Plan, step: Ints, ranks: tuple[Ints, Ints], packs: Sequence[Ints], window_bytes: Ints, added: NDArray[np.bool_]
) -> Ints:
    """The round of each message. Messages of a collective whose ranks pack no more than their windows are one round.

    What is added up (bool[n_messages]) goes sender after sender, for that is the order of sums; else the n-th messages of all
    pairs go together. Messages are ordered by step.
    """
    found = np.zeros(len(step), dtype=np.int64)
    n_ranks, n_steps = len(window_bytes), max(len(plan.steps), 1)
    together = np.flatnonzero(plan.steps.op[step] != Op.COPY)
    too_much = np.zeros(n_steps, dtype=bool)
    for side in (0, 1):
        key, of = np.unique(ranks[side][together] * n_steps + step[together], return_inverse=True)
        n_bytes = np.bincount(of.ravel(), weights=packs[side][together], minlength=len(key))
        too_much[key[n_bytes > window_bytes[key // n_steps, side]] % n_steps] = True
    for number in np.flatnonzero(too_much).tolist():
        rows = np.arange(*np.searchsorted(step, [number, number + 1]).tolist())
        if not added[rows].any():
            rows = rows[np.argsort(count_within(ranks[0][rows] * n_ranks + ranks[1][rows]), kind="stable")]
        at, left = 0, window_bytes.copy()
        columns = (column[rows].tolist() for column in (*ranks, *packs))
        for row, src, dst, n_out, n_in in zip(rows.tolist(), *columns, strict=True):
            if n_out > left[src, 0] or n_in > left[dst, 1]:
                at, left = at + 1, window_bytes.copy()
            left[src, 0] -= n_out
            left[dst, 1] -= n_in
            found[row] = at
    return found


def count_within(group: Ints) -> Ints:
    """For each row, how many rows before it are of its group."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    before = np.empty(len(group), dtype=np.int64)
    before[order] = np.arange(len(group)) - np.searchsorted(ordered, ordered)
    return before
