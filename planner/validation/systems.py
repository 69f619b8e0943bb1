"""What published rows were measured on: machines that ship, changed where the system differs."""

from dataclasses import dataclass, replace
from functools import cache

import msgspec

from shardroute.planner.backends.rates import load_rates
from shardroute.planner.validation.shipped import TABLES
from shardroute.topologies.calibrations import Calibration, PathCost, default_calibration
from shardroute.topologies.documents import read_toml
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine, load_machine
from shardroute.topologies.units import parse_bandwidth, parse_seconds


@dataclass(frozen=True, slots=True)
class System:
    """A machine with its calibration, changed where the system differs, the SMs of a GPU, and a note on how it differs."""

    name: str
    machine: Machine
    calibration: Calibration
    n_sms: int
    note: str


@cache
def system(name: str) -> System:
    """What collectives were measured on, by the name that their table has for it."""
    return _load("systems.toml", name)


@cache
def ring_system(name: str) -> System:
    """What attention over several GPUs was measured on. Raises InputError for a name that isn't one, as users' rows can have."""
    return _load("ring_systems.toml", name)


class _SystemTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    machine: str
    note: str = ""
    sms: int | None = None
    nvlink_bandwidth: str | None = None
    memory_bandwidth: str | None = None
    nic_bandwidth: str | None = None
    nic_latency: str | None = None


class _SystemsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    system: list[_SystemTable]


def _load(file: str, name: str) -> System:
    tables = {table.name: table for table in read_toml(TABLES / file, _SystemsFile).system}
    if name not in tables:
        raise InputError(f"system {name!r}: expected one of {', '.join(tables)}")
    table = tables[name]
    machine, calibration = load_machine(table.machine), default_calibration(table.machine)
    if table.nvlink_bandwidth is not None:
        machine = replace(machine, nvlink_Bps=parse_bandwidth(table.nvlink_bandwidth), figures=())
    if table.memory_bandwidth is not None:
        machine = replace(machine, hbm_Bps=parse_bandwidth(table.memory_bandwidth), figures=())
    if table.nic_bandwidth is not None:
        machine = replace(machine, nic_Bps=parse_bandwidth(table.nic_bandwidth), figures=())
    if table.nic_latency is not None:
        assert calibration.nic is not None
        nic = PathCost(parse_seconds(table.nic_latency), calibration.nic.efficiency)
        calibration = replace(calibration, nic=nic, figures=())
    n_sms = load_rates(table.machine).n_sms if table.sms is None else table.sms
    return System(name, machine, calibration, n_sms, table.note)
