"""What a file of a cluster is, where an option of `machines import` was given another one: which option takes it.

Rule: it is asked after reading has failed, and looks at the text alone.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shardroute.planner.file_kinds import kind_of
from shardroute.topologies.errors import InputError

_FIRST_BYTES: Final = 2**20
NO_OPTION: Final = ""
_SMI: Final = "--nvidia-smi"
# What text is, by what stands at the start of one of its lines, and the option that takes it.
_KINDS: Final = (
    (re.compile(rb"\A\s*(?:<\?xml[^>]*>\s*)?<system\b"), "XML that NCCL wrote", NO_OPTION),
    (re.compile(rb"^CA '[^']+'", re.MULTILINE), "the output of `ibstat`", "--ibstat"),
    (re.compile(rb"^(?:Switch|Ca)\s+\d+\s+\"", re.MULTILINE), "the output of `ibnetdiscover`", "--ibnetdiscover"),
    (re.compile(rb"\A\s*host\s*,\s*nic\s*,\s*rail\b", re.IGNORECASE), "a table of rails", "--rails"),
    (re.compile(rb"^(?:\x1b\[[0-9;]*m|\s)*GPU0\s+(?:GPU1|NIC0|mlx)", re.MULTILINE), "a matrix of `nvidia-smi topo -m`", _SMI),
    (re.compile(rb"NVSMI LOG|^GPU [0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:", re.MULTILINE), "the output of `nvidia-smi -q`", _SMI),
    (re.compile(rb"^GPU \d+: .+ \(UUID: ", re.MULTILINE), "the output of `nvidia-smi -L`", _SMI),
)


@contextmanager
def hinted(path: str, option: str) -> Iterator[None]:
    """Say with an InputError of reading the path what it is, if that isn't what the option (NO_OPTION: none) takes."""
    try:
        yield
    except InputError as error:
        if hint := _hint(path, option):
            raise InputError(f"{error}; {hint}") from None
        raise


def _hint(path: str, option: str) -> str:
    if not os.path.isfile(path):  # to open a pipe would wait for who writes to it
        return ""
    try:
        with open(path, "rb") as file:
            first = file.read(_FIRST_BYTES)
    except (OSError, ValueError):
        return ""
    for begins, what, taken_by in _KINDS:
        if begins.search(first):
            if taken_by == option:
                return ""
            how = f"give it with {taken_by} {path}" if taken_by else "give it without an option"
            return f"{path} is {what}: {how}"
    found = kind_of(path)
    return f"{path} is {found}, which says nothing of hosts" if found else ""
