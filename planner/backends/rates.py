"""Rates at which a machine computes: training steps, and attention on GPUs; from TOML files in which every figure has a source.

A machine's shape and its links are in shardroute.topologies; this is the arithmetic beside them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from shardroute.topologies.documents import FigureTable, listed_tables, read_toml
from shardroute.topologies.errors import InputError
from shardroute.topologies.figures import Quantity, read_figure

_FOLDER: Final = Path(__file__).parent / "rates"
_QUANTITIES: Final[Mapping[str, Quantity]] = {
    "sms": Quantity.COUNT,
    "linear": Quantity.OPERATIONS,
    "attention.forward": Quantity.OPERATIONS,
    "attention.backward": Quantity.OPERATIONS,
    "ring.forward_bytes": Quantity.TRAFFIC,
    "ring.backward_bytes": Quantity.TRAFFIC,
    "ring.channel_start": Quantity.SECONDS,
    "collectives.ring": Quantity.COUNT,
    "collectives.far_ring": Quantity.COUNT,
    "collectives.nvls": Quantity.COUNT,
    "collectives.far_nvls": Quantity.COUNT,
}


@dataclass(frozen=True, slots=True)
class Channels:
    """The most channels that NCCL's collectives take, each of which holds an SM: rings and trees in one NVLink domain and over
    several, and NVLS in one and over several.
    """

    ring: int
    far_ring: int
    nvls: int
    far_nvls: int


@dataclass(frozen=True, slots=True)
class StepRates:
    """Operations per second of one GPU, and memory traffic of a ring's steps beside attention itself.

    n_sms             SMs of one GPU, which NCCL's kernels take some of while they run
    linear_Fps        products of matrices: weights with activations
    forward_Fps, backward_Fps    attention (causal: of the half that is computed; backward has 2.5 times the operations)
    forward_bytes, backward_bytes    memory traffic of one ring step for each element of the attention's output on a rank:
                      merging outputs and log-sum-exp, conversions, copies; at the machine's nominal memory bandwidth
    channel_start_s   seconds that each doubling of an NCCL hop's channels adds to its start over NVLink
    channels          of NCCL's collectives, None where nobody knows
    source            of what they are; each figure's own source stands in the file
    """

    n_sms: int
    linear_Fps: float
    forward_Fps: float
    backward_Fps: float
    forward_bytes: float
    backward_bytes: float
    source: str
    channel_start_s: float = 0.0
    channels: Channels | None = None


class _Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    forward: FigureTable
    backward: FigureTable


class _Ring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    forward_bytes: FigureTable
    backward_bytes: FigureTable
    channel_start: FigureTable | None = None


class _Collectives(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ring: FigureTable
    far_ring: FigureTable
    nvls: FigureTable
    far_nvls: FigureTable


class _RatesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: str
    library: str
    sms: FigureTable
    linear: FigureTable
    attention: _Attention
    ring: _Ring
    collectives: _Collectives | None = None


def rates_names() -> tuple[str, ...]:
    """Names of the machines whose rates ship with shardroute, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_rates(machine_or_path: str) -> StepRates:
    """The rates that ship for a machine, or those of a file whose name ends in .toml.

    Raises InputError for a machine without rates (with those that have some) and for a file that doesn't fit (with the key).
    """
    path = Path(machine_or_path).expanduser()
    if not machine_or_path.endswith(".toml"):
        if machine_or_path not in rates_names():
            raise InputError(
                f"no rates of computation ship for machine {machine_or_path!r}, and predicting a training step needs them; "
                f"known: {', '.join(rates_names())}; or give --rates FILE.toml"
            )
        path = _FOLDER / f"{machine_or_path}.toml"
    file = read_toml(path, _RatesFile)
    listed = [("sms", file.sms), ("linear", file.linear), *listed_tables({"attention": file.attention, "ring": file.ring})]
    if file.collectives is not None:
        listed += listed_tables({"collectives": file.collectives})
    try:
        value = {key: read_figure(key, _QUANTITIES[key], table.value, table.source).value for key, table in listed}
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from None
    return StepRates(
        n_sms=round(value["sms"]),
        linear_Fps=value["linear"],
        forward_Fps=value["attention.forward"],
        backward_Fps=value["attention.backward"],
        forward_bytes=value["ring.forward_bytes"],
        backward_bytes=value["ring.backward_bytes"],
        channel_start_s=value.get("ring.channel_start", 0.0),
        source=f"{file.library} on {file.machine}",
        channels=None if file.collectives is None else _channels(value),
    )


def _channels(value: Mapping[str, float]) -> Channels:
    ring, far_ring, nvls, far_nvls = (round(value[f"collectives.{key}"]) for key in ("ring", "far_ring", "nvls", "far_nvls"))
    return Channels(ring, far_ring, nvls, far_nvls)


@cache
def shipped_channels(machine: str) -> Channels | None:
    """The channels of NCCL's collectives on the machine of that name; None where no rates ship for it, or they don't say."""
    return load_rates(machine).channels if machine in rates_names() else None


@cache
def shipped_sms(machine: str) -> int | None:
    """The SMs of one GPU of the machine of that name; None where no rates ship for it."""
    return load_rates(machine).n_sms if machine in rates_names() else None
