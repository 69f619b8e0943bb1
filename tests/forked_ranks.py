"""Ranks of a test program, forked, each of which leaves what it found in a file."""

import json
import os
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
