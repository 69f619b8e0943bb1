"""Every published collective and refit beside its prediction, and what the rows come to: what `shardroute validate` shows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardroute.planner.validation.collectives import DISTURBED, collective_rows, left_out_groups
from shardroute.planner.validation.published import LeftOut, collectives_left_out, refits_left_out
from shardroute.planner.validation.refits import refit_rows
from shardroute.planner.validation.rows import Summary, ValidationRow, summarise


@dataclass(frozen=True, slots=True)
class Report:
    """Rows, their summaries (all first, then by part), and published rows without a prediction."""

    rows: tuple[ValidationRow, ...]
    summaries: tuple[Summary, ...]
    skipped: tuple[LeftOut, ...]


def collective_report() -> Report:
    """Collectives and permutes. Takes some seconds."""
    rows = tuple(collective_rows())
    never = [row for row in rows if not row.fitted]
    curves = [row for row in rows if row.fitted and row.held_out == "row"]
    permutes = [row for row in rows if row.kind == "permute"]
    summaries = [
        summarise("collectives and permutes", rows),
        summarise("  without disturbed rows", [row for row in rows if not row.note.startswith(DISTURBED)]),
        summarise("  rows never fitted", never),
        summarise("  curves, each point left out", curves),
        summarise("  permutes, each series left out", permutes),
        summarise("  curves of GB200, each group left out", left_out_groups()),
    ]
    return Report(rows, tuple(summaries), collectives_left_out())


def refit_report(progress: Callable[[float], None] | None = None) -> Report:
    """Refits. Takes half a minute; progress is told the share that is done."""
    rows = tuple(refit_rows(progress=progress))
    stated = [row for row in rows if row.kind == "refit"]
    groups = dict.fromkeys(row.series for row in stated)
    summaries = [
        summarise("refits", stated),
        *(summarise(f"  {group}", [row for row in stated if row.series == group]) for group in groups),
        summarise("early refits, whose strategy isn't stated", [row for row in rows if row.kind != "refit"]),
    ]
    return Report(rows, tuple(summaries), refits_left_out())


def by_series(rows: Sequence[ValidationRow]) -> list[Summary]:
    """One summary a series, in order of the rows."""
    found: dict[str, list[ValidationRow]] = {}
    for row in rows:
        found.setdefault(row.series, []).append(row)
    return [summarise(name, members) for name, members in found.items()]
