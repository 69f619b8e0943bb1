"""Run a plan for real: fill the source weights with known contents, move, verify every destination byte, report when what
happened.

Rule: nothing here knows how bytes move; that is the transport's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpret import Programs, compile_plan
from shardroute.executors.memories import Buffers, Part
from shardroute.executors.processes import ProcessSession, machine_text
from shardroute.executors.transports import Progress, Session, Trial
from shardroute.planner.plans import Plan
from shardroute.planner.timelines import Timeline, Verified
from shardroute.topologies.errors import InputError


class OpenSession(Protocol):
    """Starts the ranks of a plan over one transport."""

    def __call__(self, plan: Plan, programs: Programs, *, digest: str, timeout_s: float, n_trials: int) -> Session: ...


TRANSPORTS: Mapping[str, OpenSession] = {"processes": ProcessSession}

# Enough for 256 ranks on 2 cores with gigabytes to fill and verify; a hung run should still end while someone is watching.
DEFAULT_TIMEOUT_S = 300.0
# Far more than a median needs; the times of every trial are kept.
MAX_REPEATS = 10_000


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What is wrong on a rank: its first wrong element, or the first byte that changed though no fragment covers it (tensor "").

    index     of the element in the whole tensor          n_bytes   wrong bytes of this kind on the rank
    """

    rank: int
    tensor: str
    index: tuple[int, ...]
    n_bytes: int
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """What a run showed. Every trial ran the whole plan on freshly cleared destinations and was verified.

    timeline       of the median trial; `verified` has the destination bytes of one trial and the wrong ones of all
    trials_s       seconds of each trial, from the release of the ranks to the end of the last step
    mismatches     at most one wrong element and one changed byte a rank and trial
    n_bytes_copied bytes written by block copies in one trial (a relayed byte counts at every hop)
    staging_bytes  int64[n_ranks]: memory of each rank's slots
    memory_bytes   of all arenas
    """

    timeline: Timeline
    trials_s: tuple[float, ...]
    mismatches: tuple[Mismatch, ...]
    n_bytes_copied: int
    staging_bytes: NDArray[np.int64]
    memory_bytes: int

    @property
    def measured_s(self) -> float:
        """Seconds that the median trial took."""
        return self.timeline.total_s

    @property
    def verified(self) -> Verified:
        """Destination bytes compared in each trial, and how many bytes were wrong in all of them."""
        assert self.timeline.verified is not None
        return self.timeline.verified


def run_plan(
    plan: Plan,
    *,
    transport: str = "processes",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    repeats: int = 1,
    progress: Progress | None = None,
) -> RunResult:
    """Run the plan `repeats` times and verify each. Wrong bytes are in the result's `mismatches`, not an error.

    Raises InputError for an unknown transport, a count below 1 or above MAX_REPEATS, and want of memory or open files; PlanError
    for a plan that reads or writes where its ranks have nothing; RunError, with rank and step, when a rank dies or `timeout_s`
    (for everything) pass.
    """
    if transport not in TRANSPORTS:
        raise InputError(f"transport {transport!r} is not known; expected one of {', '.join(TRANSPORTS)}")
    if not 1 <= repeats <= MAX_REPEATS or not timeout_s > 0:
        raise InputError(f"expected 1 to {MAX_REPEATS} repeats and a timeout above 0 s, found {repeats} and {timeout_s:g}")
    programs, buffers = compile_plan(plan)
    with TRANSPORTS[transport](plan, programs, digest=plan.digest, timeout_s=timeout_s, n_trials=repeats) as session:
        trials = session.run(progress)
    return _result(plan, programs, buffers, transport, trials)


def _result(plan: Plan, programs: Programs, buffers: Buffers, transport: str, trials: Sequence[Trial]) -> RunResult:
    spans = [_spans(programs, trial) for trial in trials]
    seconds = tuple(float(end.max(initial=0.0)) for _, end in spans)
    median = sorted(range(len(trials)), key=lambda k: seconds[k])[(len(trials) - 1) // 2]
    findings = [finding for trial in trials for finding in trial.findings]
    compared = sum(finding.n_bytes for finding in trials[0].findings)
    verified = Verified(compared, sum(f.n_wrong + f.n_stray for f in findings))
    slots = buffers.part == Part.SLOT
    staging = np.bincount(buffers.rank[slots], weights=buffers.n_bytes[slots], minlength=plan.problem.n_ranks).astype(np.int64)
    timeline = Timeline("measured", plan.digest, f"transport {transport} ({machine_text()})", *spans[median], verified)
    mismatches = tuple(m for trial in trials for m in _mismatches(plan, buffers, trial))
    return RunResult(timeline, seconds, mismatches, programs.n_bytes_copied, staging, int(programs.arena_bytes.sum()))


def _spans(programs: Programs, trial: Trial) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each step, when the first of its ranks began to copy and when the last had ended."""
    if not len(trial.start_s):
        return np.zeros(0), np.zeros(0)
    first = programs.cells.ptr[:-1]
    return np.minimum.reduceat(trial.start_s, first) - trial.began_s, np.maximum.reduceat(trial.end_s, first) - trial.began_s


def _mismatches(plan: Plan, buffers: Buffers, trial: Trial) -> list[Mismatch]:
    found = []
    for rank, finding in enumerate(trial.findings):
        if finding.n_wrong:
            tensor = plan.problem.tensors[finding.tensor]
            index = tuple(int(i) for i in np.unravel_index(finding.index, tensor.shape))
            text = f"rank {rank}: {finding.n_wrong} bytes are wrong, first element {list(index)} of {tensor.name}"
            found.append(Mismatch(rank, tensor.name, index, finding.n_wrong, text))
        if finding.n_stray:
            where = buffers.describe(rank, finding.stray)
            text = f"rank {rank}: {finding.n_stray} bytes changed that no tensor covers, first {where}"
            found.append(Mismatch(rank, "", (), finding.n_stray, text))
    return found
