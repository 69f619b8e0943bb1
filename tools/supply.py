"""What shardroute is made of and depends on: licences, known holes, and whether its wheel comes out the same every time.

    python tools/supply.py --licences [--write docs/licences.md]    of all packages that pyproject.toml names, and what they need
    python tools/supply.py --wheel                                  built twice, byte for byte; exit code 1 if they differ
    python tools/supply.py --audit                                  what pip-audit knows (`pip install pip-audit`; asks pypi.org)

Licences are those that the packages installed here state about themselves; one that isn't installed is listed without.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT: Final = Path(__file__).resolve().parent.parent
_PACKAGES: Final = ("topologies", "planner", "executors")
_UMASK: Final = 0o022  # a wheel keeps the rights of the files that its build makes
_EPOCH: Final = "1735689600"  # 2025-01-01: any fixed time will do, zip files know none before 1980
_NOT_SHIPPED: Final = ("test", "docs", "fuzz", "jax")  # extras that only this repository uses
_LONGEST: Final = 60  # of a licence's name; longer is the licence's text


@dataclass(frozen=True, slots=True)
class Row:
    """A package: its licence as it states it (empty if it isn't installed), and what needs it: "core", or extras."""

    name: str
    version: str
    licence: str
    needed_by: tuple[str, ...]


def rows() -> list[Row]:
    """All packages that shardroute needs, straight or in turn, by name."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    wanted: dict[str, list[str]] = {"core": project["dependencies"], **project["optional-dependencies"]}
    needed: dict[str, set[str]] = {}
    for what, requirements in wanted.items():
        for name in _closure(requirements):
            needed.setdefault(name, set()).add(what)
    found = []
    for name in sorted(needed):
        by = ("core",) if "core" in needed[name] else tuple(sorted(needed[name]))
        installed = _installed(name)
        found.append(Row(name, installed.version if installed else "", _licence(installed) if installed else "", by))
    return found


def _closure(requirements: Iterable[str]) -> Iterator[str]:
    todo, seen = [Requirement(text) for text in requirements], set[str]()
    while todo:
        requirement = todo.pop()
        name = str(canonicalize_name(requirement.name))
        if name in seen or not _applies(requirement, {""}):
            continue
        seen.add(name)
        yield name
        installed = _installed(name)
        extras = {"", *requirement.extras}
        for text in (installed.requires if installed else None) or ():
            needs = Requirement(text)
            if _applies(needs, extras):
                todo.append(needs)


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    return requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _licence(installed: Distribution) -> str:
    """What the package states: an SPDX expression (PEP 639), else its field, else its classifiers."""
    about = installed.metadata
    for key in ("License-Expression", "License"):
        text = about[key] if key in about else ""  # noqa: SIM401 - its type promises no `get`
        if text and text != "UNKNOWN" and len(text) <= _LONGEST and "\n" not in text:
            return str(text)
    stated = [value.rpartition(" :: ")[2] for value in about.get_all("Classifier") or () if value.startswith("License :: ")]
    return ", ".join(stated) or "see its metadata"


def page(found: Iterable[Row]) -> str:
    """The page of licences, as docs/licences.md has it."""
    lines = [
        "# Licences",
        "",
        "shardroute is under Apache-2.0. This is what it installs, straight or in turn, with the licence that each states.",
        "`python tools/supply.py --licences --write docs/licences.md` made this page; packages without a version weren't there",
        "then. The `config.json` files of models that ship with it are their publishers'.",
        "",
    ]
    found = list(found)
    for title, wanted in (("Needed to plan, predict and run", True), ("Of the repository's own tools", False)):
        lines += [f"## {title}", "", "| package | version | licence | for |", "| --- | --- | --- | --- |"]
        for row in found:
            if any(by not in _NOT_SHIPPED for by in row.needed_by) is wanted:
                lines.append(f"| {row.name} | {row.version or '-'} | {row.licence or '-'} | {', '.join(row.needed_by)} |")
        lines.append("")
    return "\n".join(lines)


def build_wheel(folder: Path, name: str) -> Path:
    """The wheel of a copy of the tree in a folder of this name."""
    tree = folder / name
    for package in _PACKAGES:
        shutil.copytree(_ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(_ROOT / file, tree / file)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / f"{name}.dist"), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"SOURCE_DATE_EPOCH": _EPOCH}, check=False)
    if built.returncode:
        raise SystemExit(built.stdout + built.stderr)
    (wheel,) = (folder / f"{name}.dist").glob("*.whl")
    return wheel


def check_wheel() -> int:
    """0 if two builds are the same, byte for byte."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.umask(_UMASK)
        one, other = build_wheel(Path(folder), "one"), build_wheel(Path(folder), "other-name")
        os.umask(before)
        sums = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (one, other)]
        print(f"{one.name}: {sums[0]}" + (", twice" if sums[0] == sums[1] else f" and {sums[1]}"))
        return int(sums[0] != sums[1])


def audit() -> int:
    """The exit code of pip-audit over what is installed here."""
    if shutil.which("pip-audit") is None:
        raise SystemExit("pip-audit is not installed: pip install pip-audit")
    pinned = [f"{row.name}=={row.version}" for row in rows() if row.version and "+" not in row.version]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("\n".join(pinned) + "\n")
        told = subprocess.run(
            ["pip-audit", "--disable-pip", "--no-deps", "--requirement", str(file)], capture_output=True, text=True, check=False
        )
    print(told.stdout + told.stderr)
    n_skipped = len(re.findall("could not be audited", told.stdout + told.stderr))
    if n_skipped:
        print(f"{n_skipped} of {len(pinned)} packages were not audited: pypi.org doesn't answer from here, or doesn't know them")
        return 1
    return told.returncode


def main() -> int:
    """Do what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--licences", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the licences go into this file")
    parser.add_argument("--wheel", action="store_true")
    parser.add_argument("--audit", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.licences or arguments.wheel or arguments.audit):
        parser.error("nothing to do: give --licences, --wheel or --audit")
    if arguments.licences:
        text = page(rows())
        if arguments.write is None:
            print(text)
        else:
            arguments.write.write_text(text)
    codes = [check_wheel() if arguments.wheel else 0, audit() if arguments.audit else 0]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
