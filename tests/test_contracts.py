import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGES = ("topologies", "planner", "executors")
# The import names of what the extras torch, cu12 and cu13 install.
OPTIONAL = {"torch", "nccl", "nvshmem", "cuda", "mpi4py"}


def tool(name: str) -> str:
    """The path of a program of this environment."""
    return str(Path(sys.executable).with_name(name))


def bad_imports() -> list[tuple[str, str, str]]:
    """(module, statement that it must not hold, part of the name of the contract that refuses it)."""
    return [
        ("topologies/__init__.py", "import shardroute.planner", "Imports go one way"),
        ("planner/__init__.py", "def run():\n    import shardroute.executors", "Imports go one way"),
        ("planner/routing/__init__.py", "def solve():\n    import torch", "nothing of the GPU stack"),
        ("topologies/__init__.py", "from cuda.bindings import driver", "nothing of the GPU stack"),
        ("planner/simulator/__init__.py", "def run():\n    import numba", "Numba"),
        ("executors/__init__.py", "import hypothesis", "Hypothesis"),
    ]


@pytest.mark.parametrize(("module", "statement", "contract"), bad_imports())
def test_an_import_against_a_contract_breaks_it(
    repo: Path, tmp_path: Path, module: str, statement: str, contract: str
) -> None:
    for folder in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repo / folder, tmp_path / "shardroute" / folder, ignore=ignore)
    path = tmp_path / "shardroute" / module
    path.write_text(f"{path.read_text()}\n\n{statement}\n")
    shutil.copy(repo / "pyproject.toml", tmp_path)

    command = [tool("lint-imports"), "--no-cache"]
    linted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert linted.returncode == 1, linted.stdout + linted.stderr
    broken = [line for line in linted.stdout.splitlines() if " BROKEN" in line]
    # Whoever imports executors from below reaches the GPU stack by them, which breaks a second contract.
    assert [line for line in broken if contract in line]
    assert len(broken) == (2 if "shardroute.executors" in statement else 1)


@pytest.mark.parametrize("folder", PACKAGES)
def test_lint_refuses_a_package_imported_by_its_folder(repo: Path, folder: str) -> None:
    code = f'"""Example."""\n\nimport {folder}\n\nprint({folder})\n'
    command = [tool("ruff"), "check", "--no-cache", "--stdin-filename", "tools/example.py", "-"]

    linted = subprocess.run(command, cwd=repo, input=code, capture_output=True, text=True)

    assert linted.returncode == 1
    assert "TID251" in linted.stdout
    assert f"import shardroute.{folder}" in linted.stdout


def test_every_module_that_plans_imports_without_an_optional_or_slow_package() -> None:
    code = """
import importlib, pkgutil, sys
before = set(sys.modules)  # an environment may load packages at start: cuda-bindings does
import shardroute.planner, shardroute.topologies
for package in (shardroute.topologies, shardroute.planner):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith("shardroute.planner.testing"):
            importlib.import_module(module.name)
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    loaded = set(run.stdout.split())
    assert "shardroute" in loaded
    assert loaded.isdisjoint(OPTIONAL | {"numba", "hypothesis", "pytest", "vl_convert", "pyarrow"})


def test_every_package_that_the_code_imports_is_declared(repo: Path) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    distributions = {re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in project["dependencies"]}
    declared = {
        name
        for name, owners in importlib.metadata.packages_distributions().items()
        if distributions.intersection(owners)
    }

    imported = {
        (name.partition(".")[0], path.relative_to(repo).as_posix())
        for folder in PACKAGES
        for path in (repo / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        for name in _imported_names(node)
    }

    allowed = declared | OPTIONAL | {"shardroute", "hypothesis", "vl_convert", "pyarrow"} | sys.stdlib_module_names
    assert sorted((name, path) for name, path in imported if name not in allowed) == []


def _imported_names(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module)):
            return [module]
        case _:
            return []
