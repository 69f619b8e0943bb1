"""One rank in a process of its own, over memory that all ranks map; and the process that all ranks are forked from.

A run is one fresh Python process (the *nursery*), which maps the shared file, forks a process a rank, and waits for them. It has one
thread and knows nothing of its caller's `__main__`, so forking is safe on Linux and macOS, works from notebooks and scripts without a
main guard, and a rank costs the pages that it writes. (`multiprocessing`'s fork server would import the caller's `__main__` anew in
every rank and stay alive afterwards.) Standard input is a pipe that ends when the caller dies: then all ranks end too. Standard output
is a pipe by which ranks wake the caller, and which ends when the last of them has.

Waiting and waking: the truth is in `flags`, one 4-byte word a cell and phase, each written by one rank only (aligned 4-byte stores are
whole on every CPU that Python runs on). A rank that waits says for which flag in `waiting`, looks once more, then sleeps on its own
pipe; who raises a flag looks at `waiting` and writes to the pipes of those that sleep for it. No CPU is burned, and few calls are made.

Memory order: data must be seen before its flag. x86 keeps stores in order, Arm doesn't, so `_order` stands between data and flag
on both sides, and between raising a flag and looking at `waiting` (else each side could miss the other). It releases a lock and takes
it again: on Arm a store-release followed by a load-acquire, which that architecture orders with all that is before and after (Arm ARM
B2.3, "barrier-ordered-before"), on x86 a locked instruction. As a net below that, a sleeper looks again every second.
"""

import os
import select
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.blocks import LINEAR
from shardroute.executors.drive import drive
from shardroute.executors.interpret import Programs, from_columns
from shardroute.executors.patterns import Finding, arm, fill_sources, verify
from shardroute.executors.shared_files import SharedFile, attach_shared_file
from shardroute.planner.plans import ranges
from shardroute.topologies.errors import RunError

ERROR_BYTES = 1024  # room for a rank's last words
RUNNING = 1 << 16  # in `exit_code` while a rank lives; no exit code or negated signal number is that large
_LOOK_AGAIN_S = 1.0
# Where NumPy copies elements as fast as inner loops: 12-byte runs go at 2.7 GB/s against 1.9, 64-byte runs at 2.9 against 2.9
# (measured on 2 cores of a Xeon, NumPy 2.4.6).
_ELEMENT_BYTES = 64
_PAGE = 4096  # touching more often than pages are large is harmless
_LIFELINE, _CALLER = 0, 1  # standard input and output, see above


class CallerGoneError(Exception):
    """Whoever asked for the run has died."""


class Board:
    """The columns of a shared file by which ranks and caller tell each other how far they are. c cells, n ranks, k trials.

    flags     uint32[2c + 1]   marked in trial k: k + 1; then the same for `ready`; then the phase that ranks may enter
    phase     uint32[n]        the phase that a rank has reached: 2k + 1 ready for trial k, 2k + 2 done with it
    waiting   int64[n]         the flag that the rank sleeps for, -1 for none
    at_step   int64[n]         the step that it drives; -1 before the first, n_steps after the last
    exit_code int64[n]         RUNNING, or what waitpid said;  first_failed int64[1]: the first rank with another code than 0, else -1
    pid       int64[n]
    error     uint8[n + 1, ERROR_BYTES]   why a rank failed, in UTF-8; the last row is the nursery's
    deadline_s   float64[2]    on the monotonic clock, and the time allowed that it came from
    start_s, end_s   float64[k, c];  began_s float64[k, n];  found int64[k, n, 6]: the fields of Finding
    """

    def __init__(self, shared: SharedFile) -> None:
        self.flags, self.phase, self.waiting, self.at_step, self.exit_code, self.first_failed, self.pid = (
            shared.columns[f"board.{name}"]
            for name in ("flags", "phase", "waiting", "at_step", "exit_code", "first_failed", "pid")
        )
        self.error, self.deadline_s, self.start_s, self.end_s, self.began_s, self.found = (
            shared.columns[f"board.{name}"] for name in ("error", "deadline_s", "start_s", "end_s", "began_s", "found")
        )

    @staticmethod
    def blank(n_ranks: int, n_cells: int, n_trials: int, timeout_s: float) -> dict[str, NDArray[np.generic]]:
        """The columns of a new board."""
        return {
            "board.flags": np.zeros(2 * n_cells + 1, np.uint32),
            "board.phase": np.zeros(n_ranks, np.uint32),
            "board.waiting": np.full(n_ranks, -1, np.int64),
            "board.at_step": np.full(n_ranks, -1, np.int64),
            "board.exit_code": np.full(n_ranks, RUNNING, np.int64),
            "board.first_failed": np.full(1, -1, np.int64),
            "board.pid": np.zeros(n_ranks, np.int64),
            "board.error": np.zeros((n_ranks + 1, ERROR_BYTES), np.uint8),
            "board.deadline_s": np.array([time.monotonic() + timeout_s, timeout_s]),
            "board.start_s": np.zeros((n_trials, n_cells)),
            "board.end_s": np.zeros((n_trials, n_cells)),
            "board.began_s": np.zeros((n_trials, n_ranks)),
            "board.found": np.zeros((n_trials, n_ranks, len(Finding.__slots__)), np.int64),
        }

    def write_error(self, row: int, text: str) -> None:
        """Leave a rank's (or the nursery's) last words."""
        data = text.encode()[: ERROR_BYTES - 1]
        self.error[row, : len(data)] = np.frombuffer(data, np.uint8)

    def read_error(self, row: int) -> str:
        """What write_error left, or nothing."""
        return self.error[row].tobytes().rstrip(b"\0").decode(errors="replace")


class SharedMemoryTransport:
    """A Transport whose puts are plain copies into the destination's arena; lives in the rank's process."""

    def __init__(self, shared: SharedFile, programs: Programs, rank: int, inbox: int, outboxes: Sequence[int]) -> None:
        self._board, self._rank, self._outboxes, self._inbox = Board(shared), rank, outboxes, inbox
        self._programs, self._cells = programs, programs.cells
        self._flags, self._waiting = memoryview(self._board.flags), memoryview(self._board.waiting)  # type: ignore[arg-type]
        self._at_step = memoryview(self._board.at_step)  # type: ignore[arg-type]
        self._n_cells = len(self._cells.rank)
        self._value = 0
        self._lock = threading.Lock()
        self._lock.acquire()
        self._sleep = select.poll()
        self._sleep.register(inbox, select.POLLIN)
        self._sleep.register(_LIFELINE, select.POLLIN)
        rows = programs.actions.block_ptr[programs.actions.ptr[[rank, rank + 1]]]
        self._first_block = int(rows[0])
        self._views = _views(shared, programs, rank, np.arange(rows[0], rows[1]))

    def begin_trial(self, trial: int) -> None:
        """From now on flags are those of this trial."""
        self._value = trial + 1

    def enter(self, step: int) -> None:
        self._at_step[self._rank] = step

    def wait(self, step: int) -> None:
        first, last = int(self._cells.ptr[step]), int(self._cells.ptr[step + 1])
        for cell in range(first, last):
            self._await(cell, self._value)
        self._order()

    def meet(self, action: int, *, all_ready: bool) -> None:
        step = int(self._programs.actions.step[action])
        first, last = int(self._cells.ptr[step]), int(self._cells.ptr[step + 1])
        ready = self._n_cells + int(self._programs.actions.cell[action])
        self._raise_flag(ready, self._value, self._cells.rank[first:last].tolist())
        if all_ready:
            for cell in range(first, last):
                self._await(self._n_cells + cell, self._value)
            self._order()

    def post(self, first: int, last: int) -> None:
        copy = np.copyto
        for dst, src in self._views[first - self._first_block : last - self._first_block]:
            copy(dst, src)

    def finish(self) -> None:
        """Nothing: post copies before it returns, and mark orders memory."""

    def mark(self, action: int) -> None:
        step = int(self._programs.actions.step[action])
        wake = self._cells.wake[self._cells.wake_ptr[step] : self._cells.wake_ptr[step + 1]]
        self._raise_flag(int(self._programs.actions.cell[action]), self._value, wake.tolist())

    def barrier(self, phase: int) -> None:
        """Say that this rank has reached the phase, and return when all have."""
        go = 2 * self._n_cells
        self._order()
        self._board.phase[self._rank] = phase
        self._order()
        if int(self._board.phase.min()) >= phase:  # type: ignore[call-overload]
            self._raise_flag(go, phase, range(len(self._outboxes)))
        self._await(go, phase)
        self._order()

    def _order(self) -> None:
        self._lock.release()
        self._lock.acquire()

    def _raise_flag(self, flag: int, value: int, ranks: Sequence[int]) -> None:
        self._order()
        self._flags[flag] = value
        self._order()
        for rank in ranks:
            if self._waiting[rank] == flag and rank != self._rank:
                try:
                    os.write(self._outboxes[rank], b"!")
                except BlockingIOError:
                    pass  # its pipe is full of earlier calls, any of which wakes it

    def _await(self, flag: int, value: int) -> None:
        if self._flags[flag] >= value:
            return
        self._waiting[self._rank] = flag
        self._order()
        while self._flags[flag] < value:
            left_s = float(self._board.deadline_s[0]) - time.monotonic()
            if left_s <= 0:
                raise RunError(self._too_late(flag))
            for fd, _ in self._sleep.poll(1000 * min(left_s, _LOOK_AGAIN_S)):
                if fd == _LIFELINE:
                    raise CallerGoneError
                os.read(self._inbox, _PAGE)
        self._waiting[self._rank] = -1

    def _too_late(self, flag: int) -> str:
        allowed = f"the {float(self._board.deadline_s[1]):g} s that the run may take are over"
        if flag == 2 * self._n_cells:
            behind = int(np.argmin(self._board.phase))
            return f"{allowed}; it had reached the next phase and waited for rank {behind}"
        cell = flag % self._n_cells
        step, what = int(np.searchsorted(self._cells.ptr, cell, side="right")) - 1, "complete" if flag < self._n_cells else "be ready for"
        return f"{allowed}; it waited for rank {self._cells.rank[cell]} to {what} step {step}"


def _views(shared: SharedFile, programs: Programs, rank: int, rows: NDArray[np.int64]) -> list[tuple[NDArray[np.generic], NDArray[np.generic]]]:
    """For each block, its destination and its source as arrays, made once so that a copy in the run is one call."""
    blocks, forms, memory = programs.blocks.take(rows), programs.forms, shared.memory
    src, dst = blocks.src + shared.arena_at[rank], blocks.dst + shared.arena_at[blocks.to]
    _touch(memory, programs, dst, blocks.n_bytes, blocks.form)
    views: list[tuple[NDArray[np.generic], NDArray[np.generic]]] = []
    known: dict[int, tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {}
    for a, b, n, form in zip(src.tolist(), dst.tolist(), blocks.n_bytes.tolist(), blocks.form.tolist(), strict=True):
        if form == LINEAR:
            views.append((memory[b : b + n], memory[a : a + n]))
            continue
        if form not in known:
            known[form] = _shape(int(forms.run[form]), *(x[form].tolist() for x in (forms.count, forms.src_stride, forms.dst_stride)))
        dtype, shape, src_strides, dst_strides = known[form]
        views.append((np.ndarray(shape, dtype, memory.data, b, dst_strides), np.ndarray(shape, dtype, memory.data, a, src_strides)))
    return views


def _shape(
    run: int, count: list[int], src_stride: list[int], dst_stride: list[int]
) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """dtype, shape and strides of a strided block. Short runs become elements, which NumPy copies in one loop, not one loop a run."""
    dims = [d for d, n in enumerate(count) if n > 1]
    shape, a, b = (tuple(x[d] for d in dims) for x in (count, src_stride, dst_stride))
    if run <= _ELEMENT_BYTES:
        return f"V{run}", shape, a, b
    return "u1", (*shape, run), (*a, 1), (*b, 1)


def _touch(memory: NDArray[np.uint8], programs: Programs, dst: NDArray[np.int64], n_bytes: NDArray[np.int64], form: NDArray[np.int32]) -> None:
    """Map the pages that the rank will write, so that no page fault falls into the run (what registering memory is to a network)."""
    forms = programs.forms
    reach = np.concatenate([(forms.count - 1) * forms.dst_stride, np.zeros((1, forms.count.shape[1]), np.int64)])  # last row: LINEAR
    below, above = np.minimum(reach, 0).sum(axis=1), np.maximum(reach, 0).sum(axis=1)
    run = np.where(form == LINEAR, n_bytes, np.append(forms.run, 0)[form])
    first, last = (dst + below[form]) // _PAGE, (dst + above[form] + run - 1) // _PAGE
    page, owner = ranges(np.concatenate([[0], np.cumsum(last + 1 - first)]), np.arange(len(dst)))
    starts = np.cumsum(last + 1 - first) - (last + 1 - first)
    memory[np.unique(page - starts[owner] + first[owner]) * _PAGE].sum()


def _run_rank(shared: SharedFile, digest: str, rank: int, inbox: int, outboxes: Sequence[int]) -> None:
    if shared.digest != digest:
        raise RunError(f"the programs that it was given are of plan {shared.digest[:12]}, but plan {digest[:12]} is to be run")
    programs = from_columns(Programs, dict(shared.columns))
    board, arena = Board(shared), shared.arena(rank)
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
    except BaseException as error:
        Board(shared).write_error(rank, str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}")
        return 1
    return 0


def nursery(fd: int, digest: str) -> int:
    """Fork a process for each rank of the shared file and wait until all have ended; 1 when they couldn't be started."""
    shared = attach_shared_file(fd)
    board = Board(shared)
    n_ranks = len(board.pid)
    os.set_blocking(_CALLER, False)
    ranks: dict[int, int] = {}
    try:
        _allow_files(2 * n_ranks + 64)
        pipes = [os.pipe() for _ in range(n_ranks)]
        for reading, writing in pipes:
            os.set_blocking(reading, False)
            os.set_blocking(writing, False)
        for rank in range(n_ranks):
            pid = os.fork()
            if pid == 0:
                os._exit(_rank_process(shared, digest, rank, pipes[rank][0], [writing for _, writing in pipes]))
            ranks[pid] = rank
            board.pid[rank] = pid
    except OSError as error:
        board.write_error(n_ranks, f"{len(ranks)} of {n_ranks} ranks could be started ({error})")
        return 1
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        board.exit_code[rank] = code
        if code and board.first_failed[0] < 0:
            board.first_failed[0] = rank
            try:
                os.write(_CALLER, b"!")
            except (BlockingIOError, BrokenPipeError):
                pass  # it has calls to read, or is gone
    return 0


def _allow_files(n: int) -> None:
    """Raise this process's own limit on open files, where it is lower."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < n:
        resource.setrlimit(resource.RLIMIT_NOFILE, (n if hard == resource.RLIM_INFINITY else min(n, hard), hard))
