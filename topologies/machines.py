"""Machines: what a vendor's machine is made of, read from TOML files in which every figure has a source.

A machine is a kind of unit (a DGX, a rack, a process), not a cluster: build_topology makes n of them.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, assert_never

import msgspec

from shardroute.topologies.documents import (
    FigureRecord,
    FigureTable,
    convert,
    listed_tables,
    plain,
    read_toml,
    unknown_name,
)
from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import Figure, Quantity, check_figures, read_figure
from shardroute.topologies.units import MAX_RATE_Bps, format_bandwidth

__all__ = [
    "Figure",
    "Machine",
    "MachineKind",
    "load_machine",
    "machine_from_dict",
    "machine_names",
    "machine_to_dict",
    "parse_machine",
]

_FOLDER: Final = Path(__file__).parent / "machines"
# "dgx-h100 x 32", "dgx-h100x32"; the shortest name wins, so the last x before the digits is the times sign.
_COUNTED: Final = re.compile(r"(?P<name>.*?\S)(?P<gap>\s*)[x×](?P<after>\s*)(?P<count>[+-]?\d+)")

QUANTITIES: Final[Mapping[str, Quantity]] = {
    "gpu.per_host": Quantity.COUNT,
    "gpu.memory": Quantity.BYTES,
    "gpu.memory_bandwidth": Quantity.BANDWIDTH,
    "nvlink.hosts_per_domain": Quantity.COUNT,
    "nvlink.bandwidth": Quantity.BANDWIDTH,
    "nic.per_gpu": Quantity.COUNT,
    "nic.bandwidth": Quantity.BANDWIDTH,
    "fabric.oversubscription": Quantity.RATIO,
}


class MachineKind(StrEnum):
    """What a rank of the machine is: a GPU, or a process on the CPUs of one host."""

    GPU = "gpu"
    CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of machine; bandwidths are one way, per GPU (nvlink, hbm) or per NIC (nic).

    oversubscription is fabric capacity wanted over fabric capacity built: 1.0 is full bisection. For kind CPU
    a GPU stands for one process, all processes are one domain on one host that share memory, and the NVLink,
    NIC and memory numbers are 0. Raises InputError if a number is impossible or a figure disagrees with its
    number; a what-if by `replace` therefore passes figures=() too.
    """

    name: str
    title: str
    kind: MachineKind
    gpu: str
    gpus_per_host: int
    hosts_per_domain: int
    nvlink_Bps: float
    nics_per_gpu: int
    nic_Bps: float
    hbm_Bps: float
    memory_bytes: int
    oversubscription: float
    figures: tuple[Figure, ...] = ()

    def __post_init__(self) -> None:
        match self.kind:
            case MachineKind.GPU:
                _check_gpu_machine(self)
            case MachineKind.CPU:
                _check_cpu_machine(self)
            case _:
                assert_never(self.kind)
        try:
            check_figures(self.figures, QUANTITIES, _values(self))
        except InputError as error:
            raise InputError(f"machine {self.name}: {error}") from None

    @property
    def gpus_per_unit(self) -> int:
        """GPUs that "x 1" counts: one NVLink domain's (DGX: 8, NVL72: 72); 1 process for kind CPU."""
        return self.gpus_per_host * self.hosts_per_domain

    @property
    def gpus_per_domain(self) -> int:
        """GPUs of one NVLink domain. For kind CPU 1, though one domain holds all: ask the topology."""
        return self.gpus_per_host * self.hosts_per_domain

    @property
    def gpu_nic_Bps(self) -> float:
        """Bytes per second, one way, of all NICs of one GPU."""
        return self.nics_per_gpu * self.nic_Bps


class _GpuTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    per_host: FigureTable
    memory: FigureTable
    memory_bandwidth: FigureTable


class _NvlinkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    hosts_per_domain: FigureTable
    bandwidth: FigureTable


class _NicTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    per_gpu: FigureTable
    bandwidth: FigureTable


class _FabricTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    oversubscription: FigureTable


class _MachineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    kind: MachineKind
    gpu: _GpuTable | None = None
    nvlink: _NvlinkTable | None = None
    nic: _NicTable | None = None
    fabric: _FabricTable | None = None


class _MachineRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    title: str
    kind: MachineKind
    gpu: str
    gpus_per_host: int
    hosts_per_domain: int
    nvlink_Bps: float
    nics_per_gpu: int
    nic_Bps: float
    hbm_Bps: float
    memory_bytes: int
    oversubscription: float
    figures: list[FigureRecord]


def machine_names() -> tuple[str, ...]:
    """Return the names of the machines that ship with shardroute, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_machine(name_or_path: str) -> Machine:
    """Return the shipped machine of that name, or the one in the file if the text ends in .toml.

    A file's machine is called by the file's name without .toml. Raises InputError for an unknown name (with
    the names that exist) and for a file that doesn't fit (with the key).
    """
    if name_or_path.endswith(".toml"):
        return _machine_from_file(Path(name_or_path).expanduser())
    names = machine_names()
    if name_or_path not in names:
        raise unknown_name("machine", name_or_path, names)
    return _machine_from_file(_FOLDER / f"{name_or_path}.toml")


def parse_machine(text: str) -> tuple[Machine, int | None]:
    """Return the machine and the count of "dgx-h100 x 32", "dgx-h100x32", "./my.toml x 4"; no count: None.

    Raises InputError for an unknown machine or a count below 1.
    """
    text = text.strip()
    match = _COUNTED.fullmatch(text)
    if match is None:
        name, _, tail = (part.strip() for part in text.partition(" x "))
        if tail and name in machine_names():
            raise InputError(f"machine {text!r}: {tail!r} is no count; write for example '{name} x 32'")
    if match is None or text in machine_names():
        return load_machine(text), None
    spaced = match["gap"] != "" or match["after"] != ""
    # Without spaces "dgx2" could be a name: it is split only where what comes before the x is a machine.
    if not spaced and not match["name"].endswith(".toml") and match["name"] not in machine_names():
        return load_machine(text), None
    count = int(match["count"])
    if count < 1:
        raise InputError(
            f"machine {text!r}: expected a count from 1, found {count}; write for example 'dgx-h100 x 32'"
        )
    return load_machine(match["name"]), count


def machine_to_dict(machine: Machine) -> dict[str, object]:
    """Return the machine as plain values for JSON; machine_from_dict gives an equal machine back."""
    return plain(machine)


def machine_from_dict(data: Mapping[str, object]) -> Machine:
    """Return the machine that machine_to_dict wrote; InputError, led by the key, if the dict doesn't fit."""
    record = convert(dict(data), _MachineRecord, "machine")
    figures = tuple(figure.to_figure() for figure in record.figures)
    values = {field: getattr(record, field) for field in record.__struct_fields__}
    return Machine(**{**values, "figures": figures})


def _machine_from_file(path: Path) -> Machine:
    file = read_toml(path, _MachineFile)
    try:
        return _machine_from_tables(path.stem, file)
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from None


def _machine_from_tables(name: str, file: _MachineFile) -> Machine:
    tables = {"gpu": file.gpu, "nvlink": file.nvlink, "nic": file.nic, "fabric": file.fabric}
    if file.kind is MachineKind.CPU:
        if given := [key for key, table in tables.items() if table is not None]:
            raise InputError(f"{given[0]}: a machine of kind 'cpu' has no such table; leave it out")
        return Machine(name, file.title, file.kind, "process", 1, 1, 0.0, 0, 0.0, 0.0, 0, 1.0)
    if missing := [key for key, table in tables.items() if table is None]:
        raise InputError(
            f"{missing[0]}: missing; a machine of kind 'gpu' needs the tables {', '.join(tables)}"
        )
    assert file.gpu is not None
    figures = tuple(read_figure(key, QUANTITIES[key], t.value, t.source) for key, t in listed_tables(tables))
    value = {figure.key: figure.value for figure in figures}
    return Machine(
        name=name,
        title=file.title,
        kind=file.kind,
        gpu=file.gpu.model,
        gpus_per_host=int(value["gpu.per_host"]),
        hosts_per_domain=int(value["nvlink.hosts_per_domain"]),
        nvlink_Bps=value["nvlink.bandwidth"],
        nics_per_gpu=int(value["nic.per_gpu"]),
        nic_Bps=value["nic.bandwidth"],
        hbm_Bps=value["gpu.memory_bandwidth"],
        memory_bytes=int(value["gpu.memory"]),
        oversubscription=value["fabric.oversubscription"],
        figures=figures,
    )


def _values(machine: Machine) -> dict[str, float]:
    return {
        "gpu.per_host": machine.gpus_per_host,
        "gpu.memory": machine.memory_bytes,
        "gpu.memory_bandwidth": machine.hbm_Bps,
        "nvlink.hosts_per_domain": machine.hosts_per_domain,
        "nvlink.bandwidth": machine.nvlink_Bps,
        "nic.per_gpu": machine.nics_per_gpu,
        "nic.bandwidth": machine.nic_Bps,
        "fabric.oversubscription": machine.oversubscription,
    }


def _check_gpu_machine(machine: Machine) -> None:
    for key, value in _values(machine).items():
        least = 1 if QUANTITIES[key] in (Quantity.COUNT, Quantity.RATIO) else 0
        if not math.isfinite(value) or value < least or value == 0:
            bound = f"{least} or more" if least else "above 0"
            raise InputError(f"machine {machine.name}: {key}: expected a number {bound}, found {value!r}")
        if QUANTITIES[key] is Quantity.BANDWIDTH and value > MAX_RATE_Bps:
            most = format_bandwidth(MAX_RATE_Bps)
            raise InputError(f"machine {machine.name}: {key}: expected at most {most}, found {format_bandwidth(value)}")


def _check_cpu_machine(machine: Machine) -> None:
    wanted = {"gpu.per_host": 1, "nvlink.hosts_per_domain": 1, "fabric.oversubscription": 1}
    for key, value in _values(machine).items():
        if value != wanted.get(key, 0):
            expected = wanted.get(key, 0)
            raise InputError(
                f"machine {machine.name}: {key}: expected {expected} for kind 'cpu', found {value!r}"
            )
