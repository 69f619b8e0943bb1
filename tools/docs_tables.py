"""Writes the tables of predictions beside published measurements into the pages of docs/, between two marks.

    python tools/docs_tables.py            predict everything anew (most of a minute) and write what has changed
    python tools/docs_tables.py --check    the same, but write nothing: exit code 1 says that a page is stale

A page has `<!-- table: NAME -->` and `<!-- end of table -->`, each on a line of its own, around a table that nobody edits.
"""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from shardroute.planner.validation.goals import REFITS, Goal, goal_of
from shardroute.planner.validation.published import PublishedRefit, assumed_refits, published_refits
from shardroute.planner.validation.refits import forecasts, refit_rows
from shardroute.planner.validation.report import collective_report
from shardroute.planner.validation.ring import RingReport, ring_report
from shardroute.planner.validation.rows import Summary, ValidationRow, summarise
from shardroute.topologies.units import format_seconds

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"
_TABLE: Final = re.compile(
    r"(?P<before><!-- table: (?P<name>[a-z-]+) -->\n)(?P<table>.*?)(?P<after><!-- end of table -->)", re.DOTALL
)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> str:
    """A table; the columns named in `right` are numbers."""
    rules = ["---:" if name in right else "---" for name in head]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rules, *rows))


def share(value: float | None, sign: str = "") -> str:
    """A share as the pages write it: `3.4 %`, `-26 %` from ten on, nothing for None."""
    if value is None:
        return ""
    return f"{value * 100:{sign}.{1 if abs(value) < 0.0995 else 0}f} %"


def summaries(found: Iterable[Summary], more: Sequence[Sequence[str]] = ()) -> str:
    """What sets of rows come to: all rows, and predictions that hadn't seen theirs. `more` are further rows of cells."""
    head = ["published rows", "n", "median error", "worst", "unseen", "median of these", "worst of these"]
    # Unseen: rows that no constant comes from, and fitted ones, predicted by constants that were fitted without them.
    rows = [
        [
            one.name.strip(), f"{one.n_rows:,}", share(one.error_median), share(one.error_worst),
            f"{one.n_unseen:,}", share(one.unseen_median), share(one.unseen_worst),
        ]
        for one in found
    ]  # fmt: skip
    return markdown(head, [*rows, *more], head[1:])


def collectives() -> str:
    """Summaries of collectives and permutes, as `validate --collectives` ends."""
    return summaries(collective_report().summaries)


def refit_cells(published: PublishedRefit, row: ValidationRow) -> list[str]:
    """The cells of one refit."""
    star = " *" if published.fitted else ""
    stored = f" in {published.precision}" if published.precision else ""
    what = f"{published.model}{stored} {published.source_spec} to {published.target_spec}"
    source = f"[{published.origin.title.removesuffix(' (vendor)')}]({published.origin.url})"
    low, high = (format_seconds(seconds) for seconds in (published.low_s, published.high_s))
    times = low if low == high else f"{low} to {high}"
    errors = share(row.error, "+"), share(row.judged_error, "+")
    return [what + star, published.machine, source, times, format_seconds(row.predicted_s), *errors, published.strategy]


REFIT_HEAD: Final = ("refit", "machine", "source", "published", "predicted", "error", "unseen", "strategy")


def _refits() -> tuple[Sequence[PublishedRefit], Sequence[ValidationRow]]:
    """All published refits with their rows, in one order; most of a minute."""
    published = published_refits()
    return published, list(refit_rows(published))


def _ring_steps(report: RingReport) -> str:
    """Published training steps, those that nothing explains last."""
    head = ["step", "published", "predicted", "error", "unseen"]
    steps = [row for row in report.rows if row.kind == "step"]
    rows = [
        [
            row.name + (" (unexplained, not counted)" if row in report.unexplained else " *" if row.fitted else ""),
            format_seconds(row.measured_s), format_seconds(row.predicted_s), share(row.error, "+"), share(row.judged_error, "+"),
        ]
        for row in (*steps, *report.unexplained)
    ]  # fmt: skip
    left_out = [error for row in steps if row.fitted and (error := row.left_out_error) is not None]
    rms = math.sqrt(math.fsum(error**2 for error in left_out) / len(left_out))
    return markdown(head, [*rows, ["root mean square of the starred", "", "", "", share(rms)]], head[1:])


def _gains(report: RingReport) -> list[str]:
    """What the gains of NVSHMEM over NCCL are off by, in percentage points; nothing is fitted to them."""
    off = sorted(abs(gain.predicted - gain.published) * 100 for gain in report.gains if gain.explained)
    errors = [f"{statistics.median(off):.1f} points", f"{off[-1]:.1f} points"]
    return ["gains of NVSHMEM over NCCL that are explained", str(len(off)), *errors, str(len(off)), *errors]


def ring_tables() -> Mapping[str, str]:
    """The tables about long contexts."""
    report = ring_report()
    return {"ring": summaries(report.summaries, [_gains(report)]), "ring-steps": _ring_steps(report)}


def refit_tables() -> Mapping[str, str]:
    """The tables about refits."""
    published, rows = _refits()
    stated = [(of, row) for of, row in zip(published, rows, strict=True) if row.kind == "refit"]
    groups: dict[str, list[ValidationRow]] = {}
    for of, row in stated:
        groups.setdefault(of.group, []).append(row)
    found = [
        summarise("all of these refits", [row for _, row in stated]),
        summarise("those with a star", [row for _, row in stated if row.fitted]),
        *(summarise(name, members) for name, members in groups.items()),
        summarise("early versions of NeMo RL, by `m2n-pack`, not counted", [row for row in rows if row.kind != "refit"]),
    ]
    table = markdown(REFIT_HEAD, [refit_cells(of, row) for of, row in stated], REFIT_HEAD[3:7])
    goals = [collective_report().goal, goal_of("refits, unseen", [row for _, row in stated], REFITS)]
    return {"refits": table, "refit-summaries": summaries(found), "goals": _goals(goals), "beside": _beside()}


def _goals(goals: Iterable[Goal]) -> str:
    """The goals, and what has come of them."""
    head = ["goal for", "rows", "median", "should be below", "worst", "should be below", "rows that miss"]
    rows = [
        [
            goal.name, f"{goal.n_rows:,}", share(goal.median), share(goal.median_below), share(goal.worst),
            share(goal.worst_below), str(len(goal.misses)),
        ]
        for goal in goals
    ]  # fmt: skip
    return markdown(head, rows, head[1:])


def _beside() -> str:
    """Refits without a published number, or without what it was measured on."""
    head = ["refit", "strategy", "said", "predicted", "what is assumed"]
    rows = [
        [
            row.name, case.strategy, "not found" if row.published_s is None else format_seconds(row.published_s),
            format_seconds(row.predicted_s), case.note,
        ]
        for case, row in zip(assumed_refits(), forecasts(), strict=True)
    ]  # fmt: skip
    return markdown(head, rows, ["said", "predicted"])


def quick_tables() -> Mapping[str, str]:
    """All tables that take seconds, by name."""
    return {"collectives": collectives(), **ring_tables()}


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """The page's text with these tables in their places; places of others stay as they are."""

    def filled(place: re.Match[str]) -> str:
        # Blank lines, as Markdown wants them around a table.
        return f"{place['before']}\n{tables[place['name']]}\n\n{place['after']}" if place["name"] in tables else place[0]

    return _TABLE.sub(filled, text)


def table_of(name: str) -> str:
    """The table of this name as its page has it."""
    for page in sorted(DOCS.rglob("*.md")):
        for place in _TABLE.finditer(page.read_text(encoding="utf-8")):
            if place["name"] == name:
                return place["table"].strip()
    raise KeyError(f"no page of docs/ has a place for table {name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables, or say which pages are stale."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    parser.add_argument("--quick", action="store_true", help="leave out refits, which take most of a minute")
    given = parser.parse_args(arguments)
    parts: list[Callable[[], Mapping[str, str]]] = [quick_tables] if given.quick else [quick_tables, refit_tables]
    tables = {name: table for part in parts for name, table in part().items()}
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if (fresh := with_tables(text, tables)) != text:
            stale.append(page)
            if not given.check:
                page.write_text(fresh, encoding="utf-8")
    for page in stale:
        print(f"{page.relative_to(DOCS.parent)}: {'stale; run python tools/docs_tables.py' if given.check else 'written'}")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
