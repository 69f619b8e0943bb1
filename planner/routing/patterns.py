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
from shardroute.planner.plans import ranges
from shardroute.planner.problems import Problem
from shardroute.topologies.topologies import Topology

Csr = tuple[Ints, Ranks]

# Pairs of sets that are compared at a time: domains of a million GPUs are 16 KB a set.
MEET_ROWS = 2**12


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
    """The entries of the problem, and the holders and needers of each pattern, numbered as they are met.

    Equal sets of ranks are one array, whichever patterns and classes they occur in.
    """
    sets = _RankSets()
    known: dict[tuple[int, int], int] = {}
    columns: list[NDArray[np.int64]] = []
    for cls, of_class in zip(problem.classes, pieces, strict=True):
        pairs = zip(map(sets.number, of_class.holders), map(sets.number, of_class.needers), strict=True)
        number = np.array([known.setdefault(pair, len(known)) for pair in pairs], dtype=np.int64)
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
    holders, needers = (tuple(sets.ranks[pair[side]] for pair in known) for side in (0, 1))
    return Entries(tensor, piece, n_bytes, pattern), holders, needers


class _RankSets:
    """Sets of ranks, numbered as they are met. An array that was seen before costs one look-up."""

    def __init__(self) -> None:
        self.ranks: list[Ranks] = []
        self._by_value: dict[bytes, int] = {}
        self._by_array: dict[int, int] = {}
        self._seen: list[Ranks] = []  # keeps the arrays alive, so that none takes another's id

    def number(self, ranks: Ranks) -> int:
        """The number of this set."""
        found = self._by_array.get(id(ranks))
        if found is None:
            found = self._by_value.setdefault(ranks.tobytes(), len(self.ranks))
            if found == len(self.ranks):
                self.ranks.append(ranks)
            self._by_array[id(ranks)] = found
            self._seen.append(ranks)
        return found


def patterns_of(entries: Entries, holders: Sequence[Ranks], needers: Sequence[Ranks], topology: Topology) -> Patterns:
    """The patterns on the topology.

    A set of ranks is sorted into domains once, however many patterns it occurs in. Only where holders and needers of a pattern
    share a domain are they looked at together.
    """
    n = len(holders)
    sets = _RankSets()
    hold, need = (np.array([sets.number(ranks) for ranks in side], dtype=np.int64) for side in (holders, needers))
    table = _by_domain(sets.ranks, topology)
    meet = table.meets(hold, need)
    near, far = _met(np.flatnonzero(meet), holders, needers, topology), np.flatnonzero(~meet)
    # Group rows of the patterns whose sides share no domain: those of the holders' set, then those of the needers'.
    parts = []
    for side, is_home in ((hold, True), (need, False)):
        row, owner = ranges(table.group_ptr, side[far])
        parts.append((far[owner], table.domain[row], np.full(len(row), is_home), row))
    pattern, domain, home, row = (np.concatenate([first, second]) for first, second in zip(*parts, strict=True))
    n_far = len(pattern)
    pattern, domain, home = (
        np.concatenate([ours, theirs]) for ours, theirs in ((pattern, near.pattern), (domain, near.domain), (home, near.home))
    )
    order = np.lexsort((domain, ~home, pattern))
    sides = []
    for is_holder, of_near in ((True, near.holders), (False, near.needers)):
        lengths = np.zeros(len(pattern), dtype=np.int64)
        first = np.zeros(len(pattern), dtype=np.int64)
        takes = np.flatnonzero(home[:n_far] == is_holder)
        lengths[takes] = np.diff(table.rank_ptr)[row[takes]]
        first[takes] = table.rank_ptr[row[takes]]
        lengths[n_far:] = np.diff(of_near[0])
        first[n_far:] = len(table.ranks) + of_near[0][:-1]
        value = np.concatenate([table.ranks, of_near[1]])
        lengths, first = lengths[order], first[order]
        ptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        at = np.repeat(first - ptr[:-1], lengths) + np.arange(int(ptr[-1]))
        sides.append((ptr, value[at]))
    return Patterns(
        holder_sets=tuple(holders),
        needer_sets=tuple(needers),
        local=_csr(near.local[0], near.local[1], n),
        group_ptr=np.searchsorted(pattern[order], np.arange(n + 1)),
        domain=domain[order].astype(np.int32),
        home=home[order],
        holders=sides[0],
        needers=sides[1],
        n_bytes=np.bincount(entries.pattern, weights=entries.n_bytes, minlength=n).astype(np.int64),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _ByDomain:
    """Sets of ranks, each cut into groups by domain: CSR of groups a set, CSR of ranks a group."""

    group_ptr: Ints
    domain: Ints
    rank_ptr: Ints
    ranks: Ranks
    n_domains: int

    def meets(self, first: Ints, second: Ints) -> NDArray[np.bool_]:
        """For pairs of sets, whether they have a domain in common."""
        n_sets = len(self.group_ptr) - 1
        is_in = np.zeros((n_sets, self.n_domains), dtype=bool)
        is_in[np.repeat(np.arange(n_sets), np.diff(self.group_ptr)), self.domain] = True
        packed = np.packbits(is_in, axis=1)
        found = np.zeros(len(first), dtype=bool)
        for start in range(0, len(first), MEET_ROWS):
            rows = slice(start, start + MEET_ROWS)
            found[rows] = (packed[first[rows]] & packed[second[rows]]).any(axis=1)
        return found


def _by_domain(sets: Sequence[Ranks], topology: Topology) -> _ByDomain:
    owner, ranks = _flat(sets)
    domain = topology.domain[ranks].astype(np.int64)
    order = np.lexsort((ranks, domain, owner))
    owner, ranks, domain = owner[order], ranks[order], domain[order]
    starts = np.flatnonzero((np.diff(owner, prepend=-1) != 0) | (np.diff(domain, prepend=-1) != 0))
    return _ByDomain(
        np.searchsorted(owner[starts], np.arange(len(sets) + 1)), domain[starts], np.append(starts, len(ranks)),
        ranks.astype(np.int32), topology.n_domains,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Met:
    """Groups of patterns whose sides share a domain: pattern, domain and home of each, ranks CSR; `local`: (pattern, rank)."""

    pattern: Ints
    domain: Ints
    home: NDArray[np.bool_]
    holders: Csr
    needers: Csr
    local: tuple[Ints, Ints]


def _met(which: Ints, holders: Sequence[Ranks], needers: Sequence[Ranks], topology: Topology) -> _Met:
    n_domains, n_gpus = topology.n_domains, topology.n_gpus
    (hold_row, hold_rank), (need_row, need_rank) = (_flat([side[k] for k in which.tolist()]) for side in (holders, needers))
    hold_pattern, need_pattern = which[hold_row], which[need_row]
    is_local = np.isin(need_pattern * n_gpus + need_rank, hold_pattern * n_gpus + hold_rank)
    local = need_pattern[is_local], need_rank[is_local]
    need_pattern, need_rank = need_pattern[~is_local], need_rank[~is_local]
    hold_key = hold_pattern * n_domains + topology.domain[hold_rank]
    need_key = need_pattern * n_domains + topology.domain[need_rank]
    # A domain that holds a piece and doesn't need it is a group too: it can send.
    keys = np.unique(np.concatenate([hold_key, need_key]))
    home = np.isin(keys, hold_key)
    return _Met(
        keys // n_domains, keys % n_domains, home,
        _csr(np.searchsorted(keys, hold_key), hold_rank, len(keys)),
        _csr(np.searchsorted(keys, need_key), need_rank, len(keys)),
        local,
    )  # fmt: skip


def by_pattern(patterns: Patterns, of_group: NDArray[np.integer]) -> Ints:
    """Sums over the groups of each pattern."""
    sums = np.concatenate([[0], np.cumsum(of_group)])
    return np.asarray(sums[patterns.group_ptr[1:]] - sums[patterns.group_ptr[:-1]])


def _flat(sets: Sequence[Ranks]) -> tuple[Ints, Ints]:
    lengths = np.array([len(s) for s in sets], dtype=np.int64)
    ranks = np.concatenate([np.zeros(0, np.int32), *sets]).astype(np.int64)
    return np.repeat(np.arange(len(sets), dtype=np.int64), lengths), ranks


def _csr(row: Ints, value: Ints, n_rows: int) -> Csr:
    order = np.lexsort((value, row))
    return np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n_rows))]).astype(np.int64), value[order].astype(np.int32)
