"""Columns and arenas in one file that processes map: the shared memory of a run.

Rule: the file has no name once it exists (an anonymous memory file on Linux, elsewhere a temporary one that is unlinked at
once), so whatever kills whom, nothing stays behind. Its pages take memory only once they are touched.
"""

import json
import mmap
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints

_ALIGNMENT = 128  # as for buffers of arenas
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class SharedFile:
    """A mapped file: who shares its descriptor shares the memory.

    digest    of the plan whose programs it holds
    columns   named arrays over the file, writable
    memory    uint8[n]: the whole file
    arena_at, arena_bytes   int64[n_ranks]: where each rank's arena lies in it; arenas begin on pages of their own
    """

    fd: int
    digest: str
    columns: Mapping[str, NDArray[np.generic]]
    memory: NDArray[np.uint8]
    arena_at: Ints
    arena_bytes: Ints

    def arena(self, rank: int) -> NDArray[np.uint8]:
        """The arena of one rank."""
        start = int(self.arena_at[rank])
        return self.memory[start : start + int(self.arena_bytes[rank])]


def file_bytes(columns: Mapping[str, NDArray[np.generic]], arena_bytes: Ints) -> int:
    """The size of the file that would hold these."""
    return sum(_padded(c.nbytes, mmap.PAGESIZE) for c in columns.values()) + sum(
        _padded(n, mmap.PAGESIZE) for n in arena_bytes.tolist()
    )


def create_shared_file(digest: str, columns: Mapping[str, NDArray[np.generic]], arena_bytes: Ints) -> SharedFile:
    """A new file with copies of the columns, and room for the arenas; whoever asked closes its descriptor. Raises OSError."""
    table, at = {}, 0
    for name, column in columns.items():
        table[name] = (column.dtype.str, column.shape, at)
        at += _padded(column.nbytes, _ALIGNMENT)
    head = {"digest": digest, "columns": table, "arena_bytes": arena_bytes.tolist()}
    text = json.dumps(head).encode()
    columns_at = _padded(_LENGTH_BYTES + len(text), _ALIGNMENT)
    _, end = _arenas_at(columns_at + at, arena_bytes)
    fd = _anonymous_file()
    os.ftruncate(fd, max(end, mmap.PAGESIZE))
    with mmap.mmap(fd, columns_at) as start:
        start[: _LENGTH_BYTES + len(text)] = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    shared = attach_shared_file(fd)
    for name, column in columns.items():
        shared.columns[name][...] = column
    return shared


def attach_shared_file(fd: int) -> SharedFile:
    """The file behind a descriptor that create_shared_file made, here or in another process."""
    with mmap.mmap(fd, _LENGTH_BYTES) as start:
        length = int.from_bytes(start[:], "little")
    memory = np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=np.uint8)
    head = json.loads(memory[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    columns_at = _padded(_LENGTH_BYTES + length, _ALIGNMENT)
    columns: dict[str, NDArray[np.generic]] = {}
    end = columns_at
    for name, (dtype, shape, at) in head["columns"].items():
        columns[name] = np.ndarray(tuple(shape), dtype, memory.data, columns_at + at)
        end = columns_at + at + _padded(columns[name].nbytes, _ALIGNMENT)
    arena_bytes = np.array(head["arena_bytes"], dtype=np.int64)
    return SharedFile(fd, head["digest"], columns, memory, _arenas_at(end, arena_bytes)[0], arena_bytes)


def _arenas_at(start: int, arena_bytes: Ints) -> tuple[Ints, int]:
    ends = _padded(start, mmap.PAGESIZE) + np.cumsum(-(-arena_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    return np.concatenate([[_padded(start, mmap.PAGESIZE)], ends[:-1]])[: len(arena_bytes)], int(ends[-1]) if len(ends) else start


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        # Not in /dev/shm, which containers often limit to 64 MiB.
        return os.memfd_create("shardroute", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix="shardroute-")
    os.unlink(path)
    return fd


def _padded(n_bytes: int, alignment: int) -> int:
    return -(-n_bytes // alignment) * alignment
