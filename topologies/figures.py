"""A figure: one number of a machine or calibration file, as its author wrote it, with its source."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shardroute.topologies.errors import InputError
from shardroute.topologies.units import parse_bandwidth, parse_bytes, parse_operations, parse_seconds


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and its source: key "nic.bandwidth", text "400 Gb/s", value 5e10 (SI), source a document."""

    key: str
    text: str
    value: float
    source: str

    def __post_init__(self) -> None:
        # 80 and 80.0 are one value; a plan's digest is taken over its text.
        object.__setattr__(self, "value", float(self.value))


class Quantity(StrEnum):
    """What a figure counts; decides how its text is read and which values are possible."""

    BANDWIDTH = "bandwidth"
    BYTES = "bytes"
    SECONDS = "seconds"
    COUNT = "count"
    RATIO = "ratio"
    EFFICIENCY = "efficiency"
    CORES = "cores"
    OPERATIONS = "operations"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True)
class _Rule:
    parse: Callable[[str], float] | None  # None: the file holds a number, not text with a unit
    unit: str
    expected: str
    allows: Callable[[float], bool]


_RULES: Final[Mapping[Quantity, _Rule]] = {
    Quantity.BANDWIDTH: _Rule(parse_bandwidth, " B/s", "text such as '400 Gb/s', above 0", lambda v: v > 0),
    Quantity.BYTES: _Rule(parse_bytes, " B", "text such as '80 GB', above 0", lambda v: v > 0),
    Quantity.SECONDS: _Rule(parse_seconds, " s", "text such as '18 us'", lambda v: v >= 0),
    Quantity.COUNT: _Rule(None, "", "a whole number from 1", lambda v: v >= 1 and v == int(v)),
    Quantity.RATIO: _Rule(None, "", "a number from 1.0", lambda v: v >= 1),
    Quantity.EFFICIENCY: _Rule(None, "", "a number above 0 and up to 1.0", lambda v: 0 < v <= 1),
    Quantity.CORES: _Rule(None, "", "a number above 0", lambda v: v > 0),
    Quantity.OPERATIONS: _Rule(parse_operations, " FLOP/s", "text such as '1400 TFLOP/s', above 0", lambda v: v > 0),
    Quantity.TRAFFIC: _Rule(None, "", "bytes an element, from 0", lambda v: v >= 0),
}


def read_figure(key: str, quantity: Quantity, value: str | int | float, source: str) -> Figure:
    """Return the figure that a file's `key = { value = ..., source = "..." }` states.

    Raises InputError, led by the key, if value is not what the quantity is written as or is out of its range.
    """
    rule = _RULES[quantity]
    if isinstance(value, str) != (rule.parse is not None):
        raise InputError(f"{key}: expected {rule.expected}, found {value!r}")
    try:
        number = rule.parse(value) if isinstance(value, str) and rule.parse is not None else float(value)
    except (InputError, OverflowError) as error:
        raise InputError(f"{key}: {error}") from None
    _check(key, quantity, number, value)
    if not source.strip():
        raise InputError(
            f"{key}: source is empty; name the document, row or measurement that the figure is from"
        )
    return Figure(key, str(value), number, source)


def write_figure(key: str, quantity: Quantity, value: float, source: str) -> Figure:
    """Return a figure for a number that a program measured; its text reads back as exactly that number."""
    _check(key, quantity, value, value)
    number = int(value) if value == int(value) and quantity in (Quantity.COUNT, Quantity.BYTES) else value
    text = f"{number!r}{_RULES[quantity].unit}"
    return read_figure(key, quantity, number if _RULES[quantity].parse is None else text, source)


def figure_value(figure: Figure, quantity: Quantity) -> str | int | float:
    """Return what a file holds as the figure's value: text with a unit, or a plain number."""
    if _RULES[quantity].parse is not None:
        return figure.text
    return int(figure.value) if quantity is Quantity.COUNT else figure.value


def check_figures(
    figures: Iterable[Figure], quantities: Mapping[str, Quantity], values: Mapping[str, float]
) -> None:
    """Raise InputError unless every figure is known, stands once, reads as its value and equals values[key].

    It keeps a source from standing beside a number that it doesn't back.
    """
    seen: set[str] = set()
    for figure in figures:
        if figure.key not in quantities:
            raise InputError(f"{figure.key}: unknown figure; expected one of {', '.join(quantities)}")
        if figure.key in seen:
            raise InputError(f"{figure.key}: the figure appears twice")
        seen.add(figure.key)
        quantity = quantities[figure.key]
        stated = figure.text if _RULES[quantity].parse is not None else _number(figure)
        if read_figure(figure.key, quantity, stated, figure.source).value != figure.value:
            raise InputError(
                f"{figure.key}: text {figure.text!r} does not say the figure's value {figure.value!r}"
            )
        if figure.key not in values or values[figure.key] != figure.value:
            raise InputError(
                f"{figure.key}: the figure says {figure.text!r} ({figure.value!r}), but the value is "
                f"{values.get(figure.key)!r}; change both, or leave the figure out"
            )


def _number(figure: Figure) -> float:
    try:
        return float(figure.text)
    except (ValueError, OverflowError):
        raise InputError(f"{figure.key}: expected a number, found {figure.text!r}") from None


def _check(key: str, quantity: Quantity, number: float, found: str | int | float) -> None:
    if not math.isfinite(number) or not _RULES[quantity].allows(number):
        raise InputError(f"{key}: expected {_RULES[quantity].expected}, found {found!r}")
