"""The page of promises names tests that exist."""

import ast
import re
from pathlib import Path

import pytest
from fault_cases import CASES


def named(repo: Path) -> list[tuple[str, str]]:
    return re.findall(r"`([\w/]+\.py)::(test_\w+)`", (repo / "docs" / "promises.md").read_text())


def test_every_promise_names_a_test_that_exists(repo: Path) -> None:
    missing = []
    for file, name in named(repo):
        tree = ast.parse((repo / "tests" / file).read_text())
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{file}::{name}")

    assert len(named(repo)) > 20
    assert missing == []


def test_every_row_of_the_page_is_held_by_something(repo: Path) -> None:
    rows = [line.split("|")[1:3] for line in (repo / "docs" / "promises.md").read_text().splitlines() if line.startswith("| ")]

    for promise, held in rows:
        assert "held by" in held or "---" in held or re.search(r"`[\w/]+\.py::test_\w+`|the same", held), promise


@pytest.mark.parametrize("case", ["relay stops", "relay stops and is resumed", "one rank verifies alone",
                                  "one rank lacks memory for staging"])  # fmt: skip
def test_cases_that_the_page_names_are_cases(repo: Path, case: str) -> None:
    assert f"`{case}`" in (repo / "docs" / "promises.md").read_text()
    assert case in CASES


def test_at_least_forty_faults_are_injected() -> None:
    assert len(CASES) >= 40
