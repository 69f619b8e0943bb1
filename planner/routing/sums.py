"""Plans that add up: tensors whose source ranks hold addends (placement P), by collectives over the ranks that hold them.

Two ways to give all of them the whole sum: `one-shot`, an ALL_REDUCE, in which every rank adds up everything itself on libraries
without a reduction of their own; and `two-shot`, a REDUCE_SCATTER in which each adds up its share, then an ALL_GATHER of the
shares. Where each rank needs a part of its own, both are one REDUCE_SCATTER.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardroute.planner.layouts.fragments import Ints, Ranks, box_text
from shardroute.planner.layouts.overlaps import Pieces, overlap
from shardroute.planner.plans import SOURCE, TARGET, Backend, Op, Plan
from shardroute.planner.problems import SUMMED_DTYPES, Problem, TensorClass
from shardroute.planner.routing.drafts import Draft
from shardroute.planner.routing.options import Options
from shardroute.topologies.errors import InfeasibleError, InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

SUMMING: Final[Mapping[str, str]] = {
    "one-shot": "adds up partial tensors (P), each rank all that it needs",
    "two-shot": "the same, each rank a share, which are then gathered",
}


def plan_sums(problem: Problem, topology: Topology, way: str, options: Options | None = None) -> Plan:
    """The plan that adds up the problem's tensors, `way` being one of SUMMING; steps carry at most `options.message_bytes`.

    Raises InputError for another way, for dtypes that nothing adds up and for too few GPUs; InfeasibleError where the ranks that
    need an element are neither all that hold addends of it nor one of them.
    """
    options = Options() if options is None else options
    if way not in SUMMING:
        ways = ", ".join([*SUMMING, "auto"])
        raise InputError(f"strategy {way!r} moves bytes, and the source is partial; expected one of {ways}")
    if problem.n_ranks > topology.n_gpus:
        raise InputError(f"the layouts use {problem.n_ranks} GPUs, but {topology.title} has {topology.n_gpus}")
    draft, none = Draft(), np.zeros(0, np.int64)
    window_bytes = options.window_bytes if topology.machine.kind is MachineKind.CPU else 0  # libraries on GPUs pack no addends
    pieces = []
    for cls in problem.classes:
        name = problem.tensors[int(cls.members[0])].name
        if cls.dtype not in SUMMED_DTYPES:
            raise InputError(f"tensor {name}: {cls.dtype} isn't added up; expected one of {', '.join(SUMMED_DTYPES)}")
        found, parts = _parts(cls, name, two_shot=way == "two-shot", most=_Most(options.message_bytes, window_bytes))
        pieces.append(found)
        for tensor in cls.members.tolist():
            for part in parts:
                bundle = draft.bundle(np.full(len(part.piece), tensor), part.piece, np.full(len(part.piece), -1))
                group = draft.group(part.ranks)
                op = Op.REDUCE_SCATTER if part.is_scattered else Op.ALL_REDUCE
                step = draft.collective(op, bundle, -1, group, SOURCE, TARGET, none)
                if part.is_gathered:
                    draft.collective(Op.ALL_GATHER, bundle, -1, group, TARGET, TARGET, np.array([step]))
    return draft.plan(way, problem, pieces, topology, _backend(topology, options))


def _backend(topology: Topology, options: Options) -> Backend:
    """NCCL where it may carry steps, as only its reductions are modelled; else the first library that may."""
    if topology.machine.kind is MachineKind.CPU:
        return Backend.PROCESSES
    return Backend.NCCL if Backend.NCCL in options.backends else options.backends[0]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What one collective adds up: pieces of a class, in order of who gets each, over the ranks that hold addends."""

    piece: Ints
    ranks: Ranks
    is_scattered: bool
    is_gathered: bool


@dataclass(frozen=True, slots=True)
class _Most:
    """Bytes that a step may carry: what was asked for, and what fits a rank's window (0: none is used)."""

    message_bytes: int | None
    window_bytes: int

    def of_step(self, times: int) -> int | None:
        """The limit for a step that brings a rank its own bytes so often. What brings more than a window goes in rounds, one rank
        after the other, which costs more than to begin another step.
        """
        limits = [n for n in (self.message_bytes, self.window_bytes // times if self.window_bytes else None) if n is not None]
        return max(1, min(limits)) if limits else None


def _parts(cls: TensorClass, name: str, *, two_shot: bool, most: "_Most") -> tuple[Pieces, list[_Part]]:
    """The pieces of a class and the collectives that add them up, for each of its tensors alike."""
    whole = overlap(cls.source, cls.target)
    rows = _Cut(cls, whole)
    parts: list[_Part] = []
    scattered: dict[bytes, list[int]] = {}
    for i in range(len(whole)):
        holders, needers = (who[int(whole.pattern[i])] for who in (whole.holders, whole.needers))
        if len(needers) == len(holders) and (needers == holders).all() and len(holders) > 1:
            for lo, hi in rows.chunks(i, most.of_step(1 if two_shot else len(holders) - 1)):
                shares = rows.shares(lo, hi, len(holders)) if two_shot else [(lo, hi)]
                parts.append(_Part(rows.add(i, shares), holders, two_shot, two_shot))
        elif len(needers) == 1 and needers[0] in holders:
            scattered.setdefault(holders.tobytes(), []).append(i)
        else:
            raise InfeasibleError(
                f"tensor {name}: ranks {_shown(holders)} hold addends of {box_text(whole.lo[i], whole.hi[i])}, which ranks "
                f"{_shown(needers)} need; a sum goes to all ranks that hold addends of it, or a part to each of them: give the "
                "destination the source's ranks, and R or one S for its partial axes"
            )
    for of_group in scattered.values():
        parts += _scatters(whole, rows, of_group, most.of_step(1))
    return rows.pieces(), parts


def _scatters(whole: Pieces, rows: "_Cut", of_group: Sequence[int], message_bytes: int | None) -> list[_Part]:
    """REDUCE_SCATTERs of pieces with the same holders: each takes a part of every rank's piece, rank after rank."""
    holders = whole.holders[int(whole.pattern[of_group[0]])]
    order = sorted(of_group, key=lambda i: (int(whole.needers[int(whole.pattern[i])][0]), i))
    cuts = [rows.chunks(i, None if message_bytes is None else max(1, message_bytes // len(order))) for i in order]
    parts = []
    for k in range(max(map(len, cuts))):
        piece = np.concatenate([rows.add(i, [cut[k]]) for i, cut in zip(order, cuts, strict=True) if k < len(cut)])
        parts.append(_Part(piece, holders, is_scattered=True, is_gathered=False))
    return parts


class _Cut:
    """Pieces cut along one dim each, the first that is longer than 1, so that parts of whole rows lie in one run."""

    def __init__(self, cls: TensorClass, whole: Pieces) -> None:
        self._cls, self._whole = cls, whole
        self._boxes: list[tuple[Ints, Ints]] = []
        self._pattern: list[int] = []

    def chunks(self, piece: int, most_bytes: int | None) -> list[tuple[Ints, Ints]]:
        """The piece as boxes of at most so many bytes, if a row isn't longer; as few and even as can be."""
        lo, hi = self._whole.lo[piece], self._whole.hi[piece]
        n_bytes = int(self._whole.n_elements[piece]) * self._cls.itemsize
        return self.shares(lo, hi, 1 if most_bytes is None else -(-n_bytes // most_bytes))

    def shares(self, lo: Ints, hi: Ints, n: int) -> list[tuple[Ints, Ints]]:
        """The box as `n` even boxes, or as many as it has rows if that is fewer."""
        long = np.flatnonzero(hi - lo > 1)
        if not len(long):
            return [(lo, hi)]
        dim = int(long[0])
        edges = np.linspace(lo[dim], hi[dim], min(n, int(hi[dim] - lo[dim])) + 1).astype(np.int64)
        found = []
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            a, b = lo.copy(), hi.copy()
            a[dim], b[dim] = first, last
            found.append((a, b))
        return found

    def add(self, piece: int, boxes: Sequence[tuple[Ints, Ints]]) -> Ints:
        """Number boxes of a piece."""
        self._boxes += boxes
        self._pattern += [int(self._whole.pattern[piece])] * len(boxes)
        return np.arange(len(self._boxes) - len(boxes), len(self._boxes))

    def pieces(self) -> Pieces:
        """All that were numbered."""
        lo, hi = (np.array([box[k] for box in self._boxes], np.int64).reshape(-1, len(self._cls.shape)) for k in (0, 1))
        return Pieces(lo, hi, np.array(self._pattern, np.int32), self._whole.holders, self._whole.needers)


def _shown(ranks: Ranks) -> str:
    text = ", ".join(map(str, ranks[:8].tolist()))
    return text + (", ..." if len(ranks) > 8 else "")
