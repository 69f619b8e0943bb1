"""The board by which the ranks of a run and their caller tell each other how far they are."""

import time
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.interpret import from_columns
from shardroute.executors.interpreting.patterns import Finding
from shardroute.executors.launching.shared_files import SharedFile

ERROR_BYTES = 1024  # room for a rank's last words
RUNNING = 1 << 16  # in `exit_code` while a rank lives; no exit code or negated signal number is that large


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Columns of a board that lie where others may see how far its ranks have come."""

    at_step: NDArray[np.int64]
    phase: NDArray[np.uint32]
    share: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Board:
    """Columns in shared memory, for c cells, n ranks and k trials. Each entry has one writer, but first_failed the nursery.

    flags        uint32[2c + 1]  for each cell, trial + 1 once it is marked; then once its rank is ready for its step; then the
                                 phase that ranks may enter
    phase        uint32[n]       the phase that a rank has reached: 2k + 1 is ready for trial k, 2k + 2 done with it
    waiting      int64[n]        the flag that the rank sleeps for, -1 for none
    at_step      int64[n]        the step that it drives; -1 before the first, n_steps after the last
    share        float64[n]      how much it has done of filling, or of verifying the trial that its phase is done with
    exit_code    int64[n]        RUNNING, then what its process ended with (negated signal numbers)
    first_failed int64[1]        the first rank that ended with another code than 0, -1 for none
    pid          int64[n]
    error        uint8[n + 1, ERROR_BYTES]   why a rank failed, in UTF-8; the last row is the nursery's
    deadline_s   float64[2]      on the monotonic clock, and the time allowed that it came from
    start_s, end_s   float64[k, c]    when the copies for a cell began and ended
    began_s      float64[k, n]   when a rank was let go
    found        int64[k, n, 6]  the fields of Finding
    worst        float64[k, n]   the largest difference from what was expected, where numbers are compared; see Contents
    wrong_piece  int64[k, n]     the first row of PieceRows that came to a rank and isn't what was sent, -1 for none
    """

    flags: NDArray[np.uint32]
    phase: NDArray[np.uint32]
    waiting: NDArray[np.int64]
    at_step: NDArray[np.int64]
    share: NDArray[np.float64]
    exit_code: NDArray[np.int64]
    first_failed: NDArray[np.int64]
    pid: NDArray[np.int64]
    error: NDArray[np.uint8]
    deadline_s: NDArray[np.float64]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    began_s: NDArray[np.float64]
    found: NDArray[np.int64]
    worst: NDArray[np.float64]
    wrong_piece: NDArray[np.int64]

    @classmethod
    def blank(cls, n_ranks: int, n_cells: int, n_trials: int, timeout_s: float) -> Self:
        """A new board, whose deadline is timeout_s from now."""
        return cls(
            flags=np.zeros(2 * n_cells + 1, np.uint32),
            phase=np.zeros(n_ranks, np.uint32),
            waiting=np.full(n_ranks, -1, np.int64),
            at_step=np.full(n_ranks, -1, np.int64),
            share=np.zeros(n_ranks),
            exit_code=np.full(n_ranks, RUNNING, np.int64),
            first_failed=np.full(1, -1, np.int64),
            pid=np.zeros(n_ranks, np.int64),
            error=np.zeros((n_ranks + 1, ERROR_BYTES), np.uint8),
            deadline_s=np.array([time.monotonic() + timeout_s, timeout_s]),
            start_s=np.zeros((n_trials, n_cells)),
            end_s=np.zeros((n_trials, n_cells)),
            began_s=np.zeros((n_trials, n_ranks)),
            found=np.zeros((n_trials, n_ranks, len(Finding.__slots__)), np.int64),
            worst=np.zeros((n_trials, n_ranks)),
            wrong_piece=np.full((n_trials, n_ranks), -1, np.int64),
        )

    @staticmethod
    def bytes_of_trials(n_ranks: int, n_cells: int, n_trials: int) -> int:
        """Bytes of the columns that grow with the trials."""
        return n_trials * 8 * (2 * n_cells + n_ranks * (3 + len(Finding.__slots__)))

    @classmethod
    def of(cls, shared: SharedFile) -> Self:
        """The board that lies in a shared file under `board.`."""
        return from_columns(cls, dict(shared.columns), "board.")

    def blocker(self, rank: int, cell_rank: NDArray[np.int32]) -> tuple[int, int, str] | None:
        """Whom a rank waits for, the cell (-1: a phase) and what that should do; None if nothing holds the rank up."""
        flag, phase = int(self.waiting[rank]), int(self.phase[rank])
        n_cells = len(cell_rank)
        wanted = phase if flag == 2 * n_cells else (phase + 1) // 2
        if flag < 0 or int(self.flags[flag]) >= wanted:
            return None
        if flag == 2 * n_cells:
            return int(np.argmin(self.phase)), -1, "reach the next phase"
        return int(cell_rank[flag % n_cells]), flag % n_cells, "complete" if flag < n_cells else "be ready for"

    def write_error(self, row: int, text: str) -> None:
        """Leave a rank's (or the nursery's) last words."""
        data = text.encode()[: ERROR_BYTES - 1]
        self.error[row, : len(data)] = np.frombuffer(data, np.uint8)

    def read_error(self, row: int) -> str:
        """What write_error left, or nothing."""
        data: bytes = self.error[row].tobytes()
        return data.rstrip(b"\0").decode(errors="replace")
