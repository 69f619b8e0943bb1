"""Whether two layouts fit: what the destination needs, how much of it is held, and who lacks what. No plan, no machine.

Rule: nothing is taken from planning but the overlap of fragments, and element data is never touched.
"""

from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.overlaps import Pieces, overlap
from shardroute.planner.problems import Problem, TensorClass


@dataclass(frozen=True, slots=True)
class Lack:
    """A box that some ranks need and none holds, alike in all these tensors."""

    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def __str__(self) -> str:
        box = ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True))
        more = f" (and {len(self.tensors) - 1} more tensors)" if len(self.tensors) > 1 else ""
        return f"{self.tensors[0]}[{box}]{more}"


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a problem comes to before any plan.

    n_pieces         disjoint boxes that must move, over all tensors
    n_bytes_needed   bytes that destination ranks need, a byte counted once for each rank
    n_bytes_held     those of them that the rank holds itself, so that no link carries them
    n_bytes_unneeded bytes of the tensors that no destination rank needs, counted once
    lacks            what is needed and held by none; empty when the layouts fit
    """

    n_tensors: int
    n_pieces: int
    n_bytes_needed: int
    n_bytes_held: int
    n_bytes_unneeded: int
    lacks: tuple[Lack, ...]


def coverage(problem: Problem) -> Coverage:
    """What the destination needs against what the source holds. Lacks are reported, not raised."""
    n_pieces = needed = held = distinct = 0
    lacks: list[Lack] = []
    for cls in problem.classes:
        pieces, nobody = _pieces(cls, problem.n_ranks)
        n_members, n_bytes = len(cls.members), pieces.n_elements * cls.itemsize
        n_pieces += len(pieces) * n_members
        distinct += int(n_bytes.sum()) * n_members
        sizes = np.zeros(len(pieces.needers), dtype=np.int64)
        np.add.at(sizes, pieces.pattern, n_bytes)
        for holders, needers, size in zip(pieces.holders, pieces.needers, sizes.tolist(), strict=True):
            needed += size * len(needers) * n_members
            held += size * len(np.intersect1d(holders, needers)) * n_members
        for k in np.flatnonzero([len(pieces.holders[p]) == 1 and pieces.holders[p][0] == nobody for p in pieces.pattern]):
            names = tuple(problem.tensors[i].name for i in cls.members.tolist())
            ranks = tuple(pieces.needers[pieces.pattern[k]].tolist())
            lacks.append(Lack(names, ranks, tuple(pieces.lo[k].tolist()), tuple(pieces.hi[k].tolist())))
    return Coverage(len(problem.tensors), n_pieces, needed, held, problem.n_bytes - distinct, tuple(lacks))


def _pieces(cls: TensorClass, n_ranks: int) -> tuple[Pieces, int]:
    """The pieces of a class with one more holder of everything, rank `n_ranks`: what only that one holds, nobody does."""
    n_dims = len(cls.shape)
    everything = Fragments.dense(cls.shape, [n_ranks], np.zeros((1, n_dims), np.int64), np.array([cls.shape]).reshape(1, n_dims))
    source = Fragments.dense(
        cls.shape,
        np.concatenate([cls.source.rank, everything.rank]),
        np.concatenate([cls.source.lo, everything.lo]),
        np.concatenate([cls.source.hi, everything.hi]),
    )
    return overlap(source, cls.target), n_ranks
