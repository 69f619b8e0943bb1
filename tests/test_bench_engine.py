"""tools/bench_engine.py: what it prints for small cases, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "bench_engine.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)


def test_it_measures_cases_exactly_and_with_the_tolerance_and_says_why_simgrid_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    report = tmp_path / "report.json"

    found = run("a2av_4", "a2av_8", "--no-simgrid", "--tolerance", "0.02", "--json", str(report))

    assert found.returncode == 0, found.stderr
    assert "No SimGrid column: not asked for." in found.stdout
    assert "growth of a2av: exact" in found.stdout
    rows = json.loads(report.read_text())
    assert [(row["case"], row["n_flows"]) for row in rows] == [("a2av_4", 12), ("a2av_8", 56)]
    for row in rows:
        assert "simgrid" not in row
        assert row["exact"]["reached"] == 0.0
        assert 0.0 < row["tolerance"]["reached"] <= 0.02 * (1 + 1e-9)
        assert row["tolerance"]["n_solves"] <= row["exact"]["n_solves"]


@pytest.mark.parametrize("case", ["a2z_4", "a2a", "a2a_1", "refit_x"])
def test_an_unknown_case_is_refused_in_words(case: str) -> None:
    found = run(case, "--no-simgrid")

    assert found.returncode == 2
    assert found.stderr.startswith(f"bench_engine: {case}: found no such case; expected one of a2a, a2av, ring, refit,")
