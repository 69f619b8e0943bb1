"""The goals that predictions are held to, whether each is met, and the rows that miss."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardroute.planner.validation.rows import ValidationRow

# Shares that the project set itself, in the median and at worst, for predictions that haven't seen their row.
COLLECTIVES: Final = (0.10, 0.40)
REFITS: Final = (0.15, 0.35)
# Of the ring: the root mean square of training steps over NVSHMEM, each left out; gains at TP 1, at worst; the median and the
# worst of all other rows.
RING_STEPS: Final = 0.04
RING_GAINS: Final = 0.015
RING_OTHERS: Final = (0.10, 0.25)


@dataclass(frozen=True, slots=True)
class Limit:
    """A goal for a figure of some rows: what is found, a share (for gains a difference of shares), and what it must be below."""

    name: str
    n_rows: int
    figure: str
    found: float
    below: float

    @property
    def met(self) -> bool:
        """Whether it is below."""
        return self.found < self.below


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal and what rows come to that no prediction has seen; misses are those at or above the worst that is allowed."""

    name: str
    n_rows: int
    median: float
    median_below: float
    worst: float
    worst_below: float
    misses: tuple[ValidationRow, ...]

    @property
    def median_met(self) -> bool:
        """Whether the median error is below its goal."""
        return self.median < self.median_below

    @property
    def worst_met(self) -> bool:
        """Whether no row misses."""
        return not self.misses


def goal_of(name: str, rows: Sequence[ValidationRow], below: tuple[float, float]) -> Goal:
    """The goal of these rows, of which at least one is unseen; a fitted row that can't be left out isn't counted."""
    unseen = {i: abs(error) for i, row in enumerate(rows) if (error := row.judged_error) is not None}
    misses = sorted((i for i, error in unseen.items() if error >= below[1]), key=lambda i: (-unseen[i], i))
    return Goal(
        name,
        len(unseen),
        statistics.median(unseen.values()),
        below[0],
        max(unseen.values()),
        below[1],
        tuple(rows[i] for i in misses),
    )
