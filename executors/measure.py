"""What this machine's processes cost: a calibration fitted to runs of small plans by the very executor that it will predict.

The model (see planner.backends.costs): a step costs its driving rank launch_s + n_pieces * piece_s + n_bytes / copy_Bps of CPU time,
and all ranks that have work share `cores` cores.

Three kinds of steps are run by one rank alone: a tiny piece, many tiny pieces, one large piece. Their median times are three equations
with three unknowns. Then as many ranks as the machine can use copy at once; the CPU time that the model says this takes, over the time
that it took, is `cores`.
"""

import datetime
import os
import platform

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpret import compile_plan
from shardroute.executors.processes import ProcessSession, machine_text
from shardroute.planner.layouts.fragments import Fragments, Ints
from shardroute.planner.plans import SOURCE, TARGET, Backend, Boxes, Bundles, Lane, Op, Plan, Steps
from shardroute.planner.problems import Layout, Problem, Tensor
from shardroute.topologies.calibrations import Calibration, calibration_figure, calibration_from_figures
from shardroute.topologies.errors import RunError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

MACHINE = "cpu-processes"
LIBRARY = "processes"
_N_TRIALS = 3
# Steps of each kind: enough that each kind takes some 10 ms, which is long against a scheduler's tick of 1 to 4 ms.
_N_SINGLE, _N_MANY, _N_LARGE = 2000, 16, 16
_PIECES_OF_MANY = 500
# Pieces are bf16 boxes that take half of each row, as a column-parallel weight split in two does: (rows, columns).
_TINY, _LARGE = (4, 16), (2048, 512)
# What all ranks copy together when they run at once: far beyond caches, little enough for any machine.
_TOGETHER_BYTES = 256 * 2**20


def calibrate_here(timeout_s: float = 60.0) -> Calibration:
    """The costs of transport `processes` on this machine, measured now; takes some seconds.

    Raises RunError when what was measured contradicts the model (a machine too busy to measure on), or a run fails.
    """
    launch_s, piece_s, copy_Bps = _alone(timeout_s)
    cores = _together(launch_s, piece_s, copy_Bps, timeout_s)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = f"measured on {today} by `shardroute.executors.measure` on {platform.node()}, {machine_text()}"
    values = {"step.launch": launch_s, "step.piece": piece_s, "cpu.cores": cores, "cpu.copy_bandwidth": copy_Bps}
    figures = [calibration_figure(key, value, source) for key, value in values.items()]
    return calibration_from_figures(MACHINE, LIBRARY, today, machine_text(), figures)


def _alone(timeout_s: float) -> tuple[float, float, float]:
    """launch_s, piece_s and copy_Bps, from one rank that copies to another while nothing else runs."""
    n_pieces = [1] * _N_SINGLE + [_PIECES_OF_MANY] * _N_MANY + [1] * _N_LARGE
    kind = np.repeat([0, 1, 2], [_N_SINGLE, _N_MANY, _N_LARGE])
    tiny = _half_rows("tiny", _N_SINGLE + _N_MANY * _PIECES_OF_MANY, _TINY, [(0, 1)])
    large = _half_rows("large", _N_LARGE, _LARGE, [(0, 1)])
    pieces = np.concatenate([np.arange(len(tiny[1].lo)), np.arange(len(large[1].lo))])
    tensors = np.repeat([0, 1], [len(tiny[1].lo), len(large[1].lo)])
    plan = _copies([tiny, large], n_pieces, tensors, pieces, [(0, 1)] * len(n_pieces))
    periods = np.median([_starts(plan, trial) for trial in range(1)], axis=0) if False else _periods(plan, timeout_s)
    medians = np.array([np.median(periods[:, kind[: periods.shape[1]] == k]) for k in range(3)])
    costs = plan.step_bytes[[0, _N_SINGLE, -1]]
    model = np.stack([np.ones(3), [1, _PIECES_OF_MANY, 1], costs], axis=1)
    launch_s, piece_s, byte_s = np.linalg.solve(model, medians).tolist()
    if byte_s <= 0 or piece_s < 0:
        raise RunError(f"measured step times of {medians} s contradict the model; is the machine busy? Measure again when it isn't")
    return max(launch_s, 0.0), piece_s, 1 / byte_s
