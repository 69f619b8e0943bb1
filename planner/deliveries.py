"""Proof of deliveries: each piece reaches each rank that needs it, once, from a rank that has it by then.

Rule: pieces of like tensors that travel in the same bundles fare alike, so only the first of them is followed; and they are
followed some at a time, with a place for each rank that needs each and the step that fills it. So memory depends neither on how
many like tensors there are nor on what all ranks take in together.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.piece_tables import PieceTables, distinct
from shardroute.planner.plans import SOURCE, TARGET, Op, Plan, places, ranges
from shardroute.topologies.errors import PlanError

# Deliveries followed at once, each of which takes some 40 bytes meanwhile.
_AT_ONCE: Final = 2**23


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Deliveries of a piece to a rank, int64[n] each: the step, the rank, the global number of the (tensor, piece)."""

    step: Ints
    rank: Ints
    piece: Ints


@dataclass(frozen=True, slots=True)
class _Carriers:
    """Some steps by their bundles, CSR: those of bundle b are step[ptr[b]:ptr[b + 1]], ascending; `rank` is one of each."""

    ptr: Ints
    step: Ints
    rank: NDArray[np.int32]

    @classmethod
    def of(cls, plan: Plan, steps: Ints, ranks: NDArray[np.int32]) -> Self:
        """These steps of the plan, each with the rank in the column."""
        bundle = plan.steps.bundle[steps]
        order = np.argsort(bundle, kind="stable")
        ptr = np.concatenate([[0], np.cumsum(np.bincount(bundle, minlength=len(plan.bundles)))])
        return cls(ptr, steps[order], ranks[steps][order])

    def count(self, bundle: Ints) -> Ints:
        """How many steps carry each bundle."""
        return self.ptr[bundle + 1] - self.ptr[bundle]


@dataclass(frozen=True, slots=True)
class _Alike:
    """Pieces of one class row that lie in the same bundles: the first of each kind, ascending, how many there are, and the
    bundles, CSR, one entry each time that one has the piece.
    """

    piece: Ints
    n: Ints
    ptr: Ints
    bundle: Ints

    @classmethod
    def of(cls, plan: Plan, tables: PieceTables) -> Self:
        """The kinds of pieces of a plan."""
        order = np.argsort(tables.entry_piece, kind="stable")
        bundle = np.repeat(np.arange(len(plan.bundles)), np.diff(plan.bundles.ptr))[order]
        count = np.bincount(tables.entry_piece, minlength=len(tables.class_row))
        ptr = np.concatenate([[0], np.cumsum(count)])
        first = _first_alike(ptr, bundle, tables.class_row)
        piece, n = np.unique(first, return_counts=True)
        entry, _ = ranges(ptr, piece)
        return cls(piece, n, np.concatenate([[0], np.cumsum(count[piece])]), bundle[entry])


class _Landing:
    """Where deliveries of some pieces land: a place for each rank that needs one, piece by piece, and the step that fills it.

    `kind` is for each row of the tables the first row that the same ranks need, so that ranks are looked up once a kind.
    """

    def __init__(self, tables: PieceTables, kind: Ints, pieces: Ints) -> None:
        needed, rows = tables.needed, tables.class_row[pieces]
        kinds, self._kind = np.unique(kind[rows], return_inverse=True)
        member, of_kind = ranges(needed.ptr, kinds)
        self._place = np.full((len(kinds), needed.n_columns), -1, dtype=np.int32)
        self._place[of_kind, needed.column[member]] = places(of_kind)
        n_needing = needed.ptr[rows + 1] - needed.ptr[rows]
        self.first = np.concatenate([[0], np.cumsum(n_needing)])
        self.step = np.full(int(self.first[-1]), -1, dtype=np.int64)
        self._needing = ranges(needed.ptr, rows)[0]  # of each place, the row of `needed.column`

    def at(self, local: Ints, column: Ints) -> Ints:
        """The place of each (piece, column), -1 where that rank doesn't need the piece."""
        place = self._place[self._kind.ravel()[local], column]
        return np.where(place >= 0, self.first[local] + place, -1)

    def missing(self, tables: PieceTables) -> tuple[int, int] | None:
        """The first piece and rank that nothing has been delivered to."""
        empty = np.flatnonzero(self.step < 0)
        if not len(empty):
            return None
        column = tables.needed.column[self._needing[empty[0]]]
        piece = int(np.searchsorted(self.first, empty[0], side="right")) - 1
        return piece, int(np.flatnonzero(tables.column == column)[0])


def check_reads(plan: Plan, tables: PieceTables) -> None:
    """Raise PlanError where a step reads pieces from source weights that don't hold them."""
    steps = plan.steps
    owner = np.repeat(np.arange(len(plan.bundles)), np.diff(plan.bundles.ptr))
    n_bundles = max(len(plan.bundles), 1)
    row, bundle = np.divmod(np.unique(tables.class_row[tables.entry_piece] * n_bundles + owner), n_bundles)
    reading = _Carriers.of(plan, np.flatnonzero((steps.src_at == SOURCE) & (steps.src >= 0)), steps.src)
    is_new = np.diff(row, prepend=-1) != 0
    for part in _parts(np.maximum(reading.count(bundle), is_new * tables.held.n_columns)):
        rows, local = np.unique(row[part], return_inverse=True)
        at, entry = ranges(reading.ptr, bundle[part])
        held = tables.held.rows(rows)[local.ravel()[entry], tables.column[reading.rank[at]]]
        if not held.all():
            step = int(reading.step[at[~held]].min())
            rank = int(steps.src[step])
            entries = tables.entry_piece[_entries(plan, step)].tolist()
            piece = next(k for k in entries if tables.column[rank] not in tables.held.of(int(tables.class_row[k])))
            raise PlanError(f"step {step}: rank {rank} sends {tables.name(plan, piece)}, which it doesn't hold")
    for step in np.flatnonzero(steps.op == Op.ALL_GATHER).tolist():
        gathered = tables.entry_piece[_entries(plan, step)]
        members = tables.column[plan.group(int(steps.group[step]))]
        there = tables.held.rows(tables.class_row[gathered])[:, members].any(axis=1)
        if not there.all():
            piece = int(gathered[np.argmin(there)])
            raise PlanError(f"step {step}: no rank of the all-gather holds {tables.name(plan, piece)}")


def check_deliveries(plan: Plan, tables: PieceTables, progress: Callable[[float], None]) -> tuple[int, int]:
    """Follow all copies to destination weights, and those from there onward: how many deliveries, and their bytes.

    Raises PlanError for one that isn't needed, is the second or never comes, and for a relay that doesn't wait for what it sends.
    """
    steps = plan.steps
    if ((steps.dst_at == TARGET) & (steps.op != Op.COPY) & (steps.op != Op.BARRIER)).any():
        raise PlanError("a collective must deliver to a staging slot")
    arriving = _Carriers.of(plan, np.flatnonzero((steps.dst_at == TARGET) & (steps.op == Op.COPY)), steps.dst)
    relaying = _Carriers.of(plan, np.flatnonzero(steps.src_at == TARGET), steps.src)
    alike, kind = _Alike.of(plan, tables), _needed_alike(tables)
    n_carried = _sums(arriving.count(alike.bundle) + relaying.count(alike.bundle), alike.ptr)
    many = np.flatnonzero(n_carried > _AT_ONCE)
    if len(many):
        name = tables.name(plan, int(alike.piece[many[0]]))
        raise PlanError(f"{n_carried[many[0]]} copies deliver or relay {name}, which {plan.problem.n_ranks} ranks can't need")
    n_found = n_bytes = 0
    pairs = [np.zeros(0, np.int64)]
    for part in _parts(np.maximum(n_carried, tables.needed.n_columns)):
        local, step, rank = _carried(alike, arriving, part)
        landing = _landed(plan, tables, kind, alike.piece[part], local, step, rank)
        got = np.diff(landing.first) * alike.n[part]
        n_found += int(got.sum())
        n_bytes += int((got * tables.piece_bytes[alike.piece[part]]).sum())
        local, step, rank = _carried(alike, relaying, part)
        at = landing.at(local, tables.column[rank])
        if (at < 0).any():
            i = int(np.argmin(np.where(at < 0, step, len(steps))))
            piece = tables.name(plan, int(alike.piece[part][local[i]]))
            raise PlanError(f"step {step[i]}: rank {rank[i]} relays {piece}, which it never gets")
        pairs.append(distinct(step * len(steps) + landing.step[at]))
        progress(part.stop / len(alike.piece))
    _check_relays(plan, distinct(np.concatenate(pairs)))
    return n_found, n_bytes


def check_single(plan: Plan, tables: PieceTables, found: Deliveries) -> tuple[int, int]:
    """Prove deliveries that were found otherwise to be needed, complete and single: how many, and their bytes."""
    order = np.argsort(found.piece, kind="stable")
    step, rank, piece = found.step[order], found.rank[order], found.piece[order]
    ptr, kind = np.searchsorted(piece, np.arange(len(tables.class_row) + 1)), _needed_alike(tables)
    for part in _parts(np.maximum(np.diff(ptr), tables.needed.n_columns)):
        rows = slice(ptr[part.start], ptr[part.stop])
        _landed(plan, tables, kind, np.arange(part.start, part.stop), piece[rows] - part.start, step[rows], rank[rows])
    return len(piece), int(tables.piece_bytes[piece].sum())


def _landed(
    plan: Plan, tables: PieceTables, kind: Ints, pieces: Ints, local: Ints, step: Ints, rank: NDArray[np.integer]
) -> _Landing:
    """The pieces with the steps that deliver them; of each delivery `local` says which of the pieces."""
    landing = _Landing(tables, kind, pieces)
    at = landing.at(local, tables.column[rank])
    landing.step[at[at >= 0]] = step[at >= 0]
    if (at < 0).any() or np.count_nonzero(landing.step >= 0) != len(step):
        _raise_for_worst(plan, tables, pieces, local, step, rank, at < 0)
    if (lacking := landing.missing(tables)) is not None:
        piece = tables.name(plan, int(pieces[lacking[0]]))
        raise PlanError(f"nothing delivers {piece} to rank {lacking[1]}, which needs it")
    return landing


def _raise_for_worst(
    plan: Plan, tables: PieceTables, pieces: Ints, local: Ints, step: Ints, rank: NDArray[np.integer], wrong: NDArray[np.bool_]
) -> None:
    """Name the first delivery, by piece and rank, that isn't needed; there being none, the first second one."""
    order = np.lexsort((rank, local))
    local, step, rank, wrong = local[order], step[order], rank[order], wrong[order]
    i = int(np.argmax(wrong))
    if wrong.any():
        raise PlanError(f"step {step[i]}: rank {rank[i]} gets {tables.name(plan, int(pieces[local[i]]))}, which it doesn't need")
    i = int(np.argmax((np.diff(local) == 0) & (np.diff(rank) == 0)))
    name = tables.name(plan, int(pieces[local[i]]))
    raise PlanError(f"steps {step[i]} and {step[i + 1]} both deliver {name} to rank {rank[i]}")


def _needed_alike(tables: PieceTables) -> Ints:
    """For each row of the tables the first that the same ranks need."""
    needed = tables.needed
    return _first_alike(needed.ptr, needed.column.astype(np.int64), np.zeros(len(needed.ptr) - 1, dtype=np.int64))


def _first_alike(ptr: Ints, values: Ints, key: Ints) -> Ints:
    """For each CSR row the first row with the same key and values, or itself."""
    # Sums bring together what may be alike; then each is compared with the first of its kind.
    keys = np.stack([_sums(values * values, ptr), _sums(values, ptr), np.diff(ptr), key])
    by_key = np.lexsort(keys)
    starts = np.flatnonzero((np.diff(keys[:, by_key], prepend=-1) != 0).any(axis=0))
    first = np.repeat(by_key[starts], np.diff([*starts, len(by_key)]))
    (mine, row), (theirs, _) = ranges(ptr, by_key), ranges(ptr, first)
    unlike = row[values[mine] != values[theirs]]
    first[unlike] = by_key[unlike]
    found = np.empty_like(first)
    found[by_key] = first
    return found


def _check_relays(plan: Plan, pairs: Ints) -> None:
    """Each pair, step * n_steps + another step, says that the first relays what the second delivers, for which it must wait."""
    steps = plan.steps
    relayers = distinct(pairs // max(len(steps), 1))
    at, relayer = ranges(steps.after_ptr, relayers)
    waits = np.sort(relayers[relayer] * len(steps) + steps.after[at])
    # NumPy's `isin` hashes from 2.3 on, see `distinct`.
    found = np.searchsorted(waits, pairs)
    unordered = np.append(waits, -1)[found] != pairs
    if unordered.any():
        step, delivery = divmod(int(pairs[np.argmax(unordered)]), len(steps))
        raise PlanError(f"step {step} relays what step {delivery} delivers, but doesn't wait for it")


def _carried(alike: _Alike, carriers: _Carriers, part: slice) -> tuple[Ints, Ints, NDArray[np.int32]]:
    """Each time that a step carries a piece of the part: which of the part's pieces, the step, its rank."""
    entries = slice(alike.ptr[part.start], alike.ptr[part.stop])
    local = np.repeat(np.arange(part.stop - part.start), np.diff(alike.ptr[part.start : part.stop + 1]))
    at, entry = ranges(carriers.ptr, alike.bundle[entries])
    return local[entry], carriers.step[at], carriers.rank[at]


def _entries(plan: Plan, step: int) -> slice:
    bundle = plan.steps.bundle[step]
    return slice(plan.bundles.ptr[bundle], plan.bundles.ptr[bundle + 1])


def _sums(values: Ints, ptr: Ints) -> Ints:
    """The sum of each CSR row."""
    total = np.concatenate([[0], np.cumsum(values)])
    return np.asarray(total[ptr[1:]] - total[ptr[:-1]])


def _parts(sizes: Ints) -> Iterator[slice]:
    """Runs of rows whose sizes come to some _AT_ONCE together."""
    part = np.cumsum(sizes) // _AT_ONCE
    starts = np.flatnonzero(np.diff(part, prepend=-1))
    for start, stop in itertools.pairwise([*starts.tolist(), len(sizes)]):
        yield slice(start, stop)
