"""Ranks of a library, which counts them from 0 without gaps, by the numbers that they have in a plan.

Rule: above a transport only numbers of plans are known, below it only the library's.
"""

from collections.abc import Sequence
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.transports.seam import Deadline, Handle, Wire


class Numbers:
    """`of[i]` is what the library's rank i is called; by default the same."""

    def __init__(self, of: Sequence[int]) -> None:
        self.of = tuple(of)
        self._at = {number: i for i, number in enumerate(self.of)}

    def at(self, number: int) -> int:
        """The library's number of a rank."""
        return self._at[number]

    def all_at(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The same of several, ascending."""
        return tuple(sorted(self._at[number] for number in numbers))

    def are_in(self, n_ranks: int) -> bool:
        """Whether a plan for so many ranks knows all of them."""
        return max(self.of) < n_ranks


class NumberedWire(Generic[Handle]):
    """A Wire whose peers go by the numbers of a plan."""

    def __init__(self, wire: Wire[Handle], numbers: Numbers) -> None:
        self._wire, self._numbers = wire, numbers

    def send(self, data: NDArray[np.uint8], to: int, tag: int) -> Handle:
        return self._wire.send(data, self._numbers.at(to), tag)

    def receive(self, data: NDArray[np.uint8], source: int, tag: int) -> Handle:
        return self._wire.receive(data, self._numbers.at(source), tag)

    def wait(self, handle: Handle, deadline: Deadline) -> None:
        self._wire.wait(handle, deadline)
