"""Rates at which a machine computes: training steps, and attention on GPUs; from TOML files in which every figure has a source.

A machine's shape and its links are in shardroute.topologies; this is the arithmetic beside them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from shardroute.topologies.documents import read_toml
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import parse_operations, parse_seconds

_FOLDER: Final = Path(__file__).parent / "rates"


@dataclass(frozen=True, slots=True)
class StepRates:
    """Operations per second of one GPU, and memory traffic of a ring's steps beside attention itself.

    linear_Fps        products of matrices: weights with activations
    forward_Fps, backward_Fps    attention (causal: of the half that is computed; backward has 2.5 times the operations)
    forward_bytes, backward_bytes    memory traffic of one ring step for each element of the attention's output on a rank:
                      merging outputs and log-sum-exp, conversions, copies; at the machine's nominal memory bandwidth
    channel_start_s   seconds that each doubling of an NCCL hop's channels adds to its start over NVLink
    source            of what they are; each figure's own source stands in the file
    """

    linear_Fps: float
    forward_Fps: float
    backward_Fps: float
    forward_bytes: float
    backward_bytes: float
    source: str
    channel_start_s: float = 0.0


class _Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: str
    source: str


class _Bytes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: float
    source: str


class _Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    forward: _Figure
    backward: _Figure


class _Ring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    forward_bytes: _Bytes
    backward_bytes: _Bytes
    channel_start: _Figure | None = None


class _RatesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    machine: str
    library: str
    linear: _Figure
    attention: _Attention
    ring: _Ring


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
    for key, figure in (("ring.forward_bytes", file.ring.forward_bytes), ("ring.backward_bytes", file.ring.backward_bytes)):
        if not 0 <= figure.value < float("inf"):
            raise InputError(f"{path.name}: {key}: expected bytes an element from 0, found {figure.value!r}")
    start = file.ring.channel_start
    return StepRates(
        linear_Fps=_parsed(path, "linear", file.linear),
        forward_Fps=_parsed(path, "attention.forward", file.attention.forward),
        backward_Fps=_parsed(path, "attention.backward", file.attention.backward),
        forward_bytes=file.ring.forward_bytes.value,
        backward_bytes=file.ring.backward_bytes.value,
        channel_start_s=0.0 if start is None else _parsed(path, "ring.channel_start", start, parse_seconds),
        source=f"{file.library} on {file.machine}",
    )


def _parsed(path: Path, key: str, figure: _Figure, parse: Callable[[str], float] = parse_operations) -> float:
    try:
        value = parse(figure.value)
    except InputError as error:
        raise InputError(f"{path.name}: {key}: {error}") from None
    if parse is parse_operations and value == 0:
        raise InputError(f"{path.name}: {key}: expected text such as '1400 TFLOP/s', above 0, found {figure.value!r}")
    return value
