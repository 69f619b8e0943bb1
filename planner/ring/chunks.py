"""Chunks: the rows of one document that lie together on one rank, and how much of each other they attend.

Rule: a chunk's rows are an arithmetic progression of positions in their document (step 1, or the number of ranks where the
sequence is striped), so masks between chunks are counted in closed form, however long the sequence is.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.ring.workloads import Attention, SequenceLayout
from shardroute.topologies.errors import PlanError


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of chunks: row k of chunk i is position start[i] + k * stride of document[i]; n_real[i] of n[i] are no padding."""

    document: Ints
    start: Ints
    stride: int
    n: Ints
    n_real: Ints

    def __len__(self) -> int:
        return len(self.n)

    def take(self, index: Ints) -> "Rows":
        """Some of them, in this order."""
        return Rows(self.document[index], self.start[index], self.stride, self.n[index], self.n_real[index])


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """All chunks of a call, ordered by rank, then as they lie in its memory.

    rank     int64[n]             who holds it
    lo, hi   int64[n, n_dims]     its box in the token dims of every tensor, see `Attention.seq_shape`
    local    int64[n]             tokens that lie before it on its rank
    rows     its rows
    """

    rank: Ints
    lo: Ints
    hi: Ints
    local: Ints
    rows: Rows

    def __len__(self) -> int:
        return len(self.rank)

    def of(self, rank: int) -> Ints:
        """The chunks of a rank."""
        return np.flatnonzero(self.rank == rank)


def chunks_of(attention: Attention) -> Chunks:
    """The chunks that the sequence layout makes: one a document and rank, two for zigzag."""
    n_ranks, padded = attention.n_ranks, np.array(attention.padded, dtype=np.int64)
    first = np.cumsum(padded) - padded
    rank, document = (x.ravel() for x in np.meshgrid(np.arange(n_ranks), np.arange(len(padded)), indexing="ij"))
    match attention.layout:
        case SequenceLayout.STRIPED:
            row = first[document] // n_ranks
            lo = np.stack([row, rank], axis=1)
            hi = np.stack([row + padded[document] // n_ranks, rank + 1], axis=1)
        case SequenceLayout.CONTIGUOUS:
            size = padded[document] // n_ranks
            lo = (first[document] + rank * size)[:, None]
            hi = lo + size[:, None]
        case SequenceLayout.ZIGZAG:
            rank, document = np.repeat(rank, 2), np.repeat(document, 2)
            late = np.arange(len(rank)) % 2 == 1
            size = padded[document] // (2 * n_ranks)
            lo = (first[document] + np.where(late, 2 * n_ranks - 1 - rank, rank) * size)[:, None]
            hi = lo + size[:, None]
    rows = rows_of(attention, lo, hi)
    before = np.cumsum(rows.n) - rows.n
    return Chunks(rank, lo, hi, before - attention.local_tokens * rank, rows)


def rows_of(attention: Attention, lo: Ints, hi: Ints) -> Rows:
    """The rows in boxes of the token dims, int64[n, n_dims]. Raises PlanError for a box that isn't of rows of one document."""
    striped = attention.layout is SequenceLayout.STRIPED
    stride = attention.n_ranks if striped else 1
    n = hi[:, 0] - lo[:, 0]
    token = lo[:, 0] * stride + lo[:, 1] if striped else lo[:, 0]
    ends = np.cumsum(np.array(attention.padded, dtype=np.int64))
    document = np.minimum(np.searchsorted(ends, token, side="right"), len(ends) - 1)
    last = token + (n - 1) * stride
    bad = (n < 1) | (last >= ends[document]) | (striped & (hi[:, -1] - lo[:, -1] != 1))
    if bad.any():
        i = int(np.argmax(bad))
        raise PlanError(f"piece of tokens {lo[i].tolist()} to {hi[i].tolist()}: expected rows of one document, one rank's stripe")
    start = token - (ends[document] - np.array(attention.padded)[document])
    length = np.array(attention.lengths, dtype=np.int64)[document]
    return Rows(document, start, stride, n, np.clip(-(-(length - start) // stride), 0, n))


def unmasked(attention: Attention, queries: Rows, keys: Rows) -> Ints:
    """Pairs of a row of each chunk that attend, int64[n_queries, n_keys]; padding attends nothing and is attended by nothing.

    Causal, query i sees min(max(a + i, 0), n_keys) keys, where a = (q - k) // stride + 1 for the chunks' first positions q and k;
    the sum over i is an arithmetic series between where it leaves 0 and where all keys are seen.
    """
    same = queries.document[:, None] == keys.document[None, :]
    n_q, n_k = queries.n_real[:, None], keys.n_real[None, :]
    if not attention.causal:
        return np.where(same, n_q * n_k, 0)
    a = (queries.start[:, None] - keys.start[None, :]) // queries.stride + 1
    leaves = np.clip(-a, 0, n_q)
    full = np.maximum(np.clip(n_k - a, 0, n_q), leaves)
    series = (full - leaves) * a + (full * (full - 1) - leaves * (leaves - 1)) // 2
    return np.where(same, series + (n_q - full) * n_k, 0)


def seen(attention: Attention, queries: Rows, keys: Rows) -> NDArray[np.bool_]:
    """Whether any row of the one chunk attends any of the other, bool[n_queries, n_keys]."""
    return unmasked(attention, queries, keys) > 0
