"""The examples run as their first lines say, and their ranks agree on every step."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run_example(repo: Path, name: str, home: Path) -> list[str]:
    """The lines that an example prints; Ray keeps a token in its home."""
    told = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env = told | {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(repo / "examples" / name)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.splitlines()


def test_the_refit_loop_ends_each_step_with_ranks_that_agree(repo: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")

    planned, *steps = run_example(repo, "refit_loop.py", tmp_path)

    assert re.fullmatch(r"planned: \d+ steps, strategy greedy", planned)
    assert [line.split(" (")[0] for line in steps] == [f"step {k}: all 6 ranks agree" for k in range(3)]


@pytest.mark.slow
def test_the_same_loop_runs_in_ray_actors(repo: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("ray", reason="ray is not installed; it is an extra of the example")

    _, *steps = run_example(repo, "refit_ray.py", tmp_path)

    assert [line.split(" (")[0] for line in steps] == [f"step {k}: 4 trainers and 2 servers agree" for k in range(3)]
