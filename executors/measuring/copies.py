"""What this machine's processes cost: a calibration fitted to runs of small plans by the very executor that it will predict.

The model (see planner.backends.cpu_steps): a step costs its driving rank launch_s + n_pieces * piece_s + n_runs * run_s +
n_bytes / copy_Bps of CPU time, check_s more when it waits for another rank's step, and wait_s when that isn't done yet; the first
step of a thread that computes costs start_s more. Ranks that have work share `cores` cores.

Four kinds of steps are run by one rank alone: one tiny piece, many small ones, a large one, one of short rows, none of them
in a cache and, as in a plan, none next to the piece before it. Their median times are four equations with four unknowns. Steps
that wait for another rank's, long done, give check_s. Then twice as many ranks as there are CPUs copy at once; the CPU time that
the model says this takes, over the time that it took, is `cores`. Then many pairs of ranks play ping-pong with tiny pieces, so
that every step sleeps and is woken while all cores have work: what the model can't explain otherwise is wait_s.
And a ring of ranks attends to small blocks, forward, and backward too: what is left there, a thread and a COMPUTE, are start_s
and compute_s.
"""

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.executors.foresee import n_cpus
from shardroute.executors.launching.processes import machine_text
from shardroute.executors.measuring.attention import attention_figures
from shardroute.executors.run import run_plan
from shardroute.planner.backends.costs import tasks_of
from shardroute.planner.backends.runs import step_runs
from shardroute.planner.layouts.fragments import Fragments, Ints
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.plans import SOURCE, TARGET, Backend, Boxes, Bundles, Lane, Op, Plan, Steps
from shardroute.planner.problems import Problem
from shardroute.planner.ring.strategies import ring_plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.shares import Told, parts
from shardroute.topologies.calibrations import Calibration, calibration_figure, calibration_from_figures
from shardroute.topologies.errors import RunError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology
from shardroute.topologies.units import format_seconds

MACHINE = "cpu-processes"
LIBRARY = "processes"
_REPEATS, _REPEATS_TOGETHER = 3, 5
# Steps of each kind: enough that each kind takes some 10 ms, which is long against a scheduler's tick of 1 to 4 ms.
_N_SINGLE, _N_MANY, _N_LARGE, _N_SHORT = 2000, 16, 24, 24
_PIECES_OF_MANY = 500
# Pieces are bf16 boxes that take half of each row, like a weight split by columns: (rows, columns), of 128 B, 4 KiB and 2 MiB;
# the short ones have rows of 12 B, as a weight has that was shrunk with --scale.
_TINY, _SMALL, _LARGE, _SHORT = (4, 16), (8, 256), (2048, 512), (2**15, 6)
# Tokens of each rank of the ring that computes, and how often that runs: tens of milliseconds each.
_SMALL_BLOCK, _REPEATS_COMPUTING = 64, 15
# Turns of each pair of ranks that play ping-pong.
_N_TURNS = 400
# What all ranks together copy when they run at once: far beyond caches, little enough for any machine.
_TOGETHER_BYTES = 256 * 2**20
# Seconds of each part in turn, from copies of one rank alone to a ring that computes (2-core Xeon, 2026-12-01).
PARTS_S = (1.3, 2.5, 0.6, 1.1, 4.8, 2.7)


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor whose rows lie on source ranks, and the left half of whose columns goes to destination ranks, in equal pieces."""

    tensor: Tensor
    source: Fragments
    target: Fragments
    boxes: Boxes


def calibrate_here(timeout_s: float = 60.0, progress: Told | None = None) -> Calibration:
    """The costs of transport `processes` on this machine, measured now; takes some seconds. progress is told the share done.

    Raises RunError when what was measured contradicts the model (the machine is busy with something else), or a run fails.
    """
    load = os.getloadavg()[0]
    alone, together, checking, playing, attending, computing = parts(progress, PARTS_S)
    launch_s, piece_s, run_s, copy_Bps = _alone(timeout_s, alone)
    cores = _together(launch_s, piece_s, run_s, copy_Bps, timeout_s, together)
    tiny_s = launch_s + piece_s + _TINY[0] * run_s
    check_s = _checking(tiny_s, timeout_s, checking)
    wait_s = _ping_pong(tiny_s + check_s, cores, timeout_s, playing)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    where = f"{platform.node()} ({machine_text()}, load average {load:.1f})"
    source = f"measured on {today} on {where} by running plans, see executors/measuring/copies.py"
    steps = {"step.launch": launch_s, "step.piece": piece_s, "step.check": check_s, "step.wait": wait_s, "step.run": run_s}
    cpus = {"cpu.cores": cores, "cpu.copy_bandwidth": copy_Bps}
    attended = f"measured on {today} on {where} by running attention, see executors/measuring/attention.py"
    tables = attention_figures(timeout_s, attending)

    def found(steps: dict[str, float]) -> Calibration:
        figures = [  # in the order of a calibration file
            calibration_figure(key, float(f"{value:.3g}"), from_where)
            for values, from_where in ((steps, source), (tables, attended), (cpus, source))
            for key, value in values.items()
        ]
        return calibration_from_figures(MACHINE, LIBRARY, today, machine_text(), figures)

    start_s, compute_s = _computing(found(steps), timeout_s, computing)
    return found(steps | {"step.start": start_s, "step.compute": compute_s})


def _alone(timeout_s: float, told: Told) -> tuple[float, float, float, float]:
    """launch_s, piece_s, run_s and copy_Bps, from one rank that copies to another while nothing else runs."""
    n_pieces = [1] * _N_SINGLE + [_PIECES_OF_MANY] * _N_MANY + [1] * (_N_LARGE + _N_SHORT)
    sizes = {
        "tiny": (_N_SINGLE, _TINY),
        "small": (_N_MANY * _PIECES_OF_MANY, _SMALL),
        "large": (_N_LARGE, _LARGE),
        "short": (_N_SHORT, _SHORT),
    }
    rows = [_rows(name, [(0, 1)], n, piece) for name, (n, piece) in sizes.items()]
    plan = _copies(rows, n_pieces, [(0, 1)] * len(n_pieces), scattered=True)
    start_s = run_plan(plan, timeout_s=timeout_s, repeats=_REPEATS, progress=told).timeline.start_s
    kind = np.repeat(np.arange(4), [_N_SINGLE, _N_MANY, _N_LARGE, _N_SHORT])[:-1]
    # From start to start, so that what lies between two steps (marks, clocks) is counted as part of launching.
    medians = np.array([np.median(np.diff(start_s)[kind == k]) for k in range(4)])
    example = np.array([0, _N_SINGLE, _N_SINGLE + _N_MANY, -1])
    model = np.stack([np.ones(4), plan.step_pieces[example], step_runs(plan)[example], plan.step_bytes[example]], axis=1)
    launch_s, piece_s, run_s, byte_s = np.linalg.solve(model, medians).tolist()
    if launch_s < 0 or piece_s < 0 or byte_s <= 0:
        took = ", ".join(f"{format_seconds(s)} {what}" for what, s in zip(sizes, medians.tolist(), strict=True))
        raise RunError(
            f"copies took {took} (medians by the size of their pieces), which no costs a step, a piece and a byte explain; "
            "is the machine busy? Measure when it is idle"
        )
    return launch_s, piece_s, max(run_s, 0.0), 1 / byte_s


def _together(launch_s: float, piece_s: float, run_s: float, copy_Bps: float, timeout_s: float, told: Told) -> float:
    """cores, from a ring of ranks that all copy to the next at the same time."""
    n_cores = n_cpus()
    n_ranks = 2 * n_cores
    n_each = max(1, _TOGETHER_BYTES // n_ranks // (_LARGE[0] * _LARGE[1] * 2))
    ring = [(rank, (rank + 1) % n_ranks) for rank in range(n_ranks)]
    plan = _copies(
        [_rows("ring", ring, n_each, _LARGE)], [1] * (n_ranks * n_each), [pair for pair in ring for _ in range(n_each)]
    )
    # The fastest trial: whatever else the machine did meanwhile can only have taken cores away.
    measured_s = min(run_plan(plan, timeout_s=timeout_s, repeats=_REPEATS_TOGETHER, progress=told).trials_s)
    work_s = len(plan.steps) * launch_s + int(plan.step_pieces.sum()) * piece_s + int(step_runs(plan).sum()) * run_s
    work_s += int(plan.step_bytes.sum()) / copy_Bps
    return min(work_s / measured_s, float(n_cores))


def _checking(step_s: float, timeout_s: float, told: Told) -> float:
    """check_s, from two ranks: one makes tiny copies, then the other makes as many, each of which waits for one of those."""
    rows = [_rows("first", [(0, 2)], _N_SINGLE, _TINY), _rows("second", [(1, 2)], _N_SINGLE, _TINY)]
    waits_for = np.r_[_N_SINGLE - 1, np.arange(_N_SINGLE - 1)]  # the first for the last, so all others find theirs done
    after = np.r_[np.full(_N_SINGLE, -1), waits_for]
    pairs = [(0, 2)] * _N_SINGLE + [(1, 2)] * _N_SINGLE
    plan = _copies(rows, [1] * len(pairs), pairs, after=after, scattered=True)
    start_s = run_plan(plan, timeout_s=timeout_s, repeats=_REPEATS, progress=told).timeline.start_s
    return max(0.0, float(np.median(np.diff(start_s[_N_SINGLE:]))) - step_s)


def _ping_pong(step_s: float, cores: float, timeout_s: float, told: Told) -> float:
    """wait_s, from pairs of ranks that send each other tiny pieces in turn; step_s is what a step costs otherwise."""
    n_pairs = 4 * n_cpus()
    there = [(2 * i, 2 * i + 1) for i in range(n_pairs)]
    back = [(b, a) for a, b in there]
    rows = _rows("ping", there + back, _N_TURNS // 2, _TINY)
    # The pieces lie pair by pair; the steps go turn by turn, each after the pair's turn before it.
    player, turn = np.meshgrid(np.arange(n_pairs), np.arange(_N_TURNS))
    order = ((turn % 2) * n_pairs + player) * (_N_TURNS // 2) + turn // 2
    after = np.where(turn > 0, np.arange(order.size).reshape(order.shape) - n_pairs, -1).ravel()
    pairs = [pair for pair in there + back for _ in range(_N_TURNS // 2)]
    plan = _copies([rows], [1] * order.size, pairs, order.ravel(), after)
    measured_s = min(run_plan(plan, timeout_s=timeout_s, repeats=_REPEATS_TOGETHER, progress=told).trials_s)
    return max(0.0, measured_s * cores / len(plan.steps) - step_s)


def _computing(known: Calibration, timeout_s: float, told: Told) -> tuple[float, float]:
    """start_s and compute_s, from a ring of ranks that attend to small blocks: the CPU time that nothing known explains.

    Forward there are few COMPUTE steps a thread, and with a backward pass behind it many: two equations. By the median trial, as
    what the system takes to bring threads to free cores belongs to it.
    """
    assert known.cores is not None
    n_ranks = 2 * n_cpus()
    call = Attention((_SMALL_BLOCK * n_ranks,), n_ranks, 4, 2, 64, dtype="f32")
    left_s, n_steps = np.zeros(2), np.zeros(2)
    for i, (which, done) in enumerate(zip((Pass.FORWARD, Pass.RECOMPUTE), parts(told, (1.0, 2.0)), strict=True)):
        plan = ring_plan(call, build_topology(load_machine(MACHINE), min_gpus=n_ranks), "ring", which)
        ran = run_plan(plan, timeout_s=timeout_s, repeats=_REPEATS_COMPUTING, progress=done)
        measured_s = statistics.median(ran.trials_s)
        left_s[i] = measured_s * known.cores - float(tasks_of(plan, plan.topology, known).graph.amount.sum())
        n_steps[i] = len(plan.computes)
    compute_s = max(0.0, float((left_s[1] - left_s[0]) / (n_steps[1] - n_steps[0])))
    return max(0.0, float(left_s.mean() - compute_s * n_steps.mean())) / n_ranks, compute_s


def _rows(name: str, pairs: Sequence[tuple[int, int]], n_pieces: int, piece: tuple[int, int]) -> _Rows:
    """`n_pieces` pieces of (rows, columns) for each (source, destination) pair."""
    n_rows, n_columns = piece
    shape = (len(pairs) * n_pieces * n_rows, 2 * n_columns)
    first = np.arange(len(pairs), dtype=np.int64) * n_pieces * n_rows
    source = Fragments.dense(shape, [a for a, _ in pairs], *_boxes(first, n_pieces * n_rows, 2 * n_columns))
    target = Fragments.dense(shape, [b for _, b in pairs], *_boxes(first, n_pieces * n_rows, n_columns))
    pieces = _boxes(np.arange(len(pairs) * n_pieces, dtype=np.int64) * n_rows, n_rows, n_columns)
    return _Rows(Tensor(name, shape, "bf16"), source, target, Boxes(*pieces))


def _boxes(first_row: Ints, n_rows: int, n_columns: int) -> tuple[Ints, Ints]:
    lo = np.stack([first_row, np.zeros_like(first_row)], axis=1)
    return lo, lo + np.array([n_rows, n_columns])


def _copies(
    rows: Sequence[_Rows],
    n_pieces: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    order: Ints | None = None,
    after: Ints | None = None,
    *,
    scattered: bool = False,
) -> Plan:
    """The plan that copies all pieces: bundle i takes the next n_pieces[i] from rank pairs[i][0] to rank pairs[i][1].

    Steps carry the bundles in turn, or in `order`; `after` is for each step the one that it waits for, -1 for none. Pieces of a
    tensor are taken in turn, or `scattered`: in an order of no pattern, the same each time, if all are one rank's.
    """
    names = tuple((r.tensor.name,) for r in rows)
    source, target = Layout(tuple(r.source for r in rows), names), Layout(tuple(r.target for r in rows), names)
    n, n_ranks = len(n_pieces), int(max(max(pair) for pair in pairs)) + 1
    order = np.arange(n) if order is None else order
    after = np.full(n, -1) if after is None else after
    counts, shuffle = [len(r.boxes.lo) for r in rows], np.random.default_rng(0)
    bundles = Bundles(
        np.cumsum([0, *n_pieces]),
        np.repeat(np.arange(len(rows)), counts).astype(np.int32),
        np.concatenate([shuffle.permutation(c) if scattered else np.arange(c) for c in counts]).astype(np.int32),
        np.full(sum(counts), -1),
    )
    ends = np.array(pairs, dtype=np.int32)[order]
    steps = Steps(
        op=np.full(n, Op.COPY, dtype=np.uint8),
        lane=np.full(n, Lane.INJECT, dtype=np.uint8),
        backend=np.full(n, Backend.PROCESSES, dtype=np.uint8),
        bundle=order.astype(np.int32),
        src=ends[:, 0],
        dst=ends[:, 1],
        group=np.full(n, -1, dtype=np.int32),
        src_at=np.full(n, SOURCE, dtype=np.int16),
        dst_at=np.full(n, TARGET, dtype=np.int16),
        after_ptr=np.concatenate([[0], np.cumsum(after >= 0)]),
        after=after[after >= 0].astype(np.int32),
    )
    return Plan(
        strategy="measure", topology=build_topology(load_machine(MACHINE), min_gpus=n_ranks),
        problem=Problem(tuple(r.tensor for r in rows), source, target, n_ranks), boxes=tuple(r.boxes for r in rows),
        bundles=bundles, steps=steps, group_ptr=np.zeros(1, np.int64), group_ranks=np.zeros(0, np.int32),
        slot_bytes=np.zeros(0, np.int64),
    )  # fmt: skip
