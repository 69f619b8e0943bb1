"""Calibrations: what a library was measured to reach on a machine, apart from the machine's nominal rates.

A prediction names the calibration that it used; there is no silent default.
"""

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from shardroute.topologies.documents import (
    FigureRecord,
    FigureTable,
    convert,
    listed_tables,
    plain,
    read_toml,
)
from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import (
    Figure,
    Quantity,
    check_figures,
    figure_value,
    read_figure,
    write_figure,
)
from shardroute.topologies.files import check_writable, write_file
from shardroute.topologies.machines import Machine, MachineKind

_FOLDER: Final = Path(__file__).parent / "calibrations"

_QUANTITIES: Final[Mapping[str, Quantity]] = {
    "nvlink.latency": Quantity.SECONDS,
    "nvlink.efficiency": Quantity.EFFICIENCY,
    "nic.latency": Quantity.SECONDS,
    "nic.efficiency": Quantity.EFFICIENCY,
    "step.launch": Quantity.SECONDS,
    "step.piece": Quantity.SECONDS,
    "step.wait": Quantity.SECONDS,
    "step.run": Quantity.SECONDS,
    "cpu.cores": Quantity.CORES,
    "cpu.copy_bandwidth": Quantity.BANDWIDTH,
}


@dataclass(frozen=True, slots=True)
class PathCost:
    """Cost of a copy over a path: latency_s, then bytes at efficiency x nominal bandwidth (0 < it <= 1)."""

    latency_s: float
    efficiency: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise InputError(f"latency: expected seconds from 0, found {self.latency_s!r}")
        if not 0 < self.efficiency <= 1:
            raise InputError(f"efficiency: expected a number above 0 and up to 1, found {self.efficiency!r}")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured costs of one library on one machine.

    launch_s is the time that the issuing rank spends to start one step; a path's latency comes after it.
    piece_s is the time to gather or scatter one box of a step (CPU time for kind CPU). cores is how many
    cores copy at once and copy_Bps the bytes per second that one of them copies, strided boxes included. wait_s
    is the CPU time to sleep and be woken for a step that waits for another rank's, run_s that of each contiguous
    run of memory that a strided box lies in (both for kind CPU; on GPUs they are part of latency and bandwidth).
    A calibration holds nvlink and nic, or cores and copy_Bps, or all four; anything else, and a figure that
    disagrees with its number, raises InputError.
    """

    machine: str
    library: str
    measured: str
    versions: str
    nvlink: PathCost | None
    nic: PathCost | None
    launch_s: float
    piece_s: float
    cores: float | None
    copy_Bps: float | None
    figures: tuple[Figure, ...] = ()
    wait_s: float = 0.0
    run_s: float = 0.0

    def __post_init__(self) -> None:
        try:
            _check_pair("nvlink", self.nvlink, "nic", self.nic)
            _check_pair("cpu.cores", self.cores, "cpu.copy_bandwidth", self.copy_Bps)
            if self.nvlink is None and self.cores is None:
                raise InputError(
                    "expected the tables nvlink and nic (GPUs) or cpu (processes), found neither"
                )
            for key, value in _values(self).items():
                least_open = _QUANTITIES[key] in (Quantity.CORES, Quantity.BANDWIDTH)
                if not math.isfinite(value) or value < 0 or (least_open and value == 0):
                    raise InputError(
                        f"{key}: expected a number {'above' if least_open else 'from'} 0, found {value!r}"
                    )
            check_figures(self.figures, _QUANTITIES, _values(self))
        except InputError as error:
            raise InputError(f"calibration of {self.machine}: {error}") from None


class _PathTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    latency: FigureTable
    efficiency: FigureTable


class _StepTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    launch: FigureTable
    piece: FigureTable
    wait: FigureTable | None = None
    run: FigureTable | None = None


class _CpuTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cores: FigureTable
    copy_bandwidth: FigureTable


class _CalibrationFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: str
    library: str
    measured: str
    versions: str
    step: _StepTable
    nvlink: _PathTable | None = None
    nic: _PathTable | None = None
    cpu: _CpuTable | None = None


class _PathRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    latency_s: float
    efficiency: float


class _CalibrationRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: str
    library: str
    measured: str
    versions: str
    nvlink: _PathRecord | None
    nic: _PathRecord | None
    launch_s: float
    piece_s: float
    cores: float | None
    copy_Bps: float | None
    figures: list[FigureRecord]
    wait_s: float = 0.0
    run_s: float = 0.0


def calibration_names() -> tuple[str, ...]:
    """Return the names of the calibrations that ship with shardroute, sorted; each is its machine's name."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_calibration(name_or_path: str) -> Calibration:
    """Return the shipped calibration of that name, or the one in the file if the text ends in .toml.

    Raises InputError for an unknown name (with the names that exist) and a file that doesn't fit (with the
    key).
    """
    if name_or_path.endswith(".toml"):
        return _calibration_from_file(Path(name_or_path).expanduser())
    names = calibration_names()
    if name_or_path not in names:
        close = difflib.get_close_matches(name_or_path, names, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise InputError(
            f"unknown calibration {name_or_path!r}{hint}; known calibrations: {', '.join(names)}; "
            "or give a path that ends in .toml"
        )
    return _calibration_from_file(_FOLDER / f"{name_or_path}.toml")


def default_calibration(machine_name: str) -> Calibration:
    """Return the calibration that ships for the machine; InputError says what to do if there is none."""
    if machine_name not in calibration_names():
        raise InputError(
            f"no calibration ships for machine {machine_name!r}, and predicting needs one; give "
            "--calibration FILE with measured costs, or --calibration nominal for nominal rates alone"
        )
    return load_calibration(machine_name)


def nominal_calibration(machine: Machine) -> Calibration:
    """Return costs that assume the nominal rates: efficiency 1, no latency, no launch; for kind GPU only.

    Raises InputError for kind CPU: shared memory has no nominal rate.
    """
    if machine.kind is MachineKind.CPU:
        raise InputError(
            f"machine {machine.name} has no nominal rates (processes copy through shared memory); give "
            "--calibration FILE with measured cores and copy bandwidth"
        )
    source = "assumption: nominal rates, nothing measured"
    nominal = {"nvlink.latency": 0.0, "nvlink.efficiency": 1.0, "nic.latency": 0.0, "nic.efficiency": 1.0}
    figures = [
        calibration_figure(key, v, source)
        for key, v in {**nominal, "step.launch": 0.0, "step.piece": 0.0}.items()
    ]
    return calibration_from_figures(machine.name, "none (nominal rates)", "not measured", "none", figures)


def calibration_figure(key: str, value: float, source: str) -> Figure:
    """Return the figure for a measured number, in SI; key is for example "nic.latency" or "cpu.cores".

    Raises InputError for an unknown key or an impossible value.
    """
    if key not in _QUANTITIES:
        raise InputError(f"{key}: unknown figure; expected one of {', '.join(_QUANTITIES)}")
    return write_figure(key, _QUANTITIES[key], value, source)


def calibration_from_figures(
    machine: str, library: str, measured: str, versions: str, figures: Iterable[Figure]
) -> Calibration:
    """Return the calibration that the figures state; how a measuring program makes one.

    Raises InputError for an unknown or missing figure.
    """
    figures = tuple(figures)
    value = {figure.key: figure.value for figure in figures}
    for key in ("step.launch", "step.piece"):
        if key not in value:
            raise InputError(f"calibration of {machine}: {key}: missing")
    return Calibration(
        machine=machine,
        library=library,
        measured=measured,
        versions=versions,
        nvlink=_path_cost(value, "nvlink"),
        nic=_path_cost(value, "nic"),
        launch_s=value["step.launch"],
        piece_s=value["step.piece"],
        wait_s=value.get("step.wait", 0.0),
        run_s=value.get("step.run", 0.0),
        cores=value.get("cpu.cores"),
        copy_Bps=value.get("cpu.copy_bandwidth"),
        figures=figures,
    )


def check_calibration(calibration: Calibration, machine: Machine) -> None:
    """Raise InputError unless the calibration has the costs that the machine's kind needs."""
    needs_gpu = machine.kind is MachineKind.GPU
    if (calibration.nvlink if needs_gpu else calibration.cores) is None:
        needed = "nvlink and nic" if needs_gpu else "cpu (cores and copy_bandwidth)"
        raise InputError(
            f"calibration of {calibration.machine} ({calibration.library}) has no {needed} costs, which "
            f"machine {machine.name} of kind '{machine.kind}' needs"
        )


def save_calibration(calibration: Calibration, path: Path | str) -> None:
    """Write the calibration as a TOML file that load_calibration reads back as an equal value.

    Raises InputError if a number has no figure (a file holds no number without a source) or if path can't be
    written.
    """
    check_calibration_path(path)
    by_key = {figure.key: figure for figure in calibration.figures}
    if missing := [key for key in _values(calibration) if key not in by_key]:
        raise InputError(
            f"{path}: no source for {', '.join(missing)}; add a figure for each (calibration_figure)"
        )
    lines = [
        f"{key} = {_toml(text)}"
        for key, text in (
            ("machine", calibration.machine),
            ("library", calibration.library),
            ("measured", calibration.measured),
            ("versions", calibration.versions),
        )
    ]
    table = ""
    for figure in calibration.figures:
        name, key = figure.key.split(".")
        if name != table:
            lines += ["", f"[{name}]"]
            table = name
        value = _toml(figure_value(figure, _QUANTITIES[figure.key]))
        lines.append(f"{key} = {{ value = {value}, source = {_toml(figure.source)} }}")
    write_file(path, ("\n".join(lines) + "\n").encode(), "the calibration")


def check_calibration_path(path: Path | str) -> None:
    """Raise InputError for a path that save_calibration couldn't write to; so that it is known before anything is measured."""
    if not str(path).endswith(".toml"):
        raise InputError(f"{path}: expected a name that ends in .toml")
    check_writable(path, "the calibration")


def calibration_to_dict(calibration: Calibration) -> dict[str, object]:
    """Return the calibration as plain values for JSON; calibration_from_dict gives an equal one back."""
    return plain(calibration)


def calibration_from_dict(data: Mapping[str, object]) -> Calibration:
    """Return the calibration that calibration_to_dict wrote; InputError, with the key, if it doesn't fit."""
    record = convert(dict(data), _CalibrationRecord, "calibration")
    return Calibration(
        machine=record.machine,
        library=record.library,
        measured=record.measured,
        versions=record.versions,
        nvlink=_path_from_record(record.nvlink),
        nic=_path_from_record(record.nic),
        launch_s=record.launch_s,
        piece_s=record.piece_s,
        wait_s=record.wait_s,
        run_s=record.run_s,
        cores=record.cores,
        copy_Bps=record.copy_Bps,
        figures=tuple(figure.to_figure() for figure in record.figures),
    )


def _calibration_from_file(path: Path) -> Calibration:
    file = read_toml(path, _CalibrationFile)
    tables = {"nvlink": file.nvlink, "nic": file.nic, "step": file.step, "cpu": file.cpu}
    try:
        figures = [read_figure(key, _QUANTITIES[key], t.value, t.source) for key, t in listed_tables(tables)]
        return calibration_from_figures(file.machine, file.library, file.measured, file.versions, figures)
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from None


def _path_cost(value: Mapping[str, float], path: str) -> PathCost | None:
    latency_s, efficiency = value.get(f"{path}.latency"), value.get(f"{path}.efficiency")
    _check_pair(f"{path}.latency", latency_s, f"{path}.efficiency", efficiency)
    return None if latency_s is None or efficiency is None else PathCost(latency_s, efficiency)


def _path_from_record(record: _PathRecord | None) -> PathCost | None:
    return None if record is None else PathCost(record.latency_s, record.efficiency)


def _check_pair(name: str, value: object, other_name: str, other: object) -> None:
    if (value is None) != (other is None):
        missing, given = (name, other_name) if value is None else (other_name, name)
        raise InputError(f"{missing}: missing, though {given} is given; both are needed")


def _values(calibration: Calibration) -> dict[str, float]:
    values = {"step.launch": calibration.launch_s, "step.piece": calibration.piece_s}
    given = {figure.key for figure in calibration.figures}
    values |= {
        key: value
        for key, value in (("step.wait", calibration.wait_s), ("step.run", calibration.run_s))
        if value != 0 or key in given
    }
    for name, cost in (("nvlink", calibration.nvlink), ("nic", calibration.nic)):
        if cost is not None:
            values |= {f"{name}.latency": cost.latency_s, f"{name}.efficiency": cost.efficiency}
    if calibration.cores is not None and calibration.copy_Bps is not None:
        values |= {"cpu.cores": calibration.cores, "cpu.copy_bandwidth": calibration.copy_Bps}
    return values


def _toml(value: str | int | float) -> str:
    # TOML's basic strings are JSON's, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
