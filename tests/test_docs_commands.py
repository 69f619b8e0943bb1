"""Runs what README.md, CONTRIBUTING.md, docs/ and examples/ tell a reader to type.

The convention: in a block fenced as ```console, each line that starts with `$ ` is a command (a line that
ends with a backslash goes on in the next one); other lines are output, shown for the reader. A block fenced
as ```python is a script. A document's blocks run in order in one folder, with this environment's programs
first on PATH, and must exit 0. The folder is empty but for a link to examples/, or, where the document says
<!-- continues: other.md -->, the one that the blocks of that document have left: plans are made once.

A block fenced as ```console needs torch (or several words of NEEDS) runs where that is here; where not, a test of
its own is skipped and says how to get it. A block fenced as ```console no-run or ```python no-run is not run; the
line above its fence says why: <!-- no-run: reason -->. Its commands must still be ones that the program takes, its
Python must compile, and what it imports of shardroute must be there; so must commands in a line of text, `shardroute
x`. A file that a page shows in whole (--8<-- "examples/x.py") is an example, which tests/test_examples.py runs.
Fences of other kinds are refused but for plain data, so that nothing escapes.
"""

import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
from typer import Exit

import shardroute.executors.commands  # noqa: F401 - the whole program's commands
from shardroute.planner.cli.program import app, let_speak

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip
# What a fence may be: run, left out for a reason, or data and output for the reader.
RUN, LEFT_OUT, SHOWN = {"console", "python"}, {"console no-run", "python no-run"}, {"text", "toml", "json", "yaml"}


def has(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def on_path(program: str) -> bool:
    return shutil.which(program, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) is not None


# What a block may need beside the core install: whether it is here, and how to get it.
NEEDS: dict[str, tuple[bool, str]] = {
    "torch": (has("torch"), "pip install 'shardroute[torch]'"),
    "mpi": (has("mpi4py") and on_path("mpirun"), "pip install 'shardroute[mpi]'"),
    "report": (has("vl_convert"), "pip install 'shardroute[report]'"),
    "parquet": (has("pyarrow"), "pip install 'shardroute[parquet]'"),
    "openssl": (on_path("openssl"), "install openssl"),
    "no-gpu": (not on_path("nvidia-smi"), "a machine without GPUs; with them it takes minutes"),
}
CONTINUES = re.compile(r"^<!-- continues: ([\w-]+\.md) -->$", re.MULTILINE)
# A command in a line of text.
IN_TEXT = re.compile(r"`shardroute ([^`]+)`")
# A command by its name alone, with options: `replan --slow-domain`.
OPTIONS_IN_TEXT = re.compile(r"`([a-z][a-z-]*)(\s[^`]*--[^`]*)`")
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
    def kind(self) -> str:
        """What the fence says without what the block needs."""
        return self.info.partition(" needs ")[0]

    @property
    def needs(self) -> list[str]:
        """Words of NEEDS."""
        return self.info.partition(" needs ")[2].split()

    @property
    def lacks(self) -> list[str]:
        """What it needs and isn't here, with how to get it."""
        return [f"{name} ({NEEDS[name][1]})" for name in self.needs if not NEEDS[name][0]]

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
        assert block.kind in RUN | LEFT_OUT | SHOWN, f"{place}: fence {block.info!r}; commands are ```console, with `$ `"
        assert block.kind in RUN or not block.needs, f"{place}: what isn't run needs nothing"
        assert set(block.needs) <= set(NEEDS), f"{place}: fence {block.info!r}; a block may need {', '.join(NEEDS)}"
        assert block.kind != "console" or block.commands, f"{place}: a console block without a command"


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
                for name in ("examples", "tools"):
                    (folder / name).symlink_to(ROOT / name)
            run_blocks(document, folder, programs)
            left[document] = folder
        return left[document]

    return run


def run_blocks(document: Path, folder: Path, programs: str) -> None:
    """Run a document's blocks; a command that fails is an assertion, with its line and what it printed."""
    for block in blocks_of(document.read_text()):
        # mpirun leaves file descriptors to what it starts, which a fork of another program doesn't get.
        path = programs.partition(os.pathsep)[2] if "mpi" in block.needs else programs
        environment = os.environ | {"PATH": path}
        if block.lacks:
            continue
        if block.kind == "console":
            parts = [(number, ["bash", "-euo", "pipefail", "-c", command]) for number, command in block.commands]
        elif block.kind == "python" and not any(INCLUDED.match(line) for line in block.lines):
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


NEEDY = [(document, block) for document in DOCUMENTS for block in blocks_of(document.read_text()) if block.needs]


@pytest.mark.slow
@pytest.mark.parametrize(("document", "block"), NEEDY, ids=[f"{name_of(d)}:{b.number - 1} {' '.join(b.needs)}" for d, b in NEEDY])
def test_what_a_block_needs_is_here_and_it_has_run(document: Path, block: Block, folder_after: Callable[[Path], Path]) -> None:
    if block.lacks:
        pytest.skip("needs " + ", ".join(block.lacks))

    folder_after(document)


def simple_commands(text: str) -> list[list[str]]:
    """The words of each command of a line of shell, without operators and redirections."""
    found: list[list[str]] = [[]]
    redirected = False
    for word in shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars=True):
        operator = set(word) <= set("();<>|&")
        if operator and not set(word) & set("<>"):
            found.append([])
        elif operator and found[-1] and found[-1][-1].isdigit():
            found[-1].pop()  # the stream of 2> or 2>&1
        elif not operator and not redirected:
            found[-1].append(word)
        redirected = operator and bool(set(word) & set("<>"))
    return [words for words in found if words]


def arguments_for_shardroute(words: list[str]) -> list[str] | None:
    """What a command gives to `shardroute`, which a launcher may stand before; None if it isn't one of ours."""
    for program in ("shardroute", "shardroute.executors"):
        if program in words:
            return words[words.index(program) + 1 :]
    return None


@functools.cache
def the_program():
    """The command line, as its own parser has it."""
    let_speak(app)
    return typer.main.get_command(app)


def parse(arguments: list[str]) -> None:
    """Have the program's own parser read the arguments; what it refuses raises. No command runs, no file is looked for."""
    command, name, context = the_program(), "shardroute", None
    with contextlib.suppress(Exit, SystemExit), contextlib.redirect_stdout(io.StringIO()):  # --help ends here
        while True:
            context = command.make_context(name, list(arguments), parent=context)
            given = [*getattr(context, "_protected_args", []), *context.args]
            if not given:
                return
            name, command, arguments = command.resolve_command(context, given)


def check_tool(words: list[str]) -> None:
    """Options that a command gives to one of tools/ must stand in its source."""
    if len(words) > 1 and words[0] == "python" and words[1].startswith("tools/"):
        source = (ROOT / words[1]).read_text()
        assert [word for word in words[2:] if word.startswith("-") and f'"{word}"' not in source] == []


def test_a_line_of_shell_is_taken_apart_into_commands() -> None:
    line = "(a -e 1; b 'x y') > out.txt && X=1 srun -n 2 \\\n  shardroute run r.plan | shardroute show 2>&1"

    found = simple_commands(line)

    assert found == [
        ["a", "-e", "1"], ["b", "x y"], ["X=1", "srun", "-n", "2", "shardroute", "run", "r.plan"], ["shardroute", "show"],
    ]  # fmt: skip
    assert [arguments_for_shardroute(words) for words in found] == [None, None, ["run", "r.plan"], ["show"]]


def test_an_option_that_a_tool_lacks_is_found() -> None:
    check_tool(["python", "tools/soak.py", "--refits", "1000"])

    with pytest.raises(AssertionError, match="--refit-often"):
        check_tool(["python", "tools/soak.py", "--refit-often", "1000"])


@pytest.mark.parametrize("arguments", ["run r.plan --no-such", "nosuch", "study nosuch", "machines show", "run r.plan extra"])
def test_what_the_program_would_refuse_is_not_parsed(arguments: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing|unexpected"):
        parse(arguments.split())


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_command_that_is_not_run_is_one_that_the_program_takes(document: Path) -> None:
    for block in blocks_of(document.read_text()):
        if block.kind != "console no-run" and not (block.kind == "console" and block.lacks):
            continue
        for number, line in block.commands:
            for words in simple_commands(line):
                check_tool(words)
                if (arguments := arguments_for_shardroute(words)) is not None:
                    try:
                        parse(arguments)
                    except Exception as error:  # whatever the parser says of it
                        pytest.fail(f"{name_of(document)}:{number}: $ {line}\n{error}")


def prose_of(document: Path) -> str:
    """The document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_command_in_a_line_of_text_is_one_that_the_program_takes(document: Path) -> None:
    text = prose_of(document)

    for found in IN_TEXT.finditer(text):
        try:
            parse(shlex.split(found[1]))
        except Exception as error:  # whatever the parser says of it; text may leave out what a command must have
            if not str(error).startswith("Missing parameter"):
                pytest.fail(f"{name_of(document)}: {found[0]}\n{error}")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_python_that_is_not_run_compiles_and_its_imports_of_ours_are_there(document: Path) -> None:
    for block in blocks_of(document.read_text()):
        if block.kind != "python no-run" and not (block.kind == "python" and block.lacks):
            continue
        tree = ast.parse("\n".join(block.lines), f"{name_of(document)}:{block.number}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardroute"):
                module = importlib.import_module(node.module or "")
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
            if isinstance(node, ast.Import):
                for alias in node.names:
                    assert not alias.name.startswith("shardroute") or importlib.import_module(alias.name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_options_in_a_line_of_text_are_those_of_their_command(document: Path) -> None:
    program = the_program()

    for found in OPTIONS_IN_TEXT.finditer(prose_of(document)):
        command, words = program, found[0].strip("`").split()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if command is not program:
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            given = {word.partition("=")[0] for word in words if word.startswith("--") and word != "--"}
            assert given <= known | {"--help"}, f"{name_of(document)}: {found[0]}"
