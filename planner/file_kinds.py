"""What a file is that was given where another kind is wanted, and which commands take it.

Rule: it looks at the first bytes only, and is asked after reading has failed; so it may say nothing, and never says no.
"""

import os
import re
import zipfile
from pathlib import Path
from typing import Final

_FIRST_BYTES: Final = 4096
_PLAN: Final = "a plan"
_TIMELINE: Final = "a timeline"
_IS_FOR: Final = {
    _PLAN: "`show`, `check`, `simulate`, `explain`, `report`, `diff`, `run` and `choose --plan`",
    _TIMELINE: "`compare`, `diff`, `trace PLAN TIMELINE` and `report --measured`",
    "a layout file": "`--from-json` and `--to-json`",
    "a machine, calibration or rates file": "`--machine`, `--calibration` or `--rates`",
    "the text of an HLO module": "`choose --hlo`",
    "XML": "`machines import`, if NCCL wrote it",
    "a page": "a browser",
}
# What the files begin with, and the kind that does.
_BEGINS: Final = (
    (re.compile(rb'\s*\{[^{}\[\]]*"format"\s*:\s*"shardroute-timeline"'), _TIMELINE),
    (re.compile(rb'\s*\{[^{}\[\]]*"format"\s*:\s*"shardroute-layout"'), "a layout file"),
    (re.compile(rb"HloModule\s"), "the text of an HLO module"),
    (re.compile(rb"\s*<!doctype html|\s*<html", re.IGNORECASE), "a page"),
    (re.compile(rb"\s*<(?:\?xml|system)"), "XML"),
)
_HOW_MADE: Final = {
    _PLAN: "`shardroute plan ... -o FILE` writes one",
    _TIMELINE: "`shardroute simulate PLAN -o FILE` writes a predicted one and `run PLAN -o FILE` a measured one",
}


def mistaken(path: str | Path, wanted: str) -> str:
    """Words for a path that isn't what is wanted, "a plan" or "a timeline": what it is, how to get what is wanted, and what it is
    for. Empty where it may be damaged, or is of no kind that is known.
    """
    if os.path.isdir(path):
        return f"{path} is a folder, and {wanted} is wanted, which is a file; {_HOW_MADE[wanted]}"
    found = kind_of(path)
    if found in ("", wanted):
        return ""
    return f"{path} is {found}, and {wanted} is wanted: {_HOW_MADE[wanted]}; {found} is for {_IS_FOR[found]}"


def kind_of(path: str | Path) -> str:
    """What a regular file is, "a plan"; empty for any other path, and where nothing that is known begins so."""
    if not os.path.isfile(path):  # to open a pipe would wait for who writes to it
        return ""
    try:
        with open(path, "rb") as file:
            first = file.read(_FIRST_BYTES)
        if first.startswith(b"PK\x03\x04") and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                return _PLAN if "header.json" in archive.namelist() else ""
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return ""
    for begins, kind in _BEGINS:
        if begins.match(first):
            return kind
    return "a machine, calibration or rates file" if os.fspath(path).endswith(".toml") else ""
