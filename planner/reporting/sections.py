"""A section of the report: words, a picture, and the picture's table. Values only; `pages` makes HTML of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardroute.planner.reporting.charts import Chart
from shardroute.topologies.units import format_bandwidth, format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: its text, and the number that it is of, which programs read; `key` names it where it is a fact."""

    text: str
    value: float | int | None = None
    key: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings; the first cell of a row names it."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page. `about` describes the chart for those who don't see it; without a chart the table is shown open."""

    name: str
    title: str
    words: tuple[str, ...]
    chart: Chart | None
    about: str
    table: Table | None


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell | str]]) -> Table:
    """A table of cells; strings become cells without a number."""
    made = tuple(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row) for row in rows)
    return Table(tuple(columns), made)


def seconds(value: float | None) -> Cell:
    """Seconds as a cell."""
    return Cell("-") if value is None else Cell(format_seconds(value), value)


def size(value: int | None) -> Cell:
    """Bytes as a cell."""
    return Cell("-") if value is None else Cell(format_bytes(value), value)


def rate(value: float) -> Cell:
    """Bytes per second as a cell."""
    return Cell(format_bandwidth(value), value)


def count(value: int | None) -> Cell:
    """A number of things as a cell."""
    return Cell("-") if value is None else Cell(f"{value:,}", value)


def share(value: float | None) -> Cell:
    """A share as per cent."""
    return Cell("-") if value is None else Cell(f"{value:.0%}", value)


def ratio(value: float | None) -> Cell:
    """How many times."""
    return Cell("-") if value is None else Cell(f"{value:.2f} x", value)
