"""What the program says of what its modules log: files that are read (with --verbose), and kernels that are compiled."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardroute.planner.cli.output import say, tell
from shardroute.planner.compiling import COMPILINGS
from shardroute.topologies.files import READINGS


class _Teller(logging.Handler):
    """Says each record, once a text: catalogues read a machine's file many times."""

    def __init__(self, say_it: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._say, self._said = say_it, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Say the record unless it has been."""
        text = record.getMessage()
        if text not in self._said:
            self._said.add(text)
            self._say(text)


@contextmanager
def tell_records() -> Iterator[None]:
    """Say, while the block runs, which files are read, and why the first run takes longer."""
    with _heard(READINGS, tell), _heard(COMPILINGS, _say_to_a_person):
        yield


def _say_to_a_person(text: str) -> None:
    if sys.stderr.isatty():
        say(text)


@contextmanager
def _heard(logger: logging.Logger, say_it: Callable[[str], None]) -> Iterator[None]:
    teller, level = _Teller(say_it), logger.level
    logger.addHandler(teller)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(teller)
        logger.setLevel(level)
