"""What a file is that was given where another kind is wanted, and which commands take it.

Rule: it looks at the first bytes only, and is asked after reading has failed; so it may say nothing, and never says no.
"""

import os
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from shardroute.topologies.errors import InputError

_FIRST_BYTES: Final = 4096
PLAN: Final = "a plan"
TIMELINE: Final = "a timeline"
LAYOUT: Final = "a layout file"
MACHINE: Final = "a machine file"
CALIBRATION: Final = "a calibration"
RATES: Final = "a file of rates"
CONFIG: Final = "a model's config.json"
HLO: Final = "the text of an HLO module"
SCRIPT: Final = "a launch script"
RECIPE: Final = "a recipe (YAML)"
CALLS: Final = "a table of calls (CSV)"
LOG: Final = "a log"
_SOME_TOML: Final = "a machine, calibration or rates file"
_IS_FOR: Final = {
    PLAN: "`show`, `check`, `simulate`, `explain`, `report`, `diff`, `run` and `choose --plan`",
    TIMELINE: "`compare`, `diff`, `trace PLAN TIMELINE` and `report --measured`",
    LAYOUT: "`--from-json` and `--to-json`",
    MACHINE: "`--machine`",
    CALIBRATION: "`--calibration`",
    RATES: "`--rates`",
    _SOME_TOML: "`--machine`, `--calibration` or `--rates`",
    CONFIG: "`--model`",
    HLO: "`choose --hlo`",
    "XML": "`machines import`, if NCCL wrote it",
    "a page": "a browser",
}
# What the files begin with, and the kind that does.
_BEGINS: Final = (
    (re.compile(rb'\s*\{[^{}\[\]]*"format"\s*:\s*"shardroute-timeline"'), TIMELINE),
    (re.compile(rb'\s*\{[^{}\[\]]*"format"\s*:\s*"shardroute-layout"'), LAYOUT),
    (re.compile(rb'\s*\{[^{}]*"(?:architectures|model_type)"\s*:'), CONFIG),
    (re.compile(rb"HloModule\s"), HLO),
    (re.compile(rb"\s*<!doctype html|\s*<html", re.IGNORECASE), "a page"),
    (re.compile(rb"\s*<(?:\?xml|system)"), "XML"),
)
# The same of TOML files, by a key above their first table.
_TOML_KEYS: Final = (
    (re.compile(rb"^kind[ \t]*=", re.MULTILINE), MACHINE),
    (re.compile(rb"^measured[ \t]*=", re.MULTILINE), CALIBRATION),
    (re.compile(rb"^linear[ \t]*=", re.MULTILINE), RATES),
)
_TABLE: Final = re.compile(rb"^[ \t]*\[", re.MULTILINE)
_TOMLS: Final = (MACHINE, CALIBRATION, RATES)
_HOW_MADE: Final = {
    PLAN: "`shardroute plan ... -o FILE` writes one",
    TIMELINE: "`shardroute simulate PLAN -o FILE` writes a predicted one and `run PLAN -o FILE` a measured one",
    LAYOUT: "`shardroute layout ... -o FILE` writes one",
    MACHINE: "`shardroute machines import ... -o FILE.toml` writes one",
    CALIBRATION: "`shardroute calibrate ... -o FILE.toml` writes one",
    RATES: "docs/ring-steps.md says what is in one",
    CONFIG: "it lies beside a model's weights",
    HLO: "XLA writes one with --xla_dump_to=FOLDER",
}


def mistaken(path: str | Path, wanted: str) -> str:
    """Words for a path that isn't what is wanted, PLAN or another kind with a name here: what it is, how to get what is wanted,
    and what it is for. Empty where it may be damaged, or is of no kind that is known.
    """
    how = f"; {_HOW_MADE[wanted]}" if wanted in _HOW_MADE else ""
    if os.path.isdir(path):
        return f"{path} is a folder, and {wanted} is wanted, which is a file{how}"
    found = kind_of(path)
    if found in ("", wanted) or (found == _SOME_TOML and wanted in _TOMLS):
        return ""
    return f"{path} is {found}, and {wanted} is wanted{how.replace(';', ':')}; {found} is for {_IS_FOR[found]}"


@contextmanager
def reading(paths: str | Sequence[str], wanted: str) -> Iterator[None]:
    """Say instead of an InputError of reading a path, or several, which is a file of another kind than what is wanted."""
    try:
        yield
    except InputError as error:
        for path in (paths,) if isinstance(paths, str) else paths:
            if os.path.isfile(path) and (words := mistaken(path, wanted)):
                raise InputError(words) from error
        raise


def kind_of(path: str | Path) -> str:
    """What a regular file is, "a plan"; empty for any other path, and where nothing that is known begins so."""
    if not os.path.isfile(path):  # to open a pipe would wait for who writes to it
        return ""
    try:
        with open(path, "rb") as file:
            first = file.read(_FIRST_BYTES)
        if first.startswith(b"PK\x03\x04") and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return PLAN if "header.json" in archive.namelist() else ""
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return ""
    if os.fspath(path).endswith(".toml"):
        above = _TABLE.split(first, maxsplit=1)[0]
        return next((kind for key, kind in _TOML_KEYS if key.search(above)), _SOME_TOML)
    return next((kind for begins, kind in _BEGINS if begins.match(first)), "")
