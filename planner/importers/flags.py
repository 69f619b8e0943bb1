"""Flags of a command as its user typed it, or of a launch script: names with their values, in any spelling of the frameworks."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class Flags:
    """A command's words and its flags by name: dashes in front dropped, underscores read as dashes, the last value counts."""

    words: tuple[str, ...]
    values: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def given(self, *names: str) -> str | None:
        """The value of the first of these names that was given; "" for a flag without a value."""
        return next((self.values[name] for name in names if name in self.values), None)

    def has(self, *names: str) -> bool:
        """Whether a switch is there, or its value isn't false."""
        value = self.given(*names)
        return value is not None and value.lower() not in ("false", "0", "no")

    def number(self, *names: str, default: int | None = 1) -> int | None:
        """The whole number of the first of these names, or the default. Raises InputError for a value that is none."""
        name = next((name for name in names if name in self.values), None)
        if name is None:
            return default
        text = self.values[name]
        if re.fullmatch(r"-?\d{1,9}", text) is None:
            hint = "; it is a variable of your shell, write its value" if "$" in text else ""
            raise InputError(f"--{name} {text!r}: expected a whole number{hint}")
        return int(text)

    def size(self, *names: str) -> int:
        """A size of an axis: 1 if not given. Raises InputError below 1."""
        n = self.number(*names)
        assert n is not None
        if n < 1:
            raise InputError(f"--{names[0]}: expected 1 or more, found {n}")
        return n


def parse_flags(command: str) -> Flags:
    """The flags of a command or of a script's text; lines that end in a backslash go on, comments are left out.

    Raises InputError for quotes that don't close.
    """
    try:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"command {command[:60]!r}: can't be split into words ({error})") from None
    values: dict[str, str] = {}
    environment: dict[str, str] = {}
    for at, word in enumerate(words):
        word = word.rstrip("\n")
        if (match := re.fullmatch(r"([A-Z_][A-Z0-9_]*)=(.*)", word, re.DOTALL)) is not None:
            environment[match[1]] = match[2]
        if re.match(r"--?[A-Za-z]", word) is None:
            continue
        name, equals, value = word.lstrip("-").partition("=")
        following = words[at + 1] if at + 1 < len(words) else "-"
        if not equals:
            value = following if not re.match(r"--?[A-Za-z]", following) and following != "-" else ""
        values[name.replace("_", "-")] = value
    return Flags(tuple(words), values, environment)


def n_launched(flags: Flags) -> int | None:
    """Processes that torchrun or accelerate starts, if the command says; None otherwise."""
    per_node = flags.number("nproc-per-node", default=None)
    if per_node is not None:
        nodes = flags.number("nnodes", default=1)
        assert nodes is not None
        return per_node * nodes
    return flags.number("num-processes", default=None)


def refuse(flags: Flags, framework: str, names: Sequence[str], why: str) -> None:
    """Raise InputError if one of these is given and not switched off."""
    for name in names:
        if flags.has(name) and flags.given(name) != "1":
            raise InputError(f"--{name}: {why} of {framework} isn't described; write the layout as a file (docs/layouts.md)")
