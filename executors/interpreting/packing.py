"""Packing: rows of blocks gathered into contiguous bytes, scattered out of them, and copied within a rank.

Rule: both sides of a message walk the same rows in the same order, so packed bytes need no description.
"""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.adding import HOST_DTYPES, add_to
from shardroute.executors.interpreting.arenas import Arena, Strided, number_form, strided_form
from shardroute.executors.interpreting.blocks import LINEAR
from shardroute.executors.interpreting.interpret import Programs


class Rows:
    """The rows of all ranks' blocks, as one rank reads and writes them in its own arena."""

    def __init__(self, programs: Programs, arena: Arena, rank: int) -> None:
        self._arena, self._blocks, self._forms = arena, programs.blocks, programs.forms
        self._known: dict[int, Strided] = {}
        self._numbers: dict[tuple[int, int], Strided] = {}
        actions = programs.actions
        first = int(actions.ptr[rank])
        rows = np.arange(*actions.block_ptr[actions.ptr[[rank, rank + 1]]].tolist())
        local = rows[programs.blocks.to[rows] == rank]
        action = np.searchsorted(actions.block_ptr[first : int(actions.ptr[rank + 1]) + 1], local, side="right") - 1 + first
        self._local: dict[int, list[int]] = {}
        for row, of in zip(local.tolist(), action.tolist(), strict=True):
            self._local.setdefault(of, []).append(row)

    def pack(self, first: int, last: int, into: NDArray[np.uint8]) -> None:
        """Gather rows first to last into contiguous bytes."""
        blocks, rows, at = self._blocks, slice(first, last), 0
        columns = (column[rows].tolist() for column in (blocks.src, blocks.n_bytes, blocks.form))
        for src, n, form in zip(*columns, strict=True):
            if form == LINEAR:
                into[at : at + n] = self._arena.bytes(src, n)
            else:
                dtype, shape, strides, _ = self._form(form)
                np.copyto(np.ndarray(shape, dtype, into.data, at), self._arena.strided(src, dtype, shape, strides))
            at += n

    def unpack(self, first: int, last: int, packed: NDArray[np.uint8], *, adds: bool = False) -> None:
        """Scatter what `pack` gathered into the places of rows first to last; or add it to what is there."""
        blocks, rows, at = self._blocks, slice(first, last), 0
        columns = (column[rows].tolist() for column in (blocks.dst, blocks.n_bytes, blocks.form, blocks.sums))
        for dst, n, form, code in zip(*columns, strict=True):
            if adds:
                self._add(dst, packed[at : at + n], n, form, code)
            elif form == LINEAR:
                self._arena.bytes(dst, n)[...] = packed[at : at + n]
            else:
                dtype, shape, _, strides = self._form(form)
                np.copyto(self._arena.strided(dst, dtype, shape, strides), np.ndarray(shape, dtype, packed.data, at))
            at += n

    def copy_local(self, action: int, *, adds: bool = False) -> None:
        """Copy the rows of an action that stay on the rank; or add them to what is there."""
        blocks = self._blocks
        for row in self._local.get(action, ()):
            src, dst, n, form = int(blocks.src[row]), int(blocks.dst[row]), int(blocks.n_bytes[row]), int(blocks.form[row])
            code = int(blocks.sums[row])
            if adds and form == LINEAR:
                self._add(dst, self._arena.bytes(src, n), n, form, code)
            elif adds:
                dtype, shape, a, b = self._number_form(form, code)
                add_to(self._arena.strided(dst, dtype, shape, b), self._arena.strided(src, dtype, shape, a), code)
            elif form == LINEAR:
                self._arena.bytes(dst, n)[...] = self._arena.bytes(src, n)
            else:
                dtype, shape, a, b = self._form(form)
                np.copyto(self._arena.strided(dst, dtype, shape, b), self._arena.strided(src, dtype, shape, a))

    def _add(self, dst: int, packed: NDArray[np.uint8], n_bytes: int, form: int, code: int) -> None:
        if form == LINEAR:
            dtype = HOST_DTYPES[code]
            into: NDArray[np.generic] = self._arena.bytes(dst, n_bytes).view(dtype)
            add_to(into, np.ndarray(into.shape, dtype, packed), code)
            return
        dtype, shape, _, strides = self._number_form(form, code)
        add_to(self._arena.strided(dst, dtype, shape, strides), np.ndarray(shape, dtype, packed), code)

    def _number_form(self, form: int, code: int) -> Strided:
        if (form, code) not in self._numbers:
            self._numbers[form, code] = number_form(self._forms, form, code)
        return self._numbers[form, code]

    def _form(self, form: int) -> Strided:
        if form not in self._known:
            self._known[form] = strided_form(self._forms, form)
        return self._known[form]


class Pool:
    """Memory that windows share whose messages are never on their way at once: as much as the largest of them needs."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def at_least(self, n_bytes: int) -> NDArray[np.uint8]:
        """So many bytes of it."""
        if len(self._memory) < n_bytes:
            self._memory = np.empty(n_bytes, dtype=np.uint8)
        return self._memory[:n_bytes]


class Window:
    """A fixed piece of memory, handed out in turn like a ring: what was taken first makes room first."""

    def __init__(self, pool: Pool, n_bytes: int) -> None:
        self._pool, self._n_bytes = pool, n_bytes
        self._memory = pool.at_least(n_bytes)
        self._taken: deque[tuple[int, int, int]] = deque()  # start, end, step
        self._back: set[int] = set()  # starts that were given back out of turn

    def begin(self) -> None:
        """Begin anew; the pool may have moved to larger memory since."""
        assert not self._taken
        self._memory = self._pool.at_least(self._n_bytes)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is taken."""
        return not self._taken

    @property
    def oldest(self) -> int:
        """The step of what must come back before there is more room."""
        return self._taken[0][2]

    def has_room(self, n_bytes: int) -> bool:
        """Whether so many bytes can be taken now. Raises AssertionError when they never could."""
        assert n_bytes <= len(self._memory)
        return self._start(n_bytes) is not None

    def take(self, n_bytes: int, step: int) -> NDArray[np.uint8]:
        """So many bytes, at least 1, for a message of a step; `has_room` must hold."""
        start = self._start(n_bytes)
        assert start is not None
        self._taken.append((start, start + n_bytes, step))
        return self._memory[start : start + n_bytes]

    def give_back(self, part: NDArray[np.uint8]) -> None:
        """Return what was taken."""
        self._back.add(part.ctypes.data - self._memory.ctypes.data)
        while self._taken and self._taken[0][0] in self._back:
            self._back.remove(self._taken.popleft()[0])

    def _start(self, n_bytes: int) -> int | None:
        if not self._taken:
            return 0
        tail, head = self._taken[0][0], self._taken[-1][1]
        if head > tail:
            return head if head + n_bytes <= len(self._memory) else 0 if n_bytes < tail else None
        return head if head + n_bytes < tail else None
