"""What errors of other libraries come to in a message of ours, and what is said of libraries that are lacking."""

import pytest
from gpu_doubles import INSTALL, need

from shardroute.executors.reasons import first_line
from shardroute.executors.transports.libraries import LIBRARIES, load_library
from shardroute.topologies.errors import InputError


@pytest.mark.parametrize(
    ("said", "shown"), [("no route to host", "no route to host"), ("\nout of memory\n at line 3", "out of memory")]
)
def test_of_what_an_error_says_the_first_line_stands_in_the_message(said: str, shown: str) -> None:
    found = first_line(RuntimeError(said))

    assert found == shown


def test_an_error_that_says_nothing_is_shown_by_its_kind() -> None:
    found = first_line(RuntimeError(" \n"))

    assert found == "RuntimeError"


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_transport_that_cannot_be_used_says_how_to_install_what_it_lacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(InputError, match="pip install"):
        load_library(name)


@pytest.mark.parametrize("module", [*INSTALL, "another"])
def test_a_test_that_is_skipped_says_how_to_install_what_it_lacks(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(pytest.skip.Exception, match=rf"{module} is not installed \(pip install"):
        need(module)
