"""How `shardroute validate` shows what sets of rows come to: as a table, and as fields of its JSON."""

from collections.abc import Sequence
from dataclasses import replace

from shardroute.planner.cli.output import print_table
from shardroute.planner.validation.rows import Summary


def print_summaries(title: str, summaries: Sequence[Summary]) -> None:
    """Print one line a set: rows, how many are fitted, and the median and worst error of all and of unseen ones."""
    print_table(
        ["rows", "n", "fitted", "median", "worst", "unseen median", "unseen worst"],
        [
            [
                found.name, str(found.n_rows), str(found.n_fitted), f"{found.error_median:.1%}", f"{found.error_worst:.1%}",
                share_text(found.unseen_median), share_text(found.unseen_worst),
            ]
            for found in summaries
        ],
        right=["n", "fitted", "median", "worst", "unseen median", "unseen worst"],
        title=f"\n{title}; unseen: rows not fitted, and fitted ones left out",
    )  # fmt: skip


def unpadded(found: Summary) -> Summary:
    """The summary as `validate --json` has it: a name is indented for tables only."""
    return replace(found, name=found.name.strip())


def share_text(value: float | None, sign: str = "") -> str:
    """A share as per cent, nothing for None."""
    return "" if value is None else f"{value:{sign}.1%}"
