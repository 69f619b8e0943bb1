"""The site of docs/: every page is in the navigation, every link leads somewhere, and what is built loads nothing."""

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import docs_site
import pytest

# Pages of the Python API, by the package that they are made of.
PACKAGES = {
    "planner": "planner", "layouts": "planner.layouts", "exchange": "planner.exchange", "ring": "planner.ring",
    "steps": "planner.steps", "choice": "planner.choice", "topologies": "topologies", "executors": "executors",
}  # fmt: skip
FENCED = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without code."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub and Python-Markdown spell them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M), re.M)
    words = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in heads)
    return {re.sub(r"\s+", "-", text) for text in words}


def pages_of(repo: Path) -> list[Path]:
    return [repo / "README.md", repo / "CONTRIBUTING.md", repo / "examples" / "README.md", *(repo / "docs").rglob("*.md")]


def test_every_link_between_pages_leads_to_a_page_and_a_heading(repo: Path) -> None:
    broken = []
    for page in pages_of(repo):
        for link in LINK.findall(prose(page)):
            if re.match(r"https?://|mailto:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(repo)}: {link}")

    assert broken == []


def test_a_link_of_a_page_of_the_site_stays_on_the_site(repo: Path) -> None:
    docs = repo / "docs"

    for page in docs.rglob("*.md"):
        local = [link.partition("#")[0] for link in LINK.findall(prose(page)) if "//" not in link]
        assert all((page.parent / path).resolve().is_relative_to(docs) for path in local if path), page


def test_the_navigation_has_every_page_once(repo: Path) -> None:
    navigation = (repo / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]

    listed = sorted(re.findall(r"[\w/-]+\.md$", navigation, re.MULTILINE))

    assert listed == sorted(page.relative_to(repo / "docs").as_posix() for page in (repo / "docs").rglob("*.md"))


def test_the_page_of_the_plan_format_has_every_column_of_a_plan_file(repo: Path) -> None:
    from shardroute.planner.plan_files import _COLUMNS, _Header, _TensorHead
    from shardroute.planner.plans import Backend, Kind, Lane, Op

    text = (repo / "docs" / "plan-format.md").read_text(encoding="utf-8")

    assert {name for name in re.findall(r"`([a-z_.]+)`", text) if "." in name or name in _COLUMNS} >= _COLUMNS
    assert all(f"`{name}`" in text for head in (_Header, _TensorHead) for name in head.__struct_fields__)
    assert all(f"{op.value} {op.name}" in text for op in (*Op, *Kind))
    assert all(f"{lane.value} {lane.name.lower().replace('_', ' ')}" in text for lane in Lane)
    assert all(f"{backend.value} " in text for backend in Backend)


@pytest.mark.parametrize(
    ("words", "title"),
    [
        ("", ""), (" needs torch mpi", ' title="Needs torch, MPI"'), (" needs no-gpu", ""), (" exits 0 1", ""), (" of gate", ""),
        (" needs gpus slurm exits 0 1", ' title="Needs GPUs, Slurm"'), (" in checkout needs report", ' title="Needs report"'),
    ],
)  # fmt: skip
def test_a_block_says_in_its_title_what_it_needs_and_nothing_of_how_it_is_tested(words: str, title: str) -> None:
    shown = docs_site.on_page_markdown(f"before\n\n```console{words}\n$ true\n```\n")

    assert shown == f"before\n\n```console{title}\n$ true\n```\n"


def test_columns_and_code_of_docstrings_keep_their_lines_and_prose_flows() -> None:
    columns = "rank   who holds it\nlo, hi   the box, lo &lt;= i"
    code = "plan = make(problem)\ncheck(plan)"
    prose = "Compared by content. Raises InputError\nwhen a box is empty; `lo` and (n, m) stay."

    shown = docs_site.on_page_content('<div class="doc x">' + "".join(f"<p>{text}</p>" for text in (columns, code, prose)))

    set_apart = "".join(f'<pre class="docstring">{text}</pre>' for text in (columns, code))
    assert shown == f'<div class="doc x">{set_apart}<p>{prose}</p>'


@pytest.mark.parametrize("text", ["Bytes of each step", "rank", "a, b and c", "Raises as make_plan does.", "x"])
def test_prose_is_not_taken_for_code(text: str) -> None:
    assert not docs_site.is_code(text)


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(repo: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("the site needs the extra `docs`; `make docs` builds it")

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    built = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=120)

    assert built.returncode == 0, built.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=\"?(https?:[^\"\s>]+|//[^\"\s>]+)", text)
        assert loaded == [], page.name
        assert not re.search(r"(console|python) (needs|exits|in|of) ", text), page.name
    for page, package in PACKAGES.items():
        text = (tmp_path / "site" / "api" / f"{page}.html").read_text(encoding="utf-8")
        offered = importlib.import_module(f"shardroute.{package}").__all__
        assert [name for name in offered if not re.search(rf'id="shardroute\.[\w.]*\b{name}"', text)] == []
