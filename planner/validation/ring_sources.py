"""Where published rows of ring attention come from."""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_TABLE: Final = Path(__file__).parent / "tables" / "ring_sources.csv"


@dataclass(frozen=True, slots=True)
class RingSource:
    """A publication: its title, and its address (or how it was found, where it has none)."""

    title: str
    url: str


def ring_source(name: str) -> RingSource:
    """The source of that name. Raises KeyError for one that isn't in the table."""
    return _sources()[name]


@cache
def _sources() -> dict[str, RingSource]:
    with _TABLE.open(encoding="utf-8", newline="") as file:
        return {row["source"]: RingSource(row["title"], row["url"]) for row in csv.DictReader(file)}
