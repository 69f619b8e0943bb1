"""Charts of the report as Vega-Lite specifications, and their SVG.

Rule: a chart names no colour of its own but those of the page's style sheet, so light, dark and print differ by that sheet alone.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from shardroute.topologies.errors import InputError

Value = str | int | float | None
Rows = Sequence[Mapping[str, Value]]
Chart = dict[str, object]

WIDTH: Final = 680
# The version of Vega-Lite that specifications are written for; vl-convert keeps older ones.
_VEGA_LITE: Final = "5.21"
# Left of a chart, in pixels: where none of these fonts is installed, labels are up to a fifth wider than vl-convert measures.
_PAD: Final = 40
_FONT: Final = "Liberation Sans, Arial, Helvetica, sans-serif"
Units = Sequence[tuple[float, str]]
SECONDS: Final[Units] = ((1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds"), (1e-9, "nanoseconds"))
BYTES: Final[Units] = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
_LINE, _INK = "var(--line)", "var(--ink)"
COLOURS: Final = tuple(f"var(--c{i})" for i in range(1, 8))
# Names in an SVG that others of its elements refer to; several SVGs of one page must not share them.
_NAMES = re.compile(r'(\bid="|url\(#|href="#)')


def check_charts() -> None:
    """Raise InputError where the package that draws is not installed."""
    if find_spec("vl_convert") is None:
        raise InputError(
            "charts are drawn by the package vl-convert-python, which isn't installed; pip install 'shardroute[report]'"
        )


def svg_of(chart: Chart, name: str) -> str:
    """The chart as an SVG element; `name` sets its inner names apart from those of other charts of the page.

    Raises InputError where the package that draws is not installed.
    """
    check_charts()
    import vl_convert

    words: Chart = {"labelColor": _INK, "titleColor": _INK}
    axis = words | {"gridColor": _LINE, "domainColor": _LINE, "tickColor": _LINE, "labelLimit": 260, "titleFontWeight": "normal"}
    config = {
        "font": _FONT, "view": {"stroke": None}, "axis": axis, "legend": words, "header": words,
        "title": {"color": _INK, "anchor": "start", "fontSize": 13}, "text": {"color": _INK}, "mark": {"aria": False},
    }  # fmt: skip
    spec = {"background": None, "padding": {"left": _PAD, "top": 6, "right": 6, "bottom": 6}, **chart, "config": config}
    drawn: str = vl_convert.vegalite_to_svg(json.dumps(spec), vl_version=_VEGA_LITE)
    return _NAMES.sub(rf"\1{name}-", drawn)


def bars(rows: Rows, *, rule_s: float | None = None, colour: str | None = None, units: Units = SECONDS) -> Chart:
    """Horizontal bars of seconds or bytes (field `s`), one a row, in the order given: field `name` beside, `text` at the end.

    `rule_s` is a line across all; `colour` names a field that colours by its words.
    """
    values, unit, scale = _in_unit(rows, ("s",), units)
    names = [row["name"] for row in rows]
    y = {"field": "name", "type": "nominal", "sort": names, "title": None}
    x = {"field": "s", "type": "quantitative", "title": unit, "scale": {"zero": True}, "axis": {"tickCount": 6}}
    fill: Chart = {"value": COLOURS[0]} if colour is None else _by_words(colour, rows)
    layers: list[Chart] = [
        {"mark": {"type": "bar", "aria": False}, "encoding": {"x": x, "y": y, "color": fill}},
        {
            "mark": {"type": "text", "align": "left", "dx": 4, "aria": False},
            "encoding": {"x": x, "y": y, "text": {"field": "text"}},
        },
    ]
    if rule_s is not None:
        layers.append(
            {
                "data": {"values": [{"at": rule_s / scale}]},
                "mark": {"type": "rule", "color": COLOURS[1], "strokeDash": [5, 3], "size": 2, "aria": False},
                "encoding": {"x": {"field": "at", "type": "quantitative"}},
            }
        )
    return {"width": WIDTH - 220, "height": {"step": 24}, "data": {"values": values}, "layer": layers}


def lines(rows: Rows, ticks: Sequence[tuple[float, str]], x_title: str, *, dashed: str = "", log_x: bool = True) -> Chart:
    """Seconds (field `s`, above 0) over what varies (field `x`), a line and points for each word of `series`; y is logarithmic.

    `ticks` are where the x axis is labelled, and how; the series `dashed` is drawn so.
    """
    values, unit, _ = _in_unit(rows, ("s",))
    label = "''"
    for at, text in reversed(ticks):
        label = f"datum.value == {at!r} ? {json.dumps(text)} : {label}"
    shown = {"values": [at for at, _ in ticks], "labelExpr": label, "labelOverlap": "greedy", "labelAngle": 0, "grid": False}
    marks = _round_numbers([float(value) for row in values if isinstance(value := row["s"], int | float)])
    dash = {"condition": {"test": {"field": "series", "equal": dashed}, "value": [5, 3]}, "value": [1, 0]}
    x_scale = {"type": "log" if log_x else "linear", "nice": False, "zero": False, "padding": 40}
    y_axis = {"values": marks, "format": "~g", "labelOverlap": True}
    y_scale = {"type": "log", "nice": False, "domain": [marks[0], marks[-1]]}
    return {
        "width": WIDTH - 120,
        "height": 280,
        "data": {"values": values},
        "encoding": {
            "x": {"field": "x", "type": "quantitative", "title": x_title, "scale": x_scale, "axis": shown},
            "y": {"field": "s", "type": "quantitative", "title": f"{unit}, log scale", "scale": y_scale, "axis": y_axis},
            "color": _by_words("series", rows),
        },
        "layer": [
            {"mark": {"type": "line", "strokeWidth": 2, "aria": False}, "encoding": {"strokeDash": dash}},
            {"mark": {"type": "point", "filled": True, "size": 50, "opacity": 1, "aria": False}},
        ],
    }


def heat_map(rows: Rows, x: str, y: str, facet: str, x_title: str, y_title: str, legend: str) -> Chart:
    """Cells by column and row, darker by field `share` (0 to 1); a panel a word of `facet`."""
    n_columns = max(len({row[x] for row in rows}), 1)
    n_rows = max(len({row[y] for row in rows}), 1)
    cell = min(28.0, (WIDTH / 2 - 70) / n_columns)
    return {
        "data": {"values": list(rows)},
        "facet": {"field": facet, "type": "nominal", "title": None, "sort": _order(facet, rows)},
        "columns": 2,
        "spec": {
            "width": cell * n_columns,
            "height": max(min(28.0, 440 / n_rows), 2.0) * n_rows,
            "mark": {"type": "rect", "color": COLOURS[0], "aria": False},
            "encoding": {
                "x": {"field": x, "type": "ordinal", "title": x_title, "axis": {"labelOverlap": True, "labelAngle": 0}},
                "y": {"field": y, "type": "ordinal", "title": y_title, "axis": {"labelOverlap": True}},
                "opacity": _by_share(legend),
                "stroke": {"value": "var(--paper)"},
            },
        },
        "resolve": {"axis": {"x": "independent", "y": "independent"}},
    }


def strips(rows: Rows, row_names: Sequence[str], legend: str) -> Chart:
    """A strip a name over time, darker by field `share`; fields `name`, `begin` and `end` (seconds)."""
    values, unit, _ = _in_unit(rows, ("begin", "end"))
    return {
        "width": WIDTH - 140,
        "height": {"step": 16},
        "data": {"values": values},
        "mark": {"type": "rect", "color": COLOURS[0], "aria": False},
        "encoding": {
            "x": _time_axis(unit),
            "x2": {"field": "end"},
            "y": {"field": "name", "type": "nominal", "sort": list(row_names), "title": None, "scale": {"paddingInner": 0.15}},
            "opacity": _by_share(legend),
        },
    }


def gantt(rows: Rows, row_names: Sequence[str], colour: str) -> Chart:
    """A bar a span: fields `name`, `begin`, `end` (seconds); a strip of its own for each word of `colour`."""
    words = sorted({str(row[colour]) for row in rows})
    values, unit, _ = _in_unit(rows, ("begin", "end"))
    return {
        "width": WIDTH - 80,
        "height": {"step": max(14, 7 * len(words)), "for": "position"},
        "data": {"values": values},
        "mark": {"type": "bar", "aria": False},
        "encoding": {
            "x": _time_axis(unit),
            "x2": {"field": "end"},
            "y": {"field": "name", "type": "nominal", "sort": list(row_names), "title": None},
            "yOffset": {"field": colour, "type": "nominal", "sort": words},
            "color": _by_words(colour, rows),
        },
    }


def boxes(rows: Rows, x_title: str, y_title: str, x_end: int, y_end: int, *, labelled: bool) -> Chart:
    """Boxes on a plane, a panel a word of `side`: fields x, x2, y, y2, `text`, and `shade`, the colour's number."""

    def at(field: str, title: str, end: int, reverse: bool) -> Chart:
        scale = {"domain": [0, end], "nice": False, "reverse": reverse}
        return {"field": field, "type": "quantitative", "title": title, "scale": scale}

    plane = {"x": at("x", x_title, x_end, False), "y": at("y", y_title, y_end, True)}
    shades = {"domain": list(range(len(COLOURS))), "range": COLOURS}
    fill = {"field": "shade", "type": "nominal", "legend": None, "scale": shades}
    layers: list[Chart] = [
        {
            "mark": {"type": "rect", "fillOpacity": 0.35, "strokeWidth": 1, "aria": False},
            "encoding": {
                **plane, "x2": {"field": "x2"}, "y2": {"field": "y2"}, "fill": fill, "stroke": {"value": _INK},
            },
        }
    ]  # fmt: skip
    if labelled:
        middle = [{"calculate": "(datum.x + datum.x2) / 2", "as": "xm"}, {"calculate": "(datum.y + datum.y2) / 2", "as": "ym"}]
        layers.append(
            {
                "transform": middle,
                "mark": {"type": "text", "fontSize": 10, "aria": False},
                "encoding": {
                    "x": at("xm", x_title, x_end, False), "y": at("ym", y_title, y_end, True), "text": {"field": "text"},
                },
            }
        )  # fmt: skip
    return {
        "data": {"values": list(rows)},
        "facet": {"field": "side", "type": "nominal", "title": None, "sort": _order("side", rows)},
        "columns": 2,
        "spec": {"width": WIDTH / 2 - 80, "height": 260, "layer": layers},
    }


def _round_numbers(values: Sequence[float]) -> list[float]:
    """The numbers 1, 2 and 5 times powers of ten, from the last that isn't above the values to the first beyond them."""
    first, last = math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 1
    # By their text, since 5 * 10 ** -3 isn't the number that a reader sees as 0.005.
    every = [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in (1, 2, 5)]
    low, high = max(v for v in every if v <= min(values)), min(v for v in every if v > max(values))
    return [v for v in every if low <= v <= high]


def _order(field: str, rows: Rows) -> list[Value]:
    """The words of a field in the order in which they first occur."""
    return list(dict.fromkeys(row[field] for row in rows))


def _in_unit(rows: Rows, fields: Sequence[str], units: Units = SECONDS) -> tuple[list[dict[str, Value]], str, float]:
    """The rows with these fields in the unit that suits the largest; the unit's name, and its seconds (bytes)."""
    found = [value for row in rows for field in fields if isinstance(value := row[field], int | float)]
    largest = max(found, default=0.0)
    scale, name = next(((s, n) for s, n in units if largest >= s), units[0])
    values = []
    for row in rows:
        scaled = {field: value / scale for field in fields if isinstance(value := row[field], int | float)}
        values.append({**row, **scaled})
    return values, name, scale


def _time_axis(unit: str) -> Chart:
    return {"field": "begin", "type": "quantitative", "title": unit, "scale": {"zero": True, "nice": False}}


def _by_words(field: str, rows: Rows) -> Chart:
    words = sorted({str(row[field]) for row in rows})
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(words))]
    legend = {"orient": "top", "title": None, "labelLimit": 300, "columnPadding": 24}
    return {"field": field, "type": "nominal", "scale": {"domain": words, "range": colours}, "legend": legend}


def _by_share(legend: str) -> Chart:
    shown = {"title": legend, "orient": "top", "format": ".0%", "values": [0, 0.25, 0.5, 0.75, 1]}
    shown |= {"symbolType": "square", "symbolFillColor": COLOURS[0], "symbolStrokeColor": _LINE}
    return {"field": "share", "type": "quantitative", "scale": {"domain": [0, 1], "range": [0.03, 1]}, "legend": shown}
