"""tools/oracle.py: our finish times against those of an independent simulator, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "oracle.py"
FILES = sorted((Path(__file__).parent / "data" / "oracle").glob("*.json"))


def run(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *map(str, files)], capture_output=True, text=True, check=False)


def test_every_oracle_file_agrees_to_a_billionth() -> None:
    found = run(*FILES)

    assert found.returncode == 0, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == len(FILES) >= 13
    for line, file in zip(lines, FILES, strict=True):
        name, difference, verdict = line.split()
        assert Path(name) == file
        assert float(difference) <= 1e-9
        assert verdict == "ok"


def test_a_file_that_disagrees_is_named_and_exits_1(tmp_path: Path) -> None:
    case = json.loads(FILES[0].read_text())
    case["finish_s"][0] *= 1.001
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(case))

    found = run(wrong, FILES[1])

    assert found.returncode == 1
    assert "wrong.json  9.99e-04  over 1e-06" in found.stdout
    assert f"{FILES[1]}  0.00e+00  ok" in found.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "isn't JSON"),
        ("[]", "isn't an oracle file"),
        ('{"links": []}', "has no key 'flows'"),
        ('{"links": [], "flows": [], "finish_s": [1]}', "finish_s: found shape (1,), expected one time for each of 0 flows"),
        (
            '{"links": [], "flows": [{"start_s": 0, "size_B": 1, "route": [], "deps": []}], "finish_s": [1]}',
            "task 0 can never be timed",
        ),
    ],
)
def test_a_bad_file_exits_2_with_what_is_wrong_and_no_traceback(tmp_path: Path, text: str, words: str) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(text)

    found = run(bad)

    assert found.returncode == 2
    assert found.stderr.startswith(f"oracle: {bad}: ")
    assert words in found.stderr
    assert "Traceback" not in found.stderr


def test_a_missing_file_exits_2(tmp_path: Path) -> None:
    found = run(tmp_path / "absent.json")

    assert found.returncode == 2
    assert "absent.json: can't be read" in found.stderr


def test_no_file_at_all_exits_2_with_the_usage() -> None:
    found = run()

    assert found.returncode == 2
    assert "python tools/oracle.py FILE..." in found.stderr
