"""The fuzzer itself: it finds what it is there to find, tells it apart from errors in words, and keeps the smallest input."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz import Row, fuzz_reader, keep
from hypothesis import find

from fuzzing import limits
from fuzzing.engines import warm_up
from fuzzing.limits import Crash
from fuzzing.mutations import changed
from fuzzing.readers import Reader, make_samples, readers
from shardroute.topologies.errors import InputError


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


def fuzzed(read: Callable[[bytes], object], sample: bytes = b"size 12 name x") -> tuple[Row, list[tuple[Crash, bytes]]]:
    def run(data: bytes) -> None:
        read(data)

    row = Row("a reader")
    return row, fuzz_reader(Reader("a reader", [sample], run), ["hypothesis"], 0.6, 1, row)


def spin(data: bytes) -> None:
    while b"name" not in data:
        time.process_time()


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda data: {b"size": 1}[data[:4]], "KeyError"),
        (lambda data: bytearray(len(data) * 2**33), "more than 1024 MiB"),
        (spin, "more than 0.2 s of processor time"),
        (lambda data: os._exit(9) if b"12" not in data else None, "the process ended with 9"),
    ],
    ids=["an exception", "memory", "time", "an end"],
)
def test_what_a_reader_does_wrong_is_found_with_an_input_that_shows_it(monkeypatch, read, kind: str) -> None:
    monkeypatch.setattr(limits, "TIME_S", 0.2)

    row, found = fuzzed(read)

    assert row.n_inputs > 0
    assert [crash.kind for crash, _ in found] == [kind]


def test_errors_in_words_are_no_crashes_and_those_without_are() -> None:
    def refuse(data: bytes) -> None:
        raise InputError("expected something else")

    def say_nothing(data: bytes) -> None:
        raise InputError(" ")

    assert fuzzed(refuse)[1] == []
    assert [crash.kind for crash, _ in fuzzed(say_nothing)[1]] == ["an error without words"]


def test_crashes_are_kept_as_files(tmp_path: Path) -> None:
    names = keep(tmp_path / "kept", "a reader", [(Crash("KeyError", "x.py:f", "Traceback"), b"\x00data")])

    assert [Path(name).read_bytes() for name in names] == [b"\x00data"]
    assert [path.read_text() for path in (tmp_path / "kept").glob("*.txt")] == ["Traceback"]


def test_a_change_keeps_most_of_a_sample() -> None:
    sample = b"".join(b"line %d\n" % i for i in range(100))

    found = find(changed([sample]), lambda data: data != sample and len(data) > 700)

    assert sum(line in sample for line in found.splitlines()) > 50


def test_every_reader_takes_its_own_samples(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_samples(tmp_path)

    for reader in readers(tmp_path):
        if reader.name != "command line":  # whose samples take seconds: whole commands
            reader.read(reader.samples[0])
