import configparser
import email
import email.message
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = ("topologies", "planner", "executors")


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from the sdist of a copy of the working tree, where no old build/ can leak into it."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in PACKAGES:
        shutil.copytree(repo / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(repo / name, tree / name)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True)

    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as opened:
        yield opened


def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_every_file_of_the_three_packages_and_nothing_else(
    repo: Path, wheel: zipfile.ZipFile
) -> None:
    in_tree = {
        f"shardroute/{path.relative_to(repo).as_posix()}"
        for folder in PACKAGES
        for path in (repo / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    in_wheel = {name for name in wheel.namelist() if ".dist-info/" not in name}

    missing, unexpected = sorted(in_tree - in_wheel), sorted(in_wheel - in_tree)
    assert not missing, "list these under packages or package-data in pyproject.toml"
    assert not unexpected


def test_the_wheel_keeps_every_file_byte_for_byte(repo: Path, wheel: zipfile.ZipFile) -> None:
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]

    changed = [n for n in names if wheel.read(n) != (repo / n.removeprefix("shardroute/")).read_bytes()]

    assert names
    assert changed == []


def test_the_namespace_has_no_init_so_other_distributions_can_share_it(wheel: zipfile.ZipFile) -> None:
    assert "shardroute/__init__.py" not in wheel.namelist()


def test_every_package_says_that_it_is_typed(wheel: zipfile.ZipFile) -> None:
    for folder in PACKAGES:
        assert f"shardroute/{folder}/py.typed" in wheel.namelist()


def test_the_metadata_names_the_distribution_its_version_and_its_licence(
    repo: Path, wheel: zipfile.ZipFile
) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]

    fields = metadata(wheel)

    assert fields["Name"] == "shardroute"
    assert fields["Version"] == project["version"]
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.11"
    assert set(fields.get_all("Provides-Extra") or []) == set(project["optional-dependencies"])
    (licence,) = (name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
    assert wheel.read(licence) == (repo / "LICENSE").read_bytes()


def test_the_readme_is_the_long_description(repo: Path, wheel: zipfile.ZipFile) -> None:
    fields = metadata(wheel)

    assert fields["Description-Content-Type"] == "text/markdown"
    assert str(fields.get_payload()).strip() == (repo / "README.md").read_text().strip()


def test_the_command_shardroute_starts_the_command_line_program(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    entry_points = configparser.ConfigParser()

    entry_points.read_string(wheel.read(name).decode())

    assert dict(entry_points["console_scripts"]) == {"shardroute": "shardroute.executors.cli:main"}
