"""Calibration files: TOML in which every number is a figure with its source, and measured curves of collectives."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from shardroute.topologies.collectives import Collective, CollectiveCurve
from shardroute.topologies.costs import COST_TABLES
from shardroute.topologies.documents import FigureTable, listed_tables, read_toml, toml_value
from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import Figure, Quantity, figure_value, read_figure
from shardroute.topologies.files import write_file

QUANTITIES: Final[Mapping[str, Quantity]] = {
    **{f"{table}.{key}": quantity for table, (_, keys) in COST_TABLES.items() for key, (_, quantity) in keys.items()},
    "step.launch": Quantity.SECONDS,
    "step.piece": Quantity.SECONDS,
    "step.message": Quantity.SECONDS,
    "step.check": Quantity.SECONDS,
    "step.wait": Quantity.SECONDS,
    "step.run": Quantity.SECONDS,
    "step.start": Quantity.SECONDS,
    "step.compute": Quantity.SECONDS,
    "cpu.cores": Quantity.CORES,
    "cpu.copy_bandwidth": Quantity.BANDWIDTH,
}

# Times of a curve are in microseconds: "12.9" reads better than "0.0000129".
_US: Final = 1e6


@dataclass(frozen=True, slots=True)
class CalibrationDocument:
    """What a calibration file says, before it is checked as a whole."""

    machine: str
    library: str
    measured: str
    versions: str
    figures: tuple[Figure, ...]
    curves: tuple[CollectiveCurve, ...]


class _StepTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    launch: FigureTable
    piece: FigureTable
    message: FigureTable | None = None
    check: FigureTable | None = None
    wait: FigureTable | None = None
    run: FigureTable | None = None
    start: FigureTable | None = None
    compute: FigureTable | None = None


class _CpuTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cores: FigureTable
    copy_bandwidth: FigureTable


def _cost_struct(table: str) -> type[msgspec.Struct]:
    """The struct that a cost table is read as: each of its keys a figure, all required."""
    keys = [(key, FigureTable) for key in COST_TABLES[table][1]]
    return msgspec.defstruct(f"_{table.title()}Table", keys, frozen=True, forbid_unknown_fields=True)


class _CurveTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    op: Collective
    ranks: int
    source: str
    bytes: list[int]
    us: list[float]
    domains: int = 1


_CalibrationFile = msgspec.defstruct(
    "_CalibrationFile",
    [
        *((name, str) for name in ("machine", "library", "measured", "versions")),
        ("step", _StepTable),
        *((table, _cost_struct(table) | None, None) for table in COST_TABLES),
        ("cpu", _CpuTable | None, None),
        ("collective", list[_CurveTable], msgspec.field(default_factory=list)),
    ],
    frozen=True,
    forbid_unknown_fields=True,
)


def read_calibration_file(path: Path) -> CalibrationDocument:
    """Return what the file says; InputError, led by its name and the key, if it doesn't fit."""
    file = read_toml(path, _CalibrationFile)
    content: dict[str, object] = msgspec.structs.asdict(file)
    tables = {name: table for name, table in content.items() if isinstance(table, msgspec.Struct)}
    machine, library, measured, versions = (str(content[name]) for name in ("machine", "library", "measured", "versions"))
    rows = content["collective"]
    assert isinstance(rows, list)
    try:
        figures = tuple(read_figure(key, QUANTITIES[key], t.value, t.source) for key, t in listed_tables(tables))
        curves = tuple(_curve(row, f"collective[{i}]") for i, row in enumerate(rows))
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from None
    return CalibrationDocument(machine, library, measured, versions, figures, curves)


def write_calibration_file(document: CalibrationDocument, path: Path | str) -> None:
    """Write the document so that read_calibration_file gives an equal one back; times of curves to 15 digits."""
    lines = [f"{name} = {toml_value(getattr(document, name))}" for name in ("machine", "library", "measured", "versions")]
    table = ""
    for figure in document.figures:
        name, key = figure.key.split(".")
        if name != table:
            lines += ["", f"[{name}]"]
            table = name
        value = toml_value(figure_value(figure, QUANTITIES[figure.key]))
        lines.append(f"{key} = {{ value = {value}, source = {toml_value(figure.source)} }}")
    for curve in document.curves:
        lines += ["", *_curve_lines(curve)]
    write_file(path, ("\n".join(lines) + "\n").encode(), "the calibration")


def _curve(row: _CurveTable, where: str) -> CollectiveCurve:
    try:
        return CollectiveCurve(
            row.op, row.ranks, row.domains, tuple(row.bytes), tuple(float(f"{us / _US:.15g}") for us in row.us), row.source
        )
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _curve_lines(curve: CollectiveCurve) -> Iterable[str]:
    yield "[[collective]]"
    yield f"op = {toml_value(str(curve.op))}"
    yield f"ranks = {curve.n_ranks}"
    if curve.n_domains != 1:
        yield f"domains = {curve.n_domains}"
    yield f"source = {toml_value(curve.source)}"
    yield f"bytes = [{', '.join(map(str, curve.n_bytes))}]"
    yield f"us = [{', '.join(f'{t * _US:.15g}' for t in curve.time_s)}]"
