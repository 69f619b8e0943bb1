"""The lines of a log, while the share that was read is told: a day's log of a large job takes seconds."""

from collections.abc import Iterator
from typing import Final

from shardroute.planner.shares import Told, untold

# Lines between two shares that are told: some 20 ms.
_A_SHARE: Final = 4096


def lines_of(text: str, progress: Told = untold) -> Iterator[str]:
    """Each line, without its end."""
    lines = text.splitlines()
    for n_read, line in enumerate(lines):
        if n_read % _A_SHARE == 0:
            progress(n_read / len(lines))
        yield line
    progress(1.0)
