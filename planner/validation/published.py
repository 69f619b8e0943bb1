"""Published measurements that ship with shardroute: small tables, each row with its source and the system it was taken on."""

from dataclasses import dataclass

from shardroute.planner.backends.channels import Traffic
from shardroute.planner.backends.tuning import Algorithm, Group
from shardroute.planner.validation.shipped import Source, sources, table_rows
from shardroute.planner.validation.systems import System, system
from shardroute.topologies.collectives import Collective


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
    fewer than the machine; else 0. framework: a training framework ran it, whose host spends time on each tensor. fitted: that
    time comes from this row. bulk_only: only feed-forward weights are taken to have moved.
    """

    name: str
    model: str
    source_spec: str
    target_spec: str
    machine: str
    domain_gpus: int
    strategy: str
    framework: bool
    fitted: bool
    bulk_only: bool
    time_s: float
    low_s: float
    high_s: float
    group: str
    origin: Source
    note: str


def published_collectives() -> tuple[PublishedCollective, ...]:
    """Every published collective that states its machine, group and, but for peaks, size."""
    found = sources()
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
            found[row["source"]],
        )
        for row in table_rows("collectives.csv")
    )


def published_permutes() -> tuple[PublishedPermute, ...]:
    """XLA's collective-permutes, which the channel laws of the calibrations are fitted to."""
    return tuple(
        PublishedPermute(row["machine"], Traffic(row["traffic"]), int(row["ranks"]), int(row["bytes"]), float(row["us"]) / 1e6)
        for row in table_rows("permutes.csv")
    )


def published_refits() -> tuple[PublishedRefit, ...]:
    """Every published refit that states hardware, model and layout, and runs a strategy that shardroute has."""
    found = sources()
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
            row["fitted"] == "1",
            row["bulk_only"] == "1",
            float(row["s"]),
            float(row["low_s"] or row["s"]),
            float(row["high_s"] or row["s"]),
            row["group"],
            found[row["source"]],
            row["note"],
        )
        for row in table_rows("refits.csv")
    )


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Published rows that aren't predicted: how many, which, why. `names` are theirs in a collection that lists them, if any."""

    n_rows: int
    what: str
    reason: str
    names: tuple[str, ...]


def refits_left_out() -> tuple[LeftOut, ...]:
    """Published refits that aren't predicted."""
    return _left_out("refits_left_out.csv")


def collectives_left_out() -> tuple[LeftOut, ...]:
    """Published collectives that aren't predicted."""
    return _left_out("collectives_left_out.csv")


def _left_out(table: str) -> tuple[LeftOut, ...]:
    rows = table_rows(table)
    return tuple(LeftOut(int(row["n"]), row["what"], row["reason"], tuple(row["ids"].split())) for row in rows)


def permute_source() -> Source:
    """Where the permutes are from."""
    return sources()["xla"]
