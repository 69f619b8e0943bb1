"""Rows of a validation: one published measurement each, with what is predicted for it, and what a set of rows comes to."""

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardroute.planner.shares import Told, heard


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """One published time and its prediction.

    series      what the row belongs to: rows of one source, machine and operation
    fitted      whether a constant or curve of the calibration comes from this row
    left_out_s  what is predicted without this row (or its series, see `held_out`), where the row is fitted
    held_out    "" or what was left out: "row", "series", "law"
    how         by what the prediction was found
    """

    kind: str
    series: str
    name: str
    measured_s: float
    predicted_s: float
    fitted: bool
    left_out_s: float | None
    held_out: str
    how: str
    url: str
    note: str = ""

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def left_out_error(self) -> float | None:
        """The same for what is predicted without the row."""
        return None if self.left_out_s is None else self.left_out_s / self.measured_s - 1

    @property
    def judged_error(self) -> float | None:
        """The error of a prediction that hasn't seen the row; None for a fitted row that can't be left out."""
        return self.left_out_error if self.fitted else self.error


@dataclass(frozen=True, slots=True)
class Forecast:
    """A prediction that stands beside the rows and counts nowhere: no time was published, or not what it was measured on.

    published_s  what is said to have been measured, None where no number was found
    how          by what the prediction was found; note says what was assumed
    """

    series: str
    name: str
    published_s: float | None
    predicted_s: float
    how: str
    note: str

    @property
    def error(self) -> float | None:
        """Predicted over published, less 1; None without a number."""
        return None if self.published_s is None else self.predicted_s / self.published_s - 1


@dataclass(frozen=True, slots=True)
class Summary:
    """What a set of rows comes to: their number, how many are fitted, and median and worst absolute error.

    `error_*` are of the predictions that users get; `unseen_*` of those that haven't seen their row: rows not fitted, and fitted
    rows left out. None where there is no such row.
    """

    name: str
    n_rows: int
    n_fitted: int
    n_unseen: int
    error_median: float
    error_worst: float
    unseen_median: float | None
    unseen_worst: float | None


def summarise(name: str, rows: Iterable[ValidationRow]) -> Summary:
    """The summary of rows, of which there is at least one."""
    rows = list(rows)
    errors = [abs(row.error) for row in rows]
    unseen = [abs(error) for row in rows if (error := row.judged_error) is not None]
    return Summary(
        name,
        len(rows),
        sum(row.fitted for row in rows),
        len(unseen),
        statistics.median(errors),
        max(errors),
        statistics.median(unseen) if unseen else None,
        max(unseen, default=None),
    )


def telling(
    rows: Iterable[ValidationRow], n_rows: int, progress: Told | None
) -> Iterator[ValidationRow]:
    """The rows, while progress is told the share of them that is done.

    n_rows may be a guess: no more than 1 is told, and 1 at the end.
    """
    done = heard(progress)
    for n_done, row in enumerate(rows, 1):
        done(min(n_done / n_rows, 1.0))
        yield row
    done(1.0)
