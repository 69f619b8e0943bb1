"""Checksums of bytes: sums of words, each mixed with its position, so that parts may be summed in any order and added up.

Rule: a checksum is of the bytes in row-major order, however they lie in memory: the same piece has the same one wherever it is.

Word i (8 bytes, little-endian; the last one filled up with zeros) counts w_i * m_i modulo 2^64, and all m_i are odd. So whatever
changes in one word changes the sum; of changes in several words about one in 2^63 goes unseen, as the m_i are as good as random.
This is multilinear hashing (Carter and Wegman 1981; Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
"""

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.patterns import scatter

_WORD_BYTES: Final = 8
# Words that are multiplied at a time: with the table of multipliers they stay within a level-2 cache.
_TILE_WORDS: Final = 2**14
_ODD: Final = np.uint64(1)
_MIX: Final[NDArray[np.uint64]] = scatter(np.arange(_TILE_WORDS, dtype=np.uint64)) | _ODD
_MODULUS: Final = 1 << 64
# Added to a tile's number before hashing, so that the first tile's multiplier isn't the first word's.
_TILE_SEED: Final = 1 << 32


def checksum(data: NDArray[np.uint8], at: int = 0) -> int:
    """The share in a piece's checksum of contiguous bytes that begin `at` bytes into it, a multiple of 8; the sum of all parts'
    shares modulo 2^64 is the checksum of the piece.
    """
    assert at % _WORD_BYTES == 0
    n_words = len(data) // _WORD_BYTES
    words = data[: n_words * _WORD_BYTES].view("<u8")  # may begin anywhere; NumPy copies where a CPU reads aligned words only
    total, start = 0, at // _WORD_BYTES
    tile, inside = divmod(start, _TILE_WORDS)
    while len(words):
        part = words[: _TILE_WORDS - inside]
        total += int(part.dot(_MIX[inside : inside + len(part)])) * _of_tile(tile)
        words, tile, inside = words[len(part) :], tile + 1, 0
    if n_words * _WORD_BYTES < len(data):
        tile, inside = divmod(start + n_words, _TILE_WORDS)
        rest = int.from_bytes(data[n_words * _WORD_BYTES :].tobytes(), "little")
        total += rest * int(_MIX[inside]) * _of_tile(tile)
    return total % _MODULUS


def multipliers(n_bytes: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """By what the words of a piece of so many bytes count, for who sums them elsewhere: word i counts by the product of entry
    i % n of the first, which has n, and entry i // n of the second.
    """
    n_tiles = -(-n_bytes // (_WORD_BYTES * _TILE_WORDS))
    return _MIX.copy(), scatter(np.arange(n_tiles, dtype=np.uint64) + np.uint64(_TILE_SEED)) | _ODD


@lru_cache(maxsize=4096)  # of 128 KiB each: 512 MiB, far more than a piece has
def _of_tile(tile: int) -> int:
    """The odd number by which the sum of a tile's words counts."""
    return int(scatter(np.array([tile + _TILE_SEED], dtype=np.uint64))[0]) | 1
