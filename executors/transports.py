"""The seam between running a plan and the library that moves its bytes.

Rule: above it no library is named, below it no plan is known. A new transport is one file with two classes: a `Transport`,
of which every rank has one, and a `Session`, which whoever asked for the run holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.patterns import Finding

Progress = Callable[[float], None]


class Transport(Protocol):
    """One rank's way to move bytes. `drive` calls it from one thread; every wait has a deadline and raises RunError past it."""

    def enter(self, step: int) -> None:
        """Note for whoever watches the run that the rank is at this step now."""

    def wait(self, step: int) -> None:
        """Return when the step is complete and what it wrote can be read."""

    def meet(self, action: int, *, all_ready: bool) -> None:
        """Say that this rank is ready for the collective of its action; with all_ready, return when all its ranks are."""

    def post(self, first: int, last: int) -> None:
        """Begin to copy these rows of the blocks. A two-sided transport posts its receives from the other ranks' rows."""

    def finish(self) -> None:
        """Return when all that was posted lies at its destination."""

    def mark(self, action: int) -> None:
        """Mark the action's cell and wake the ranks that wait for its step."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One run of the programs: when each cell's copies began and ended, and what verifying found on each rank.

    began_s    when the first rank was let go; start_s, end_s float64[n_cells] on the same clock, one for all ranks
    """

    began_s: float
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    findings: Sequence[Finding]


class Session(Protocol):
    """Ranks that have been started for one plan; leaving the context ends them and frees all that they used."""

    def run(self, progress: Progress | None = None) -> Sequence[Trial]:
        """Fill, run and verify as often as was asked for when the session was opened. Raises RunError with rank and step."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
