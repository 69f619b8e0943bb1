"""Published measurements that ship with shardroute: small tables, each row with its source and the system it was taken on."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from shardroute.planner.backends.channels import Traffic
from shardroute.planner.backends.tuning import Algorithm, Group
from shardroute.topologies.calibrations import Calibration, PathCost, default_calibration
from shardroute.topologies.collectives import Collective
from shardroute.topologies.documents import read_toml
from shardroute.topologies.machines import Machine, load_machine
from shardroute.topologies.units import parse_bandwidth, parse_seconds

_TABLES: Final = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows were published."""

    title: str
    url: str


@dataclass(frozen=True, slots=True)
class System:
    """What rows were measured on: a machine with its calibration, changed where the system differs, and how it differs."""

    name: str
    machine: Machine
    calibration: Calibration
    note: str


@dataclass(frozen=True, slots=True)
class PublishedCollective:
    """One measured collective. `one_at_a_time`: a framework called it and waited; else calls followed each other.

    `fitted`: a constant of the calibration (not a curve) comes from it. `size_stated`: else n_bytes is 8 GiB, as the source gives
    what large messages reach.
    """

    name: str
    system: System
    op: Collective
    group: Group
    n_bytes: int
    time_s: float
    algorithm: Algorithm | None
    one_at_a_time: bool
    size_stated: bool
    fitted: bool
    source: Source


@dataclass(frozen=True, slots=True)
class PublishedPermute:
    """One measured collective-permute of all ranks of one NVLink domain."""

    machine: str
    traffic: Traffic
    n_ranks: int
    n_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True)
class PublishedRefit:
    """One measured refit: a model between two layouts on a machine, by the strategy that the system runs.

    time_s is the middle of low_s to high_s where the source gives a range. domain_gpus: of an NVLink domain, where the system had
    fewer than the machine; else 0. framework: a training framework ran it, whose host spends time on each tensor. bulk_only: only
    feed-forward weights are taken to have moved.
    """

    name: str
    model: str
    source_spec: str
    target_spec: str
    machine: str
    domain_gpus: int
    strategy: str
    framework: bool
    bulk_only: bool
    time_s: float
    low_s: float
    high_s: float
    group: str
    origin: Source
    note: str


class _SystemTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    machine: str
    note: str = ""
    nic_bandwidth: str | None = None
    nic_latency: str | None = None


class _SystemsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    system: list[_SystemTable]


def published_collectives() -> tuple[PublishedCollective, ...]:
    """Every published collective that states its machine, group and, but for peaks, size."""
    sources = _sources()
    return tuple(
        PublishedCollective(
            row["id"],
            system(row["system"]),
            Collective(row["op"]),
            Group(int(row["ranks"]), int(row["domains"])),
            int(row["bytes"]),
            float(row["us"]) / 1e6,
            Algorithm(row["algorithm"]) if row["algorithm"] else None,
            row["one_at_a_time"] == "1",
            row["size_stated"] == "1",
            row["fitted"] == "1",
            sources[row["source"]],
        )
        for row in _rows("collectives.csv")
    )


def published_permutes() -> tuple[PublishedPermute, ...]:
    """XLA's collective-permutes, which the channel laws of the calibrations are fitted to."""
    return tuple(
        PublishedPermute(row["machine"], Traffic(row["traffic"]), int(row["ranks"]), int(row["bytes"]), float(row["us"]) / 1e6)
        for row in _rows("permutes.csv")
    )


def published_refits() -> tuple[PublishedRefit, ...]:
    """Every published refit that states hardware, model and layout, and runs a strategy that shardroute has."""
    sources = _sources()
    return tuple(
        PublishedRefit(
            row["id"],
            row["model"],
            row["from"],
            row["to"],
            row["machine"],
            int(row["domain_gpus"]),
            row["strategy"],
            row["framework"] == "1",
            row["bulk_only"] == "1",
            float(row["s"]),
            float(row["low_s"] or row["s"]),
            float(row["high_s"] or row["s"]),
            row["group"],
            sources[row["source"]],
            row["note"],
        )
        for row in _rows("refits.csv")
    )


def refits_left_out() -> tuple[tuple[int, str, str], ...]:
    """Published refits that aren't predicted: how many, which, and why."""
    return tuple((int(row["n"]), row["what"], row["reason"]) for row in _rows("refits_left_out.csv"))


def permute_source() -> Source:
    """Where the permutes are from."""
    return _sources()["xla"]


@cache
def system(name: str) -> System:
    """The system of that name, as the rows of the tables name it."""
    table = next(table for table in read_toml(_TABLES / "systems.toml", _SystemsFile).system if table.name == name)
    machine, calibration = load_machine(table.machine), default_calibration(table.machine)
    if table.nic_bandwidth is not None:
        machine = replace(machine, nic_Bps=parse_bandwidth(table.nic_bandwidth), figures=())
    if table.nic_latency is not None:
        assert calibration.nic is not None
        nic = PathCost(parse_seconds(table.nic_latency), calibration.nic.efficiency)
        calibration = replace(calibration, nic=nic, figures=())
    return System(name, machine, calibration, table.note)


@cache
def _sources() -> dict[str, Source]:
    return {row["source"]: Source(row["title"], row["url"]) for row in _rows("sources.csv")}


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (_TABLES / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
