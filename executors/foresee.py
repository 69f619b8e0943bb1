"""About how long the parts of running a plan take on this machine: what the shares that a run tells are weighed by.

Rule: counts of the plan, times what one of each took on one machine. Shares and the time left rest on it, and nothing else.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardroute.executors.attention.contents import NARROW, TOLERANCES
from shardroute.executors.attention.references import MAX_REFERENCE_FLOPS, reference_flops
from shardroute.executors.launching.ranks import PROCESSES
from shardroute.executors.transports.libraries import MPI
from shardroute.planner.plans import Plan
from shardroute.planner.ring.tensors import Pass

# Times of one core of a 2-core Xeon with other work beside, 2026-12-01: plans of 4 to 256 ranks that move 4 MB to 3 GB.
# Seconds until the first rank is forked, of which importing torch is most.
_BOOT_S: Final[Mapping[str, float]] = {"gloo": 1.5, MPI: 1.0}
_BOOT_OTHER_S: Final = 0.5
# A rank until it fills, which under MPI starts a Python of its own; and to find each other one where they share no memory.
_RANK_S, _MPI_RANK_S, _PAIR_S = 35e-3, 0.6, 0.4e-3
# Compiling, of a step, a piece and a fragment.
_STEP_S, _PIECE_S, _FRAGMENT_S = 10e-6, 1e-6, 1e-6
# Filling, of a fragment and of a byte; and what a byte takes that others will write: pages are made, of memory that is shared or
# a rank's own.
_FILL_S, _SHARED_S, _OWN_S = (20e-6, 0.8e-9), 1.2e-9, 2.4e-9
# Verifying, of a fragment and of a byte.
_VERIFY_S: Final = (28e-6, 0.8e-9)
# Moving, of a step, a piece and a byte: in memory that is shared, and in messages.
_MOVE_S, _SEND_S = (30e-6, 2e-6, 0.2e-9), (150e-6, 2e-6, 1e-9)
# Floating-point operations in a second: of one device in float64, with softmax (5 to 12e9), of a rank, and of one in bf16 or f16.
_REFERENCE_FLOPS, _FLOPS, _NARROW_FLOPS = 8e9, 1e11, 5e9


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Seconds of the parts of a run: computing what one device would, to compare with (0 where bytes only move); compiling;
    starting the ranks; filling their sources; then, of each trial, moving and verifying.
    """

    referring_s: float
    compiling_s: float
    starting_s: float
    filling_s: float
    moving_s: float
    verifying_s: float

    @property
    def trial_s(self) -> float:
        """Seconds of a trial."""
        return self.moving_s + self.verifying_s

    def whole_s(self, repeats: int) -> float:
        """Seconds of all."""
        return sum(self.parts_s(repeats))

    def parts_s(self, repeats: int) -> tuple[float, float, float, float]:
        """Seconds of what follows each other: one device's computing, compiling, getting the ranks ready, all trials."""
        return self.referring_s, self.compiling_s, self.starting_s + self.filling_s, repeats * self.trial_s


def foresee(plan: Plan, transport: str, moving_s: float | None = None) -> Foreseen:
    """About what running the plan takes. `moving_s` is what its steps take, where that is known, as of predictions."""
    n_ranks = max(plan.problem.n_ranks, 1)
    n_cores = min(n_cpus(), n_ranks)
    sources, targets = _held(plan, target=False), _held(plan, target=True)
    written_s = _SHARED_S if transport == PROCESSES else _OWN_S
    return Foreseen(
        referring_s=_referring_s(plan),
        compiling_s=_STEP_S * len(plan.steps) + _PIECE_S * int(plan.step_pieces.sum()) + _FRAGMENT_S * (sources[0] + targets[0]),
        starting_s=starting_ranks_s(n_ranks, transport),
        filling_s=(_both(_FILL_S, sources) + written_s * targets[1]) / n_cores,
        moving_s=_moving_s(plan, transport) / n_cores if moving_s is None else moving_s,
        verifying_s=_both(_VERIFY_S, targets) / n_cores,
    )


def starting_ranks_s(n_ranks: int, transport: str) -> float:
    """About what starting so many ranks takes, until they have found each other."""
    rank_s = (_MPI_RANK_S if transport == MPI else _RANK_S) + (0.0 if transport == PROCESSES else _PAIR_S * n_ranks)
    return _BOOT_S.get(transport, _BOOT_OTHER_S) + n_ranks * rank_s / min(n_cpus(), max(n_ranks, 1))


def _referring_s(plan: Plan) -> float:
    """What one device takes, for what a run is compared with; see `contents`."""
    if plan.attention is None:
        return 0.0
    n_flops = _flops(plan)
    n_times = 1 if plan.attention.dtype in TOLERANCES else 1 + NARROW
    return 0.0 if n_flops > MAX_REFERENCE_FLOPS else n_times * n_flops / _REFERENCE_FLOPS


def _moving_s(plan: Plan, transport: str) -> float:
    """Core seconds of what its steps do."""
    step_s, piece_s, byte_s = _MOVE_S if transport == PROCESSES else _SEND_S
    moved_s = step_s * len(plan.steps) + piece_s * int(plan.step_pieces.sum()) + byte_s * int(plan.step_bytes.sum())
    if plan.attention is None:
        return moved_s
    rate = _FLOPS if plan.attention.dtype in TOLERANCES else _NARROW_FLOPS
    return moved_s + _flops(plan) / (2 if plan.attention.causal else 1) / rate


def _flops(plan: Plan) -> float:
    assert plan.attention is not None
    return reference_flops(plan.attention, Pass(dict(plan.problem.about)["pass"]))


def _held(plan: Plan, *, target: bool) -> tuple[int, int]:
    """Fragments on one side, and their bytes."""
    classes = [(c, c.target if target else c.source) for c in plan.problem.classes]
    n_fragments = sum(len(c.members) * len(f) for c, f in classes)
    return n_fragments, sum(len(c.members) * int(f.extent.prod(axis=1).sum()) * c.itemsize for c, f in classes)


def _both(each_s: tuple[float, float], counts: tuple[int, int]) -> float:
    return each_s[0] * counts[0] + each_s[1] * counts[1]


def n_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
