"""Sums as a plan of partial tensors promises them, element by element: addends in ascending order of ranks, each sum rounded."""

import itertools
from bisect import bisect_left

import numpy as np

from shardroute.executors.interpreting.memories import Part
from shardroute.planner.plans import Plan

Numbers = dict[tuple[int, tuple[int, ...]], np.generic]  # by rank and element
NUMPY = {"f32": "<f4", "f64": "<f8", "f16": "<f2", "bf16": "<u2"}
# All finite bf16 numbers that are not negative, ascending; number i has the bits i.
_BF16 = [float((np.array([i], np.uint32) << 16).view(np.float32)[0]) for i in range(0x7F80)]


def from_bits(bits: np.generic, dtype: str) -> float:
    if dtype != "bf16":
        return float(bits)
    return -_BF16[int(bits) & 0x7FFF] if int(bits) & 0x8000 else _BF16[int(bits)]


def to_bits(value: float, dtype: str) -> np.generic:
    """The nearest number's bits, ties to even."""
    if dtype != "bf16":
        return np.dtype(NUMPY[dtype]).type(value)
    above = bisect_left(_BF16, abs(value))
    nearest = min((above - 1, above), key=lambda i: (abs(_BF16[i] - abs(value)), i % 2)) if above else 0
    return np.uint16(nearest | (0x8000 if value < 0 else 0))


def expected_sums(plan: Plan, addends: Numbers) -> Numbers:
    """(rank, element) -> sum, for everything that the single tensor's destination needs; addends by (rank, element)."""
    dtype, needed = plan.problem.tensors[0].dtype, {}
    for rank, element in elements(plan, Part.TARGET):
        total = None
        for holder in sorted(r for r, e in addends if e == element):
            mine = from_bits(addends[holder, element], dtype)
            total = mine if total is None else from_bits(to_bits(total + mine, dtype), dtype)
        needed[rank, element] = to_bits(total, dtype)
    return needed


def elements(plan: Plan, part: Part) -> dict[tuple[int, tuple[int, ...]], int]:
    """(rank, element) -> its place in the rank's only buffer of that side."""
    layout = plan.problem.source if part is Part.SOURCE else plan.problem.target
    fragments, found = layout.fragments[0], {}
    for i in range(len(fragments)):
        lo, hi = fragments.lo[i].tolist(), fragments.hi[i].tolist()
        for element in itertools.product(*(range(a, b) for a, b in zip(lo, hi, strict=True))):
            at = int(fragments.offset[i]) + sum(
                (e - a) * s for e, a, s in zip(element, lo, fragments.strides[i].tolist(), strict=True)
            )
            found[int(fragments.rank[i]), element] = at
    return found
