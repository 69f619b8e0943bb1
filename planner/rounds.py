"""Rounds: in which groups libraries exchange that match sends and receives in order, without tags.

Rule: a step's round is above those of all that it waits for, the step before it in its queues included. So steps of one round
don't wait for each other, and NCCL sends and receives what a rank has of a round as one group, behind one launch. Executors form
their groups by this, and predictions count them by it.
"""

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Backend, Op, Plan


def rounds_of(dep_ptr: Ints, deps: NDArray[np.integer]) -> Ints:
    """The round of each row, from 0: the longest chain of rows that it waits for. CSR; rows wait for smaller rows only."""
    found = [0] * (len(dep_ptr) - 1)
    ptr, waits_for = dep_ptr.tolist(), deps.tolist()
    for row in range(len(found)):
        first, last = ptr[row], ptr[row + 1]
        if first != last:
            found[row] = 1 + max([found[dep] for dep in waits_for[first:last]])
    return np.array(found, dtype=np.int64)


def group_sizes(plan: Plan, rounds: Ints) -> Ints:
    """With how many messages each step's launch goes, int64[n_steps]: the larger of its sender's and its receiver's group.

    A message is a copy between two ranks by NCCL's send and receive; steps that are none have 1. What a rank sends and what it
    receives go side by side, as NCCL schedules them in pairs (src/enqueue.cc): the more of the two is the group's size.
    """
    steps = plan.steps
    grouped = np.flatnonzero((steps.op == Op.COPY) & (steps.backend == Backend.NCCL) & (steps.src != steps.dst))
    sizes = np.ones(len(steps), dtype=np.int64)
    if len(grouped):
        n_rounds = int(rounds.max()) + 1
        sent, received = (rank[grouped].astype(np.int64) * n_rounds + rounds[grouped] for rank in (steps.src, steps.dst))
        n = plan.problem.n_ranks * n_rounds
        most = np.maximum(np.bincount(sent, minlength=n), np.bincount(received, minlength=n))
        sizes[grouped] = np.maximum(most[sent], most[received])
    return sizes
