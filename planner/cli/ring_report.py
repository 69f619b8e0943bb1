"""How `shardroute validate --ring` shows published rows of ring attention beside their predictions."""

from collections.abc import Sequence

import msgspec

from shardroute.planner.cli.options import about
from shardroute.planner.cli.output import print_facts, print_json, print_table, progress
from shardroute.planner.cli.summaries import print_summaries, share_text, unpadded
from shardroute.planner.file_kinds import CALLS, reading
from shardroute.planner.validation.ring import RingReport, own_report, ring_report
from shardroute.planner.validation.rows import Summary, ValidationRow
from shardroute.planner.validation.step_rows import Gain
from shardroute.topologies.units import format_count, format_seconds

# Rows of calls are many: those that miss most are shown, all go into --json.
_SHOWN = 12


class RingRow(msgspec.Struct, frozen=True):
    """One published row; the field names are those of `validate --ring --json`, and stay. Errors are shares."""

    kind: str
    series: str
    name: str
    published_s: float
    predicted_s: float
    error: float
    fitted: bool
    left_out_error: float | None
    how: str
    source: str
    note: str


class LeftOutRows(msgspec.Struct, frozen=True):
    """Rows that aren't predicted, and why."""

    n_rows: int
    reason: str


class RingGoal(msgspec.Struct, frozen=True):
    """A figure of rows that no prediction has seen, as a share, and what it should stay below."""

    name: str
    n_rows: int
    figure: str
    found: float
    below: float
    met: bool


class ValidatedRing(msgspec.Struct, frozen=True):
    """Published training steps and attention calls beside predictions; the field names are those of `validate --ring --json`."""

    rows: list[RingRow]
    gains: list[Gain]
    summaries: list[Summary]
    not_predicted: list[LeftOutRows]
    goals: list[RingGoal]


def print_ring_report(json: bool, rows: str | None = None) -> None:
    """Predict all published rows, or those of a table of one's own, and print them as tables or as JSON."""
    with progress("ring attention") as done:
        report = ring_report(done) if rows is None else _own(rows)
    if json:
        print_json(_as_json(report))
        return
    print_facts(
        "Ring attention: published against predicted",
        [("not predicted", f"{format_count(n, 'row')}: {reason}") for n, reason in report.skipped],
    )
    print_summaries("Errors of step and call times", report.summaries)
    if steps := [row for row in report.rows if row.kind == "step"]:
        _print_rows("Training steps: three rates fitted to the NVSHMEM column", steps)
        _print_rows("Unexplained: shown, not fitted, not counted", report.unexplained)
        _print_gains(report.gains)
    attention = [row for row in report.rows if row.kind == "attention"]
    attention.sort(key=lambda row: -abs(row.judged_error or 0.0))
    _print_rows(f"Attention: the rows that miss most of {len(attention)}", attention[:_SHOWN])
    if report.goals:
        print_table(
            ["goal for", "rows", "figure", "found", "below", ""],
            [
                [g.name, str(g.n_rows), g.figure, f"{g.found:.2%}", f"{g.below:.1%}", "met" if g.met else "MISSED"]
                for g in report.goals
            ],
            right=["rows", "found", "below"],
            title="\nGoals, for predictions that haven't seen their row",
        )


def _print_gains(gains: Sequence[Gain]) -> None:
    print_table(
        ["NVSHMEM over NCCL", "published", "predicted", "off by", ""],
        [
            [
                gain.name, f"{gain.published:+.1%}", f"{gain.predicted:+.1%}",
                f"{(gain.predicted - gain.published) * 100:+.2f} pp", "" if gain.explained else "UNEXPLAINED",
            ]
            for gain in gains
        ],
        right=["published", "predicted", "off by"],
        title="\nGains: hops that nothing hides, by NCCL's channel law and by copy engines",
    )  # fmt: skip


def _own(rows: str) -> RingReport:
    with about("--ring-rows"), reading(rows, CALLS):
        return own_report(rows)


def _print_rows(title: str, rows: Sequence[ValidationRow]) -> None:
    print_table(
        ["row", "published", "predicted", "error", "fitted", "left out"],
        [
            [
                row.name, format_seconds(row.measured_s), format_seconds(row.predicted_s), f"{row.error:+.1%}",
                "yes" if row.fitted else "", share_text(row.left_out_error, "+"),
            ]
            for row in rows
        ],
        right=["published", "predicted", "error", "left out"],
        title=f"\n{title}",
    )  # fmt: skip


def _as_json(report: RingReport) -> ValidatedRing:
    rows = [*report.rows, *report.unexplained, *report.kernels]
    return ValidatedRing(
        rows=[
            RingRow(
                row.kind, row.series, row.name, row.measured_s, row.predicted_s, row.error, row.fitted, row.left_out_error,
                row.how, row.url, row.note,
            )
            for row in rows
        ],
        gains=list(report.gains),
        summaries=[unpadded(found) for found in report.summaries],
        not_predicted=[LeftOutRows(n, reason) for n, reason in report.skipped],
        goals=[RingGoal(g.name, g.n_rows, g.figure, g.found, g.below, g.met) for g in report.goals],
    )  # fmt: skip
