"""Steps on a CPU machine: a rank is one thread that runs all its steps in plan order; a step is CPU time.

Its launch, its look whether another rank's step is done, its sleep until it is, its pieces, their runs and their bytes; the
cores are shared fairly by the ranks that have work.
"""

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.computes import cpu_seconds
from shardroute.planner.backends.runs import step_runs
from shardroute.planner.backends.step_tasks import StepTasks
from shardroute.planner.ownership import gathered_from
from shardroute.planner.plans import Op, Plan
from shardroute.planner.shares import Told, untold
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InputError


def cpu_tasks(plan: Plan, calibration: Calibration, progress: Told = untold) -> StepTasks:
    """One task for each step and rank that drives it; amounts are core-seconds on one shared link, at most one core each.
    progress is told the share that is done.
    """
    steps = plan.steps
    assert calibration.copy_Bps is not None
    copy = steps.op == Op.COPY
    size = np.where(copy, 1, np.diff(plan.group_ptr)[np.maximum(steps.group, 0)] if len(plan.group_ptr) > 1 else 1)
    step = np.repeat(np.arange(len(steps)), size)
    rank = np.repeat(steps.src.astype(np.int64), size)
    n_pieces = np.repeat(plan.step_pieces, size)
    n_bytes = np.repeat(plan.step_bytes, size)
    starts = np.cumsum(size) - size
    for i in np.flatnonzero(~copy).tolist():
        group = plan.group(int(steps.group[i]))
        rows = slice(starts[i], starts[i] + len(group))
        rank[rows] = group
        if steps.op[i] == Op.BROADCAST:
            share = np.where(group == steps.src[i], len(group) - 1, 0)
            n_pieces[rows], n_bytes[rows] = n_pieces[rows] * share, n_bytes[rows] * share
        elif steps.op[i] == Op.ALL_GATHER:
            owner, entry_bytes = gathered_from(plan, i)
            n_pieces[rows] = np.bincount(owner, minlength=len(group)) * len(group)
            n_bytes[rows] = np.bincount(owner, weights=entry_bytes, minlength=len(group)).astype(np.int64) * len(group)
        elif steps.op[i] == Op.COMPUTE:  # beside the rank's copies: a second thread
            rank[rows] = group + plan.problem.n_ranks
        elif steps.op[i] == Op.ALL_REDUCE:  # each member adds up all that every member brings
            n_pieces[rows], n_bytes[rows] = n_pieces[rows] * len(group), n_bytes[rows] * len(group)
        # A member of a REDUCE_SCATTER adds up its part of the bundle, which every member brings: as many bytes as the bundle has.
    amount = calibration.launch_s + n_pieces * calibration.piece_s + n_bytes / calibration.copy_Bps
    if plan.attention is not None or plan.problem.summed:
        amount += _computed_s(plan, calibration, progress)[step]
    waits = np.repeat(_waits(plan), size)
    threads, first = np.unique(rank, return_index=True)
    amount[first[threads >= plan.problem.n_ranks]] += calibration.start_s
    amount += calibration.check_s * waits + calibration.wait_s * (waits & ~copy[step])
    if calibration.run_s:  # a collective's runs are those of all its members together: pieces, shared out as its bytes are
        share = n_pieces / np.maximum(np.repeat(plan.step_pieces, size), 1)
        amount += calibration.run_s * np.repeat(step_runs(plan), size) * share
    n = len(step)
    return StepTasks(
        step,
        rank,
        np.zeros(n),
        amount,
        np.ones(n),
        np.arange(n + 1),
        np.zeros(n, dtype=np.int32),
        int(n_bytes.sum()),
        late=calibration.wait_s * (waits & copy[step]),
    )


def _computed_s(plan: Plan, calibration: Calibration, progress: Told) -> NDArray[np.float64]:
    """CPU seconds of arithmetic that each step has beside its moving."""
    seconds = np.zeros(len(plan.steps))
    if plan.attention is not None:
        seconds[plan.computes.step] = cpu_seconds(plan, calibration, progress)
    sums = np.isin(plan.steps.op, (Op.REDUCE_SCATTER, Op.ALL_REDUCE))
    if sums.any():
        assert calibration.copy_Bps is not None
        if calibration.sums is None:
            raise InputError(f"calibration of {calibration.machine} has no table sums; `shardroute calibrate --here` measures it")
        n_members = np.diff(plan.group_ptr)[np.maximum(plan.steps.group, 0)]
        added = plan.step_bytes * np.where(plan.steps.op == Op.ALL_REDUCE, n_members, 1)
        seconds[sums] = added[sums] * (1 / calibration.sums.add_Bps - 1 / calibration.copy_Bps)
    return seconds


def _waits(plan: Plan) -> NDArray[np.bool_]:
    """Which steps wait for a step that another rank drives; collectives always do, and sleep."""
    steps = plan.steps
    waits: NDArray[np.bool_] = steps.op != Op.COPY
    owner = np.repeat(np.arange(len(steps)), np.diff(steps.after_ptr))
    waits[owner[steps.src[steps.after] != steps.src[owner]]] = True
    return waits
