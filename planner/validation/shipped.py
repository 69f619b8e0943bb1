"""The tables of published rows that ship with shardroute, read as text by column; and where each row was published."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

TABLES: Final = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Source:
    """A publication: its title, and its address (or how it was found, where it has none)."""

    title: str
    url: str


def table_rows(name: str) -> Iterator[dict[str, str]]:
    """The rows of a table, in its order, each by its columns."""
    with (TABLES / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


@cache
def sources(table: str = "sources.csv") -> dict[str, Source]:
    """The publications that a table lists, by the names that rows have for them."""
    return {row["source"]: Source(row["title"], row["url"]) for row in table_rows(table)}


def ring_source(name: str) -> Source:
    """The publication of rows of ring attention. Raises KeyError for a name that isn't in the table."""
    return sources("ring_sources.csv")[name]
