"""The rank's side of transport `processes`: puts are plain copies into another rank's arena, waits sleep until they are woken.

Waiting and waking: the truth is in the board's `flags`, one 4-byte word a cell and phase, each written by one rank only
(aligned 4-byte stores are whole on every CPU that NumPy runs on). A rank that waits says for which flag in `waiting`, looks
once more, then sleeps on its own pipe; who raises a flag looks at `waiting` and writes to the pipes of those that sleep for
it. So no CPU is burned, and few system calls are made.

Memory order: data must be seen before its flag. x86 keeps stores in order, Arm doesn't, so `_order` stands between data and
flag on both sides, and between raising a flag and looking at `waiting` (else each side could miss the other). It releases a
lock and takes it again: on Arm a store-release and then a load-acquire, which that architecture orders with each other and
with all that is before and after (Arm ARM B2.3, "barrier-ordered-before"); on x86 locked instructions, which are full
barriers. As a net below that, a sleeper looks again every second.
"""

import contextlib
import os
import select
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.adding import COPIES, HOST_DTYPES, add_to
from shardroute.executors.interpreting.arenas import Strided, number_form, strided_form
from shardroute.executors.interpreting.blocks import LINEAR
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.launching.boards import Board
from shardroute.executors.launching.shared_files import SharedFile
from shardroute.executors.transports.seam import Deadline, LateError
from shardroute.planner.plans import ranges
from shardroute.planner.shares import Told, part

LIFELINE = 0  # standard input: a pipe that ends when the caller dies
_LOOK_AGAIN_S = 1.0
_PAGE = 4096  # touching more often than pages are large is harmless
_PAGES = 2**14  # touched between two shares: tens of milliseconds
# The share of getting ready that mapping pages takes; filling and arming those that the rank has itself takes the rest. Where a
# rank receives as much as it sends: 1.2 ns a byte against 0.9 (a core of a Xeon, 2026-12-01).
MAPPING: Final = 0.6

Views = list[tuple[NDArray[np.generic], NDArray[np.generic]]]


class CallerGoneError(Exception):
    """Whoever asked for the run has died."""


class SharedMemoryTransport:
    """A Transport whose puts are plain copies into the destination's arena; lives in the rank's process.

    LateError names nobody: the board's `waiting` says for what a rank waits, and the caller reads it.
    """

    overlaps = False
    deadline: Deadline  # on the board instead, for all ranks

    def __init__(self, shared: SharedFile, programs: Programs, rank: int, inbox: int, outboxes: Sequence[int]) -> None:
        self._board, self._rank, self._outboxes, self._inbox = Board.of(shared), rank, outboxes, inbox
        self._programs, self._cells = programs, programs.cells
        self._flags, self._waiting = self._board.flags.data, self._board.waiting.data
        self._n_cells = len(self._cells.rank)
        self._value = self._phase = 0
        self._lock = threading.Lock()
        self._lock.acquire()
        self._sleep = select.poll()
        self._sleep.register(inbox, select.POLLIN)
        self._sleep.register(LIFELINE, select.POLLIN)
        first, last = programs.actions.ptr[[rank, rank + 1]].tolist()
        rows = programs.actions.block_ptr[first : last + 1]
        self._first_action, self._ptr = first, (rows - rows[0]).tolist()
        told = part(partial(self._board.share.__setitem__, rank), 0.0, MAPPING)
        self._views = _views(shared, programs, rank, np.arange(rows[0], rows[-1]), told)
        self._sums = _sums(shared, programs, rank)

    def begin(self, trial: int) -> None:
        self._value = trial + 1

    def enter(self, step: int) -> None:
        """Nothing: others put here without being asked."""

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

    def post(self, action: int) -> None:
        copy, at = np.copyto, action - self._first_action
        if action in self._sums:  # pulled by who gets the sum, not put: all ranks are ready, and nobody else writes there
            for dst, src, code in self._sums[action]:
                add_to(dst, src, code) if code else copy(dst, src)
            return
        for dst, src in self._views[self._ptr[at] : self._ptr[at + 1]]:
            copy(dst, src)

    def finish(self, action: int) -> None:
        """Nothing: post copies before it returns, and mark orders memory."""

    def mark(self, action: int) -> None:
        step = int(self._programs.actions.step[action])
        wake = self._cells.wake[self._cells.wake_ptr[step] : self._cells.wake_ptr[step + 1]]
        self._raise_flag(int(self._programs.actions.cell[action]), self._value, wake.tolist())

    def drain(self) -> None:
        """Nothing: what others put here needs no help, and the barrier that follows waits for them."""

    def barrier(self) -> None:
        """Say that this rank has reached the board's next phase, and return when all have."""
        self._phase += 1
        phase, go = self._phase, 2 * self._n_cells
        self._order()
        self._board.phase[self._rank] = phase
        self._order()
        if int(self._board.phase.min()) >= phase:
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
                with contextlib.suppress(BlockingIOError):  # its pipe is full of earlier calls, any of which wakes it
                    os.write(self._outboxes[rank], b"!")

    def _await(self, flag: int, value: int) -> None:
        if self._flags[flag] >= value:
            return
        self._waiting[self._rank] = flag
        self._order()
        while self._flags[flag] < value:
            left_s = float(self._board.deadline_s[0]) - time.monotonic()
            if left_s <= 0:
                raise LateError()  # `waiting` stays as it is, for the caller to see who waited for whom
            for fd, _ in self._sleep.poll(1000 * min(left_s, _LOOK_AGAIN_S)):
                if fd == LIFELINE:
                    raise CallerGoneError
                os.read(self._inbox, _PAGE)
        self._waiting[self._rank] = -1


def _views(shared: SharedFile, programs: Programs, rank: int, rows: NDArray[np.int64], told: Told) -> Views:
    """For each block, its destination and its source as arrays, made once so that a copy in the run is one call."""
    blocks, forms, memory = programs.blocks.take(rows), programs.forms, shared.memory
    src, dst = blocks.src + shared.arena_at[rank % programs.n_ranks], blocks.dst + shared.arena_at[blocks.to]
    _touch(memory, programs, dst, blocks.n_bytes, blocks.form, told)
    views: Views = []
    known: dict[int, Strided] = {}
    for a, b, n, form in zip(src.tolist(), dst.tolist(), blocks.n_bytes.tolist(), blocks.form.tolist(), strict=True):
        if form == LINEAR:
            views.append((memory[b : b + n], memory[a : a + n]))
            continue
        if form not in known:
            known[form] = strided_form(forms, form)
        dtype, shape, src_strides, dst_strides = known[form]
        views.append(
            (np.ndarray(shape, dtype, memory.data, b, dst_strides), np.ndarray(shape, dtype, memory.data, a, src_strides))
        )
    return views


def _sums(
    shared: SharedFile, programs: Programs, rank: int
) -> dict[int, list[tuple[NDArray[np.generic], NDArray[np.generic], int]]]:
    """For each action of the rank that adds up: what lands on the rank, where, and as which dtype it is added (COPIES: written),
    in ascending order of the ranks that bring it.
    """
    actions, cells, blocks, memory = programs.actions, programs.cells, programs.blocks, shared.memory
    if not blocks.sums.any():
        return {}
    n_blocks, action_of = np.diff(actions.block_ptr), np.argsort(actions.cell, kind="stable")
    found: dict[int, list[tuple[NDArray[np.generic], NDArray[np.generic], int]]] = {}
    for action in range(*actions.ptr[[rank, rank + 1]].tolist()):
        step = int(actions.step[action])
        of_step = action_of[cells.ptr[step] : cells.ptr[step + 1]].tolist()
        if not any(n_blocks[a] and blocks.sums[actions.block_ptr[a]] for a in of_step):
            continue
        brings = found.setdefault(action, [])
        for number, a in enumerate(of_step):  # cells of a step ascend by rank
            src_at = int(shared.arena_at[cells.rank[cells.ptr[step] + number]])
            for row in range(*actions.block_ptr[[a, a + 1]].tolist()):
                if blocks.to[row] != rank:
                    continue
                src, dst = src_at + int(blocks.src[row]), int(shared.arena_at[rank] + blocks.dst[row])
                form, code, n = int(blocks.form[row]), int(blocks.sums[row]), int(blocks.n_bytes[row])
                if form == LINEAR:
                    dtype, strides = HOST_DTYPES[code], (np.dtype(HOST_DTYPES[code]).itemsize,)
                    shape: tuple[int, ...] = (n // strides[0],)
                    views = [np.ndarray(shape, dtype, memory.data, at, strides) for at in (dst, src)]
                else:
                    dtype, shape, a_strides, b_strides = number_form(programs.forms, form, code)
                    views = [np.ndarray(shape, dtype, memory.data, at, s) for at, s in ((dst, b_strides), (src, a_strides))]
                brings.append((views[0], views[1], code if number else COPIES))
    return found


def _touch(
    memory: NDArray[np.uint8], programs: Programs, dst: NDArray[np.int64], n_bytes: NDArray[np.int64], form: NDArray[np.int32],
    told: Told,
) -> None:  # fmt: skip
    """Map the pages that the rank will write, so that no page fault falls into the run (as a network registers memory)."""
    forms = programs.forms
    reach = np.concatenate(
        [(forms.count - 1) * forms.dst_stride, np.zeros((1, forms.count.shape[1]), np.int64)]
    )  # last row: LINEAR
    below, above = np.minimum(reach, 0).sum(axis=1), np.maximum(reach, 0).sum(axis=1)
    run = np.where(form == LINEAR, n_bytes, np.append(forms.run, 0)[form])
    first, last = (dst + below[form]) // _PAGE, (dst + above[form] + run - 1) // _PAGE
    page, owner = ranges(np.concatenate([[0], np.cumsum(last + 1 - first)]), np.arange(len(dst)))
    starts = np.cumsum(last + 1 - first) - (last + 1 - first)
    pages = np.unique(page - starts[owner] + first[owner]) * _PAGE
    for at in range(0, len(pages), _PAGES):
        memory[pages[at : at + _PAGES]].sum()
        told(min((at + _PAGES) / len(pages), 1.0))
