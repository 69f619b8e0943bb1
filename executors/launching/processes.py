"""Ranks on this machine, one operating-system process each: the transport `processes`, whose ranks share one memory, and the
local ranks of transports that bring memory of their own.

The caller's side: it lays the programs (and the arenas, where they are shared) into a shared file, starts the ranks (see
`ranks`), watches them, and ends them. Whatever happens, leaving the session kills what is left of its process group; memory and
pipes have no names to leak.
"""

import contextlib
import json
import os
import platform
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.attention.contents import Contents
from shardroute.executors.foresee import Foreseen, foresee
from shardroute.executors.interpreting.interpret import Programs, to_columns
from shardroute.executors.interpreting.patterns import Finding
from shardroute.executors.interpreting.piece_sums import PieceRows
from shardroute.executors.launching.advances import moved_share, prepared_share, trials_share
from shardroute.executors.launching.boards import RUNNING, Board
from shardroute.executors.launching.ranks import LATE, PROCESSES, files_needed, pieces_columns
from shardroute.executors.launching.shared_files import create_shared_file, file_bytes
from shardroute.executors.messages.messages import Messages
from shardroute.executors.steps import describe_place
from shardroute.executors.transports.seam import Progress, Trial
from shardroute.planner.plans import Plan
from shardroute.topologies.errors import InputError, RunError
from shardroute.topologies.units import format_bytes

# What has linear algebra run in one thread, whichever library NumPy was built with.
ONE_THREAD: Final = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_POLL_S = 0.1  # how often progress is told
_GRACE_S = 2.0  # ranks report a passed deadline themselves; after this much more the caller does it for them
_SIGNAL_HINTS = {signal.SIGBUS: "; memory ran out", signal.SIGKILL: "; by someone, or by the system for want of memory"}
_SHOWN_WAITS = 3  # of a chain of waits, in an error
# From this length on memcpy stores past the caches, which saves reading what it overwrites. By itself glibc does so only for what
# outgrows the last cache, which all cores of a server share. Blocks of 1 MiB go at 10.3 GB/s against 7.2 then, of 64 MiB at 11.8
# against 7.3 (CPU time of one core of a Xeon with 260 MiB of such cache, glibc 2.36). Other C libraries don't read this.
_NON_TEMPORAL = "glibc.cpu.x86_non_temporal_threshold"
_NON_TEMPORAL_BYTES = 2**20
# The caller's path is handed over, so that ranks import the same packages wherever these were found.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from shardroute.executors.launching.ranks import nursery; sys.exit(nursery(int(sys.argv[1]), sys.argv[2], sys.argv[4]))"
)


class ProcessSession:
    """A Session of processes. `pids` are those of the ranks, 0 until they have started.

    Raises InputError when the memory that the run needs isn't free, RunError when the ranks can't be started.
    """

    def __init__(
        self, plan: Plan, programs: Programs, *, digest: str, timeout_s: float, n_trials: int = 1, transport: str = PROCESSES,
        messages: Messages | None = None, contents: Contents | None = None,
        wiring: Mapping[str, NDArray[np.generic]] | None = None, inherited: Sequence[int] = (), pieces: PieceRows | None = None,
        foreseen: Foreseen | None = None,
    ) -> None:  # fmt: skip
        """`digest` is of the plan that the programs were compiled from; ranks refuse to run any other than `plan`. Transports
        other than `processes` need the messages of the programs; a plan that computes needs contents. `wiring` are further
        columns for the ranks, `inherited` further descriptors. With `pieces` checksums follow them. `foreseen` weighs the shares
        that `run` tells, where more is known of the plan than its counts.
        """
        check_files(programs.n_drivers)
        n_cells = len(programs.cells.rank)
        _check_memory(Board.bytes_of_trials(programs.n_drivers, n_cells, n_trials) + int(programs.arena_bytes.sum()), plan)
        board = Board.blank(programs.n_drivers, n_cells, n_trials, timeout_s)
        columns = to_columns(programs) | to_columns(board, "board.")
        if messages is not None:
            columns |= to_columns(messages, "messages.")
        if contents is not None:
            columns |= contents.columns()
        columns |= wiring or {}
        if pieces is not None:
            columns |= pieces_columns(pieces)
        _check_memory(file_bytes(columns, programs.arena_bytes), plan)
        self._plan, self._programs, self._n_trials, self._transport = plan, programs, n_trials, transport
        self._foreseen = foresee(plan, transport) if foreseen is None else foreseen
        no_arenas = np.zeros_like(programs.arena_bytes)
        try:
            self._shared = create_shared_file(digest, columns, programs.arena_bytes if transport == PROCESSES else no_arenas)
        except OSError as error:
            raise RunError(f"the shared memory of the run can't be made: {error.strerror}") from error
        self._board = Board.of(self._shared)
        # A session of its own: Ctrl-C reaches the caller only, who then ends the whole group. One BLAS thread: a rank is
        # one core's work, and forking must find a single thread.
        self._nursery = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(self._shared.fd), plan.digest, json.dumps(sys.path), transport],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self._shared.fd, *inherited], start_new_session=True,
            bufsize=0, env=os.environ | _environment(),
        )  # fmt: skip

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the ranks."""
        pids: list[int] = self._board.pid.tolist()
        return pids

    def run(self, progress: Progress | None = None, preparing: Progress | None = None) -> Sequence[Trial]:
        """Wait until the ranks have run and verified all trials. Raises RunError.

        Calls `progress` with the share of the trials that is done, which is 0 until the first one moves bytes, and `preparing`
        with that of what comes before: starting the ranks and filling their sources.
        """
        board, calls, done = self._board, select.poll(), 0.0
        assert self._nursery.stdout is not None
        calls.register(self._nursery.stdout, select.POLLIN)
        while True:
            ended = calls.poll(1000 * _POLL_S) and os.read(self._nursery.stdout.fileno(), 4096) == b""
            if board.first_failed[0] >= 0:
                self._let_others_tell()
                raise RunError(self._failure(int(board.first_failed[0])))
            if ended or self._nursery.poll() not in (None, 0):
                break
            if time.monotonic() > float(board.deadline_s[0]) + _GRACE_S:
                raise RunError(self._late(self._slowest()))
            done = max(done, self._trials_share())  # which a rank that goes on to the next trial may let fall for a moment
            if preparing is not None and done == 0:
                preparing(prepared_share(board.pid, board.phase, board.share, self._foreseen))
            if progress is not None:
                progress(done)
        if self._nursery.wait() != 0 or (board.exit_code != 0).any():
            raise RunError(self._nursery_failure())
        if progress is not None:
            progress(1.0)
        n_ranks = self._programs.n_ranks
        return [
            Trial(float(board.began_s[k].min(initial=np.inf)), board.start_s[k].copy(), board.end_s[k].copy(),
                  [Finding(*row) for row in board.found[k, :n_ranks].tolist()], float(board.worst[k].max(initial=0.0)),
                  board.wrong_piece[k, :n_ranks].tolist())
            for k in range(self._n_trials)
        ]  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with uninterrupted():
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
                os.killpg(self._nursery.pid, signal.SIGKILL)
            self._nursery.wait()
            for pipe in (self._nursery.stdin, self._nursery.stdout):
                assert pipe is not None
                if pipe is self._nursery.stdout:
                    pipe.read()  # ends when the last rank has ended
                pipe.close()
            os.close(self._shared.fd)

    def _let_others_tell(self) -> None:
        """Ranks reach a deadline at about the same time; those that wait then say for whom before they end."""
        board, until_s = self._board, time.monotonic() + _GRACE_S
        late = board.exit_code[board.first_failed[0]] == LATE
        while late and (board.exit_code == RUNNING).any() and time.monotonic() < until_s:
            time.sleep(_POLL_S / 10)

    def _trials_share(self) -> float:
        board, n_cells = self._board, len(self._programs.cells.rank)
        trial = min(max((int(board.phase.min()) - 1) // 2, 0), self._n_trials - 1)
        if self._transport == PROCESSES:
            moved = int(np.count_nonzero(board.flags[:n_cells] > trial)) / max(n_cells, 1)
        else:  # no rank marks cells where others could see it
            moved = moved_share(board.at_step, len(self._plan.steps))
        return trials_share(board.phase, board.share, moved, self._n_trials, self._foreseen)

    def _failure(self, rank: int) -> str:
        code, words = int(self._board.exit_code[rank]), self._board.read_error(rank)
        if code == LATE:
            return self._late(rank)
        if code < 0:
            number = signal.Signals(-code)
            words = f"was killed ({number.name}{_SIGNAL_HINTS.get(number, '')})"
        return f"{self._name(rank)} {self._where(rank)}: {words}. {self._all_ended()}"

    def _nursery_failure(self) -> str:
        """Why the process that the ranks are forked from ended before they had."""
        code, words = self._nursery.returncode, self._board.read_error(-1)
        n_started = int(np.count_nonzero(self._board.pid))
        if not words and code < 0:
            number = signal.Signals(-code)
            words = f"the process that they are forked from was killed ({number.name}{_SIGNAL_HINTS.get(number, '')})"
        words = words or f"the process that they are forked from ended with exit code {code}"
        when = "couldn't be started" if n_started < self._programs.n_drivers else "were lost while they ran"
        return f"the ranks {when}: {words}. {self._all_ended()}"

    def _late(self, rank: int) -> str:
        """Follow who waits for whom from the rank, to the one that held up all others."""
        seen = [rank]
        waits: list[str] = []
        while (found := self._board.blocker(seen[-1], self._programs.cells.rank)) is not None:
            blocker, cell, what = found
            step = int(np.searchsorted(self._programs.cells.ptr, cell, side="right")) - 1
            which = f" step {step}" if cell >= 0 else ""
            waits.append(f"{self._name(seen[-1])} waited for {self._name(blocker)} to {what}{which}")
            if blocker in seen:
                break
            seen.append(blocker)
        stopped = self._stopped()
        last = stopped[0] if stopped else seen[-1]
        chain = "; ".join(reversed(waits[-_SHOWN_WAITS:]))
        why = "is stopped by a signal and " if stopped else ""
        return (
            f"{self._name(last)} {self._where(last)}: {why}held up the run until the {self._board.deadline_s[1]:g} s that "
            f"--timeout allows were over{f' ({chain})' if chain else ''}. Where each rank was: {self._where_all()}. "
            f"{self._all_ended()}"
        )

    def _stopped(self) -> list[int]:
        """Ranks whose processes are stopped (SIGSTOP, a debugger), as far as the system tells: Linux does."""
        found = []
        for rank, pid in enumerate(self._board.pid.tolist()):
            with contextlib.suppress(OSError):  # ended meanwhile, or a system without /proc
                status = Path(f"/proc/{pid}/stat").read_text()
                if status.rpartition(") ")[2].startswith(("T", "t")):
                    found.append(rank)
        return found

    def _where_all(self) -> str:
        """Step and peers of every rank; those at one place in one phrase."""
        ranks: dict[str, list[int]] = {}
        for rank in range(self._programs.n_ranks):
            found, words = self._board.blocker(rank, self._programs.cells.rank), self._board.read_error(rank)
            peers = f", waiting for {self._name(found[0])}" if found is not None else f", {words}" if words else ""
            ranks.setdefault(self._where(rank) + peers, []).append(rank)
        return "; ".join(f"rank {', '.join(map(str, where))} {text}" for text, where in ranks.items())

    def _slowest(self) -> int:
        """A rank that still runs and waits for nothing, or the one that is furthest behind."""
        busy = (self._board.exit_code == RUNNING) & (self._board.waiting < 0)
        return int(np.argmax(busy)) if busy.any() else int(np.argmin(self._board.phase))

    def _all_ended(self) -> str:
        return f"All {self._programs.n_ranks} ranks have been ended."

    def _name(self, driver: int) -> str:
        n_ranks = self._programs.n_ranks
        return f"rank {driver}" if driver < n_ranks else f"rank {driver - n_ranks} (computing)"

    def _where(self, rank: int) -> str:
        step, phase = int(self._board.at_step[rank]), int(self._board.phase[rank])
        if phase == 0:
            return "while it got ready"
        if step >= len(self._plan.steps) and phase % 2 == 0:
            return "while it verified"
        return describe_place(self._plan, step)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let no further Ctrl-C stop what is done inside, which must be short: a second one must not leave half of it behind."""
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _environment() -> dict[str, str]:
    """What ranks need in theirs, beside ours: one thread, and stores past the caches for long copies."""
    given = [text for text in (os.environ.get("GLIBC_TUNABLES"), f"{_NON_TEMPORAL}={_NON_TEMPORAL_BYTES:#x}") if text]
    return ONE_THREAD | {"GLIBC_TUNABLES": ":".join(given)}


def check_files(n_ranks: int) -> None:
    """Raise InputError where the system lets a process have fewer open files than the nursery needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and files_needed(n_ranks) > hard:
        raise InputError(
            f"running {n_ranks} ranks takes {files_needed(n_ranks)} open files in one process, and this system allows {hard}; "
            "raise that limit (ulimit -Hn), or plan for fewer ranks"
        )


def _check_memory(n_bytes: int, plan: Plan) -> None:
    free = available_bytes()
    if free is not None and n_bytes > free:
        raise InputError(
            f"running this plan on one machine takes {format_bytes(n_bytes)} of memory for all {plan.problem.n_ranks} ranks, "
            f"and {format_bytes(free)} are free; plan a smaller copy of the model with --scale, or fewer ranks"
        )


def available_bytes() -> int | None:
    """Memory that can be used without swapping, or None where the system doesn't say; a container's limit counts."""
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with contextlib.suppress(OSError, ValueError):  # cgroup v2; reads "max" where there is no limit
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    if not found:
        with contextlib.suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def machine_text() -> str:
    """This machine in words, for a measurement's source."""
    system = f"{platform.system()} {platform.machine()}"
    return f"{os.cpu_count()} cores, {system}, Python {platform.python_version()}, NumPy {np.__version__}"
