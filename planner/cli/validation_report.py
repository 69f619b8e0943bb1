"""How `shardroute validate` shows published collectives and refits beside their predictions."""

from collections.abc import Sequence

import msgspec

from shardroute.planner.cli.output import print_json, print_table, progress
from shardroute.planner.cli.summaries import print_summaries, share_text, unpadded
from shardroute.planner.validation.report import Report, by_series, collective_report, refit_report
from shardroute.planner.validation.rows import Summary, ValidationRow
from shardroute.topologies.units import format_seconds

# Of the many collectives, those that miss most are shown; --rows shows all.
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


class Validated(msgspec.Struct, frozen=True):
    """Published rows beside predictions; the field names are those of `validate --json`, and stay."""

    rows: list[PublishedRow]
    summaries: list[Summary]
    not_predicted: list[LeftOutRow]


def print_validation(collectives: bool, refits: bool, rows: bool, json: bool) -> None:
    """Predict all published collectives and refits that are asked for, and print them as tables or as JSON."""
    reports: list[tuple[str, Report]] = []
    if refits:
        with progress("refits") as done:
            reports.append(("refits", refit_report(done)))
    if collectives:
        with progress("collectives"):
            reports.append(("collectives", collective_report()))
    if json:
        print_json(_as_json([report for _, report in reports]))
        return
    for kind, report in reports:
        if kind == "refits":
            stated, early = ([row for row in report.rows if (row.kind == "refit") is is_stated] for is_stated in (True, False))
            _print_refits("Refits; left out: with the host's time a weight from the other rows", stated)
            _print_refits("\nEarly versions, whose strategy isn't stated: beside m2n-pack, and not counted", early)
        elif rows:
            _print_collectives("Collectives", report.rows)
        else:
            print_summaries("Collectives, by series (--rows shows each row)", by_series(report.rows))
            worst = sorted(report.rows, key=lambda row: -abs(row.judged_error or 0.0))[:_SHOWN]
            _print_collectives(f"The {_SHOWN} that miss most", worst)
    for _, report in reports:
        if report.skipped:
            print_table(
                ["rows", "not predicted", "why"],
                [[str(left.n_rows), left.what, left.reason] for left in report.skipped],
                right=["rows"],
                title="\nPublished, but not predicted",
            )
    print_summaries("Together", [summary for _, report in reports for summary in report.summaries])


def _print_refits(title: str, rows: Sequence[ValidationRow]) -> None:
    print_table(
        ["refit", "published", "predicted", "error", "left out", "by"],
        [
            [
                row.name, format_seconds(row.measured_s), format_seconds(row.predicted_s), f"{row.error:+.0%}",
                share_text(row.left_out_error, "+"), row.how + (f"; {row.note}" if row.note else ""),
            ]
            for row in rows
        ],
        right=["published", "predicted", "error", "left out"],
        title=title,
    )  # fmt: skip


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
    )  # fmt: skip
