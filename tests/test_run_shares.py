"""Shares of time that running a plan tells: of getting ready, of the trials, of all; and the time left that commands show."""

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from attention_plans import planned
from hand_plans import HandPlan, column_shards, relay_chain, row_shards
from hypothesis import given
from hypothesis import strategies as st

from shardroute.executors.attention.contents import contents_of
from shardroute.executors.foresee import Foreseen, foresee
from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.interpreting.patterns import COMPARING, arm, fill_sources, verify
from shardroute.executors.launching.advances import moved_share, prepared_share, trials_share
from shardroute.executors.launching.processes import ProcessSession
from shardroute.executors.launching.ranks import PROCESSES
from shardroute.executors.run import run_plan
from shardroute.planner.cli import output
from shardroute.planner.cli.output import progress
from shardroute.planner.plan_files import save_plan
from shardroute.planner.plans import Plan

FORESEEN = Foreseen(
    referring_s=0.0, compiling_s=0.0, starting_s=3.0, filling_s=1.0, moving_s=2.0, verifying_s=6.0
)  # fmt: skip


def all_to_all(n: int, rows: int, columns: int) -> Plan:
    """From rows on n ranks to columns on n others."""
    hand = HandPlan()
    shape = (n * rows, n * columns)
    t = hand.tensor(shape, row_shards(shape, range(n)), column_shards(shape, range(n, 2 * n)))
    for src in range(n):
        for dst in range(n):
            box = (rows * src, rows * (src + 1)), (columns * dst, columns * (dst + 1))
            hand.copy(hand.bundle((t, list(box))), src, n + dst)
    return hand.build(2 * n)


def phases(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def test_before_the_first_trial_the_share_is_of_ranks_that_have_started_and_of_what_they_have_filled() -> None:
    pid, share = np.array([11, 12, 13, 0]), np.array([1.0, 0.5, 0.1, 0.0])

    told = prepared_share(pid, phases(1, 0, 0, 0), share, FORESEEN)

    assert told == pytest.approx((3.0 * 3 / 4 + 1.0 * (1 + 0.5 + 0.1) / 4) / 4.0)


def test_ranks_that_are_all_ready_are_prepared_whatever_their_shares_say_by_now() -> None:
    assert prepared_share(np.array([11, 12]), phases(2, 1), np.array([0.2, 0.0]), FORESEEN) == 1.0


def test_no_trial_has_a_share_while_any_rank_gets_ready() -> None:
    assert trials_share(phases(1, 0), np.ones(2), 1.0, 3, FORESEEN) == 0.0


def test_a_trial_is_moving_then_verifying_each_by_the_time_that_it_is_foreseen_to_take() -> None:
    moving = trials_share(phases(3, 3), np.zeros(2), 0.5, 4, FORESEEN)
    verifying = trials_share(phases(4, 4), np.array([1.0, 0.5]), 1.0, 4, FORESEEN)

    assert moving == pytest.approx((1 + 0.5 * 2 / 8) / 4)
    assert verifying == pytest.approx((1 + (2 + 6 * 0.75) / 8) / 4)


def test_a_rank_that_has_come_to_the_next_barrier_counts_as_having_verified() -> None:
    assert trials_share(phases(3, 2), np.array([1.0, 1.0]), 1.0, 2, FORESEEN) == 0.5


@given(st.integers(1, 5), st.lists(st.integers(0, 11), min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_shares_of_trials_stay_between_0_and_1(n_trials: int, phase: list[int], moved: float, share: float) -> None:
    capped = phases(*(min(p, 2 * n_trials) for p in phase))

    told = trials_share(capped, np.full(len(phase), share), moved, n_trials, FORESEEN)

    assert 0.0 <= told <= 1.0


def test_what_is_moved_is_how_far_ranks_have_come_in_the_mean() -> None:
    assert moved_share(np.array([7, 4, 10]), 10) == 0.7
    assert moved_share(np.array([-1, 4]), 10) == 0.2
    assert moved_share(np.array([-1, -1]), 10) == 0.0
    assert moved_share(np.zeros(0, np.int64), 0) == 0.0


def test_filling_and_verifying_tell_a_share_for_each_fragment() -> None:
    hand = HandPlan()
    for shape in ((8, 64), (16, 32), (4, 128)):
        hand.tensor(shape, row_shards(shape, [0]), row_shards(shape, [0]))
    programs, buffers = compile_plan(hand.build(1))
    arena = np.zeros(int(buffers.arena_bytes[0]), np.uint8)
    target_at, slots_at = int(buffers.target_at[0]), int(buffers.slots_at[0])
    arm(arena, target_at)
    filled: list[float] = []
    verified: list[float] = []

    fill_sources(arena, programs.holdings, 0, filled.append)
    verify(arena, programs.holdings, 0, target_at, slots_at, verified.append)

    assert filled == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert verified == pytest.approx([COMPARING / 3, COMPARING * 2 / 3, COMPARING])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_what_one_device_computes_tells_a_share_for_each_block_of_rows(dtype: str) -> None:
    told: list[float] = []
    plan = planned(dtype=dtype)
    arithmetic = "torch" if dtype == "bf16" else "numpy"

    contents_of(plan, arithmetic, told=told.append)

    assert plan.attention is not None
    assert len(told) >= plan.attention.n_heads * plan.attention.batch * (2 if dtype == "bf16" else 1)
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)


def test_a_run_tells_shares_of_getting_ready_before_the_first_trial_moves() -> None:
    plan = all_to_all(3, 512, 1024)
    told: list[tuple[str, float]] = []
    foreseen = foresee(plan, PROCESSES)
    before = sum(foreseen.parts_s(4)[:3]) / foreseen.whole_s(4)

    run_plan(
        plan, repeats=4, timeout_s=60, progress=lambda share: told.append(("all", share)),
        trials=lambda share: told.append(("trials", share)),
    )  # fmt: skip

    shares = [share for which, share in told if which == "all"]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1.0)
    assert any(0 < share < before for share in shares)
    for (_, share), (which, trial) in pairwise(told):
        if which == "trials":
            assert (trial == 0) == (share <= before + 1e-9)


def test_getting_ready_is_told_until_the_first_trial_moves_and_no_longer() -> None:
    plan = relay_chain(4, n_elements=8, n_chunks=500)
    programs, _ = compile_plan(plan)
    told: list[str] = []

    with ProcessSession(plan, programs, digest=plan.digest, timeout_s=60, n_trials=30) as session:
        session.run(lambda share: told.append("trials") if share > 0 else None, lambda _share: told.append("preparing"))

    assert told.index("trials") == told.count("preparing") > 0


def test_what_is_foreseen_grows_with_ranks_and_bytes_and_takes_a_prediction_for_what_moving_takes() -> None:
    small, large = relay_chain(3, n_elements=1000), relay_chain(6, n_elements=100_000)

    fewer, more = foresee(small, PROCESSES), foresee(large, PROCESSES)

    assert more.starting_s > fewer.starting_s
    assert more.filling_s > fewer.filling_s
    assert more.moving_s > fewer.moving_s
    assert foresee(large, PROCESSES, 7.0) == replace(more, moving_s=7.0)
    assert more.whole_s(3) == pytest.approx(sum(more.parts_s(0)) + 3 * more.trial_s)


# On a terminal


@pytest.mark.parametrize(("foreseen_us", "least", "most"), [(None, 100, 300), (10e6, 9, 11)])
def test_a_share_of_a_thousandth_says_little_where_it_was_foreseen_how_long_all_takes(
    capsys, monkeypatch, foreseen_us: float | None, least: int, most: int
) -> None:
    monkeypatch.setattr(output, "_LINE_S", 0.05)

    with progress("work", foreseen_us) as done:
        time.sleep(0.2)
        done(0.001)

    minutes, seconds = re.search(r"some (?:(\d+) min )?(\d+) s left", capsys.readouterr().err).groups()
    assert least <= 60 * int(minutes or 0) + int(seconds) <= most


@pytest.mark.parametrize("between_shares", [True, False])
def test_a_bar_is_drawn_between_shares_unless_that_would_disturb_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, between_shares: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")

    with progress("work", 5e6, between_shares=between_shares) as done:
        first = len(terminal.getvalue())
        time.sleep(0.5)
        second = len(terminal.getvalue())
        done(0.5)
        third = len(terminal.getvalue())

    assert first > 0
    assert (second > first) is between_shares
    assert third > second or between_shares


class Terminal(io.StringIO):
    """Takes text as a terminal would."""

    def isatty(self) -> bool:
        return True


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
CLOCK = re.compile(r"\d:\d\d:\d\d")


def frames_of(what: str, n: int, command: list[str], folder: Path) -> list[str]:
    """The first n lines that a command draws on a terminal for `what`; then it is interrupted."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm", "COLUMNS": "100"}
    drawn, frames, end_s = b"", list[str](), time.monotonic() + 60
    with subprocess.Popen(
        [sys.executable, "-m", "shardroute.executors", *command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=theirs,
    ) as process:  # fmt: skip
        os.close(theirs)
        while len(frames) < n and time.monotonic() < end_s:
            try:
                drawn += os.read(ours, 65536)
            except OSError:  # nobody has the other end any more
                break
            lines = ESCAPE.sub("", drawn.decode(errors="replace")).replace("\r", "\n").splitlines()
            frames = [line for line in lines[:-1] if what in line]
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # until nobody has the other end: who can't write what it draws doesn't end
            while os.read(ours, 65536):
                pass
    os.close(ours)
    return frames


@pytest.mark.parametrize(
    ("what", "command"),
    [("running 6 ranks", ["run", "a.plan", "--repeats", "100"]), ("measuring", ["calibrate", "--here"])],
    ids=["run", "calibrate"],
)
def test_what_runs_shows_the_time_left_from_the_first_moment_on(tmp_path: Path, what: str, command: list[str]) -> None:
    save_plan(relay_chain(6, n_elements=8, n_chunks=500), tmp_path / "a.plan")

    frames = frames_of(what, 8, command, tmp_path)

    assert len(frames) >= 8
    assert [frame for frame in frames if len(CLOCK.findall(frame)) != 2] == []  # how long it has taken, and what is left
