"""What every test runs under: the repository's path, Hypothesis' profiles, a terminal that never varies."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A deadline would measure this machine's load, not the code. CI draws the same examples every time, so that
# a change fails for what it changed; runs by hand keep looking for new ones.
settings.register_profile("developer", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "developer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker is left with one of them when the others have nothing more to do."""
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def plain_terminal() -> Iterator[None]:
    """Tables come out 110 columns wide and without colour, whatever terminal the tests are started from."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "110")
        patch.setenv("NO_COLOR", "1")
        patch.setenv("TERM", "dumb")
        patch.delenv("FORCE_COLOR", raising=False)
        yield


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: exit code, standard output, standard error."""
    from shardroute.executors.cli import main  # most tests need no commands, which take a second to load

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardroute", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run
