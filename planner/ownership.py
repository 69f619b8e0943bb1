"""Which rank of a group gives or gets each piece of a collective: the rules that checking, predicting and running share."""

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import TARGET, Plan
from shardroute.topologies.errors import PlanError


def gathered_from(plan: Plan, step: int) -> tuple[Ints, Ints]:
    """For each entry of ALL_GATHER `step`: the place in its group of the first rank that holds the piece, and the piece's bytes.

    Of one that gathers sums, the rank that has the sum. Raises PlanError when no rank of the group holds it.
    """
    if plan.steps.src_at[step] == TARGET:
        bundle = int(plan.steps.bundle[step])
        return reduced_to(plan, step), plan.entry_bytes[plan.bundles.ptr[bundle] : plan.bundles.ptr[bundle + 1]]
    bundle = int(plan.steps.bundle[step])
    row = slice(plan.bundles.ptr[bundle], plan.bundles.ptr[bundle + 1])
    group = plan.group(int(plan.steps.group[step]))
    tensor, piece = plan.bundles.tensor[row], plan.bundles.piece[row]
    classes = plan.tensor_class[tensor]
    owner = np.full(len(tensor), -1, dtype=np.int64)
    for i in np.unique(classes).tolist():
        rows = np.flatnonzero(classes == i)
        owner[rows] = _first_holder(plan, i, group)[piece[rows]]
    if (owner < 0).any():
        name = plan.problem.tensors[int(tensor[np.argmax(owner < 0)])].name
        raise PlanError(f"step {step}: no rank of the all-gather holds a piece of {name}")
    return owner, plan.entry_bytes[row]


def reduced_to(plan: Plan, step: int) -> Ints:
    """For each entry of a REDUCE_SCATTER, or of the ALL_GATHER behind it: the place in its group of the rank that gets the sum.

    Where several ranks of the group need a piece they take turns: entry i goes to the (i mod n)-th of the n that do. Raises
    PlanError when none needs it.
    """
    bundle = int(plan.steps.bundle[step])
    row = slice(plan.bundles.ptr[bundle], plan.bundles.ptr[bundle + 1])
    group = plan.group(int(plan.steps.group[step]))
    tensor, piece = plan.bundles.tensor[row], plan.bundles.piece[row]
    classes = plan.tensor_class[tensor]
    needs = np.zeros((len(tensor), len(group)), dtype=bool)
    for i in np.unique(classes).tolist():
        rows = np.flatnonzero(classes == i)
        needs[rows] = _needs(plan, i, group)[piece[rows]]
    n_needs = needs.sum(axis=1)
    if (n_needs == 0).any():
        name = plan.problem.tensors[int(tensor[np.argmax(n_needs == 0)])].name
        raise PlanError(f"step {step}: no rank of its group needs the sum of a piece of {name}")
    turn = np.arange(len(tensor)) % n_needs
    return np.asarray(np.argmax(np.cumsum(needs, axis=1) == (turn + 1)[:, None], axis=1), dtype=np.int64)


def _needs(plan: Plan, index: int, group: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which ranks of the group have a destination fragment that contains each piece of class `index`, bool[n_pieces, n]."""
    fragments, boxes = plan.problem.classes[index].target, plan.boxes[index]
    found = np.zeros((len(boxes.lo), len(group)), dtype=bool)
    for place, rank in enumerate(group.tolist()):
        for row in np.flatnonzero(fragments.rank == rank).tolist():
            found[:, place] |= ((boxes.lo >= fragments.lo[row]) & (boxes.hi <= fragments.hi[row])).all(axis=1)
    return found


def _first_holder(plan: Plan, index: int, group: NDArray[np.int32]) -> Ints:
    """For each piece of class `index`, the place in `group` of the first rank with a fragment that contains it, -1 for none."""
    fragments, boxes = plan.problem.classes[index].source, plan.boxes[index]
    place_of = np.full(plan.problem.n_ranks, len(group), dtype=np.int64)
    place_of[group] = np.arange(len(group))
    places = place_of[fragments.rank]
    corners, inverse = np.unique(np.concatenate([fragments.lo, fragments.hi], axis=1), axis=0, return_inverse=True)
    first = np.full(len(corners), len(group), dtype=np.int64)
    np.minimum.at(first, inverse.ravel(), places)
    n_dims = len(fragments.shape)
    owner = np.full(len(boxes.lo), len(group), dtype=np.int64)
    for corner, place in zip(corners, first.tolist(), strict=True):
        inside = ((boxes.lo >= corner[:n_dims]) & (boxes.hi <= corner[n_dims:])).all(axis=1)
        owner[inside] = np.minimum(owner[inside], place)
    return np.where(owner < len(group), owner, -1)
