"""How `shardroute validate` shows published collectives and refits beside their predictions."""

from collections.abc import Sequence

import msgspec

from shardroute.planner.cli.output import print_json, print_table, progress
from shardroute.planner.cli.summaries import print_summaries, share_text, unpadded
from shardroute.planner.validation.goals import Goal
from shardroute.planner.validation.report import Report, by_series, collective_report, refit_report
from shardroute.planner.validation.rows import Forecast, Summary, ValidationRow
from shardroute.topologies.units import format_seconds

# Of the rows that miss a goal, those that miss most are shown; --rows shows all.
_SHOWN = 12


class PublishedRow(msgspec.Struct, frozen=True):
    """One published row; the field names are those of `validate --json`, and stay. Errors are shares: 0.1 is 10 % too long.

    `left_out` says what `left_out_error` was predicted without: the row itself, or its whole series.
    """

    kind: str
    series: str
    name: str
    published_s: float
    predicted_s: float
    error: float
    fitted: bool
    left_out: str
    left_out_error: float | None
    how: str
    source: str
    note: str


class LeftOutRow(msgspec.Struct, frozen=True):
    """Rows that aren't predicted, and why."""

    n_rows: int
    what: str
    reason: str


class ForecastRow(msgspec.Struct, frozen=True):
    """A prediction beside the rows; published_s and error are null where no number was found, the note says what is assumed."""

    series: str
    name: str
    published_s: float | None
    predicted_s: float
    error: float | None
    how: str
    note: str


class Missed(msgspec.Struct, frozen=True):
    """A row that misses its goal, and the likely reason. The error is that of a prediction that hasn't seen it."""

    series: str
    name: str
    error: float
    reason: str


class GoalRow(msgspec.Struct, frozen=True):
    """A goal for rows that no prediction has seen, as shares: the median and the worst error, and what they should stay below."""

    name: str
    n_rows: int
    median_error: float
    median_below: float
    median_met: bool
    worst_error: float
    worst_below: float
    worst_met: bool
    misses: list[Missed]


class Validated(msgspec.Struct, frozen=True):
    """Published rows beside predictions; the field names are those of `validate --json`, and stay."""

    rows: list[PublishedRow]
    summaries: list[Summary]
    not_predicted: list[LeftOutRow]
    beside: list[ForecastRow]
    goals: list[GoalRow]


def print_validation(collectives: bool, refits: bool, rows: bool, json: bool) -> None:
    """Predict all published collectives and refits that are asked for, and print them as tables or as JSON."""
    reports: list[tuple[str, Report]] = []
    if refits:
        with progress("refits") as done:
            reports.append(("refits", refit_report(done)))
    if collectives:
        with progress("collectives") as done:
            reports.append(("collectives", collective_report(done)))
    if json:
        print_json(_as_json([report for _, report in reports]))
        return
    for kind, report in reports:
        if kind == "refits":
            stated, early = ([row for row in report.rows if (row.kind == "refit") is is_stated] for is_stated in (True, False))
            _print_refits("Refits; left out: with the host's time a weight from the other rows", stated)
            _print_refits("\nEarly versions, whose strategy isn't stated: beside m2n-pack, and not counted", early)
            _print_forecasts(report.beside)
        elif rows:
            _print_collectives("Collectives", report.rows)
        else:
            print_summaries("Collectives, by series (--rows shows each row)", by_series(report.rows))
    for _, report in reports:
        if report.skipped:
            print_table(
                ["rows", "not predicted", "why"],
                [[str(left.n_rows), left.what, left.reason] for left in report.skipped],
                right=["rows"],
                title="\nPublished, but not predicted",
            )
    print_summaries("Together", [summary for _, report in reports for summary in report.summaries])
    _print_goals([report.goal for _, report in reports], rows)


def _print_refits(title: str, rows: Sequence[ValidationRow]) -> None:
    print_table(
        ["", "refit", "published", "predicted", "error", "left out"],
        [
            [
                str(i), row.name, format_seconds(row.measured_s), format_seconds(row.predicted_s), f"{row.error:+.0%}",
                share_text(row.left_out_error, "+"),
            ]
            for i, row in enumerate(rows, 1)
        ],
        right=["published", "predicted", "error", "left out"],
        title=title,
    )  # fmt: skip
    _print_hows([row.how + (f"; {row.note}" if row.note else "") for row in rows])


def _print_forecasts(rows: Sequence[Forecast]) -> None:
    print_table(
        ["", "refit", "published", "predicted", "error"],
        [
            [
                str(i), row.name, "not found" if row.published_s is None else format_seconds(row.published_s),
                format_seconds(row.predicted_s), share_text(row.error, "+"),
            ]
            for i, row in enumerate(rows, 1)
        ],
        right=["published", "predicted", "error"],
        title="\nWithout a published number, or without what it was measured on: under what is assumed, and not counted",
    )  # fmt: skip
    _print_hows([f"{row.how}; {row.note}" for row in rows])


def _print_hows(hows: Sequence[str]) -> None:
    """By what each row of the table above was predicted: in a table of its own, where it has the width of the terminal."""
    print_table(["", "by"], [[str(i), how] for i, how in enumerate(hows, 1)], title="\nHow these were predicted")


def _print_goals(goals: Sequence[Goal], rows: bool) -> None:
    print_table(
        ["goal for", "rows", "median", "worst", "rows that miss"],
        [
            [
                goal.name, f"{goal.n_rows:,}", _held(goal.median, goal.median_below, goal.median_met),
                _held(goal.worst, goal.worst_below, goal.worst_met), str(len(goal.misses)),
            ]
            for goal in goals
        ],
        right=["rows", "rows that miss"],
        title="\nGoals, for predictions that haven't seen their row",
    )  # fmt: skip
    missed = [(goal, goal.misses if rows else goal.misses[:_SHOWN]) for goal in goals if goal.misses]
    for goal, shown in missed:
        part = "" if len(shown) == len(goal.misses) else f": {len(shown)} of {len(goal.misses)}, --rows shows all"
        print_table(
            ["row", "error", "likely reason"],
            [[f"{row.name}: {row.series}", share_text(row.judged_error, "+"), _reason(row)] for row in shown],
            right=["error"],
            title=f"\nWhat misses the goal for {goal.name}{part}",
        )


def _held(error: float, below: float, met: bool) -> str:
    return f"{error:.1%}, below {below:.0%}: {'met' if met else 'missed'}"


def _reason(row: ValidationRow) -> str:
    return row.note or "unknown"


def _print_collectives(title: str, rows: Sequence[ValidationRow]) -> None:
    print_table(
        ["collective", "published", "predicted", "unseen", "likely reason"],
        [
            [
                f"{row.name}: {row.series}", format_seconds(row.measured_s), format_seconds(row.predicted_s),
                share_text(row.judged_error, "+"), row.note,
            ]
            for row in rows
        ],
        right=["published", "predicted", "unseen"],
        title=f"\n{title}",
    )  # fmt: skip


def _as_json(reports: Sequence[Report]) -> Validated:
    return Validated(
        rows=[
            PublishedRow(
                row.kind, row.series, row.name, row.measured_s, row.predicted_s, row.error, row.fitted, row.held_out,
                row.left_out_error, row.how, row.url, row.note,
            )
            for report in reports
            for row in report.rows
        ],
        summaries=[unpadded(found) for report in reports for found in report.summaries],
        not_predicted=[LeftOutRow(left.n_rows, left.what, left.reason) for report in reports for left in report.skipped],
        beside=[
            ForecastRow(row.series, row.name, row.published_s, row.predicted_s, row.error, row.how, row.note)
            for report in reports
            for row in report.beside
        ],
        goals=[_goal_row(report.goal) for report in reports],
    )  # fmt: skip


def _goal_row(goal: Goal) -> GoalRow:
    return GoalRow(
        goal.name, goal.n_rows, goal.median, goal.median_below, goal.median_met, goal.worst, goal.worst_below, goal.worst_met,
        [Missed(row.series, row.name, row.judged_error or 0.0, _reason(row)) for row in goal.misses],
    )  # fmt: skip
