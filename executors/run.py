"""Run a plan for real: fill the source weights with known contents, move, verify every destination byte, report when what
happened.

Rule: nothing here knows how bytes move; that is the transport's.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.attention.contents import Contents, contents_of
from shardroute.executors.attention.jobs import load_arithmetic
from shardroute.executors.attention.on_streams import why_no_attention
from shardroute.executors.attention.seam import Arithmetic
from shardroute.executors.foresee import Foreseen, foresee
from shardroute.executors.gpus.device_sums import why_no_sums
from shardroute.executors.interpreting.interpret import Programs, compile_plan
from shardroute.executors.interpreting.memories import Buffers, Part
from shardroute.executors.interpreting.piece_sums import NONE, PieceRows, describe_wrong, piece_rows
from shardroute.executors.launching.advances import once_begun
from shardroute.executors.launching.launched import run_launched
from shardroute.executors.launching.mpiexec import MpiexecSession
from shardroute.executors.launching.processes import ProcessSession, machine_text
from shardroute.executors.launching.ranks import PROCESSES
from shardroute.executors.launching.tokens import token_of
from shardroute.executors.messages.separate import Separate, compile_separate
from shardroute.executors.transports.libraries import LIBRARIES, MPI, ON_GPUS, load_library
from shardroute.executors.transports.seam import Deadline, Place, Progress, Session, Trial
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Plan
from shardroute.planner.shares import Told, parts
from shardroute.planner.timelines import Timeline, Verified
from shardroute.topologies.errors import InputError

TRANSPORTS: Final[Sequence[str]] = (PROCESSES, *LIBRARIES)

# Enough for 256 ranks on 2 cores with gigabytes to fill and verify; a hung run should still end while someone is watching.
DEFAULT_TIMEOUT_S = 300.0
# Far more than a median needs; the times of every trial are kept.
MAX_REPEATS = 10_000
# Far more than anything takes; libraries, and Python's sockets, count nanoseconds up to 2^63, which are 9.2e9 s.
MAX_TIMEOUT_S = 1e9


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
    corrupted      with checksums: at most one piece a rank and trial that isn't what was sent, in words; None without
    n_bytes_copied bytes written by block copies in one trial (a relayed byte counts at every hop)
    staging_bytes  int64[n_ranks]: memory of each rank's slots
    memory_bytes   of all arenas
    packing_bytes  of all windows in which ranks with memory of their own pack what lies apart; 0 where memory is shared
    """

    timeline: Timeline
    trials_s: tuple[float, ...]
    mismatches: tuple[Mismatch, ...]
    n_bytes_copied: int
    staging_bytes: NDArray[np.int64]
    memory_bytes: int
    packing_bytes: int = 0
    corrupted: tuple[str, ...] | None = None

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
    transport: str = PROCESSES,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    repeats: int = 1,
    progress: Progress | None = None,
    compare: bool = True,
    arithmetic: Arithmetic | None = None,
    verify: bool = False,
    trials: Progress | None = None,
) -> RunResult:
    """Run the plan `repeats` times, with ranks started on this machine, and verify each. Wrong bytes are in the result's
    `mismatches`, not an error. What attention computes (by NumPy on CPUs, by torch on GPUs, unless told otherwise) is compared
    with one device's, unless told not to. With `verify` checksums follow each piece from rank to rank, and what isn't as it was
    sent is in `corrupted`. `progress` is told the share of all this that is done, `trials` that of the trials alone, which is 0
    until the first one moves.

    Raises InputError for an unknown transport, what `check_limits` refuses, and want of memory or open files; PlanError
    for a plan that reads or writes where its ranks have nothing; RunError, with rank and step, when a rank dies or `timeout_s`
    (for everything) pass.
    """
    _check_request(transport, timeout_s, repeats)
    foreseen = foresee(plan, transport)
    referring, compiling, preparing, running = parts(progress, foreseen.parts_s(repeats))
    contents = _contents(plan, transport, arithmetic, compare=compare, told=referring)
    _check_verifies(transport, verify=verify)
    if transport == PROCESSES:
        programs, buffers = compile_plan(plan)
        separate = None
    else:
        separate = compile_separate(plan, library_sums=transport in ON_GPUS)
        programs, buffers = separate.programs, separate.buffers
    run = plan if separate is None else separate.plan
    pieces = piece_rows(run) if verify else None
    compiling(1.0)
    with _start(plan, programs, separate, transport, timeout_s, repeats, contents, pieces, foreseen) as session:
        found = session.run(once_begun(running, trials), preparing)
    result = result_of(plan, programs, buffers, transport, found, contents, separate)
    return result if pieces is None else replace(result, corrupted=_corrupted(run, pieces, found))


def run_as_rank(
    plan: Plan, place: Place, *, transport: str, timeout_s: float = DEFAULT_TIMEOUT_S, repeats: int = 1,
    progress: Progress | None = None, arithmetic: Arithmetic | None = None, verify: bool = False,
) -> RunResult | None:  # fmt: skip
    """Run the plan as one of its ranks, which a launcher has started like this one; the result on rank 0, None elsewhere.
    `progress` is told the share that is done, and never while a trial moves bytes.

    Raises what `run_plan` does, and RunError on every rank when the ranks were given different plans.
    """
    _check_request(transport, timeout_s, repeats)
    if transport == PROCESSES:
        raise InputError(
            f"this is rank {place.rank} of {place.size}, but transport {PROCESSES} starts its ranks itself; run it without a "
            f"launcher, or choose one of {', '.join(LIBRARIES)}"
        )
    if place.size != plan.problem.n_ranks:  # before ranks meet: one that left early would look like a failure to the others
        raise InputError(f"the plan is for {plan.problem.n_ranks} ranks, and {place.size} were started")
    deadline = Deadline.after(timeout_s)
    referring, compiling, preparing, running = parts(progress, foresee(plan, transport).parts_s(repeats))
    contents = _contents(plan, transport, arithmetic, told=referring)  # what one device computes, on every rank by itself
    _check_verifies(transport, verify=verify)
    separate = compile_separate(plan, library_sums=transport in ON_GPUS)
    pieces = piece_rows(separate.plan) if verify else None
    compiling(1.0)
    world = load_library(transport).connect(place, deadline)
    preparing(1.0)
    try:
        if contents is not None:
            load_arithmetic(contents.arithmetic)
        trials = run_launched(
            world, separate.plan, separate.programs, separate.messages, n_trials=repeats, deadline=deadline, contents=contents,
            pieces=pieces, progress=running,
        )  # fmt: skip
    except BaseException:
        world.abandon()
        raise
    world.close()
    if not trials:
        return None
    result = result_of(plan, separate.programs, separate.buffers, transport, trials, contents, separate)
    return result if pieces is None else replace(result, corrupted=_corrupted(separate.plan, pieces, trials))


def _start(
    plan: Plan, programs: Programs, separate: Separate | None, transport: str, timeout_s: float, repeats: int,
    contents: Contents | None, pieces: PieceRows | None, foreseen: Foreseen,
) -> Session:  # fmt: skip
    if transport == MPI:
        return MpiexecSession(
            plan, timeout_s=timeout_s, n_trials=repeats, contents=contents, verify=pieces is not None, foreseen=foreseen
        )
    run = plan if separate is None else separate.plan
    return ProcessSession(
        run, programs, digest=run.digest, timeout_s=timeout_s, n_trials=repeats, transport=transport,
        messages=None if separate is None else separate.messages, contents=contents, pieces=pieces, foreseen=foreseen,
    )  # fmt: skip


def check_transport(transport: str) -> None:
    """Raise InputError for a transport that isn't known."""
    if transport not in TRANSPORTS:
        raise InputError(f"transport {transport!r} is not known; expected one of {', '.join(TRANSPORTS)}")


def _check_verifies(transport: str, *, verify: bool) -> None:
    if verify and transport in ON_GPUS and (reason := why_no_sums()) is not None:
        raise InputError(f"{reason}; leave --verify out")


def _corrupted(plan: Plan, pieces: PieceRows, trials: Sequence[Trial]) -> tuple[str, ...]:
    return tuple(describe_wrong(plan, pieces, row) for trial in trials for row in trial.wrong_pieces if row != NONE)


def _check_request(transport: str, timeout_s: float, repeats: int) -> None:
    check_transport(transport)
    if transport != PROCESSES:
        load_library(transport)
        token_of()  # here a bad one is the caller's mistake, in a rank it would end a run
    check_limits(timeout_s, repeats)


def check_limits(timeout_s: float, repeats: int) -> None:
    """Raise InputError for a deadline or a number of runs that makes no sense."""
    if not 1 <= repeats <= MAX_REPEATS:
        raise InputError(f"repeats: expected 1 to {MAX_REPEATS}, found {repeats}")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InputError(f"timeout: expected seconds above 0, up to {MAX_TIMEOUT_S:g}, found {timeout_s:g}")


def _contents(
    plan: Plan, transport: str, arithmetic: Arithmetic | None, *, compare: bool = True, told: Told | None = None
) -> Contents | None:
    """What a plan that computes is given and must give. Raises InputError for what can't compute it here."""
    if plan.attention is None:
        if arithmetic is not None:
            raise InputError(f"this plan computes no attention, which {arithmetic} could be chosen for; leave --arithmetic out")
        return None
    if transport in ON_GPUS:
        if arithmetic is Arithmetic.NUMPY:
            raise InputError(f"transport {transport} computes on GPUs, which NumPy doesn't; leave --arithmetic out")
        if (reason := why_no_attention()) is not None:
            raise InputError(reason)
        return contents_of(plan, Arithmetic.TORCH, compare=compare, told=told)
    if arithmetic is Arithmetic.TORCH and importlib.util.find_spec("torch") is None:
        raise InputError("attention by torch: torch is not installed (pip install 'shardroute[torch]')")
    return contents_of(plan, arithmetic or Arithmetic.NUMPY, compare=compare, told=told)


def result_of(
    plan: Plan, programs: Programs, buffers: Buffers, transport: str, trials: Sequence[Trial], contents: Contents | None,
    separate: Separate | None,
) -> RunResult:  # fmt: skip
    """What the trials of a plan showed; `separate` where its ranks have memory of their own and the plan was cut for that."""
    cells = (np.arange(len(programs.cells.rank)), programs.cells.ptr) if separate is None else separate.cells_of(len(plan.steps))
    spans = [_spans(*cells, trial) for trial in trials]
    seconds = tuple(float(end.max(initial=0.0)) for _, end in spans)
    median = sorted(range(len(trials)), key=lambda k: seconds[k])[(len(trials) - 1) // 2]
    findings = [finding for trial in trials for finding in trial.findings]
    compared = sum(finding.n_bytes for finding in trials[0].findings)
    verified = Verified(compared, sum(f.n_wrong + f.n_stray for f in findings), _against(contents, trials))
    slots = buffers.part == Part.SLOT
    staging = np.bincount(buffers.rank[slots], weights=buffers.n_bytes[slots], minlength=plan.problem.n_ranks).astype(np.int64)
    by = "" if contents is None else f", attention by {contents.arithmetic}"
    timeline = Timeline("measured", plan.digest, f"transport {transport}{by} ({machine_text()})", *spans[median], verified)
    mismatches = tuple(m for trial in trials for m in _mismatches(plan, buffers, trial))
    packing = 0 if separate is None else int(separate.messages.window_bytes.sum())
    memory = int(programs.arena_bytes.sum())
    return RunResult(timeline, seconds, mismatches, programs.n_bytes_copied, staging, memory, packing)


def _against(contents: Contents | None, trials: Sequence[Trial]) -> str:
    """What outputs that are computed were compared with, and how near they came; nothing for bytes that only move."""
    if contents is None:
        return ""
    if not contents.expected:
        return contents.about
    worst = max(trial.worst for trial in trials)
    return f"{contents.about}: largest difference {worst:.1e}, {contents.tolerance:.0e} allowed"


def _spans(cells: Ints, ptr: Ints, trial: Trial) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each step, when the first of its cells began and when the last had ended; step i has cells ptr[i] to ptr[i + 1]."""
    if not len(cells):
        return np.zeros(0), np.zeros(0)
    start_s, end_s = trial.start_s[cells] - trial.began_s, trial.end_s[cells] - trial.began_s
    return np.minimum.reduceat(start_s, ptr[:-1]), np.maximum.reduceat(end_s, ptr[:-1])


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
