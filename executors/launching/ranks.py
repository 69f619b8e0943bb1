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
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.attention.contents import Contents
from shardroute.executors.attention.jobs import Attending, load_arithmetic
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs, from_columns, to_columns
from shardroute.executors.interpreting.piece_sums import PieceRows, PieceSums
from shardroute.executors.interpreting.trials import run_trials
from shardroute.executors.launching.boards import Board
from shardroute.executors.launching.launched import run_over
from shardroute.executors.launching.shared_files import SharedFile, attach_shared_file
from shardroute.executors.messages.messages import Messages
from shardroute.executors.transports.following import FollowedTransport
from shardroute.executors.transports.libraries import Library, load_library
from shardroute.executors.transports.seam import Deadline, LateError, Place
from shardroute.executors.transports.shared_memory import LIFELINE, CallerGoneError, SharedMemoryTransport
from shardroute.topologies.errors import RunError

PROCESSES = "processes"  # the transport of ranks that share their memory
EMULATED = "emulated"  # that of ranks joined by links of given rates, see shardroute.executors.emulation

LATE = 3  # exit code of a rank that gave up at the deadline
_CALLER = 1  # standard output, see above
_PIPE_BYTES = 4096  # read at a time; a pipe gives what it has
_PIECES, _SENT, _KEPT = "pieces.", "pieces.sent", "pieces.kept"  # columns of the shared file
_OTHER_FILES = 64  # descriptors that a process needs besides the ranks' pipes; generous


def _run_rank(shared: SharedFile, digest: str, driver: int, inbox: int, outboxes: Sequence[int]) -> None:
    """A driver of a rank of transport `processes`, whose arena lies in the shared file."""
    _check_digest(shared, digest)
    programs = from_columns(Programs, dict(shared.columns))
    transport = SharedMemoryTransport(shared, programs, driver, inbox, outboxes)
    rank, contents = driver % programs.n_ranks, Contents.of(shared.columns)
    job = None if contents is None else Attending(shared.memory, shared.arena_at, programs, contents, rank)
    if contents is not None and driver != rank and contents.attention.is_even:
        keep_to_one_cpu(rank, programs.n_ranks)
    followed = _followed(shared, programs, transport, rank)
    run_trials(programs, Board.of(shared), shared.arena(rank), driver, followed or transport, job, followed)


def keep_to_one_cpu(rank: int, n_ranks: int) -> None:
    """Bind this process to a CPU where each CPU gets as many of the ranks, as mpiexec binds ranks to cores.

    Left to the system, two that are woken at once may share a core for 4 ms while another has nothing to do.
    """
    if hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        if n_ranks % len(cpus) == 0:
            os.sched_setaffinity(0, {cpus[rank % len(cpus)]})


def _run_rank_over(library: Library, shared: SharedFile, digest: str, rank: int, rendezvous: str) -> None:
    """A rank of another transport: it has memory of its own, and only its board in the shared file."""
    _check_digest(shared, digest)
    columns = dict(shared.columns)
    programs, messages, board = from_columns(Programs, columns), from_columns(Messages, columns, "messages."), Board.of(shared)
    deadline = Deadline(*board.deadline_s.tolist())
    world = library.connect(Place(rank, programs.n_ranks, rendezvous), deadline)
    run_over(world, programs, messages, board, digest, deadline, Contents.of(columns), _pieces_of(shared))
    world.close()


def pieces_columns(pieces: PieceRows) -> dict[str, NDArray[np.generic]]:
    """What ranks need in their shared file to follow pieces by checksums."""
    sums = {name: np.zeros(len(pieces.step), dtype=np.uint64) for name in (_SENT, _KEPT)}
    return to_columns(pieces, _PIECES) | sums


def _pieces_of(shared: SharedFile) -> PieceRows | None:
    return from_columns(PieceRows, dict(shared.columns), _PIECES) if _SENT in shared.columns else None


def _followed(shared: SharedFile, programs: Programs, transport: SharedMemoryTransport, rank: int) -> FollowedTransport | None:
    """The transport with checksums, which lie in the shared file and so need no sending: a trial's last barrier has passed."""
    rows = _pieces_of(shared)
    if rows is None:
        return None
    sent, kept = (cast(NDArray[np.uint64], shared.columns[name]) for name in (_SENT, _KEPT))
    sums = PieceSums(rows, programs.forms, Arena.whole(shared.arena(rank)), rank, sent, kept)
    return FollowedTransport(transport, programs, rows, sums, rank, lambda: None)


def _check_digest(shared: SharedFile, digest: str) -> None:
    if shared.digest != digest:
        raise RunError(f"the programs that it was given are of plan {shared.digest[:12]}, but plan {digest[:12]} is to be run")


def _rank_process(shared: SharedFile, rank: int, run: Callable[[], None]) -> int:
    """Run the rank; the exit code of its process."""
    try:
        run()
    except CallerGoneError:
        return 1
    except LateError as error:
        if error.peers:
            Board.of(shared).write_error(rank, f"waiting for rank {', '.join(map(str, error.peers))}")
        return LATE
    except BaseException as error:
        Board.of(shared).write_error(rank, str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}")
        return 1
    return 0


def nursery(fd: int, digest: str, transport: str) -> int:
    """Fork a process for each rank of the shared file and wait until all have ended; 1 when they couldn't be started."""
    shared = attach_shared_file(fd)
    board = Board.of(shared)
    n_ranks = len(board.pid)
    os.set_blocking(_CALLER, False)
    ranks: dict[int, int] = {}
    try:
        contents = Contents.of(shared.columns)
        if contents is not None:
            load_arithmetic(contents.arithmetic)
        run = _shared_memory_ranks(shared, digest) if transport == PROCESSES else _ranks_over(transport, shared, digest)
        gc.freeze()  # else the first collection in each rank writes to, and so copies, every page that holds an object
        for rank in range(n_ranks):
            pid = os.fork()
            if pid == 0:
                os._exit(_rank_process(shared, rank, partial(run, rank)))
            ranks[pid] = rank
            board.pid[rank] = pid
    except OSError as error:
        board.write_error(n_ranks, f"{len(ranks)} of {n_ranks} ranks could be started ({error})")
        return 1
    _watch(board, ranks)
    return 0


def _shared_memory_ranks(shared: SharedFile, digest: str) -> Callable[[int], None]:
    n_ranks = len(Board.of(shared).pid)
    _allow_files(files_needed(n_ranks))
    pipes = [os.pipe() for _ in range(n_ranks)]
    for reading, writing in pipes:
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
    outboxes = [writing for _, writing in pipes]
    return lambda rank: _run_rank(shared, digest, rank, pipes[rank][0], outboxes)


def _ranks_over(transport: str, shared: SharedFile, digest: str) -> Callable[[int], None]:
    library = _emulated(shared) if transport == EMULATED else load_library(transport)
    library.preload()
    rendezvous, server = library.listen()

    def run(rank: int) -> None:
        if rank > 0:
            server.close()
        _run_rank_over(library, shared, digest, rank, rendezvous)

    return run


def _emulated(shared: SharedFile) -> Library:
    """The library of an emulated cluster, whose wiring lies in the shared file."""
    from shardroute.executors.emulation.wirings import Wiring
    from shardroute.executors.emulation.worlds import EmulatedLibrary

    return EmulatedLibrary(from_columns(Wiring, dict(shared.columns), "wiring."))


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
        failed: list[int] = []
        while ranks and (found := os.waitpid(-1, os.WNOHANG))[0]:
            rank, code = ranks.pop(found[0]), os.waitstatus_to_exitcode(found[1])
            board.exit_code[rank] = code
            if code:
                failed.append(rank)
        if failed and board.first_failed[0] < 0:
            # They are told in no order: a rank that was killed comes before those that then lost it.
            board.first_failed[0] = min(failed, key=lambda rank: int(board.exit_code[rank]) >= 0)
            with contextlib.suppress(BlockingIOError, BrokenPipeError):  # the caller has calls to read, or is gone
                os.write(_CALLER, b"!")
        if not ranks:
            return
        for fd, _ in events.poll():
            if fd == LIFELINE:  # ranks that wait see it themselves; one that is stopped, or in a long copy, doesn't
                os.killpg(0, signal.SIGKILL)
            os.read(fd, _PIPE_BYTES)


def files_needed(n_ranks: int) -> int:
    """Open files that the nursery needs for this many processes."""
    return 2 * n_ranks + _OTHER_FILES


def _allow_files(n: int) -> None:
    """Raise this process's own limit on open files, where it is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < n:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n if hard == resource.RLIM_INFINITY else min(n, hard), hard))
