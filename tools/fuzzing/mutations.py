"""Inputs made of real samples: a few changes each, drawn by hypothesis, so that it can shrink what fails.

Rule: a change keeps most of a sample, since what is wrong everywhere is refused at the first byte.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from hypothesis import strategies as st

# What readers have stumbled over elsewhere: sizes that wrap, what JSON and TOML take for numbers, names that lead out of a
# folder, bytes that aren't text, digits that aren't ASCII, and entities of XML.
TOKENS: Final[Sequence[bytes]] = (
    b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"4294967296", b"2147483648", b"1000000000",
    b"-1", b"-9223372036854775808", b"0", b"0.5", b"1e308", b"1e999", b"-1e999", b"NaN", b"nan", b"Infinity", b"-inf", b"null",
    b"true", b'""', b"[]", b"{}", b"''", b"../../../../etc/passwd", b"/dev/zero", b"a\x00b", b"\xff\xfe", b"\xed\xa0\x80",
    b"\xc2\xb2", b"\xd9\xa3", b"\r\n", b"\n\n", b"\t", b"%s", b"${a}", b"&lol;", b"<!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]>",
    b"9" * 5000, b" x ", b"=", b",", b":", b"-", b"*", b"(", b")", b"[", b"]", b"{", b"}", b"|", b'"', b"'", b"#", b"<", b">",
)  # fmt: skip
# Openings that nest when they are repeated.
OPENINGS: Final[Sequence[bytes]] = (b"[", b"{", b'{"a":', b"(", b"<a>", b"((", b"[[", b"a.", b"-", b"a:\n ", b'[{"a":', b"x={a=")
_REPEATS: Final = (2, 100, 5000, 60_000)
_INTEGERS: Final = (0, 1, -1, 2, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
_NUMBER: Final = re.compile(rb"\d+")
_WORD: Final = re.compile(rb"[\w.+-]+")


def changed(samples: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """One of the samples after up to 4 changes; each is drawn as its kind and two numbers, which takes hypothesis little time."""
    numbers = st.integers(0, 2**24)
    changes = st.lists(st.tuples(st.sampled_from(_CHANGES), numbers, numbers), max_size=4)
    return st.builds(partial(_with_changes, samples), st.integers(0, len(samples) - 1), changes)


def _with_changes(samples: Sequence[bytes], which: int, changes: Sequence[tuple["_Change", int, int]]) -> bytes:
    data = samples[which]
    for change, a, b in changes:
        data = change(data, a, b, samples)
    return data


_Change = Callable[[bytes, int, int, Sequence[bytes]], bytes]


def _flipped(data: bytes, a: int, b: int, samples: Sequence[bytes]) -> bytes:
    at = a % (len(data) + 1)
    return data[:at] + bytes([b % 256]) + data[at + b // 256 % 2 :]


def _number(data: bytes, a: int, b: int, samples: Sequence[bytes]) -> bytes:
    """Another number in place of one of the text, near it or far from it."""
    new = TOKENS[b // 2 % 20] if b % 2 else str(b // 2 % 100_000).encode()
    return _replaced(data, _NUMBER, a, new)


def _word(data: bytes, a: int, b: int, samples: Sequence[bytes]) -> bytes:
    """A word of some sample in another's place, or one that readers stumble over."""
    others: list[bytes] = _WORD.findall(samples[b // 2 % len(samples)])
    return _replaced(data, _WORD, a, others[b // 2 % len(others)] if b % 2 and others else TOKENS[b // 2 % len(TOKENS)])


def _replaced(data: bytes, pattern: re.Pattern[bytes], a: int, new: bytes) -> bytes:
    found = [match.span() for match in pattern.finditer(data)]
    start, end = found[a % len(found)] if found else (a % (len(data) + 1),) * 2
    return data[:start] + new + data[end:]


def _inserted(data: bytes, a: int, b: int, samples: Sequence[bytes]) -> bytes:
    at = a % (len(data) + 1)
    return data[:at] + TOKENS[b % len(TOKENS)] + data[at:]


def _cut(data: bytes, a: int, b: int, samples: Sequence[bytes]) -> bytes:
    """Cut short, or without up to 64 bytes."""
    at = a % (len(data) + 1)
    return data[:at] + (data[at + b // 2 % 64 :] if b % 2 else b"")


def _twice(data: bytes, a: int, b: int, samples: Sequence[bytes]) -> bytes:
    """A line, as names that stand twice have it, or any stretch once more."""
    lines = data.splitlines(keepends=True)
    if len(lines) > 1 and b % 2:
        return b"".join([*lines[: a % len(lines)], *lines[max(0, a % len(lines) - 1) :]])
    start = a % (len(data) + 1)
    stretch = data[start : start + 1 + b // 2 % 200]
    return data[:start] + stretch * 2 + data[start + len(stretch) :]


def _nested(data: bytes, a: int, b: int, samples: Sequence[bytes]) -> bytes:
    at = a % (len(data) + 1)
    n_repeats = _REPEATS[b // len(OPENINGS) % len(_REPEATS)]
    return data[:at] + OPENINGS[b % len(OPENINGS)] * n_repeats + data[at:]


def _spliced(data: bytes, a: int, b: int, samples: Sequence[bytes]) -> bytes:
    other = samples[b % len(samples)]
    start, at = b % (len(other) + 1), a % (len(data) + 1)
    return data[:at] + other[start : start + b % 400] + data[at:]


def _integer(data: bytes, a: int, b: int, samples: Sequence[bytes]) -> bytes:
    """A whole number as binary columns and headers hold it, aligned from the end as they are."""
    size = (8, 4, 2, 1)[b // len(_INTEGERS) % 4]
    packed: bytes = (_INTEGERS[b % len(_INTEGERS)] % 2 ** (8 * size)).to_bytes(size, "little")
    at = len(data) - size * (1 + a % max(1, len(data) // size))
    return data + packed if at < 0 else data[:at] + packed + data[at + size :]


_CHANGES: Final[Sequence[_Change]] = (
    _flipped, _number, _number, _word, _word, _inserted, _cut, _twice, _nested, _spliced, _integer,
)  # fmt: skip
