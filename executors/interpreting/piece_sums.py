"""Pieces followed from rank to rank by their checksums: what each sender read against what the next one, or the destination, has.

Rule: a piece's checksum is the same wherever it lies, so each hop is compared by itself: the sender takes it when it sends, of
what it reads; the destination takes it at the end, of what lies in its weights. A relay's is compared with that of the rank which
served it. So what every hop found equal is equal from end to end, and the first hop that differs is named.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import Arena, Strided, strided_form
from shardroute.executors.interpreting.blocks import LINEAR, Forms, lay_pieces, piece_text
from shardroute.executors.interpreting.checksums import checksum
from shardroute.executors.interpreting.memories import Memory
from shardroute.executors.steps import describe_step
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import SOURCE, TARGET, Plan
from shardroute.topologies.errors import InputError

NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class PieceRows:
    """A row for each piece, step that moves it, and place where it lands; ordered by the rank that sends, then by step.

    ptr        int64[n_ranks + 1]   rank r sends rows ptr[r] to ptr[r + 1]
    step, entry, to   int64[n]      entry of the plan's bundles, rank where it lands
    src, dst   int64[n]             addresses on the sender and on `to`
    n_bytes    int64[n]
    form       int32[n]             how it lies at both, a form of the programs
    lands      bool[n]              in destination weights, where it stays; else in a slot
    before     int64[n]             the row that brought what this one reads, NONE if it is read from source weights
    """

    ptr: Ints
    step: Ints
    entry: Ints
    to: Ints
    src: Ints
    dst: Ints
    n_bytes: Ints
    form: NDArray[np.int32]
    lands: NDArray[np.bool_]
    before: Ints

    @property
    def rank(self) -> Ints:
        """The sender of each row."""
        return np.repeat(np.arange(len(self.ptr) - 1), np.diff(self.ptr))


def piece_rows(plan: Plan) -> PieceRows:
    """The rows of a plan. Raises InputError for one that computes or adds up, whose results are no copies of anything."""
    if plan.attention is not None or plan.problem.summed:
        what = "computes attention" if plan.attention is not None else "adds up"
        raise InputError(f"checksums follow bytes that are moved, and this plan {what}; leave --verify (verify=True) out")
    laid = lay_pieces(plan, Memory(plan))
    blocks, steps = laid.blocks, plan.steps
    n_steps = max(len(steps), 1)
    src_at, dst_at = steps.src_at[laid.step].astype(np.int64), steps.dst_at[laid.step].astype(np.int64)
    piece = np.stack([plan.bundles.tensor[laid.entry], plan.bundles.piece[laid.entry]]).astype(np.int64)
    written = np.stack([*piece, blocks.to.astype(np.int64), dst_at])
    read = np.stack([*piece, laid.rank, src_at])
    _, place = np.unique(np.concatenate([written, read], axis=1), axis=1, return_inverse=True)
    place = place.ravel() * n_steps
    key_written, key_read = place[: len(laid.step)] + laid.step, place[len(laid.step) :] + laid.step
    order = np.argsort(key_written, kind="stable")
    at = np.searchsorted(key_written[order], key_read) - 1  # the last one written in an earlier step, of this place or another
    found = order[np.maximum(at, 0)] if len(order) else order
    same = (at >= 0) & (src_at != SOURCE) & (key_written[found] // n_steps == key_read // n_steps)
    return PieceRows(
        np.searchsorted(laid.rank, np.arange(plan.problem.n_ranks + 1)), laid.step, laid.entry, blocks.to.astype(np.int64),
        blocks.src, blocks.dst, blocks.n_bytes, blocks.form, dst_at == TARGET, np.where(same, found, NONE),
    )  # fmt: skip


class Sums:
    """The checksums of one rank, whoever takes them: `sent` of the rows that are `mine`, `kept` of those that are `landing` here,
    both uint64[n rows].
    """

    def __init__(self, rows: PieceRows, rank: int, sent: NDArray[np.uint64], kept: NDArray[np.uint64]) -> None:
        self.sent, self.kept = sent, kept
        first, last = int(rows.ptr[rank]), int(rows.ptr[rank + 1])
        self.mine = slice(first, last)
        steps, starts = np.unique(rows.step[first:last], return_index=True)
        ends = np.append(starts, last - first)[1:]
        columns = (steps.tolist(), (starts + first).tolist(), (ends + first).tolist())
        self._of_step = {step: (a, b) for step, a, b in zip(*columns, strict=True)}
        self.landing: Ints = np.flatnonzero(rows.lands & (rows.to == rank))

    def sent_in(self, step: int) -> range:
        """The rows that this rank sends in a step."""
        return range(*self._of_step.get(step, (0, 0)))


class PieceSums(Sums):
    """The checksums that one rank takes in host memory. `sent` and `kept` may be shared with other ranks."""

    def __init__(
        self, rows: PieceRows, forms: Forms, arena: Arena, rank: int, sent: NDArray[np.uint64], kept: NDArray[np.uint64]
    ) -> None:
        super().__init__(rows, rank, sent, kept)
        self._rows, self._forms, self._arena = rows, forms, arena
        self._known: dict[int, Strided] = {}

    def take_sent(self, step: int) -> None:
        """Of all that this rank sends in a step, while what it reads is still there."""
        for row in self.sent_in(step):
            self.sent[row] = self._of(row, int(self._rows.src[row]), sending=True)

    def take_kept(self) -> None:
        """Of all that has landed in this rank's destination weights."""
        for row in self.landing.tolist():
            self.kept[row] = self._of(row, int(self._rows.dst[row]), sending=False)

    def _of(self, row: int, address: int, *, sending: bool) -> int:
        form = int(self._rows.form[row])
        if form == LINEAR:
            return checksum(self._arena.bytes(address, int(self._rows.n_bytes[row])))
        if form not in self._known:
            self._known[form] = strided_form(self._forms, form)
        dtype, shape, src_strides, dst_strides = self._known[form]
        apart = self._arena.strided(address, dtype, shape, src_strides if sending else dst_strides)
        return checksum(np.ascontiguousarray(apart).reshape(-1).view(np.uint8))


def first_wrong(rows: PieceRows, sent: NDArray[np.uint64], kept: NDArray[np.uint64], rank: int | None = None) -> int:
    """The row of the earliest step whose piece isn't what was sent, as its receiver sees it; NONE if all are. With a rank, only
    of what that rank received.
    """
    lost = rows.lands & (kept != sent)
    relayed = np.flatnonzero((rows.before >= 0) & (sent != sent[rows.before])) if len(sent) else rows.before
    bad = np.union1d(np.flatnonzero(lost), rows.before[relayed])
    if rank is not None:
        bad = bad[rows.to[bad] == rank]
    return int(bad[np.argmin(rows.step[bad])]) if len(bad) else NONE


def describe_wrong(plan: Plan, rows: PieceRows, row: int) -> str:
    """What is wrong about a row: rank, step, piece and peer."""
    step, src, dst = int(rows.step[row]), int(rows.rank[row]), int(rows.to[row])
    where = "its destination weights" if rows.lands[row] else "its staging slot"
    return (
        f"rank {dst} at step {step} ({describe_step(plan, step)}): {piece_text(plan, int(rows.entry[row]))} in {where} isn't "
        f"what rank {src} sent, by its checksum"
    )
