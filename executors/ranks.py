"""The processes that ranks are, and the one that they are forked from.

A run is one fresh Python process (the *nursery*), which maps the shared file, forks a process a rank, and waits for them.
It has one thread and knows nothing of its caller's `__main__`, so forking is safe on Linux and macOS, works from notebooks
and from scripts without a main guard, and a rank costs only the pages that it writes. (`multiprocessing`'s fork server
would import the caller's `__main__` anew in every rank, and stay alive afterwards.)

Standard input is a pipe that ends when the caller dies: then all ranks end too. Standard output is a pipe by which the
nursery tells the caller of a failure, and which ends when the last rank has.
"""

import contextlib
import gc
import os
import resource
import select
import signal
import time
from collections.abc import Sequence

from shardroute.executors.boards import Board
from shardroute.executors.drive import drive
from shardroute.executors.interpret import Programs, from_columns
from shardroute.executors.patterns import Finding, arm, fill_sources, verify
from shardroute.executors.shared_files import SharedFile, attach_shared_file
from shardroute.executors.shared_memory import LIFELINE, CallerGoneError, LateError, SharedMemoryTransport
from shardroute.topologies.errors import RunError

LATE = 3  # exit code of a rank that gave up at the deadline
_CALLER = 1  # standard output, see above
_PIPE_BYTES = 4096  # read at a time; a pipe gives what it has
_OTHER_FILES = 64  # descriptors that a process needs besides the ranks' pipes; generous


def _run_rank(shared: SharedFile, digest: str, rank: int, inbox: int, outboxes: Sequence[int]) -> None:
    if shared.digest != digest:
        raise RunError(f"the programs that it was given are of plan {shared.digest[:12]}, but plan {digest[:12]} is to be run")
    programs = from_columns(Programs, dict(shared.columns))
    board, arena = Board.of(shared), shared.arena(rank)
    target_at, slots_at = int(programs.target_at[rank]), int(programs.slots_at[rank])
    fill_sources(arena, programs.holdings, rank)
    transport = SharedMemoryTransport(shared, programs, rank, inbox, outboxes)
    for trial in range(len(board.began_s)):
        transport.begin_trial(trial)
        transport.enter(-1)
        arm(arena, target_at)
        transport.barrier(2 * trial + 1)
        board.began_s[trial, rank] = time.monotonic()
        drive(programs, rank, transport, board.start_s[trial], board.end_s[trial])
        transport.enter(len(programs.cells.ptr) - 1)
        transport.barrier(2 * trial + 2)
        finding = verify(arena, programs.holdings, rank, target_at, slots_at)
        board.found[trial, rank] = [getattr(finding, name) for name in Finding.__slots__]


def _rank_process(shared: SharedFile, digest: str, rank: int, inbox: int, outboxes: Sequence[int]) -> int:
    """Run the rank; the exit code of its process."""
    try:
        _run_rank(shared, digest, rank, inbox, outboxes)
    except CallerGoneError:
        return 1
    except LateError:
        return LATE
    except BaseException as error:
        Board.of(shared).write_error(rank, str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}")
        return 1
    return 0


def nursery(fd: int, digest: str) -> int:
    """Fork a process for each rank of the shared file and wait until all have ended; 1 when they couldn't be started."""
    shared = attach_shared_file(fd)
    board = Board.of(shared)
    n_ranks = len(board.pid)
    os.set_blocking(_CALLER, False)
    ranks: dict[int, int] = {}
    try:
        _allow_files(files_needed(n_ranks))
        pipes = [os.pipe() for _ in range(n_ranks)]
        for reading, writing in pipes:
            os.set_blocking(reading, False)
            os.set_blocking(writing, False)
        gc.freeze()  # else the first collection in each rank writes to, and so copies, every page that holds an object
        for rank in range(n_ranks):
            pid = os.fork()
            if pid == 0:
                os._exit(_rank_process(shared, digest, rank, pipes[rank][0], [writing for _, writing in pipes]))
            ranks[pid] = rank
            board.pid[rank] = pid
    except OSError as error:
        board.write_error(n_ranks, f"{len(ranks)} of {n_ranks} ranks could be started ({error})")
        return 1
    _watch(board, ranks)
    return 0


def _watch(board: Board, ranks: dict[int, int]) -> None:
    """Note how each rank ends (`ranks` gives the rank of each process id), until all have; kill all if the caller dies."""
    ended, calls = os.pipe()
    os.set_blocking(calls, False)
    signal.set_wakeup_fd(calls)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler no byte is written
    events = select.poll()
    events.register(ended, select.POLLIN)
    events.register(LIFELINE, select.POLLIN)
    while True:
        while ranks and (found := os.waitpid(-1, os.WNOHANG))[0]:
            rank, code = ranks.pop(found[0]), os.waitstatus_to_exitcode(found[1])
            board.exit_code[rank] = code
            if code and board.first_failed[0] < 0:
                board.first_failed[0] = rank
                with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the caller has calls to read, or is gone
                    os.write(_CALLER, b"!")
        if not ranks:
            return
        for fd, _ in events.poll():
            if fd == LIFELINE:  # ranks that wait see it themselves; one that is stopped, or in a long copy, doesn't
                os.killpg(0, signal.SIGKILL)
            os.read(fd, _PIPE_BYTES)


def files_needed(n_ranks: int) -> int:
    """Open files that the nursery needs for this many ranks."""
    return 2 * n_ranks + _OTHER_FILES


def _allow_files(n: int) -> None:
    """Raise this process's own limit on open files, where it is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < n:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n if hard == resource.RLIM_INFINITY else min(n, hard), hard))
