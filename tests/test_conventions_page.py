"""docs/conventions.md says only what a test shows."""

import re
from pathlib import Path

from shardroute.planner.layouts import CONVENTIONS


def cells(repo: Path) -> list[list[str]]:
    """The rows of the table of what can be moved, its head first, its rule left out."""
    text = (repo / "docs/conventions.md").read_text().partition("## What can be moved")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if not set("".join(row)) <= set("- ")]


def test_every_cell_of_shardroute_names_a_test_that_exists(repo: Path) -> None:
    files = [path.read_text() for path in (repo / "tests").rglob("test_*.py")]
    defined = {name for text in files for name in re.findall(r"^def (test_\w+)\(", text, re.MULTILINE)}

    head, *rows = cells(repo)

    assert head[1] == "shardroute"
    assert len(rows) > 20
    for row in rows:
        assert re.fullmatch(r"`test_\w+`", row[1]), row
        assert row[1].strip("`") in defined, row


def test_every_row_has_a_cell_for_every_peer(repo: Path) -> None:
    head, *rows = cells(repo)

    assert head[2:] == ["NCCL M2N Reshard", "NeMo RL", "Megatron-Core resharding", "DTensor redistribute", "Alpa"]
    assert all(len(row) == len(head) and all(row) for row in rows)


def test_every_convention_is_on_the_page(repo: Path) -> None:
    page = (repo / "docs/conventions.md").read_text()

    assert all(f"`{name}`" in page for name in CONVENTIONS)
