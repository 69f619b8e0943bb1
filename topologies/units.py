"""Text with units to SI numbers and back; the only module that knows what "400 Gb/s" means.

A small b is a bit and a capital B is a byte. kB, MB, GB are powers of 1000; KiB, MiB, GiB powers of 1024.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from shardroute.topologies.errors import InputError

# At most 3 digits of exponent and 40 of mantissa: exact arithmetic on "1e999999999" would not end.
_NUMBER: Final = re.compile(
    r"\s*([0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?)\s*([^\s0-9.]\S*)?\s*"
)

_PREFIXES: Final = (
    ("", 1),
    ("k", 10**3),
    ("K", 10**3),
    ("M", 10**6),
    ("G", 10**9),
    ("T", 10**12),
    ("P", 10**15),
)
_BINARY_PREFIXES: Final = (("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30), ("Ti", 2**40), ("Pi", 2**50))
_BYTE_UNITS: Final[Mapping[str, Fraction]] = MappingProxyType(
    {f"{prefix}B": Fraction(factor) for prefix, factor in _PREFIXES + _BINARY_PREFIXES}
)
_BANDWIDTH_UNITS: Final[Mapping[str, Fraction]] = MappingProxyType(
    {f"{unit}/s": factor for unit, factor in _BYTE_UNITS.items()}
    | {f"{unit[:-1]}b/s": factor / 8 for unit, factor in _BYTE_UNITS.items()}
)
_SECOND_UNITS: Final[Mapping[str, Fraction]] = MappingProxyType(
    {
        "s": Fraction(1),
        "ms": Fraction(1, 10**3),
        "us": Fraction(1, 10**6),
        "µs": Fraction(1, 10**6),
        "ns": Fraction(1, 10**9),
    }
)
_OPERATION_UNITS: Final[Mapping[str, Fraction]] = MappingProxyType(
    {f"{prefix}FLOP/s": Fraction(factor) for prefix, factor in _PREFIXES}
)
# As people say how long a context is: 128K tokens are 131,072.
_TOKEN_UNITS: Final[Mapping[str, Fraction]] = MappingProxyType(
    {"": Fraction(1), "k": Fraction(2**10), "K": Fraction(2**10), "M": Fraction(2**20)}
)
# A thousand times what NVLink 5 gives a GPU one way (900 GB/s).
MAX_RATE_Bps: Final = 1e15
# Byte counts are stored in int64 columns.
_MAX_BYTES: Final = 2**63 - 1

_SHOWN_BYTES: Final = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_SHOWN_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def parse_bandwidth(text: str) -> float:
    """Return bytes per second, one way, of text such as "400 Gb/s" (5e10) or "12 GiB/s".

    Raises InputError for anything but a non-negative decimal number and a bandwidth unit.
    """
    return _finite_float(
        _parse(text, "a bandwidth", _BANDWIDTH_UNITS, "'400 Gb/s', '450 GB/s' or '12 GiB/s'"), text
    )


def parse_rate(text: str) -> float:
    """Return bytes per second as parse_bandwidth does, of a link: 0, or from 1 B/s to MAX_RATE_Bps. Else InputError."""
    rate_Bps = parse_bandwidth(text)
    if rate_Bps and not 1 <= rate_Bps <= MAX_RATE_Bps:
        raise InputError(f"{text!r} is no rate of a link; expected {format_bandwidth(1)} to {format_bandwidth(MAX_RATE_Bps)}")
    return rate_Bps


def parse_bytes(text: str) -> int:
    """Return the whole number of bytes of text such as "80 GB", "64MiB" or "1024" (no unit: bytes).

    Raises InputError for anything else, for a fraction of a byte and beyond 2^63 - 1 bytes.
    """
    units = {**_BYTE_UNITS, "": Fraction(1)}
    exact = _parse(text, "a number of bytes", units, "'80 GB', '64 MiB' or '1024'")
    if exact.denominator != 1 or exact > _MAX_BYTES:
        raise InputError(
            f"{text!r} is not a whole number of bytes below 2^63; write for example '80 GB' or '1024'"
        )
    return int(exact)


def parse_seconds(text: str) -> float:
    """Return the seconds of text such as "18 us", "1.5 ms" or "2 s".

    Raises InputError for anything but a non-negative decimal number and a unit of time.
    """
    return _finite_float(_parse(text, "a time", _SECOND_UNITS, "'18 us', '1.5 ms' or '2 s'"), text)


def parse_operations(text: str) -> float:
    """Return floating-point operations per second of text such as "1400 TFLOP/s" (1.4e15).

    Raises InputError for anything but a non-negative decimal number and that unit.
    """
    return _finite_float(_parse(text, "a rate of computing", _OPERATION_UNITS, "'1400 TFLOP/s'"), text)


def parse_tokens(text: str) -> int:
    """Return the tokens of text such as "131072" or "128K": K is 1024 and M 1024 x 1024, as lengths of contexts are said.

    Raises InputError for anything else, and for none or a fraction of a token.
    """
    exact = _parse(text, "a number of tokens", _TOKEN_UNITS, "'131072' or '128K'")
    if exact.denominator != 1 or exact < 1:
        raise InputError(f"{text!r} is not a whole number of tokens from 1; write for example '131072' or '128K'")
    return int(exact)


def format_bandwidth(bandwidth_Bps: float) -> str:
    """Return bytes per second as text with 3 significant digits and an SI unit: 5e10 is "50.0 GB/s"."""
    return f"{format_bytes(bandwidth_Bps)}/s"


def format_bytes(n_bytes: float) -> str:
    """Return bytes as text with 3 significant digits and an SI unit: 80e9 is "80.0 GB", 512 is "512 B"."""
    if abs(n_bytes) < 1000 and n_bytes == int(n_bytes):
        return f"{int(n_bytes)} B"
    return _scaled(n_bytes, _SHOWN_BYTES)


def format_seconds(time_s: float) -> str:
    """Return seconds as text with 3 significant digits and an SI unit: 1.8e-5 is "18.0 us"."""
    return "0 s" if time_s == 0 else _scaled(time_s, _SHOWN_SECONDS)


def format_count(n: int, noun: str, plural: str | None = None) -> str:
    """Return how many there are, with the noun in its number: "1 step", "1,200 steps"; `plural` where that isn't noun + s."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def _parse(text: str, what: str, units: Mapping[str, Fraction], examples: str) -> Fraction:
    match = _NUMBER.fullmatch(text)
    unit = (match[2] or "") if match else ""
    if match is None or unit not in units:
        needed = "a number is needed" if "" in units else "a number and a unit are needed"
        reason = f"unit {unit!r} is unknown" if match and unit else needed
        raise InputError(f"{text!r} is not {what} ({reason}); write for example {examples}")
    return Fraction(match[1]) * units[unit]


def _finite_float(exact: Fraction, text: str) -> float:
    try:
        return float(exact)
    except OverflowError:
        raise InputError(f"{text!r} is too large for a number; check its exponent") from None


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Return value in the largest unit that leaves at least 1 after rounding to 3 significant digits."""
    # Python's own rounding to 3 significant digits, so that 999.6 becomes 1.00 of the next unit and not 1000.
    rounded = float(f"{value:.2e}")
    scale, unit = next(((s, u) for s, u in units if abs(rounded) >= s), units[-1])
    shown = rounded / scale
    n_decimals = 2 if abs(shown) < 10 else 1 if abs(shown) < 100 else 0
    return f"{shown:.{n_decimals}f} {unit}"
