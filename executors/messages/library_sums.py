"""Which calls of a library's reductions add up the sums of a plan, and where the library's sums begin and end on each rank.

Rule: computed alike on all ranks, so that all make the same calls in the same order, or all refuse. A library adds up runs of
bytes, and in an order of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
    alike = all(
        _sizes(programs, rows.get((rank, home), [])) == _sizes(programs, rows[ranks[0], home]) for rank in ranks for home in homes
    )
    if (blocks.form[every] != LINEAR).any() or not alike:
        raise InputError(
            f"step {step} adds up boxes whose rows lie apart, and libraries on GPUs add up runs of bytes: shard the outermost "
            "dim (S0), or run the plan with processes, gloo or mpi"
        )

    def src(rank: int, home: int) -> list[int]:
        return [int(blocks.src[row]) for row in rows[rank, home]]

    def dst(home: int) -> list[int]:
        return [int(blocks.dst[row]) for row in rows[ranks[0], home]]

    sizes = {home: _sizes(programs, rows[ranks[0], home]) for home in homes}
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


def _sizes(programs: Programs, rows: Sequence[int]) -> list[tuple[int, int]]:
    return [(int(programs.blocks.n_bytes[row]), int(programs.blocks.sums[row])) for row in rows]
