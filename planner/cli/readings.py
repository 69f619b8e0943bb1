"""What --verbose says of files: each one that was read, as the modules that read them log it."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from shardroute.planner.cli.output import tell
from shardroute.topologies.files import READINGS


class _Teller(logging.Handler):
    """Says each record, once a path: catalogues read a machine's file many times."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Say the record unless it has been."""
        text = record.getMessage()
        if text not in self._said:
            self._said.add(text)
            tell(text)


@contextmanager
def tell_readings() -> Iterator[None]:
    """Say, while the block runs, which files are read."""
    teller, level = _Teller(), READINGS.level
    READINGS.addHandler(teller)
    READINGS.setLevel(logging.INFO)
    try:
        yield
    finally:
        READINGS.removeHandler(teller)
        READINGS.setLevel(level)
