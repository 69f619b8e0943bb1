"""Rounds: in which groups libraries exchange that match sends and receives in order, without tags.

Rule: a step's round is above those of all that it waits for, the step before it in its queues included. So steps of one round
don't wait for each other, and NCCL sends and receives what a rank has of a round on one wire (`planner.wires`) as one group: one
launch. Executors form their groups by this, and predictions count them by it.
"""

import numpy as np
from numpy.typing import NDArray

from shardroute.planner import rounds_kernel
from shardroute.planner.compiling import compiled
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Backend, Op, Plan

# Rows that plain Python numbers in the half second that it takes to load Numba and its cache (2 cores, 2026-11).
COMPILED_FROM = 500_000


def rounds_of(dep_ptr: Ints, deps: NDArray[np.integer]) -> Ints:
    """The round of each row, from 0: the longest chain of rows that it waits for. CSR; rows wait for smaller rows only."""
    n = len(dep_ptr) - 1
    kernel = compiled(rounds_kernel) if n > COMPILED_FROM else rounds_kernel
    if kernel is rounds_kernel:
        found = [0] * n
        kernel.number(dep_ptr.tolist(), deps.tolist(), found, n)
        return np.array(found, dtype=np.int64)
    rounds = np.zeros(n, dtype=np.int64)
    kernel.number(np.ascontiguousarray(dep_ptr, np.int64), np.ascontiguousarray(deps, np.int64), rounds, n)
    return rounds


def group_sizes(plan: Plan, rounds: Ints, wires: Ints) -> Ints:
    """With how many messages each step's launch goes, int64[n_steps]: the larger of its sender's and its receiver's group. rounds
    and wires are those of the steps.

    A message is a copy between two ranks by NCCL's send and receive; steps that are none have 1. What a rank sends and what it
    receives go side by side, as NCCL schedules them in pairs (src/enqueue.cc): the more of the two is the group's size.
    """
    steps = plan.steps
    grouped = np.flatnonzero((steps.op == Op.COPY) & (steps.backend == Backend.NCCL) & (steps.src != steps.dst))
    sizes = np.ones(len(steps), dtype=np.int64)
    if len(grouped):
        n_wires = int(wires.max()) + 1
        n_turns = (int(rounds.max()) + 1) * n_wires
        turn = rounds[grouped] * n_wires + wires[grouped]
        sent, received = (rank[grouped].astype(np.int64) * n_turns + turn for rank in (steps.src, steps.dst))
        _, group = np.unique(np.concatenate([sent, received]), return_inverse=True)
        sent, received = group[: len(grouped)], group[len(grouped) :]
        n = int(group.max()) + 1
        most = np.maximum(np.bincount(sent, minlength=n), np.bincount(received, minlength=n))
        sizes[grouped] = np.maximum(most[sent], most[received])
    return sizes
