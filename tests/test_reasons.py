"""What errors of other libraries come to in a message of ours."""

import pytest

from shardroute.executors.reasons import first_line


@pytest.mark.parametrize(
    ("said", "shown"), [("no route to host", "no route to host"), ("\nout of memory\n at line 3", "out of memory")]
)
def test_of_what_an_error_says_the_first_line_stands_in_the_message(said: str, shown: str) -> None:
    found = first_line(RuntimeError(said))

    assert found == shown


def test_an_error_that_says_nothing_is_shown_by_its_kind() -> None:
    found = first_line(RuntimeError(" \n"))

    assert found == "RuntimeError"
