"""The examples run as their first lines say, and what they print is right. test_docs_commands.py runs test_own_layout.py."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run_example(repo: Path, name: str, home: Path, *arguments: str) -> list[str]:
    """The lines that an example prints; Ray keeps a token in its home."""
    told = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env = told | {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(repo / "examples" / name), *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=env)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout.splitlines()


def test_the_refit_loop_ends_each_step_with_ranks_that_agree(repo: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")

    planned, *steps = run_example(repo, "refit_loop.py", tmp_path)

    assert re.fullmatch(r"planned: \d+ steps, strategy greedy", planned)
    assert [line.split(" (")[0] for line in steps] == [f"step {k}: all 6 ranks agree" for k in range(3)]


def test_a_loop_goes_on_after_a_trainer_has_died_and_a_server_has_come(repo: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")

    lines = run_example(repo, "refit_changes.py", tmp_path)

    assert [line.split(":")[0] for line in lines] == ["6 ranks", "rank 1 has died", "rank 6 has come"]
    for part in ("meet", "plan", "agree", "get ready", "move", "vote"):
        assert re.search(rf"{part} \d+\.\d ms", lines[1])


@pytest.mark.slow
def test_the_same_loop_runs_in_ray_actors(repo: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")
    pytest.importorskip("ray", reason="ray is not installed; it is an extra of the example")

    _, *steps = run_example(repo, "refit_ray.py", tmp_path)

    assert [line.split(" (")[0] for line in steps] == [f"step {k}: 4 trainers and 2 servers agree" for k in range(3)]


def test_the_table_lists_every_example_and_each_says_what_it_is(repo: Path) -> None:
    folder = repo / "examples"
    files = sorted(path.name for path in folder.glob("*.py"))

    listed = re.findall(r"^\| `(\w+\.py)` \|", (folder / "README.md").read_text(), re.MULTILINE)

    assert sorted(listed) == files
    for name in files:
        words = ast.get_docstring(ast.parse((folder / name).read_text()))
        assert words is not None
        assert name in words, f"{name}: say how to run it"


def test_a_refit_is_planned_by_three_strategies_none_below_the_bound(repo: Path, tmp_path: Path) -> None:
    size, *rows = run_example(repo, "plan_refit.py", tmp_path)

    assert size == "579 tensors, 61.1 GB, 32 GPUs"
    ratios = {row.split()[0]: float(row.split()[3]) for row in rows}
    assert set(ratios) == {"direct", "domain-relay", "gather-broadcast"}
    assert 1 <= ratios["domain-relay"] <= ratios["direct"] <= ratios["gather-broadcast"]


def test_a_strategy_of_ones_own_is_proved_and_predicted_beside_ours(repo: Path, tmp_path: Path) -> None:
    rows = run_example(repo, "own_strategy.py", tmp_path)

    assert [row.split()[0] for row in rows] == ["staircase", "direct", "domain-relay"]


def test_a_layout_of_ones_own_is_moved_and_every_byte_compared(repo: Path, tmp_path: Path) -> None:
    [said] = run_example(repo, "own_layout.py", tmp_path)

    assert re.fullmatch(r"63 blocks moved in .+; 256000 bytes compared, 0 wrong", said)


def test_a_transport_of_ones_own_brings_every_byte(repo: Path, tmp_path: Path) -> None:
    [said] = run_example(repo, "own_transport.py", tmp_path)

    assert re.fullmatch(r"3 ranks, \d+ steps over queues: 24576 bytes compared, 0 wrong", said)


def test_a_ring_is_predicted_on_a_rack_and_right_here(repo: Path, tmp_path: Path) -> None:
    *predicted, ran = run_example(repo, "ring_attention.py", tmp_path)

    assert [row.split()[0] for row in predicted] == ["ring", "all-gather", "ulysses"]
    assert re.search(r"largest difference \S+, 1e-10 allowed", ran)


@pytest.mark.parametrize("dtype", ["bf16", "f8_e4m3", "f64"])
@pytest.mark.parametrize("strategy", ["direct", "domain-relay"])
def test_what_a_reader_without_shardroute_counts_is_what_show_says(repo: Path, tmp_path: Path, strategy: str, dtype: str) -> None:
    from shardroute.planner import make_plan, save_plan
    from shardroute.planner.arguments import tensor_problem
    from shardroute.planner.reports import traffic
    from shardroute.topologies import build_topology, load_machine

    problem = tensor_problem("96,64", dtype, "x=3", "S0", "dp=2,tp=4", "R,S1")
    plan = make_plan(problem, build_topology(load_machine("dgx-h100"), min_gpus=problem.n_ranks), strategy)
    save_plan(plan, tmp_path / "t.plan")

    first, *ranks = run_example(repo, "read_plan.py", tmp_path, str(tmp_path / "t.plan"))

    counted = [[int(n) for n in re.findall(r"(?:sends|in) (\d+)", line)] for line in ranks]
    moved = traffic(plan).n_bytes_moved
    assert first == f"{strategy}, {len(plan.steps)} steps, {moved} bytes between ranks"
    assert sum(sent for sent, _ in counted) == sum(taken for _, taken in counted) == moved
    assert [taken for _, taken in counted][3:] == [96 * 16 * problem.tensors[0].itemsize] * 8
