"""Runs what README.md, CONTRIBUTING.md and docs/ tell a reader to type.

The convention: in a block fenced as ```console, each line that starts with `$ ` is a command (a line that
ends with a backslash goes on in the next one); other lines are output, shown for the reader. A document's
commands run in order in one empty folder, with this environment's programs first on PATH, and must exit 0.
A block fenced as ```console no-run is not run; the line above its fence says why: <!-- no-run: reason -->.
Other shell fences (bash, sh, ...) are refused, so that no command escapes. Python blocks run as scripts.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
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
def test_shell_commands_stand_in_console_blocks(document: Path) -> None:
    shells = {"bash", "sh", "shell", "zsh", "shell-session", "terminal"}

    for block in blocks_of(document.read_text()):
        place = f"{name_of(document)}:{block.number - 1}"
        words = block.info.split()
        assert not (words and words[0] in shells), f"{place}: fence commands as ```console, with `$ `"
        assert words[:1] != ["console"] or words[1:] in ([], ["no-run"]), f"{place}: unknown tag {words[1:]}"
        assert block.info != "console" or block.commands, f"{place}: a console block without a command"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_block_that_is_not_run_says_why(document: Path) -> None:
    for block in blocks_of(document.read_text()):
        if block.info == "console no-run":
            place = f"{name_of(document)}:{block.number - 1}"
            reason = re.fullmatch(r"<!-- no-run: \S.*-->", block.line_above)
            assert reason, f"{place}: put <!-- no-run: reason --> above the fence"


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_commands_of_a_document_run(document: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path}
    blocks = [block for block in blocks_of(document.read_text()) if block.info == "console"]

    for number, command in (each for block in blocks for each in block.commands):
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
        )

        assert ran.returncode == 0, f"{name_of(document)}:{number}: $ {command}\n{ran.stdout}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_the_python_of_a_document_runs(document: Path, tmp_path: Path) -> None:
    for block in blocks_of(document.read_text()):
        if block.info == "python":
            code = "\n".join(block.lines)
            ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S)

            assert ran.returncode == 0, f"{name_of(document)}:{block.number}\n{ran.stderr}"
