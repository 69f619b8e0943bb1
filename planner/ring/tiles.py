"""Tiles: the parts of a score matrix that attention on CPUs works on at a time; how many there are is what predicting costs.

Rule: the kernels of executors.attention loop over exactly these. A tile of scores stays in a level-2 cache (2 MiB of float64);
a tile that is masked altogether is left out, and one that is masked in part is computed whole.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.ring.chunks import Rows
from shardroute.planner.ring.workloads import Attention

# Rows of a tile: rows of the chunk times the query heads that share a KV head. Keys of a tile.
TILE_ROWS: Final = 512
TILE_KEYS: Final = 512


@dataclass(frozen=True, slots=True)
class Work:
    """What a COMPUTE of kind ATTEND or GRAD comes to, over all its heads and the batch.

    n_pairs     scores that the mask lets through
    n_scores    scores that are computed: tiles are computed whole
    n_masked    of them, those in tiles that are masked in part
    n_edges     rows and keys of all tiles
    n_rows      rows of queries, over their heads, that meet any key: what is merged with what was there
    """

    n_pairs: int = 0
    n_scores: int = 0
    n_masked: int = 0
    n_edges: int = 0
    n_tiles: int = 0
    n_rows: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.n_pairs + other.n_pairs, self.n_scores + other.n_scores, self.n_masked + other.n_masked,
            self.n_edges + other.n_edges, self.n_tiles + other.n_tiles, self.n_rows + other.n_rows,
        )  # fmt: skip

    def times(self, n: int) -> "Work":
        """The work of n heads or sequences like this one."""
        return Work(
            self.n_pairs * n, self.n_scores * n, self.n_masked * n, self.n_edges * n, self.n_tiles * n, self.n_rows * n
        )  # fmt: skip


def rows_at_a_time(attention: Attention) -> int:
    """Rows of a chunk that a tile takes."""
    return max(1, TILE_ROWS // (attention.n_heads // attention.n_kv_heads))


def keys_seen(attention: Attention, queries: Rows, q: int, keys: Rows, k: int, row: Ints) -> Ints:
    """How many of the first keys of chunk k each of these rows of chunk q sees; its later rows see no fewer."""
    n_keys = keys.n_real[k]
    if queries.document[q] != keys.document[k]:
        return np.zeros(len(row), dtype=np.int64)
    if not attention.causal:
        return np.full(len(row), n_keys)
    position = queries.start[q] + row * queries.stride
    return np.asarray(np.clip((position - keys.start[k]) // keys.stride + 1, 0, n_keys))


def work(attention: Attention, queries: Rows, q: int, keys: Rows, k: int, n_heads: int) -> Work:
    """The work of one chunk of queries with one of keys, for one KV head and so many of the query heads that it serves.

    Its rows are left out: with other keys they are the same.
    """
    if queries.document[q] != keys.document[k]:
        return Work()
    gap = int(queries.start[q] - keys.start[k])
    return work_between(attention, int(queries.n_real[q]), int(keys.n_real[k]), gap // keys.stride + 1, n_heads)


def work_between(attention: Attention, n_rows: int, n_keys: int, first_sees: int, n_heads: int) -> Work:
    """`work` of so many rows and keys of one document; causal, the first row sees the keys up to number `first_sees`, each later
    row one more.
    """
    if not attention.causal or first_sees >= n_keys:  # every row sees every key
        return _work(n_rows, n_keys, None, n_heads, rows_at_a_time(attention))
    return _work(n_rows, n_keys, max(first_sees, -n_rows), n_heads, rows_at_a_time(attention))


@cache
def _work(n_rows: int, n_keys: int, first_sees: int | None, n_heads: int, step: int) -> Work:
    """Work of rows of which the first sees so many keys and each later one one more (None: all see all), `step` at a time."""
    row = np.arange(n_rows, dtype=np.int64)
    seen = np.full(n_rows, n_keys) if first_sees is None else np.clip(first_sees + row, 0, n_keys)
    total = Work()
    for first in range(0, n_rows, step):
        end = min(first + step, n_rows)
        last_sees, first_seen = int(seen[end - 1]), int(seen[first])
        begin = np.arange(0, last_sees, TILE_KEYS)
        width = np.minimum(begin + TILE_KEYS, last_sees) - begin
        n = (end - first) * n_heads
        masked = int(width[first_seen < begin + width].sum())
        edges = n * len(width) + int(width.sum())
        total += Work(int(seen[first:end].sum()) * n_heads, n * int(width.sum()), n * masked, edges, len(width))
    return total
