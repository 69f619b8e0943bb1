"""Every published collective and refit beside its prediction, and what the rows come to: what `shardroute validate` shows."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardroute.planner.shares import Told, parts
from shardroute.planner.validation.collectives import DISTURBED, collective_rows, left_out_groups, most_collective_rows
from shardroute.planner.validation.goals import COLLECTIVES, REFITS, Goal, goal_of
from shardroute.planner.validation.published import (
    LeftOut,
    assumed_refits,
    collectives_left_out,
    published_refits,
    refits_left_out,
)
from shardroute.planner.validation.refits import forecasts, n_gpus, refit_rows
from shardroute.planner.validation.rows import Forecast, Summary, ValidationRow, summarise, telling


@dataclass(frozen=True, slots=True)
class Report:
    """Rows, their summaries (all first, then by part), published rows without a prediction, the goal that the rows are held to,
    and predictions to set beside them.
    """

    rows: tuple[ValidationRow, ...]
    summaries: tuple[Summary, ...]
    skipped: tuple[LeftOut, ...]
    goal: Goal
    beside: tuple[Forecast, ...] = ()


def collective_report(progress: Told | None = None) -> Report:
    """Collectives and permutes. Takes some seconds; progress is told the share that is done."""
    rows = tuple(telling(collective_rows(), most_collective_rows(), progress))
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
    goal = goal_of("collectives and permutes, unseen", rows, COLLECTIVES)
    return Report(rows, tuple(summaries), collectives_left_out(), goal)


def refit_report(progress: Told | None = None) -> Report:
    """Refits, and predictions to set beside them. Takes most of a minute; progress is told the share that is done."""
    published, assumed = published_refits(), assumed_refits()
    of_rows, of_forecasts = parts(progress, [sum(map(n_gpus, cases)) for cases in (published, assumed)])
    rows = tuple(refit_rows(published, of_rows))
    beside = tuple(forecasts(assumed, of_forecasts))
    stated = [row for row in rows if row.kind == "refit"]
    groups = dict.fromkeys(row.series for row in stated)
    summaries = [
        summarise("refits", stated),
        *(summarise(f"  {group}", [row for row in stated if row.series == group]) for group in groups),
        summarise("early refits, whose strategy isn't stated", [row for row in rows if row.kind != "refit"]),
    ]
    return Report(rows, tuple(summaries), refits_left_out(), goal_of("refits, unseen", stated, REFITS), beside)


def by_series(rows: Sequence[ValidationRow]) -> list[Summary]:
    """One summary a series, in order of the rows."""
    found: dict[str, list[ValidationRow]] = {}
    for row in rows:
        found.setdefault(row.series, []).append(row)
    return [summarise(name, members) for name, members in found.items()]
