"""What a rank does over any transport: fill, line up, drive, line up, verify, as often as asked.

Rule: everything that happens is written to the board; nothing is returned.
"""

import time
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.addends import fill_addends, verify_sums
from shardroute.executors.interpreting.drive import drive
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.patterns import Finding, arm, fill_sources, verify
from shardroute.executors.launching.boards import Board
from shardroute.executors.transports.seam import Enqueuing, Transport
from shardroute.planner.shares import Told, part, parts, untold


class Job(Protocol):
    """What a rank is given before a trial, computes in it, and must have after it."""

    def fill(self, told: Told) -> None:
        """Write the source buffers."""

    def computes(self, step: int) -> bool:
        """Whether the rank computes anything in a step."""

    def compute(self, step: int) -> None:
        """Do what the rank computes in a step, if anything."""

    def verify(self, told: Told) -> tuple[Finding, float]:
        """What was found in the destination buffers, and the largest difference where numbers are compared."""


class Moving:
    """The job of a plan that only moves: known bytes, which must arrive as they were. Where the source holds addends, known ones,
    whose sums must arrive.
    """

    def __init__(self, programs: Programs, memory: NDArray[np.uint8], rank: int) -> None:
        self._programs, self._memory, self._rank = programs, memory, rank
        self._adds = bool(programs.holdings.adds.any())

    def fill(self, told: Told) -> None:
        fill = fill_addends if self._adds else fill_sources
        fill(self._memory, self._programs.holdings, self._rank, told)

    def computes(self, step: int) -> bool:
        return False

    def compute(self, step: int) -> None:
        """Nothing."""

    def verify(self, told: Told) -> tuple[Finding, float]:
        programs, rank = self._programs, self._rank
        compare = verify_sums if self._adds else verify
        ends = int(programs.target_at[rank]), int(programs.slots_at[rank])
        return compare(self._memory, programs.holdings, rank, *ends, told), 0.0


class Following(Protocol):
    """What compares the checksums of a trial's pieces."""

    def wrong_piece(self) -> int:
        """The row of the first piece that came to this rank and isn't what was sent, -1 if all are. All ranks call it."""


def run_trials(
    programs: Programs, board: Board, memory: NDArray[np.uint8], driver: int, transport: Transport | Enqueuing,
    job: Job | None = None, following: Following | None = None, progress: Told = untold,
) -> None:  # fmt: skip
    """Run all trials of the board as a driver of the rank whose arena `memory` is; the one that moves also fills and verifies.
    `progress` is told the share of trials as each is done.
    """
    rank = driver % programs.n_ranks
    moves = driver == rank
    job = Moving(programs, memory, rank) if job is None else job
    target_at = int(programs.target_at[rank])
    at_step, share = board.at_step[driver : driver + 1], board.share[driver : driver + 1]
    tell = partial(share.__setitem__, 0)
    filling, arming = parts(part(tell, float(share[0]), 1.0), (target_at, len(memory) - target_at))
    if moves:
        job.fill(filling)
    for trial in range(len(board.began_s)):
        transport.begin(trial)
        at_step[0] = -1
        if moves:
            arm(memory, target_at, untold if trial else arming)
        tell(1.0)
        transport.barrier()
        board.phase[driver] = 2 * trial + 1
        tell(0.0)
        board.began_s[trial, driver] = time.monotonic()
        drive(programs, driver, transport, board.start_s[trial], board.end_s[trial], at_step, job)
        at_step[0] = len(programs.cells.ptr) - 1
        transport.barrier()
        board.phase[driver] = 2 * trial + 2
        if following is not None:
            board.wrong_piece[trial, rank] = following.wrong_piece()
        if moves:
            finding, board.worst[trial, rank] = job.verify(tell)
            board.found[trial, rank] = [getattr(finding, name) for name in Finding.__slots__]
        tell(1.0)
        progress((trial + 1) / len(board.began_s))
