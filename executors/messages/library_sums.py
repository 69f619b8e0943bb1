"""Which calls of a library's reductions add up the sums of a plan, and where the library's sums begin and end on each rank.

Rule: computed alike on all ranks, so that all make the same calls in the same order, or all refuse. A library adds up runs of
bytes, and in an order of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from shardroute.executors.interpreting.blocks import LINEAR
from shardroute.executors.interpreting.interpret import Programs
from shardroute.topologies.errors import InputError


class Shape(Enum):
    """Who gets what is added up."""

    ALL = auto()  # all ranks the whole sum
    SCATTER = auto()  # each rank an equal part, in order of ranks
    ROOT = auto()  # one rank


@dataclass(frozen=True, slots=True)
class Summation:
    """One call: `n_bytes` on each rank that gets something.

    ranks      ascending; `root` gets the sum of a ROOT (-1 for others)
    src, dst   by rank of `ranks`: the address of its addends (of a SCATTER: of all ranks' parts) and where its sum goes, -1 if it
               gets none
    code       the dtype, as `adding` has it
    """

    step: int
    shape: Shape
    ranks: tuple[int, ...]
    root: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    n_bytes: int
    code: int

    @property
    def is_symmetric(self) -> bool:
        """Whether addends, and what comes of them, lie at one address on all ranks (of a SCATTER: the addends)."""
        return len(set(self.src)) == 1 and (self.shape is Shape.SCATTER or len(set(self.dst)) == 1)


def find_summations(programs: Programs) -> list[Summation]:
    """The calls of all ranks in the order of steps; none for a step of one rank, which copies. Raises InputError for boxes whose
    rows lie apart on a rank.
    """
    blocks, actions, cells = programs.blocks, programs.actions, programs.cells
    if not blocks.sums.any():
        return []
    first_row = np.flatnonzero(blocks.sums)
    summing = np.unique(actions.step[np.searchsorted(actions.block_ptr, first_row, side="right") - 1])
    action_of = np.argsort(actions.cell, kind="stable")
    found: list[Summation] = []
    for step in summing.tolist():
        ranks = tuple(cells.rank[cells.ptr[step] : cells.ptr[step + 1]].tolist())
        if len(ranks) > 1:
            of_step = action_of[cells.ptr[step] : cells.ptr[step + 1]].tolist()
            found += _of_step(programs, step, ranks, of_step)
    return found


def _of_step(programs: Programs, step: int, ranks: tuple[int, ...], of_step: Sequence[int]) -> list[Summation]:
    blocks, ptr = programs.blocks, programs.actions.block_ptr
    rows: dict[tuple[int, int], list[int]] = {}
    for rank, action in zip(ranks, of_step, strict=True):
        for row in range(int(ptr[action]), int(ptr[action + 1])):
            rows.setdefault((rank, int(blocks.to[row])), []).append(row)
    homes = tuple(sorted({home for _, home in rows}))
    every = [row for each in rows.values() for row in each]
    runs = {key: _runs(programs, each) for key, each in rows.items()}
    alike = all(_sizes(runs.get((rank, home), [])) == _sizes(runs[ranks[0], home]) for rank in ranks for home in homes)
    if (blocks.form[every] != LINEAR).any() or not alike:
        raise InputError(
            f"step {step} adds up boxes whose rows lie apart, and libraries on GPUs add up runs of bytes: shard the outermost "
            "dim (S0), or run the plan with processes, gloo or mpi"
        )

    def src(rank: int, home: int) -> list[int]:
        return [run.src for run in runs[rank, home]]

    def dst(home: int) -> list[int]:
        return [run.dst for run in runs[ranks[0], home]]

    sizes = {home: _sizes(runs[ranks[0], home]) for home in homes}
    if homes == ranks and all(src(r, h) == src(r, ranks[0]) and sizes[h] == sizes[ranks[0]] for r in ranks for h in homes):
        return [
            Summation(
                step, Shape.ALL, ranks, -1, tuple(src(r, r)[k] for r in ranks), tuple(dst(h)[k] for h in homes), n_bytes, code
            )
            for k, (n_bytes, code) in enumerate(sizes[ranks[0]])
        ]
    if homes == ranks and all(len(sizes[h]) == 1 and sizes[h] == sizes[ranks[0]] for h in homes):
        n_bytes, code = sizes[ranks[0]][0]
        if all(src(r, h)[0] == src(r, ranks[0])[0] + k * n_bytes for r in ranks for k, h in enumerate(homes)):
            first = tuple(src(r, ranks[0])[0] for r in ranks)
            return [Summation(step, Shape.SCATTER, ranks, -1, first, tuple(dst(h)[0] for h in homes), n_bytes, code)]
    return [
        Summation(
            step, Shape.ROOT, ranks, home, tuple(src(r, home)[k] for r in ranks),
            tuple(dst(home)[k] if r == home else -1 for r in ranks), n_bytes, code,
        )
        for home in homes
        for k, (n_bytes, code) in enumerate(sizes[home])
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows that follow each other on both sides, as one: windows cut rows, and libraries need none."""

    src: int
    dst: int
    n_bytes: int
    code: int


def _runs(programs: Programs, rows: Sequence[int]) -> list[_Run]:
    blocks, found = programs.blocks, list[_Run]()
    columns = (column[list(rows)].tolist() for column in (blocks.src, blocks.dst, blocks.n_bytes, blocks.sums))
    for src, dst, n_bytes, code in zip(*columns, strict=True):
        last = found[-1] if found else None
        if last is not None and (last.src + last.n_bytes, last.dst + last.n_bytes, last.code) == (src, dst, code):
            found[-1] = replace(last, n_bytes=last.n_bytes + n_bytes)
        else:
            found.append(_Run(src, dst, n_bytes, code))
    return found


def _sizes(runs: Sequence[_Run]) -> list[tuple[int, int]]:
    return [(run.n_bytes, run.code) for run in runs]
