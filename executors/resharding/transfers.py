"""A transfer under way, what it took, and that no two of them go on over the same ranks."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from shardroute.executors.transports.seam import World


class Transfer:
    """One run of a resharder; its tensors belong to it until `wait` has returned or raised."""

    def __init__(self, ended: threading.Event, failure: list[BaseException], parts_s: dict[str, float]) -> None:
        self._ended, self._failure, self._parts_s = ended, failure, parts_s

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._ended.is_set()

    @property
    def parts_s(self) -> Mapping[str, float]:
        """Seconds that this rank spent in each part: "agree" (with the others, before), "move", "vote" (with the others, after),
        "take over" (the old weights' place). Complete when `done`.
        """
        return dict(self._parts_s)

    def wait(self) -> None:
        """Return when this rank has the new weights. Raises RunError with rank, step and peer; the resharder's `version` says
        then what this rank has: the old weights, unless they were to be written in place or in several buckets.
        """
        self._ended.wait()
        if self._failure:
            raise self._failure[0]


@contextmanager
def added(parts_s: dict[str, float], part: str) -> Iterator[None]:
    """Add what the block takes to a part's seconds."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        parts_s[part] = parts_s.get(part, 0.0) + time.monotonic() - began_s


class Running:
    """Which plan each world is moving; a second one on it at once would match its messages with the first one's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[int, str] = {}

    def begin(self, world: World, digest: str) -> bool:
        """Note a plan, unless one is moving; says which."""
        with self._lock:
            if world.key in self._digests:
                return False
            self._digests[world.key] = digest
            return True

    def of(self, world: World) -> str:
        """The digest of what is moving."""
        with self._lock:
            return self._digests.get(world.key, "")

    def end(self, world: World) -> None:
        """Note that it has ended."""
        with self._lock:
            self._digests.pop(world.key, None)


RUNNING: Final = Running()
