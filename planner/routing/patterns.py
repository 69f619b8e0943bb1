"""The pieces of a whole problem by pattern: one table over all classes, which balancing works on.

A *pattern* is a pair (ranks that hold, ranks that need). Pieces of one pattern can travel alike, whichever tensor they are of, so
like tensors are one row. A pattern's *groups* are its ranks by NVLink domain: home groups hold the pieces, away groups only
need them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints, Ranks
from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.problems import Problem
from shardroute.topologies.topologies import Topology

Csr = tuple[Ints, Ranks]


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """Every piece of every tensor: tensor (index in the problem), piece (index in its class), bytes, pattern. By pattern's
    number.
    """

    tensor: Ints
    piece: Ints
    n_bytes: Ints
    pattern: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    """Patterns, CSR over groups, and each group's ranks, CSR.

    local       by pattern: needers that hold the piece themselves
    group_ptr   by pattern: its groups, home groups first, then ascending by domain
    domain, home   of each group
    holders, needers   of each group; a needer that holds is in `local` alone
    n_bytes     int64[n]: bytes of all pieces of each pattern
    """

    holder_sets: tuple[Ranks, ...]
    needer_sets: tuple[Ranks, ...]
    local: Csr
    group_ptr: Ints
    domain: Ranks
    home: NDArray[np.bool_]
    holders: Csr
    needers: Csr
    n_bytes: Ints

    def __len__(self) -> int:
        return len(self.group_ptr) - 1


def entries_of(problem: Problem, pieces: Sequence[Pieces]) -> tuple[Entries, tuple[Ranks, ...], tuple[Ranks, ...]]:
    """The entries of the problem, and the holders and needers of each pattern, numbered as they are met."""
    known: dict[tuple[bytes, bytes], int] = {}
    holders: list[Ranks] = []
    needers: list[Ranks] = []
    columns: list[NDArray[np.int64]] = []
    for cls, of_class in zip(problem.classes, pieces, strict=True):
        number = np.zeros(len(of_class.holders), dtype=np.int64)
        for i, (who, to) in enumerate(zip(of_class.holders, of_class.needers, strict=True)):
            key = (who.tobytes(), to.tobytes())
            if key not in known:
                known[key] = len(known)
                holders.append(who)
                needers.append(to)
            number[i] = known[key]
        n, m = len(of_class), len(cls.members)
        columns.append(
            np.stack(
                [
                    np.repeat(cls.members, n),
                    np.tile(np.arange(n), m),
                    np.tile(of_class.n_elements * cls.itemsize, m),
                    np.tile(number[of_class.pattern], m) if n else np.zeros(0, np.int64),
                ]
            )
        )
    tensor, piece, n_bytes, pattern = np.concatenate([np.zeros((4, 0), np.int64), *columns], axis=1)
    return Entries(tensor, piece, n_bytes, pattern), tuple(holders), tuple(needers)


def patterns_of(entries: Entries, holders: Sequence[Ranks], needers: Sequence[Ranks], topology: Topology) -> Patterns:
    """The patterns on the topology."""
    n, n_domains = len(holders), topology.n_domains
    n_gpus = topology.n_gpus
    hold_pattern, hold_rank = _flat(holders)
    need_pattern, need_rank = _flat(needers)
    is_local = np.isin(need_pattern * n_gpus + need_rank, hold_pattern * n_gpus + hold_rank)
    local = _csr(need_pattern[is_local], need_rank[is_local], n)
    need_pattern, need_rank = need_pattern[~is_local], need_rank[~is_local]
    hold_key = hold_pattern * n_domains + topology.domain[hold_rank]
    need_key = need_pattern * n_domains + topology.domain[need_rank]
    # A domain that holds a piece and doesn't need it is a group too: it can send.
    keys = np.unique(np.concatenate([hold_key, need_key]))
    home = np.isin(keys, hold_key)
    order = np.lexsort((keys, ~home, keys // n_domains))
    number = np.empty(len(keys), dtype=np.int64)
    number[order] = np.arange(len(keys))
    return Patterns(
        holder_sets=tuple(holders),
        needer_sets=tuple(needers),
        local=local,
        group_ptr=np.searchsorted(keys[order] // n_domains, np.arange(n + 1)),
        domain=(keys[order] % n_domains).astype(np.int32),
        home=home[order],
        holders=_csr(number[np.searchsorted(keys, hold_key)], hold_rank, len(keys)),
        needers=_csr(number[np.searchsorted(keys, need_key)], need_rank, len(keys)),
        n_bytes=np.bincount(entries.pattern, weights=entries.n_bytes, minlength=n).astype(np.int64),
    )


def _flat(sets: Sequence[Ranks]) -> tuple[Ints, Ints]:
    lengths = np.array([len(s) for s in sets], dtype=np.int64)
    ranks = np.concatenate([np.zeros(0, np.int32), *sets]).astype(np.int64)
    return np.repeat(np.arange(len(sets), dtype=np.int64), lengths), ranks


def _csr(row: Ints, value: Ints, n_rows: int) -> Csr:
    order = np.lexsort((value, row))
    return np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n_rows))]).astype(np.int64), value[order].astype(np.int32)
