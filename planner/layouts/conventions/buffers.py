"""How the dims of a tensor are cut, and from the cuts the fragments: what every convention is written in.

Rule: a buffer is row-major and has as many dims as the tensor, in its order unless said otherwise. Along each dim a cut says
which interval of the tensor every part holds, where it starts in the part's buffer, and how long that buffer is; a fused or
padded buffer is a longer one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.fragments import Fragments, Ints, dense_strides
from shardroute.planner.layouts.models.parameters import Segment


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Intervals of one dim. Columns of equal length, int64[n]; empty intervals hold nothing.

    n_parts  how many parts there are; a part may hold several intervals, or none
    part     which part holds the interval
    lo, hi   the interval in the tensor
    at       where it starts in the part's buffer
    extent   how long the part's buffer is along this dim
    """

    n_parts: int
    part: Ints
    lo: Ints
    hi: Ints
    at: Ints
    extent: Ints


def keep(size: int) -> Cut:
    """The whole dim in one part."""
    return even(size, 1)


def even(size: int, n_parts: int, *, before: int = 0, buffer: int | None = None) -> Cut:
    """The dim in equal parts, each after `before` elements of a buffer of length `buffer` (default: its own)."""
    assert size % n_parts == 0, (size, n_parts)
    step = size // n_parts
    return intervals(
        np.arange(n_parts) * step,
        np.arange(1, n_parts + 1) * step,
        before,
        step if buffer is None else buffer,
    )


def padded(size: int, padded_size: int, n_parts: int) -> Cut:
    """The dim in equal parts of `padded_size`; what lies past `size` is padding, in the buffers only."""
    step = padded_size // n_parts
    lo = np.arange(n_parts) * step
    return intervals(np.minimum(lo, size), np.minimum(lo + step, size), 0, step)


def balanced(size: int, n_parts: int) -> Cut:
    """The dim in parts that differ by at most 1, the larger ones first."""
    edges = np.arange(n_parts + 1) * (size // n_parts) + np.minimum(np.arange(n_parts + 1), size % n_parts)
    return intervals(edges[:-1], edges[1:], 0, np.diff(edges))


def chunked(size: int, n_parts: int) -> Cut:
    """The dim by torch.chunk's rule: ceil(size / n_parts) each until nothing is left; the last parts may be short or empty."""
    step = -(-size // n_parts)
    lo = np.minimum(np.arange(n_parts) * step, size)
    hi = np.minimum(lo + step, size)
    return intervals(lo, hi, 0, hi - lo)


def everywhere(size: int, n_parts: int, *, only_first: bool = False) -> Cut:
    """The whole dim in every part, or in the first one only."""
    held = np.full(n_parts, size)
    if only_first:
        held[1:] = 0
    return intervals(np.zeros(n_parts, np.int64), held, 0, size)


def segmented(segments: Sequence[Segment], n_parts: int) -> Cut:
    """Segments of the dim, each split in whole units, one after the other in a part's buffer; one unit goes to every part."""
    rank = np.arange(n_parts)
    first, at = 0, 0
    columns: list[tuple[Ints, Ints, int]] = []
    for segment in segments:
        shared = segment.n_units == 1
        n = segment.rows * (1 if shared else segment.n_units // n_parts)
        lo = first + (np.zeros(n_parts, np.int64) if shared else rank * n)
        columns.append((lo, lo + n, at))
        first, at = first + segment.n_units * segment.rows, at + n
    lo, hi = (np.concatenate([column[i] for column in columns]) for i in (0, 1))
    before = np.repeat([column[2] for column in columns], n_parts)
    return intervals(lo, hi, before, at, np.tile(rank, len(columns)), n_parts)


def intervals(
    lo: Ints,
    hi: Ints,
    at: Ints | int,
    extent: Ints | int,
    part: Ints | None = None,
    n_parts: int | None = None,
) -> Cut:
    """A cut from its columns; part i holds interval i unless `part` and `n_parts` say otherwise."""
    n = len(lo)

    def column(value: Ints | int) -> Ints:
        return np.broadcast_to(np.asarray(value, dtype=np.int64), (n,))

    return Cut(
        n if n_parts is None else n_parts,
        np.arange(n, dtype=np.int64) if part is None else column(part),
        column(lo),
        column(hi),
        column(at),
        column(extent),
    )


def spread(
    cuts: Sequence[Cut], shape: Sequence[int], ranks: Ints, buffer: Ints, order: Sequence[int] | None = None
) -> Fragments:
    """The fragments of a tensor that is cut so along its dims.

    ranks   int[n_parts, n_copies]  who holds each part; parts are numbered row-major over the cuts
    buffer  int[n_copies]           which of the tensor's buffers a copy lies in
    order   the tensor's dims as they follow one another in the buffer, when it is transposed
    """
    grid = np.indices([len(cut.part) for cut in cuts]).reshape(len(cuts), -1)
    part = np.zeros(grid.shape[1], dtype=np.int64)
    index = list(zip(cuts, grid, strict=True))
    for cut, i in index:
        part = part * cut.n_parts + cut.part[i]
    lo = np.stack([cut.lo[i] for cut, i in index], axis=1)
    hi = np.stack([cut.hi[i] for cut, i in index], axis=1)
    at = np.stack([cut.at[i] for cut, i in index], axis=1)
    extent = np.stack([cut.extent[i] for cut, i in index], axis=1)
    filled = (hi > lo).all(axis=1)
    part, lo, hi, at, extent = part[filled], lo[filled], hi[filled], at[filled], extent[filled]
    if order is None:
        strides = dense_strides(extent)
    else:
        strides = np.empty_like(extent)
        strides[:, list(order)] = dense_strides(extent[:, list(order)])
    n_copies = ranks.shape[1]

    def repeated(column: Ints) -> Ints:
        return np.repeat(column, n_copies, axis=0)

    return Fragments(
        shape=tuple(shape),
        rank=ranks[part].ravel().astype(np.int32),
        lo=repeated(lo),
        hi=repeated(hi),
        buffer=np.tile(buffer, len(part)).astype(np.int32),
        offset=repeated((at * strides).sum(axis=1)),
        strides=repeated(strides),
        buffer_size=repeated(extent.prod(axis=1, dtype=np.int64)),
    )
