"""Two ways to make inputs for a reader: hypothesis changes samples, atheris lets coverage guide it."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis.errors import Flaky

from fuzzing.limits import Crash, read_within_limits
from fuzzing.mutations import TOKENS, changed
from fuzzing.readers import Reader

_BATCH: Final = 200  # inputs between looks at the clock, and new states of hypothesis
_LEAST: Final = 10  # inputs of a batch, even where the machine is so busy that the time is over at once
_MOST_CRASHES: Final = 8  # of one reader and engine: more than anyone mends at once
_MOST_BYTES: Final = 2**18  # of an input by atheris

Tell = Callable[[Crash, bytes], None]


class Told(Protocol):
    """Who is told of each input before it is read."""

    def begin(self, data: bytes) -> None:
        """The input that comes next."""


class CrashedError(Exception):
    """Lets hypothesis shrink an input."""


def warm_up() -> None:
    """Make one example: hypothesis loads much of itself with its first, and processes that are forked later have it."""
    find(changed([b"a sample"]), lambda data: True)


def by_hypothesis(reader: Reader, seconds: float, first_seed: int, told: Told, tell: Tell) -> None:
    """Give inputs until the time is over. A crash is told once, by the smallest input that was found for it."""
    end_s = time.monotonic() + seconds
    known: set[tuple[str, str]] = set()
    batch = first_seed * 1_000_000
    while time.monotonic() < end_s and len(known) < _MOST_CRASHES:
        for key, (crash, data) in _batch(reader, batch, end_s, known, told).items():
            known.add(key)
            tell(crash, data)
        batch += 1


def _batch(
    reader: Reader, number: int, end_s: float, known: set[tuple[str, str]], told: Told
) -> dict[tuple[str, str], tuple[Crash, bytes]]:
    smallest: dict[tuple[str, str], tuple[Crash, bytes]] = {}
    n_read = 0

    @seed(number)
    @settings(
        max_examples=_BATCH, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False,
    )  # fmt: skip
    @given(changed(reader.samples))
    def read_one(data: bytes) -> None:
        nonlocal n_read
        if time.monotonic() >= end_s and n_read >= _LEAST:
            return
        n_read += 1
        told.begin(data)
        crash = read_within_limits(reader.read, data)
        if crash is None or (crash.kind, crash.place) in known:
            return
        smallest[crash.kind, crash.place] = crash, data  # hypothesis gives ever smaller ones
        raise CrashedError

    # Flaky: while shrinking the time was over. What was found counts all the same.
    with contextlib.suppress(CrashedError, Flaky):
        read_one()
    return smallest


def by_atheris(reader: Reader, seconds: float, first_seed: int, told: Told, tell: Tell) -> None:
    """The same by libFuzzer with the samples as its corpus. Never returns: the process ends when the time is over."""
    import atheris

    end_s = time.monotonic() + seconds
    known: set[tuple[str, str]] = set()

    def read_one(data: bytes) -> None:
        if time.monotonic() >= end_s:
            os._exit(0)  # libFuzzer's own way out may take an end for a crash
        told.begin(data)
        crash = read_within_limits(reader.read, data)
        if crash is None or (crash.kind, crash.place) in known or len(known) >= _MOST_CRASHES:
            return
        known.add((crash.kind, crash.place))
        tell(crash, data)

    with tempfile.TemporaryDirectory() as folder:
        corpus, words = Path(folder) / "corpus", Path(folder) / "words"
        corpus.mkdir()
        for i, sample in enumerate(reader.samples):
            (corpus / str(i)).write_bytes(sample)
        words.write_text("".join(f'"{"".join(f"{chr(92)}x{b:02x}" for b in token[:60])}"\n' for token in TOKENS))
        options = [f"-seed={first_seed + 1}", f"-max_len={_MOST_BYTES}", "-rss_limit_mb=0", "-timeout=0", f"-dict={words}",
                   f"-artifact_prefix={folder}/", str(corpus)]  # fmt: skip
        atheris.Setup(["fuzz", *options], read_one)
        atheris.Fuzz()
