"""Run the tests with the oldest versions that pyproject.toml allows, in an environment of their own.

    python tools/lowest.py [--extra torch]... [--bare rich==13.0.0]... [--python 3.11] [--folder build/lowest] [--list]
        [-- PYTEST ARGUMENTS]

Direct dependencies, those of the extra `test` and of extras that are named too, are the oldest that their bounds allow; what
they need in turn is the newest that fits, as an installer would take it today. Tests of extras that aren't there are skipped.
Where one dependency needs a newer version of another than our bound, it is said; `--bare` has a version all the same, or NVIDIA's
bindings without the libraries that they load. Needs uv (`pip install uv`) and a package index. Exit code: that of pytest.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parent.parent
# Typer before 0.26 imports names that click 8.5 calls old; the tests take warnings for errors.
_NOT_OURS: Final = "ignore:'click.utils:DeprecationWarning"


def run(command: Sequence[str | Path], **environment: str) -> int:
    """The exit code of a command, run from the root of the repository."""
    return subprocess.run([str(word) for word in command], cwd=_ROOT, env=os.environ | environment, check=False).returncode


def above_their_bounds(requirements: Sequence[str], installed: Mapping[str, str]) -> list[str]:
    """Of requirements like "rich>=13", those of which a newer version is installed, in words."""
    found = []
    for requirement in requirements:
        match = re.match(r"([\w.-]+)(?:\[[^]]*])?>=([\d.]+)", requirement)
        if match and (has := installed.get(match[1].lower())) and _numbers(has) != _numbers(match[2]):
            found.append(f"{match[1]} is {has}, allowed from {match[2]} on: others need it, or there is none in between")
    return found


def _numbers(version: str) -> list[int]:
    numbers = [int(text) for text in re.findall(r"\d+", version.partition("+")[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return numbers


def _installed(uv: str, python: Path) -> dict[str, str]:
    told = subprocess.run([uv, "pip", "list", "--quiet", "--format", "json", "--python", python], capture_output=True, check=True)
    return {package["name"].lower(): package["version"] for package in json.loads(told.stdout)}


def main() -> int:
    """Make the environment and test in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.11", help="which Python; default: 3.11, the oldest that is supported")
    parser.add_argument("--folder", type=Path, default=Path("build/lowest"), help="of the environment, made anew")
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml beside test; torch is 5 GB")
    parser.add_argument("--bare", action="append", default=[], help="NAME==VERSION to install last, and nothing that it needs")
    parser.add_argument("--list", action="store_true", help="print the versions and stop")
    parser.add_argument("pytest", nargs="*", help="tests, and options of pytest; default: all tests")
    arguments = parser.parse_args()
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        parser.error("uv is not installed: pip install uv")
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    if unknown := set(arguments.extra) - set(project["optional-dependencies"]):
        parser.error(f"--extra {min(unknown)}: pyproject.toml has {', '.join(sorted(project['optional-dependencies']))}")
    if wrong := [each for each in arguments.bare if not re.fullmatch(r"[\w.-]+==[\w.+]+", each)]:
        parser.error(f"--bare {wrong[0]}: expected NAME==VERSION")
    resolution = ["--resolution", "lowest-direct"]
    extras = ["test", *arguments.extra]
    if arguments.list:
        chosen = [uv, "pip", "compile", "--quiet", "--no-annotate", "--no-header", *resolution]
        named = [word for extra in extras for word in ("--extra", extra)]
        return run([*chosen, "--python-version", arguments.python, *named, "pyproject.toml"])
    folder = (Path.cwd() / arguments.folder).resolve()
    python = folder / "bin" / "python"
    for command in (
        [uv, "venv", "--quiet", "--clear", "--python", arguments.python, folder],
        [uv, "pip", "install", "--quiet", "--python", python, *resolution, "--editable", f".[{','.join(extras)}]"],
        *([uv, "pip", "install", "--quiet", "--python", python, "--no-deps", each] for each in arguments.bare),
        [uv, "pip", "list", "--python", python],
    ):
        if code := run(command):
            return code
    wanted = [each for extra in extras for each in project["optional-dependencies"][extra]]
    for line in above_their_bounds([*project["dependencies"], *wanted], _installed(uv, python)):
        print(line)
    return run([python, "-m", "pytest", "-p", "no:cacheprovider", "-W", _NOT_OURS, *arguments.pytest])


if __name__ == "__main__":
    sys.exit(main())
