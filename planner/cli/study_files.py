"""What `study -o` writes, by how the file's name ends: a page, the JSON of --json, or the rows as CSV."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from shardroute.planner.studies import LoadStudy, RefitStudy, RingStudy, SplitStudy
from shardroute.topologies.files import write_file

Study = RefitStudy | LoadStudy | RingStudy | SplitStudy

PAGES: Final = (".html", ".htm")
_CSV: Final = ".csv"
SUFFIXES: Final = (*PAGES, ".json", _CSV)


def is_page(path: str) -> bool:
    """Whether a page goes there."""
    return Path(path).suffix.lower() in PAGES


def save_table(study: Study, path: str) -> None:
    """Write the study as CSV where the name ends so, else as JSON. Raises InputError as `write_file` does."""
    if Path(path).suffix.lower() == _CSV:
        text = study_csv(study)
    else:
        text = msgspec.json.format(msgspec.json.encode(study), indent=2).decode() + "\n"
    write_file(path, text.encode(), "the study")


def study_csv(study: Study) -> str:
    """A line for each row, its columns the field names of --json, `refit.predicted_s` those of a row in it; what isn't known is
    empty. Estimates of gather-vs-reshard come before the rows of its plans, in columns of their own.
    """
    rows = [*(study.estimates if isinstance(study, LoadStudy) else ()), *study.rows]
    cells = [dict(_flat(msgspec.to_builtins(row))) for row in rows]
    columns = dict.fromkeys(column for row in cells for column in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    return text.getvalue()


def _flat(row: Mapping[str, object], above: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in row.items():
        if isinstance(value, dict):
            found += _flat(value, f"{above}{name}.")
        else:
            found.append((f"{above}{name}", value))
    return found
