"""How many contiguous runs of memory a piece lies in: what a strided copy costs beside its bytes.

A box that takes 6 of each row's 48 columns is one run a row; a box of whole rows is one run altogether.
"""

from typing import Literal

import numpy as np

from shardroute.planner.backends.containers import first_containing
from shardroute.planner.layouts.fragments import Fragments, Ints
from shardroute.planner.plans import SOURCE, TARGET, Boxes, Plan


def step_runs(plan: Plan) -> Ints:
    """The runs that each step copies, int64[n_steps]: those of the finer side; in a staging slot a piece is one run."""
    steps = plan.steps
    source, target = _bundle_runs(plan, "source"), _bundle_runs(plan, "target")
    both = np.maximum(source, target)[steps.bundle]
    into_slot, from_slot = steps.dst_at >= 0, steps.src_at >= 0
    one_side = np.where(into_slot, source[steps.bundle], target[steps.bundle])
    runs = np.where(into_slot | from_slot, one_side, both)
    return np.where(into_slot & from_slot, plan.step_pieces, runs)


def packed_bytes(plan: Plan) -> tuple[Ints, Ints]:
    """The bytes that each step packs at its source and unpacks at its destination, int64[n_steps] each: those in several runs."""
    steps = plan.steps
    source, target = _bundle_runs(plan, "source")[steps.bundle], _bundle_runs(plan, "target")[steps.bundle]
    gathers = np.where(steps.src_at == SOURCE, source > 1, (steps.src_at == TARGET) & (target > 1))
    scatters = (steps.dst_at == TARGET) & (target > 1)
    return plan.step_bytes * gathers, plan.step_bytes * scatters


def _bundle_runs(plan: Plan, side: Literal["source", "target"]) -> Ints:
    """The runs of each bundle where its pieces lie on that side."""
    classes = plan.problem.classes
    by_class = [piece_runs(c.source if side == "source" else c.target, b) for c, b in zip(classes, plan.boxes, strict=True)]
    starts = np.cumsum([0, *map(len, by_class)])
    of_piece = np.concatenate([np.zeros(0, np.int64), *by_class])
    of_entry = of_piece[starts[plan.tensor_class[plan.bundles.tensor]] + plan.bundles.piece]
    total = np.concatenate([[0], np.cumsum(of_entry)])
    runs: Ints = total[plan.bundles.ptr[1:]] - total[plan.bundles.ptr[:-1]]
    return runs


def piece_runs(fragments: Fragments, boxes: Boxes) -> Ints:
    """The runs of each box in the first fragment that contains it (least `lo`, `hi`, `strides`), int64[n_boxes]; 1 for a box that
    lies in none.
    """
    n_dims = len(fragments.shape)
    rows = np.unique(np.concatenate([fragments.lo, fragments.hi, fragments.strides], axis=1), axis=0)
    first = first_containing(rows[:, :n_dims], rows[:, n_dims : 2 * n_dims], boxes)
    found = first >= 0
    runs = np.ones(len(first), dtype=np.int64)
    runs[found] = _runs((boxes.hi - boxes.lo)[found], rows[first[found], 2 * n_dims :])
    return runs


def _runs(extent: Ints, strides: Ints) -> Ints:
    """Elements of each box over the length of its runs, when it lies in a buffer with the strides of its row."""
    length = np.ones(len(extent), dtype=np.int64)
    grows = np.ones(len(extent), dtype=bool)
    for dim in reversed(range(extent.shape[1])):
        long = extent[:, dim] > 1
        grows &= ~long | (strides[:, dim] == length)
        length = np.where(grows, length * extent[:, dim], length)
    return np.asarray(extent.prod(axis=1, dtype=np.int64) // length)
