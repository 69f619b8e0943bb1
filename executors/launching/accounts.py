"""What the ranks of a run know of each other: how far each has come, and why one fails. A rank shares this memory with its
witness (see `witnesses`), and with nobody else.

Rule: each row has one writer. A rank's own is the rank's, or the witness's while the rank is held in its library's start; those
of other ranks are the witness's.
"""

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

_WORDS_BYTES: Final = 1024  # of why a rank fails, in UTF-8
_ROW: Final = struct.Struct("<IBBqH")  # rank, stage, whether it is stopped, step, bytes of words


class Stage(IntEnum):
    """What is known of a rank; from FAILED on it has said why it fails."""

    ABSENT = 0  # nothing was heard of it
    STARTING = 1  # it waits for its library to start
    OVERDUE = 2  # and the deadline has passed
    RUNNING = 3
    CLOSED = 4  # it is done
    GONE = 5  # its process has ended, or can't be heard any more
    FAILED = 6
    LEFT = 7  # and whoever called it has heard that, so it may be ended


@dataclass(frozen=True, slots=True, eq=False)
class Accounts:
    """Columns in memory that a process shares with those it forks, one row a rank.

    stage    int64[n]
    step     int64[n]   of the plan, as boards have it: -1 before the first
    stopped  int64[n]   1 for a process that a signal has stopped
    words    uint8[n, 1024]
    hears    int64[1]   1 while accounts of others can come, 0 while that may still be, -1 once it can't
    """

    stage: NDArray[np.int64]
    step: NDArray[np.int64]
    stopped: NDArray[np.int64]
    words: NDArray[np.uint8]
    hears: NDArray[np.int64]

    @classmethod
    def blank(cls, n_ranks: int) -> Self:
        """Nothing is known of any rank."""
        numbers = 3 * n_ranks + 1
        memory = np.frombuffer(mmap.mmap(-1, 8 * numbers + _WORDS_BYTES * n_ranks), np.uint8)
        columns = memory[: 8 * numbers].view(np.int64)
        stage, step, stopped, hears = np.split(columns, [n_ranks, 2 * n_ranks, 3 * n_ranks])
        step[:] = -1
        return cls(stage, step, stopped, memory[8 * numbers :].reshape(n_ranks, _WORDS_BYTES), hears)

    @property
    def is_ending(self) -> bool:
        """Whether some rank has failed, or will, since others haven't come in time."""
        return bool(((self.stage == Stage.OVERDUE) | (self.stage >= Stage.FAILED)).any())

    def fail(self, rank: int, text: str) -> None:
        """Note why a rank fails: words first, so that whoever sees the stage finds them."""
        data = text.encode()[:_WORDS_BYTES]
        self.words[rank, : len(data)] = np.frombuffer(data, np.uint8)
        self.stage[rank] = Stage.FAILED

    def text(self, rank: int) -> str:
        """Why a rank fails, or nothing."""
        data: bytes = self.words[rank].tobytes()
        return data.rstrip(b"\0").decode(errors="replace")

    def row(self, rank: int) -> bytes:
        """What is known of a rank, for others."""
        stage = int(self.stage[rank])
        said = self.words[rank].tobytes().rstrip(b"\0") if stage >= Stage.FAILED else b""
        return _ROW.pack(rank, stage, int(self.stopped[rank]), int(self.step[rank]), len(said)) + said

    def take(self, rows: bytes, ranks: NDArray[np.bool_]) -> list[int]:
        """Note rows that others have sent, of those ranks only that are true in `ranks`; which these were. Raises ValueError for
        what is no row.
        """
        taken, at = [], 0
        while at < len(rows):
            if len(rows) - at < _ROW.size:
                raise ValueError("an account ends too soon")
            rank, stage, stopped, step, n = _ROW.unpack_from(rows, at)
            said = rows[at + _ROW.size : at + _ROW.size + n]
            at += _ROW.size + n
            if rank >= len(ranks) or n > _WORDS_BYTES or len(said) < n:
                raise ValueError("an account of no rank of the run")
            if ranks[rank]:
                self.step[rank], self.stopped[rank] = step, stopped
                self.words[rank, :n] = np.frombuffer(said, np.uint8)
                self.stage[rank] = Stage(stage)
                taken.append(rank)
        return taken
