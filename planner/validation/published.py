"""Published measurements that ship with shardroute: small tables, each row with its source and the system it was taken on."""

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitCase:
    """A refit as a system runs it: a model between two layouts on a machine, by a strategy.

    model        a shipped one, or a name of the studies' stand-ins; precision and mtp as `load_model` takes them
    domain_gpus  of an NVLink domain, where the system had fewer than the machine; else 0
    framework    a training framework runs it, whose host spends time on each tensor
    """

    name: str
    model: str
    precision: str | None
    mtp: bool
    source_spec: str
    target_spec: str
    machine: str
    domain_gpus: int
    strategy: str
    framework: bool
    group: str
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRefit(RefitCase):
    """One measured refit. time_s is the middle of low_s to high_s where the source gives a range. fitted: the host's time for a
    tensor comes from this row.
    """

    fitted: bool
    time_s: float
    low_s: float
    high_s: float
    origin: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedRefit(RefitCase):
    """A refit that is spoken of without all that a prediction needs, with what is assumed in the note. time_s: what is said to
    have been measured; None where no number was found. said: where it is spoken of.
    """

    time_s: float | None
    said: str


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
            **_case(row),
            fitted=row["fitted"] == "1",
            time_s=float(row["s"]),
            low_s=float(row["low_s"] or row["s"]),
            high_s=float(row["high_s"] or row["s"]),
            origin=found[row["source"]],
        )
        for row in table_rows("refits.csv")
    )


def assumed_refits() -> tuple[AssumedRefit, ...]:
    """Refits to set beside the published ones, which nothing counts."""
    return tuple(
        AssumedRefit(**_case(row), time_s=float(row["s"]) if row["s"] else None, said=row["said"])
        for row in table_rows("refits_assumed.csv")
    )


def _case(row: dict[str, str]) -> dict[str, Any]:
    """The fields of a case, which both tables have."""
    return {
        "name": row["id"],
        "model": row["model"],
        "precision": row["precision"] or None,
        "mtp": row["mtp"] == "1",
        "source_spec": row["from"],
        "target_spec": row["to"],
        "machine": row["machine"],
        "domain_gpus": int(row["domain_gpus"]),
        "strategy": row["strategy"],
        "framework": row["framework"] == "1",
        "group": row["group"],
        "note": row["note"],
    }


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
