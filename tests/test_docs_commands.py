"""Runs what README.md, CONTRIBUTING.md, docs/ and examples/ tell a reader to type.

The convention: in a block fenced as ```console, each line that starts with `$ ` is a command (a line that
ends with a backslash goes on in the next one); other lines are output, shown for the reader. The commands of a
block run in one shell. A block fenced as ```python is a script. A document's blocks run in order in one folder, with
this environment's programs first on PATH, and must exit 0. The folder is empty but for links to examples/ and tools/,
or, where the document says <!-- continues: other.md -->, the one that the blocks of that document have left: plans are
made once. What may stand behind the fence:

    needs torch    (or several words of docs_needs.NEEDS) runs where that is here; where not, a test of its own is
                   skipped and says how to get it, its commands must still be ones that the program takes, its Python
                   must compile, and what it imports of shardroute must be there
    exits 0 1      one command, which may end with any of these codes, for what is measured decides it
    in checkout    runs in a copy of the repository, the same for all such blocks of a document
    of gate        its commands are those of .ci/run, letter by letter: they are what runs these tests

What a page shows of a file (--8<-- "examples/x.py", or "examples/x.py:section") is an example, which
tests/test_examples.py runs. Commands in a line of text, `shardroute x`, must be ones that the program takes. Fences of
other kinds are refused but for plain data, so that nothing escapes.
"""

import ast
import contextlib
import functools
import importlib
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
from docs_needs import NEEDS, stand_ins, variables
from typer import Exit

import shardroute.executors.commands  # noqa: F401 - the whole program's commands
from shardroute.planner.cli.program import app, let_speak

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md")),
]  # fmt: skip
# What a fence may be: run, or data and output for the reader; and what may stand behind its kind.
RUN, SHOWN, CLAUSES = {"console", "python"}, {"text", "toml", "json", "yaml"}, {"needs", "exits", "in", "of"}
# Not copied into a checkout: what git ignores, and git's own.
NO_CHECKOUT = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "shared", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis"
)
CONTINUES = re.compile(r"^<!-- continues: ([\w-]+\.md) -->$", re.MULTILINE)
# A command in a line of text.
IN_TEXT = re.compile(r"`shardroute ([^`]+)`")
# A command by its name alone, with options: `replan --slow-domain`.
OPTIONS_IN_TEXT = re.compile(r"`([a-z][a-z-]*)(\s[^`]*--[^`]*)`")
INCLUDED = re.compile(r'^--8<-- "([^":]*)(?::([\w-]+))?"$')
# A block of a document that takes longer than this is no example; seconds.
TIMEOUT_S = 240


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the words after its fence, its first line's number, its lines."""

    info: str
    number: int
    lines: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The first word behind the fence."""
        return self.info.partition(" ")[0]

    @property
    def clauses(self) -> dict[str, list[str]]:
        """What stands behind the kind: the words of each clause; "" has those of none."""
        found: dict[str, list[str]] = {}
        clause = ""
        for word in self.info.split()[1:]:
            clause = word if word in CLAUSES else clause
            found.setdefault(clause, [])
            if word != clause:
                found[clause].append(word)
        return found

    @property
    def needs(self) -> list[str]:
        """Words of NEEDS."""
        return self.clauses.get("needs", [])

    @property
    def exits(self) -> list[int]:
        """The codes that it may end with."""
        return [int(code) for code in self.clauses.get("exits", ["0"])]

    @property
    def is_run(self) -> bool:
        """Whether the tests run it, where what it needs is here; the gate's own commands run the tests."""
        return self.kind in RUN and "of" not in self.clauses and not any(INCLUDED.match(line) for line in self.lines)

    @property
    def lacks(self) -> list[str]:
        """What it needs and isn't here, with how to get it."""
        return [f"{name} ({NEEDS[name].how})" for name in self.needs if not NEEDS[name].is_here]

    @property
    def script(self) -> str:
        """Its commands for one shell, which says at which line of the document it stopped."""
        said = "trap 'code=$?; [ $code = 0 ] || echo \"line $at: exit code $code\" >&2' EXIT"
        return "\n".join(["set -euo pipefail", said, *(f"at={number}\n{command}" for number, command in self.commands)])

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
        blocks.append(Block(fence[2].strip(), i + 2, tuple(lines[i + 1 : end])))
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

```console needs torch mpi exits 0 1
$ sleep 3600
```
~~~python
print("$ not a command")
~~~
"""


def test_commands_are_the_dollar_lines_of_a_block_with_their_continuations() -> None:
    first, second, third = blocks_of(EXAMPLE)

    assert (first.kind, second.kind, third.kind) == ("console", "console", "python")
    assert first.commands == [(5, "echo one \\\n    two"), (8, "false | true")]
    assert (first.needs, first.exits, second.needs, second.exits) == ([], [0], ["torch", "mpi"], [0, 1])


def test_a_block_stops_at_its_first_command_that_fails_and_says_which() -> None:
    [block] = blocks_of("text\n\n```console\n$ export X=kept\n$ echo $X\n$ false | true\n$ echo after\n```\n")

    ran = subprocess.run(["bash", "-c", block.script], capture_output=True, text=True)

    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "kept\n", "line 6: exit code 1\n")


def test_the_readme_shows_a_command_that_is_run() -> None:
    run = [block for block in blocks_of((ROOT / "README.md").read_text()) if block.info == "console"]

    assert any(block.commands for block in run)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_no_placeholder_is_left_in_a_document(document: Path) -> None:
    assert not re.search(r"@@\w+@@|TODO|FIXME", document.read_text())


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_fence_is_run_or_plain_data(document: Path) -> None:
    for block in blocks_of(document.read_text()):
        place = f"{name_of(document)}:{block.number - 1}: fence {block.info!r}"
        assert block.kind in RUN | SHOWN, f"{place}; commands are ```console, with `$ `"
        assert block.kind in RUN or block.info == block.kind, f"{place}: what isn't run has its kind alone"
        assert set(block.clauses) <= CLAUSES, f"{place}: expected {', '.join(sorted(CLAUSES))}"
        assert set(block.needs) <= set(NEEDS), f"{place}: a block may need {', '.join(NEEDS)}"
        assert block.clauses.get("in", ["checkout"]) == ["checkout"], place
        assert block.clauses.get("of", ["gate"]) == ["gate"], place
        assert block.kind != "console" or block.commands, f"{place}: a console block without a command"
        assert block.exits == [0] or len(block.commands) == 1, f"{place}: of several commands, which one may exit so?"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_of_the_gate_are_those_that_it_runs(document: Path) -> None:
    gate = (ROOT / ".ci" / "run").read_text().splitlines()

    for block in blocks_of(document.read_text()):
        if "of" in block.clauses:
            shown = [command.partition("#")[0].rstrip() for _, command in block.commands]
            assert [command for command in shown if command not in gate] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_what_is_shown_of_a_file_is_of_an_example_that_is_run(document: Path) -> None:
    run = (ROOT / "tests" / "test_examples.py").read_text()

    for line in (line for block in blocks_of(document.read_text()) for line in block.lines):
        if (found := INCLUDED.match(line)) is not None:
            path, section = ROOT / found[1], found[2]
            assert (path.parent, path.is_file()) == (ROOT / "examples", True), f"{name_of(document)}: {line}"
            assert path.name in run, f"{name_of(document)}: {line}"
            marks = re.findall(rf"^ *# --8<-- \[(start|end):{section}\]$", path.read_text(), re.MULTILINE)
            assert section is None or marks == ["start", "end"], f"{name_of(document)}: {line}"


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
            run_blocks(document, folder, programs, tmp_path_factory.mktemp("stand-ins"))
            left[document] = folder
        return left[document]

    return run


def run_blocks(document: Path, folder: Path, programs: str, stands_in: Path) -> None:
    """Run a document's blocks; one that fails is an assertion, with its line and what it printed."""
    for block in blocks_of(document.read_text()):
        if block.lacks or not block.is_run:
            continue
        # mpirun leaves file descriptors to what it starts, and doubles are loaded into it: neither reaches a fork of another
        # program. A checkout has a program of its own.
        own = "in" in block.clauses or not {"mpi", "gpus"}.isdisjoint(block.needs)
        path = os.pathsep.join([*stand_ins(block.needs, stands_in), programs.partition(os.pathsep)[2] if own else programs])
        environment = os.environ | variables(block.needs) | {"PATH": path}
        if "in" in block.clauses:
            where = folder / "checkout"
            if not where.exists():
                shutil.copytree(ROOT, where, symlinks=True, ignore=NO_CHECKOUT)
            environment |= {"PIP_NO_COMPILE": "1"}  # what is imported is compiled then
        else:
            where = folder
        command = ["bash", "-c", block.script] if block.kind == "console" else [sys.executable, "-c", "\n".join(block.lines)]
        ran = subprocess.run(
            command, cwd=where, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=TIMEOUT_S,
        )  # fmt: skip

        assert ran.returncode in block.exits, f"{name_of(document)}:{block.number}: {block.info}\n{ran.stdout}"


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
def test_a_command_that_cannot_run_here_is_one_that_the_program_takes(document: Path) -> None:
    for block in blocks_of(document.read_text()):
        if block.kind != "console" or not block.lacks:
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
def test_python_that_cannot_run_here_compiles_and_its_imports_of_ours_are_there(document: Path) -> None:
    for block in blocks_of(document.read_text()):
        if block.kind != "python" or not block.lacks:
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
