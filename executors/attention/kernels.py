"""Attention on blocks of keys, forward and backward, in NumPy: what a COMPUTE step does on CPUs.

Rule: these are the Kernels of `seam` in NumPy, on arrays of float32 and float64. Scores are worked on tile by tile (see
planner.ring.tiles), each tile's part kept relative to its rows' largest score, so that parts of different keys can be merged by
their log-sum-exp (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). The backward pass computes
scores anew from q, k and lse.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.attention.seam import Block
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.ring.tiles import TILE_KEYS, keys_seen, rows_at_a_time
from shardroute.planner.ring.workloads import Attention

Floats: TypeAlias = NDArray[np.floating]


@dataclass(frozen=True, slots=True, eq=False)
class _Tile:
    """A tile: a block of keys, its rows `keys`, and for each row of queries how many of them it sees; None where all."""

    block: Block[Floats]
    head: int
    keys: slice
    seen: Ints | None


def attend(attention: Attention, queries: Sequence[Block[Floats]], keys: Sequence[Block[Floats]], *, fresh: bool) -> None:
    """Add to o and lse of the queries what they see in these keys; with `fresh` begin anew."""
    for block in queries:
        q, o, lse = (block.arrays[name] for name in ("q", "o", "lse"))
        found_o, found_lse = (o, lse) if fresh else (np.empty_like(o), np.empty_like(lse))
        found_o[...], found_lse[...] = 0, -np.inf
        some = False
        for batch, heads, rows, tiles in _tiles(attention, block, keys):
            scaled = _folded(q, batch, rows, heads) * _scale(attention, q)
            top = np.full((len(scaled), 1), -np.inf, dtype=q.dtype)
            total = np.zeros_like(top)
            part = np.zeros_like(scaled)
            for tile in tiles:
                k, v = (tile.block.arrays[name][batch, tile.keys, tile.head] for name in ("k", "v"))
                scores = scaled @ k.T
                _mask(scores, tile, heads)
                highest = np.maximum(top, scores.max(axis=1, keepdims=True))
                scores -= _finite(highest)
                np.exp(scores, out=scores)
                fade = np.exp(top - _finite(highest))
                total = total * fade + scores.sum(axis=1, keepdims=True)
                part *= fade
                part += scores @ v
                top = highest
            some = True
            with np.errstate(divide="ignore"):
                summed = np.log(total) + _finite(top)
            part /= np.where(total > 0, total, 1)
            shape = (rows.stop - rows.start, heads.stop - heads.start)
            found_o[batch, rows, heads] = part.reshape(*shape, -1)
            found_lse[batch, rows, heads] = summed.reshape(shape)
        if some and not fresh:
            _merge_into(o, lse, found_o, found_lse, fresh=False)


def grad(
    attention: Attention, queries: Sequence[Block[Floats]], keys: Sequence[Block[Floats]], *, fresh_dq: bool, fresh_dkv: bool
) -> None:
    """Add to dq, dk and dv what these queries and keys give; begin anew those that are said to be fresh."""
    for block, names, fresh in [(b, ("dq",), fresh_dq) for b in queries] + [(b, ("dk", "dv"), fresh_dkv) for b in keys]:
        if fresh:
            for name in names:
                block.arrays[name][...] = 0
    for block in queries:
        arrays = block.arrays
        scale = _scale(attention, arrays["q"])
        for batch, heads, rows, tiles in _tiles(attention, block, keys):
            scaled = _folded(arrays["q"], batch, rows, heads) * scale
            do, o = (_folded(arrays[name], batch, rows, heads) for name in ("do", "o"))
            lse = _finite(arrays["lse"][batch, rows, heads].reshape(-1, 1)).astype(scaled.dtype)
            delta = (do * o).sum(axis=1, keepdims=True)
            dq = np.zeros_like(scaled)
            for tile in tiles:
                k, v, dk, dv = (tile.block.arrays[name][batch, tile.keys, tile.head] for name in ("k", "v", "dk", "dv"))
                scores = scaled @ k.T
                _mask(scores, tile, heads)
                scores -= lse
                np.exp(scores, out=scores)
                dv += scores.T @ do
                slope = do @ v.T
                slope -= delta
                slope *= scores
                dk += slope.T @ scaled
                dq += slope @ k
            dq *= scale
            arrays["dq"][batch, rows, heads] += dq.reshape(rows.stop - rows.start, heads.stop - heads.start, -1)


def merge(o: Floats, lse: Floats, parts: Sequence[tuple[Floats, Floats]], *, fresh: bool) -> None:
    """Merge outputs of the same queries over different keys, each an o and its lse, into `o` and `lse`."""
    for other, found in parts:
        _merge_into(o, lse, other, found, fresh=fresh)
        fresh = False


def add(out: Floats, parts: Sequence[Floats], *, fresh: bool) -> None:
    """Add the parts to `out`, or their sum anew."""
    if fresh:
        out[...] = parts[0]
        parts = parts[1:]
    for part in parts:
        out += part


def _merge_into(o: Floats, lse: Floats, other: Floats, found: Floats, *, fresh: bool) -> None:
    if fresh:
        o[...], lse[...] = other, found
        return
    both = _finite(np.logaddexp(lse, found))
    keep, take = np.exp(lse - both)[..., None], np.exp(found - both)[..., None]
    o *= keep
    o += take * other
    lse[...] = np.logaddexp(lse, found)


def _tiles(
    attention: Attention, block: Block[Floats], keys: Sequence[Block[Floats]]
) -> Iterator[tuple[int, slice, slice, list[_Tile]]]:
    """For each sequence, KV head and part of the block's rows: the query heads that the KV head serves, the rows, their tiles."""
    served, step = attention.n_heads // attention.n_kv_heads, rows_at_a_time(attention)
    n_rows = int(block.rows.n_real[0])
    keys = [other for other in keys if other.rows.document[0] == block.rows.document[0]]
    kv_heads = range(block.first_head // served, -(-(block.first_head + block.n_heads) // served))
    for batch in range(attention.batch):
        for kv_head in kv_heads:
            first = max(kv_head * served - block.first_head, 0)
            heads = slice(first, min((kv_head + 1) * served - block.first_head, block.n_heads))
            for start in range(0, n_rows, step):
                rows = slice(start, min(start + step, n_rows))
                tiles = [
                    tile
                    for other in keys
                    if other.first_head <= kv_head < other.first_head + other.n_heads
                    for tile in _tiles_of(attention, block, other, kv_head - other.first_head, rows)
                ]
                if tiles:
                    yield batch, heads, rows, tiles


def _tiles_of(attention: Attention, block: Block[Floats], other: Block[Floats], head: int, rows: slice) -> Iterator[_Tile]:
    seen = keys_seen(attention, block.rows, 0, other.rows, 0, np.arange(rows.start, rows.stop))
    for first in range(0, int(seen[-1]), TILE_KEYS):
        end = min(first + TILE_KEYS, int(seen[-1]))
        yield _Tile(other, head, slice(first, end), None if seen[0] >= end else seen - first)


def _mask(scores: Floats, tile: _Tile, heads: slice) -> None:
    """Scores of keys that a row doesn't see become -inf. Rows are folded with their heads, heads innermost."""
    if tile.seen is not None:
        seen = np.repeat(tile.seen, heads.stop - heads.start)
        np.copyto(scores, -np.inf, where=np.arange(scores.shape[1]) >= seen[:, None])


def _folded(array: Floats, batch: int, rows: slice, heads: slice) -> Floats:
    """Rows and heads of a tensor as rows of one matrix."""
    part = array[batch, rows, heads]
    return part.reshape(-1, part.shape[-1])


def _scale(attention: Attention, array: Floats) -> Floats:
    return np.asarray(attention.head_dim**-0.5, dtype=array.dtype)


def _finite(values: Floats) -> Floats:
    """The values, with 0 where a row has seen nothing yet, so that differences stay -inf instead of becoming NaN."""
    return np.where(np.isneginf(values), 0, values).astype(values.dtype, copy=False)
