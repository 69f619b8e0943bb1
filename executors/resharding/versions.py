"""Which version of the weights a rank's destination tensors hold, and who may look at them or change them now.

Rule: whoever reads sees one version from begin to end; whoever writes waits for those that read, and lets nobody in meanwhile.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardroute.executors.transports.seam import Deadline
from shardroute.topologies.errors import RunError


class Versions:
    """The version of one rank's weights; None where a failed transfer has left parts of two."""

    def __init__(self, version: int | None) -> None:
        self._version = version
        self._n_readers = 0
        self._written = False
        self._changed = threading.Condition()

    @property
    def current(self) -> int | None:
        """The version that whoever reads next would see."""
        return self._version

    @contextmanager
    def reading(self) -> Iterator[int]:
        """The version, which stays what it is while the block runs; waits while weights are written. Raises RunError where what
        lies there is parts of two versions.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._written)
            if self._version is None:
                raise RunError("the destination tensors hold parts of two versions: a transfer into them failed; transfer again")
            self._n_readers += 1
            version = self._version
        try:
            yield version
        finally:
            with self._changed:
                self._n_readers -= 1
                self._changed.notify_all()

    def claim(self, deadline: Deadline) -> None:
        """Return when nobody reads, and let nobody read until `release`. Raises RunError past the deadline."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._n_readers, deadline.left_s):
                late = f"when the {deadline.allowed_s:g} s that it may take were over"
                raise RunError(f"its weights were still read, by {self._n_readers} blocks of `reading`, {late}")
            self._written = True

    def release(self, version: int | None) -> None:
        """Say which version lies there now, and let others read. Nothing happens but that where nothing was claimed."""
        with self._changed:
            self._version, self._written = version, False
            self._changed.notify_all()
