"""Which version of the weights a rank's destination tensors hold, and who may look at them or change them now.

Rule: whoever reads sees one version from begin to end; whoever writes waits for those that read, and lets nobody in meanwhile.
Tensors of a bucket change together, so they have one version; those of several may have two after a failure between them.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from shardroute.executors.transports.seam import Deadline
from shardroute.topologies.errors import InputError, RunError

# One of all tensors, or of each by its name; None for parts of two.
Given = int | Mapping[str, int | None] | None


def check_version(version: object) -> None:
    """Raise InputError for what is neither a whole number nor None."""
    if version is not None and (not isinstance(version, int) or isinstance(version, bool)):
        raise InputError(f"version {version!r}: expected a whole number")


class Versions:
    """The versions of one rank's weights, by tensor. `given` is one of all, or says those of some, and the others have none."""

    def __init__(self, given: Given, names: Iterable[str]) -> None:
        for version in given.values() if isinstance(given, Mapping) else [given]:
            check_version(version)
        self._of = {name: given.get(name) if isinstance(given, Mapping) else given for name in names}
        self._n_readers = 0
        self._written = False
        self._changed = threading.Condition()

    @property
    def current(self) -> int | None:
        """The version that whoever reads next would see; None where there are two, or parts of two."""
        found = set(self._of.values())
        return found.pop() if len(found) == 1 else None

    @property
    def of_tensors(self) -> Mapping[str, int | None]:
        """The version of each tensor, None for one that holds parts of two."""
        with self._changed:
            return dict(self._of)

    @property
    def next(self) -> int:
        """What a transfer moves if nobody says: one more than any. Never one that some tensors have already, for these would not
        be moved again, and nobody has said that it is the same weights that the others get.
        """
        return max((version for version in self._of.values() if version is not None), default=0) + 1

    @contextmanager
    def reading(self) -> Iterator[int]:
        """The version, which stays what it is while the block runs; waits while weights are written. Raises RunError where what
        lies there is of two versions.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._written)
            version = self.current
            if version is None:
                raise RunError(
                    f"the destination tensors hold parts of two versions ({self._text()}): a transfer into them failed; transfer "
                    "again"
                )
            self._n_readers += 1
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

    def hold(self, names: Iterable[str], version: int) -> bool:
        """Whether all of these tensors have that version."""
        return all(self._of[name] == version for name in names)

    def mark(self, names: Iterable[str], version: int | None) -> None:
        """Say what some tensors hold from now on: None while they are being written."""
        assert self._written
        with self._changed:
            self._of |= dict.fromkeys(names, version)

    def release(self) -> None:
        """Let others read."""
        with self._changed:
            self._written = False
            self._changed.notify_all()

    def _text(self) -> str:
        """Which of them hold what."""
        known = sorted({version for version in self._of.values() if version is not None})
        names = {version: [n for n, v in self._of.items() if v == version] for version in (*known, None)}
        parts = [f"{_some(names[version])} version {version}" for version in known]
        if names[None]:
            parts.append(f"{_some(names[None])} parts of two versions")
        return "; ".join(parts)


def _some(names: list[str]) -> str:
    return f"{names[0]} holds" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more hold"
