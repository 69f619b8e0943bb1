"""Runs what README.md, CONTRIBUTING.md, docs/ and examples/ tell a reader to type.

The convention: in a block fenced as ```console, each line that starts with `$ ` is a command (a line that
ends with a backslash goes on in the next one); other lines are output, shown for the reader. A block fenced
as ```python is a script. A document's blocks run in order in one folder, with this environment's programs
first on PATH, and must exit 0. The folder is empty but for a link to examples/, or, where the document says
<!-- continues: other.md -->, the one that the blocks of that document have left: plans are made once.

A block fenced as ```console no-run or ```python no-run is not run; the line above its fence says why:
<!-- no-run: reason -->. A file that a page shows in whole (--8<-- "examples/x.py") is an example, which
tests/test_examples.py runs. Fences of other kinds are refused but for plain data, so that nothing escapes.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip
# What a fence may be: run, left out for a reason, or data and output for the reader.
RUN, LEFT_OUT, SHOWN = {"console", "python"}, {"console no-run", "python no-run"}, {"text", "toml", "json", "yaml"}
CONTINUES = re.compile(r"^<!-- continues: ([\w-]+\.md) -->$", re.MULTILINE)
INCLUDED = re.compile(r'^--8<-- "(.*)"$')
# A command in a document that takes longer than this is no example; seconds.
TIMEOUT_S = 240


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the words after its fence, the line above it, its first line's number, its lines."""

    info: str
    line_above: str
    number: int
    lines: tuple[str, ...]

    @property
    def commands(self) -> list[tuple[int, str]]:
        """(line number, command) of each command, continuation lines joined."""
        found: list[tuple[int, str]] = []
        for number, line in enumerate(self.lines, self.number):
            if found and found[-1][1].endswith("\\"):
                found[-1] = (found[-1][0], f"{found[-1][1]}\n{line}")
            elif line.startswith("$ "):
                found.append((number, line.removeprefix("$ ")))
        return found


def blocks_of(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order; a fence that is never closed ends with the text."""
    lines = text.splitlines()
    blocks: list[Block] = []
    i = 0
    while i < len(lines):
        fence = re.match(r"\s*(`{3,}|~{3,})(.*)", lines[i])
        if fence is None:
            i += 1
            continue
        end = next((j for j in range(i + 1, len(lines)) if lines[j].strip() == fence[1]), len(lines))
        above = next((line.strip() for line in reversed(lines[:i]) if line.strip()), "")
        blocks.append(Block(fence[2].strip(), above, i + 2, tuple(lines[i + 1 : end])))
        i = end + 1
    return blocks


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


EXAMPLE = """
Intro.

```console
$ echo one \\
    two
one two
$ false | true
```

<!-- no-run: takes an hour -->

```console no-run
$ sleep 3600
```
~~~python
print("$ not a command")
~~~
"""


def test_commands_are_the_dollar_lines_of_a_block_with_their_continuations() -> None:
    first, second, third = blocks_of(EXAMPLE)

    assert (first.info, second.info, third.info) == ("console", "console no-run", "python")
    assert first.commands == [(5, "echo one \\\n    two"), (8, "false | true")]
    assert second.line_above == "<!-- no-run: takes an hour -->"


def test_the_readme_shows_a_command_that_is_run() -> None:
    run = [block for block in blocks_of((ROOT / "README.md").read_text()) if block.info == "console"]

    assert any(block.commands for block in run)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_no_placeholder_is_left_in_a_document(document: Path) -> None:
    assert not re.search(r"@@\w+@@|TODO|FIXME", document.read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_fence_is_run_or_left_out_or_plain_data(document: Path) -> None:
    for block in blocks_of(document.read_text()):
        place = f"{name_of(document)}:{block.number - 1}"
        assert block.info in RUN | LEFT_OUT | SHOWN, f"{place}: fence {block.info!r}; commands are ```console, with `$ `"
        assert block.info != "console" or block.commands, f"{place}: a console block without a command"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_block_that_is_not_run_says_why(document: Path) -> None:
    for block in blocks_of(document.read_text()):
        if block.info in LEFT_OUT:
            place = f"{name_of(document)}:{block.number - 1}"
            reason = re.fullmatch(r"<!-- no-run: \S.*-->", block.line_above)
            assert reason, f"{place}: put <!-- no-run: reason --> above the fence"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_file_that_is_shown_in_whole_is_an_example(document: Path) -> None:
    for line in (line for block in blocks_of(document.read_text()) for line in block.lines):
        if (found := INCLUDED.match(line)) is not None:
            assert (ROOT / found[1]).parent == ROOT / "examples", f"{name_of(document)}: {line}"
            assert (ROOT / found[1]).is_file(), f"{name_of(document)}: {line}"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PATH whose `shardroute` starts at once, and whose other programs are those of this environment."""
    folder = tmp_path_factory.mktemp("programs")
    loaded = subprocess.Popen([sys.executable, Path(__file__).with_name("preloaded_program.py"), folder], stdout=subprocess.PIPE)
    try:
        assert loaded.stdout is not None
        assert loaded.stdout.readline() == b"ready\n"
        yield os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    finally:
        loaded.terminate()
        loaded.communicate()


@pytest.mark.parametrize("command", ["echo x | shardroute machines --json | head -c 40", "shardroute show nope.plan"])
def test_the_program_that_is_loaded_once_answers_as_the_real_one(command: str, programs: str, tmp_path: Path) -> None:
    def answer(path: str) -> tuple[int, bytes, bytes]:
        environment = os.environ | {"PATH": path}
        ran = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=60)
        return ran.returncode, ran.stdout, ran.stderr

    preloaded, real = answer(programs), answer(programs.partition(os.pathsep)[2])

    assert preloaded == real
    assert any(preloaded)


@pytest.fixture(scope="module")
def folder_after(programs: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Runs the blocks of a document, and of those that it continues, once; the folder that they leave."""
    left: dict[Path, Path] = {}

    def run(document: Path) -> Path:
        if document not in left:
            continued = CONTINUES.search(document.read_text())
            if continued is not None:
                folder = run(document.parent / continued[1])
            else:
                folder = tmp_path_factory.mktemp(document.stem)
                (folder / "examples").symlink_to(ROOT / "examples")
            run_blocks(document, folder, programs)
            left[document] = folder
        return left[document]

    return run


def run_blocks(document: Path, folder: Path, programs: str) -> None:
    """Run a document's blocks; a command that fails is an assertion, with its line and what it printed."""
    environment = os.environ | {"PATH": programs}
    for block in blocks_of(document.read_text()):
        if block.info == "console":
            parts = [(number, ["bash", "-euo", "pipefail", "-c", command]) for number, command in block.commands]
        elif block.info == "python" and not any(INCLUDED.match(line) for line in block.lines):
            parts = [(block.number, [sys.executable, "-c", "\n".join(block.lines)])]
        else:
            continue
        for number, command in parts:
            ran = subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, timeout=TIMEOUT_S,
            )  # fmt: skip

            assert ran.returncode == 0, f"{name_of(document)}:{number}: $ {command[-1]}\n{ran.stdout}"


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_commands_and_the_python_of_a_document_run(document: Path, folder_after: Callable[[Path], Path]) -> None:
    folder_after(document)
