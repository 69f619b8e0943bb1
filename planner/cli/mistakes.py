"""What the command line says of words that it can't take: the value found, what is expected, and the names that there are.

Rule: only what Typer's own messages leave out is put in (Typer 0.29 reads values by pydantic, whose words don't repeat them);
where its errors look otherwise they stay as they are.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import typer
from typer.core import TyperGroup

from shardroute.topologies.errors import InputError

_OUTPUTS: Final = {"output": "--output", "trace_to": "--trace"}
# What joins several machines, and counts them, in one word: "a.toml x 2 + b.toml".
_JOINS: Final = re.compile(r" \+ | x \d+$| x \d+(?= \+ )")


def keep_inputs(given: Mapping[str, object]) -> None:
    """Raise InputError when a command would write over a file that it reads, or over what it has just written itself."""
    written: list[str] = []
    for name, option in _OUTPUTS.items():
        path = given.get(name)
        if not isinstance(path, (str, Path)) or not str(path):
            continue
        read = [text for key, value in given.items() if key not in _OUTPUTS for text in _words(value)]
        if any(_is_one_file(str(path), text) for text in read):
            raise InputError(f"{option} {path} would write over what this command reads; give another name")
        if any(os.path.abspath(path) == os.path.abspath(other) for other in written):
            raise InputError(f"{option} {path} is where another output goes; give another name")
        written.append(str(path))


def _words(value: object) -> Iterator[str]:
    """Every text in an option's value, and the parts of those that join several."""
    for text in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(text, (str, Path)) and str(text):
            yield from {str(text), *_JOINS.split(str(text))}


def _is_one_file(path: str, text: str) -> bool:
    try:
        return os.path.isfile(path) and os.path.samefile(path, text)
    except (OSError, ValueError):  # no file's name
        return False


class Group(TyperGroup):
    """A group of commands whose mistakes are said in full."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # its name varies with Typer
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            _say_in_full(error, [*self.commands] if getattr(error, "ctx", None) is ctx else [])
            raise


def _say_in_full(error: Exception, names: list[str]) -> None:
    """Change the message of an error about what was typed; `names` are the commands of the group that it is about."""
    message = getattr(error, "message", None)
    if not isinstance(message, str) or not hasattr(error, "format_message"):
        return
    if names and message.startswith("No such command") and "Did you mean" not in message:
        error.message = f"{message.rstrip('.')}; there are {', '.join(sorted(names))}"  # type: ignore[attr-defined]  # found above
    elif words := _value_words(error.__cause__):
        error.message = words  # type: ignore[attr-defined]


def _value_words(cause: BaseException | None) -> str:
    """What pydantic found wrong with a value, with the value; empty for any other cause."""
    details = getattr(cause, "errors", None)
    if not callable(details):
        return ""
    first = details()[0]
    kind, found, limits = first["type"], first["input"], first.get("ctx", {})
    match kind:
        case "int_parsing" | "int_from_float" | "int_parsing_size":
            return f"{found!r} is not a whole number"
        case "float_parsing":
            return f"{found!r} is not a number"
        case "greater_than_equal":
            return f"{found} is too small; expected {limits['ge']} or more"
        case "less_than_equal":
            return f"{found} is too large; expected {limits['le']} or less"
        case _:
            said = str(first["msg"]).removeprefix("Value error, ")
            return said if repr(found) in said else f"{said}, found {found!r}"
