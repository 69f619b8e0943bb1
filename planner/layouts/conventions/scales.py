"""Which scales each rank holds of a weight that is stored in 8 bits, and which blocks a cut goes through.

Rule: a rank has the scale of every block that it holds a part of. A block that a cut goes through is thus on several
ranks. A buffer's scales lie in the order of its weights, block after block.

Worked example: 1536 rows over 8 ranks, blocks of 128. Ranks 0 and 1 meet at row 192, inside block 1 (rows 128 to 255):
rank 0 has the scales 0 and 1, rank 1 the scales 1 and 2.
"""

from collections.abc import Callable, Sequence

import numpy as np

from shardroute.planner.layouts.conventions.buffers import Cut, intervals
from shardroute.planner.layouts.models.parameters import Parameter

# Takes the scales' parameter, the dim and the cut of the weight along it; raises when the framework can't have that.
ScaleRule = Callable[[Parameter, int, Cut], None]


def scale_cuts(
    scales: Parameter, cuts: Sequence[Cut], fused: Sequence[Sequence[Cut]], rule: ScaleRule | None = None
) -> list[Cut]:
    """How scales are cut, dim by dim, from the cuts of their weight and of all weights in the same buffer (with its own)."""
    out = []
    for dim, (cut, block) in enumerate(zip(cuts, scales.block, strict=True)):
        if block > 1 and rule is not None:
            rule(scales, dim, cut)
        out.append(cut if block == 1 else _blocks(cut, [other[dim] for other in fused], block))
    return out


def shared_blocks(cut: Cut, block: int) -> dict[int, tuple[int, ...]]:
    """The blocks along a dim that several parts need, each with those parts, ascending."""
    parts: dict[int, set[int]] = {}
    for part, lo, hi in zip(cut.part.tolist(), cut.lo.tolist(), cut.hi.tolist(), strict=True):
        for number in range(lo // block, -(-hi // block)) if hi > lo else ():
            parts.setdefault(number, set()).add(part)
    edges = {int(edge) // block for edge in cut.lo[cut.hi > cut.lo] if edge % block}
    return {number: tuple(sorted(parts[number])) for number in sorted(edges) if len(parts[number]) > 1}


def first_off_grid(cut: Cut, block: int) -> int | None:
    """The first interval whose blocks aren't those that counting from the start of its part's buffer would give."""
    bad = np.flatnonzero((cut.hi > cut.lo) & ((cut.lo % block != 0) | (cut.at % block != 0)))
    return int(bad[0]) if len(bad) else None


def _blocks(cut: Cut, fused: Sequence[Cut], block: int) -> Cut:
    """The cut of the scales: each interval's blocks, after those of whatever lies before it in the part's buffer."""
    columns = [np.stack([c.part, c.at, c.lo, c.hi])[:, c.hi > c.lo] for c in fused]
    part, at, lo, hi = np.unique(np.concatenate(columns, axis=1), axis=1)
    # Weights fused along another dim have the same intervals along this one: they count once.
    first = np.ones(len(part), dtype=bool)
    first[1:] = (part[1:] != part[:-1]) | (at[1:] != at[:-1])
    part, at, lo, hi = part[first], at[first], lo[first], hi[first]
    n = -(-hi // block) - lo // block
    total = np.bincount(part, weights=n, minlength=cut.n_parts).astype(np.int64)
    start = np.cumsum(n) - n
    start -= (np.cumsum(total) - total)[part]
    # `part` and `at` are sorted together, so one key finds an interval among them.
    width = int(max(at.max(initial=0), cut.at.max(initial=0))) + 1
    mine = np.searchsorted(part * width + at, cut.part * width + cut.at)
    filled = cut.hi > cut.lo
    where = np.where(filled, np.minimum(mine, len(start) - 1), 0)
    return intervals(
        np.where(filled, cut.lo // block, 0),
        np.where(filled, -(-cut.hi // block), 0),
        np.where(filled, start[where], 0),
        total[cut.part],
        cut.part,
        cut.n_parts,
    )
