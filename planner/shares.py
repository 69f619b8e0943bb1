"""Shares of work that is done, told to whoever waits for it: a function that is called with shares, which rise from 0 to 1.

Rule: a share is one of time, as well as that is known before. Parts of a whole are weighed by what they are foreseen to take:
counts of what they work on, times what one took when it was measured. Only ratios of weights matter.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

Told = Callable[[float], None]


def untold(_share: float) -> None:
    """What is told where nobody waits."""


def heard(told: Told | None) -> Told:
    """Whom to tell: `untold` where there is nobody."""
    return untold if told is None else told


def part(told: Told, first: float, last: float) -> Told:
    """What to tell the share of one part of a whole, the part that lasts from `first` to `last` of it."""
    # In this form a part ends at the very number at which the next begins, so that shares don't fall by rounding.
    return lambda share: told(first * (1.0 - share) + share * last)


def parts(told: Told | None, weights: Sequence[float]) -> list[Told]:
    """What to tell the shares of parts that follow each other, each as long as its weight; `told` hears the share of all of them.

    Weights (1, 3): when half of the second is done, 0.625 is told.
    """
    if told is None:
        return [untold] * len(weights)
    sums = [0.0, *accumulate(weights)]
    ends = [done / sums[-1] if sums[-1] else 1.0 for done in sums]
    return [part(told, first, last) for first, last in pairwise(ends)]
