"""Ranks that mpiexec has started tell how far they are, and end with who started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hand_plans import relay_chain

from shardroute.executors.run import run_plan
from shardroute.planner.plan_files import save_plan

MUCH_S = 30.0  # to start, or to end; each takes some seconds, and left alone the ranks would run for ten minutes


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for a signal")
def test_ranks_end_when_the_caller_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install 'shardroute[mpi]')")
    save_plan(relay_chain(3, n_elements=8, n_chunks=500), tmp_path / "a.plan")
    run = ["run", "a.plan", "--transport", "mpi", "--spawn", "--repeats", "10000", "--timeout", "600"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}

    with subprocess.Popen(
        [sys.executable, "-m", "shardroute.executors", *run], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    ) as caller:
        assert within(MUCH_S, lambda: len(ranks_of(tmp_path)) == 3)
        caller.send_signal(signal.SIGKILL)

    assert within(MUCH_S, lambda: not ranks_of(tmp_path))


def ranks_of(folder: Path) -> list[int]:
    """Processes that run a plan out of a folder in this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"mpiexec" not in words[0] and any(word.startswith(f"{folder}/shardroute-".encode()) for word in words):
            found.append(int(path.name))
    return found


def within(seconds: float, holds) -> bool:
    """Whether it holds before so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.05)
    return False


def test_a_run_by_mpiexec_tells_how_far_its_ranks_are() -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install 'shardroute[mpi]')")
    told: list[float] = []
    trials: list[float] = []

    run_plan(
        relay_chain(3, n_elements=8, n_chunks=500), transport="mpi", repeats=20, timeout_s=60, progress=told.append,
        trials=trials.append,
    )  # fmt: skip

    assert told == sorted(told)
    assert told[-1] == trials[-1] == 1.0
    assert any(0 < share < 1 for share in trials)
