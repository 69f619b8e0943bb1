"""Processes of tests: ranks that leave what they found in files, programs that Ctrl-C ends."""

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def fork_ranks(n_ranks: int, folder: Path, run: Callable[[int], object]) -> None:
    """Run each rank in a process of its own, and wait for all; what it returns, or its traceback, is left in RANK.json."""
    pids = []
    for rank in range(n_ranks):
        pid = os.fork()
        if pid == 0:
            try:
                found = run(rank)
            except BaseException:
                found = traceback.format_exc()
            (folder / f"{rank}.json").write_text(json.dumps(found))
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def hear_ctrl_c() -> None:
    """In a process about to be started: a shell may have started the tests in the background, where Ctrl-C is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def descendants(pid: int, at_least: int, within_s: float = 30.0) -> list[int]:
    """Processes under one, once there are so many."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        found, open_ = [], [pid]
        while open_:
            path = Path(f"/proc/{open_.pop()}/task")
            try:
                children = [int(c) for task in path.iterdir() for c in (task / "children").read_text().split()]
            except OSError:
                continue
            found += children
            open_ += children
        if len(found) >= at_least:
            return found
        time.sleep(0.05)
    raise AssertionError(f"fewer than {at_least} processes under {pid}")
