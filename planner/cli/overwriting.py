"""What a command must not write over: the files that it reads, and its other outputs."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

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
