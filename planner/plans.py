"""The plan: steps that move bundles of pieces between ranks, in one global order, as columns.

Rules of meaning, on which simulating, checking and running all rest:

- A *bundle* is an ordered list of pieces (of any tensors) that travel together. A *step* carries one bundle.
- COPY is driven by its source rank, which puts the bundle into the destination's memory (one-sided); src == dst is a local copy.
  BROADCAST and ALL_GATHER are driven by all ranks of their group together. A BROADCAST goes from `src` to every other rank of the
  group. In an ALL_GATHER every rank of the group ends with all of the bundle, its own part included; each piece comes from the
  first rank of the group that holds it in its source weights.
- A BARRIER carries an empty bundle. Each rank of its group comes to it when the steps of its `after` list that the rank drives or
  receives are complete; it is complete when all ranks of the group have come. So whoever waits for a barrier waits for its whole
  `after` list.
- A plan of an attention call (`Plan.attention`) computes, too. A COMPUTE is driven by the one rank of its group and carries an
  empty bundle; its row of `Computes` says what it does to which *operands*, each a bundle at a place. In a REDUCE_SCATTER every
  rank of the group brings all of the bundle, in one slot; the sum of each piece lands at TARGET on the rank of the group whose
  destination weights contain it.
- A plan of partial tensors (`Problem.summed`) adds up, too. Every rank of the group of an ALL_REDUCE or REDUCE_SCATTER brings all
  of the bundle from its source weights, which hold addends. The sum of each piece lands at TARGET: of an ALL_REDUCE on every rank
  of the group that needs the piece, of a REDUCE_SCATTER on one of them (`ownership.reduced_to`). An ALL_GATHER reads TARGET and
  brings what a REDUCE_SCATTER of the same bundle and group has added up to the others that need it.
  Ranks that add up themselves do so in ascending order of ranks, each addition rounded to the tensor's dtype; a library that has
  reductions of its own orders sums as it likes.
- A step reads from and writes to a *place*: SOURCE (the source weights), TARGET (the destination weights) or a staging slot
  (its number). At TARGET a piece lands in every fragment of that rank that contains it. In a slot it lies dense, row-major,
  at the bundle's `offset` for it.
- A rank runs the steps that it drives queue by queue: within one queue of a lane in plan order, one at a time. Queues and lanes
  run beside each other.
- A step starts when its rank reaches it and all steps in its `after` list are complete. `after` names earlier steps only, so one
  global order rules out cyclic waits; a rank waits only on steps that it drives or that deliver to it.
- Nothing else: no pointers, handles, times or predictions.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints, volumes
from shardroute.planner.problems import Problem
from shardroute.planner.ring.workloads import KEY_SIDE, LSE, QUERY_SIDE, Attention
from shardroute.topologies.errors import PlanError
from shardroute.topologies.topologies import Topology

SOURCE = -2
TARGET = -1

# What all steps together carry, and what a slot or an offset in it may come to, stays below this: the sum of two fits int64.
MAX_PLAN_BYTES = 2**62


class Op(IntEnum):
    """What a step does."""

    COPY = 0
    ALL_GATHER = 1
    BROADCAST = 2
    BARRIER = 3
    COMPUTE = 4
    REDUCE_SCATTER = 5
    ALL_REDUCE = 6


class Lane(IntEnum):
    """What kind of work a step is for its rank. Each lane has up to 32 queues; the column packs both, see `queued`."""

    INJECT = 0  # a holder sends a piece on its first hop
    RELAY = 1  # a rank that received a piece sends it on to another domain
    HAND_OVER = 2  # the same, inside an NVLink domain
    LOCAL = 3  # copies within a rank
    COLLECTIVE = 4
    CREDIT = 5  # an empty copy: tells the rank that writes to a staging slot next that its readers are done
    COMPUTE = 6  # attention, and adding up; beside a rank's copies, as a GPU's SMs work beside its copy engines


class Kind(IntEnum):
    """What a COMPUTE does. q, k, v, o, lse, do, dq, dk, dv are the tensors of that name; rows are masked as the call says."""

    ATTEND = 0  # reads q, k, v; adds to o and lse what these queries see in these keys
    GRAD = 1  # reads q, k, v, o, lse, do; adds to dq, dk, dv
    ADD = 2  # adds the operands that it reads to those that it updates
    MERGE = 3  # the same for o and lse of one query over different keys


class Mode(IntEnum):
    """What a COMPUTE does to an operand."""

    READ = 0
    WRITE = 1  # begins anew, whatever was there
    UPDATE = 2  # adds to what is there


class Backend(IntEnum):
    """The library that is meant to carry a step; a transport on CPUs carries any of them."""

    PROCESSES = 0  # memory shared by processes of one machine
    NCCL = 1  # send and receive
    NCCL_PUT = 2  # NCCL's put with a signal
    NVSHMEM = 3

    @property
    def label(self) -> str:
        """The name as commands spell it, `nccl-put`."""
        return self.name.lower().replace("_", "-")


_LANE_BITS = 3


def queued(lane: NDArray[np.integer], queue: NDArray[np.integer]) -> NDArray[np.uint8]:
    """The `lane` column of steps: the lane's number in the low three bits, the queue's above."""
    return (lane + (queue << _LANE_BITS)).astype(np.uint8)


def lane_of(column: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The lane of each step, without its queue."""
    return column & np.uint8((1 << _LANE_BITS) - 1)


def queue_of(column: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The queue of each step, without its lane."""
    return column >> np.uint8(_LANE_BITS)


def places(key: NDArray[np.integer]) -> Ints:
    """Each row's place among those of its key, from 0; rows of one key must stand together."""
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    return np.arange(len(key)) - np.repeat(starts, np.diff(np.append(starts, len(key))))


def classes_of(problem: Problem) -> NDArray[np.int32]:
    """The class of each tensor of the problem."""
    of = np.zeros(len(problem.tensors), dtype=np.int32)
    for i, cls in enumerate(problem.classes):
        of[cls.members] = i
    return of


def ranges(ptr: Ints, rows: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """For CSR rows: the flat positions of all their items, and for each item the index into `rows` that it came from."""
    length = ptr[rows + 1] - ptr[rows]
    owner = np.repeat(np.arange(len(rows), dtype=np.int64), length)
    first = np.repeat(ptr[rows] - (np.cumsum(length) - length), length)
    return first + np.arange(len(owner), dtype=np.int64), owner


class _Columns:
    """Mix-in of the column groups below: cast, freeze and compare lengths once, when made."""

    __slots__ = ()

    def _freeze(self, dtypes: dict[str, type[np.integer]]) -> None:
        for name, dtype in dtypes.items():
            given = np.asarray(getattr(self, name))
            column: NDArray[np.generic] = np.ascontiguousarray(given, dtype=dtype)
            if given.ndim != 1 or (given.dtype != column.dtype and (given != column).any()):
                raise PlanError(f"column {name}: expected a list of {np.dtype(dtype).name} values")
            column.setflags(write=False)
            object.__setattr__(self, name, column)

    def columns(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Each column with its name, in a fixed order."""
        for entry in fields(self):  # type: ignore[arg-type]
            yield entry.name, getattr(self, entry.name)


def _check_ptr(name: str, ptr: Ints, n_rows: int | None, n_items: int) -> None:
    if (
        len(ptr) < 1
        or (n_rows is not None and len(ptr) != n_rows + 1)
        or ptr[0] != 0
        or ptr[-1] != n_items
        or (np.diff(ptr) < 0).any()
    ):
        raise PlanError(f"column {name}: row starts must rise from 0 to {n_items}, one more than rows")


@dataclass(frozen=True, slots=True, eq=False)
class Bundles(_Columns):
    """Lists of pieces, CSR. Entry columns: tensor (index in the problem), piece (index in its class), offset (bytes, in
    slots; -1 = never staged).
    """

    ptr: NDArray[np.int64]
    tensor: NDArray[np.int32]
    piece: NDArray[np.int32]
    offset: NDArray[np.int64]

    def __post_init__(self) -> None:
        self._freeze({"ptr": np.int64, "tensor": np.int32, "piece": np.int32, "offset": np.int64})
        _check_ptr("bundles.ptr", self.ptr, None, len(self.tensor))
        if not len(self.tensor) == len(self.piece) == len(self.offset):
            raise PlanError("bundles: columns differ in length")

    def __len__(self) -> int:
        return len(self.ptr) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Steps(_Columns):
    """One row a step, in the plan's global order.

    op, backend         the enums above
    lane                lane and queue, see `queued`
    bundle              what travels
    src                 the rank that sends (of a COPY or BROADCAST; else -1)
    dst                 the rank that receives a COPY (-1 for collectives)
    group               the group of a collective (-1 for a COPY)
    src_at, dst_at      places: SOURCE, TARGET or a slot number (SOURCE and TARGET for a BARRIER or COMPUTE)
    after_ptr, after    CSR: earlier steps that must be complete
    """

    op: NDArray[np.uint8]
    lane: NDArray[np.uint8]
    backend: NDArray[np.uint8]
    bundle: NDArray[np.int32]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    group: NDArray[np.int32]
    src_at: NDArray[np.int16]
    dst_at: NDArray[np.int16]
    after_ptr: NDArray[np.int64]
    after: NDArray[np.int32]

    def __post_init__(self) -> None:
        self._freeze(
            {"op": np.uint8, "lane": np.uint8, "backend": np.uint8, "bundle": np.int32, "src": np.int32, "dst": np.int32,
             "group": np.int32, "src_at": np.int16, "dst_at": np.int16, "after_ptr": np.int64, "after": np.int32}
        )  # fmt: skip
        n = len(self.op)
        if any(len(c) != n for name, c in self.columns() if name not in ("after_ptr", "after")):
            raise PlanError("steps: columns differ in length")
        _check_ptr("steps.after_ptr", self.after_ptr, n, len(self.after))
        owner = np.repeat(np.arange(n), np.diff(self.after_ptr))
        if len(self.after) and (self.after.min() < 0 or (self.after >= owner).any()):
            i = int(owner[np.argmax((self.after < 0) | (self.after >= owner))])
            raise PlanError(f"step {i}: its `after` list must name earlier steps only")

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True, eq=False)
class Computes(_Columns):
    """One row a COMPUTE step, in their order: its step, its Kind, and its operands, CSR: bundle, place and Mode of each."""

    step: NDArray[np.int32]
    kind: NDArray[np.uint8]
    ptr: NDArray[np.int64]
    bundle: NDArray[np.int32]
    at: NDArray[np.int16]
    mode: NDArray[np.uint8]

    def __post_init__(self) -> None:
        self._freeze({"step": np.int32, "kind": np.uint8, "ptr": np.int64, "bundle": np.int32, "at": np.int16, "mode": np.uint8})
        _check_ptr("computes.ptr", self.ptr, len(self.step), len(self.bundle))
        if not len(self.step) == len(self.kind) or not len(self.bundle) == len(self.at) == len(self.mode):
            raise PlanError("computes: columns differ in length")

    @classmethod
    def none(cls) -> Self:
        """Of a plan that only moves."""
        return cls(
            np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int16),
            np.zeros(0, np.uint8),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The pieces of one class: half-open boxes, int64[n, n_dims]."""

    lo: Ints
    hi: Ints

    @property
    def n_elements(self) -> Ints:
        """Elements in each box."""
        return volumes(self.lo, self.hi)


def _check_boxes(boxes: Boxes, shape: tuple[int, ...]) -> None:
    wanted = (len(boxes.lo), len(shape))
    if boxes.lo.shape != wanted or boxes.hi.shape != wanted:
        raise PlanError(f"pieces: boxes of shapes {boxes.lo.shape} and {boxes.hi.shape}, the tensors have {len(shape)} dims")
    if ((boxes.lo < 0) | (boxes.lo > boxes.hi) | (boxes.hi > np.array(shape, dtype=np.int64))).any():
        raise PlanError(f"a piece leaves the tensor of shape {shape}, or ends before it begins")


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that an interpreter needs: the problem, the machine that it was planned for, and the steps.

    boxes       one a class of the problem: the pieces that bundles refer to
    group_ptr, group_ranks   CSR: the ranks of each collective's group, in ring order
    slot_bytes  int64[n_slots]: size of each staging slot; a slot exists on every rank that a step uses it on
    attention   the attention call that it computes, if it does; `computes` then has its COMPUTE steps

    Raises PlanError when an index is out of range or a row contradicts its op. That it *delivers* is proved by `check`.
    """

    strategy: str
    topology: Topology
    problem: Problem
    boxes: tuple[Boxes, ...]
    bundles: Bundles
    steps: Steps
    group_ptr: NDArray[np.int64]
    group_ranks: NDArray[np.int32]
    slot_bytes: NDArray[np.int64]
    attention: Attention | None = None
    computes: Computes = field(default_factory=Computes.none)

    def __post_init__(self) -> None:
        problem, steps, bundles = self.problem, self.steps, self.bundles
        if problem.n_ranks > self.topology.n_gpus:
            raise PlanError(f"the problem has {problem.n_ranks} ranks, the topology {self.topology.n_gpus} GPUs")
        if len(self.boxes) != len(problem.classes):
            raise PlanError(f"pieces are given for {len(self.boxes)} classes, the problem has {len(problem.classes)}")
        for boxes, cls in zip(self.boxes, problem.classes, strict=True):
            _check_boxes(boxes, cls.shape)
        _check_ptr("group_ptr", self.group_ptr, None, len(self.group_ranks))
        n_groups = len(self.group_ptr) - 1
        copy, gather, empty = steps.op == Op.COPY, steps.op == Op.ALL_GATHER, np.isin(steps.op, (Op.BARRIER, Op.COMPUTE))
        rootless = ~copy & (steps.op != Op.BROADCAST)
        for name, column, low, high in (
            ("op", steps.op, 0, len(Op)),
            ("lane", lane_of(steps.lane), 0, len(Lane)),
            ("backend", steps.backend, 0, len(Backend)),
            ("bundle", steps.bundle, 0, len(bundles)),
            ("src", steps.src[~rootless], 0, problem.n_ranks),
            ("dst", steps.dst[copy], 0, problem.n_ranks),
            ("group", steps.group[~copy], 0, n_groups),
            ("src_at", steps.src_at, SOURCE, len(self.slot_bytes)),
            ("dst_at", steps.dst_at, TARGET, len(self.slot_bytes)),
            ("src of a collective without a root", steps.src[rootless], -1, 0),
            ("dst of a collective", steps.dst[~copy], -1, 0),
            ("group of a COPY", steps.group[copy], -1, 0),
            ("slot_bytes", self.slot_bytes, 0, MAX_PLAN_BYTES),
            ("bundles.offset", bundles.offset, -1, MAX_PLAN_BYTES),
            ("bundles.tensor", bundles.tensor, 0, len(problem.tensors)),
            ("group_ranks", self.group_ranks, 0, problem.n_ranks),
        ):
            if len(column) and (column.min() < low or column.max() >= high):
                wanted = f"be {low}" if high == low + 1 else f"lie in {low} to {high - 1}"
                raise PlanError(f"column {name}: values must {wanted}, found {column.min()} to {column.max()}")
        n_pieces = np.array([len(b.lo) for b in self.boxes], dtype=np.int64)
        if (bundles.piece < 0).any() or (bundles.piece >= n_pieces[self.tensor_class[bundles.tensor]]).any():
            raise PlanError("column bundles.piece: a piece number is outside its tensor's class")
        # In floats, which don't wrap; bundles first, whose own sums are int64.
        if self.entry_bytes.sum(dtype=np.float64) >= MAX_PLAN_BYTES or self.step_bytes.sum(dtype=np.float64) >= MAX_PLAN_BYTES:
            raise PlanError("the steps carry 2^62 bytes or more; bytes are counted in 64 bits")
        if not problem.summed and (steps.src_at[gather] != SOURCE).any():
            raise PlanError("an ALL_GATHER reads the source weights only")
        if (self.step_pieces[empty] > 0).any():
            step = int(np.flatnonzero(empty & (self.step_pieces > 0))[0])
            raise PlanError(f"step {step}: a {Op(int(steps.op[step])).name} carries an empty bundle")
        if ((steps.src_at[empty] != SOURCE) | (steps.dst_at[empty] != TARGET)).any():
            raise PlanError("a BARRIER or COMPUTE moves nothing: its places are the source weights and the destination weights")
        self._check_computes()

    def _check_computes(self) -> None:
        steps, computes = self.steps, self.computes
        if self.attention is None and (len(computes) or (steps.op == Op.COMPUTE).any()):
            raise PlanError("a plan computes (COMPUTE) only for an attention call, and has none")
        sums = steps.op[np.isin(steps.op, (Op.REDUCE_SCATTER, Op.ALL_REDUCE))]
        if len(sums) and not self.problem.summed and (self.attention is None or (sums == Op.ALL_REDUCE).any()):
            raise PlanError("a plan adds up (REDUCE_SCATTER, ALL_REDUCE) only what its problem calls addends (`Problem.summed`)")
        if self.problem.summed and self.attention is not None:
            raise PlanError("a plan computes an attention call or adds up partial tensors, not both")
        if not np.array_equal(computes.step, np.flatnonzero(steps.op == Op.COMPUTE)):
            raise PlanError("column computes.step: expected the COMPUTE steps, in order")
        if self.attention is None:
            return
        if self.attention.n_ranks != self.problem.n_ranks:
            raise PlanError(f"the attention call is of {self.attention.n_ranks} ranks, the problem of {self.problem.n_ranks}")
        for tensor in self.problem.tensors:
            if tensor.name not in (*QUERY_SIDE, *KEY_SIDE, LSE) or tensor.shape != self.attention.shape_of(tensor.name):
                raise PlanError(f"tensor {tensor.name} of shape {tensor.shape} is none of the attention call's")
        for name, column, low, high in (
            ("kind", computes.kind, 0, len(Kind)),
            ("bundle", computes.bundle, 0, len(self.bundles)),
            ("at", computes.at, SOURCE, len(self.slot_bytes)),
            ("mode", computes.mode, 0, len(Mode)),
            ("ranks of a COMPUTE's group", np.diff(self.group_ptr)[steps.group[computes.step]], 1, 2),
            ("src_at of a REDUCE_SCATTER", steps.src_at[steps.op == Op.REDUCE_SCATTER], 0, len(self.slot_bytes)),
            ("dst_at of a REDUCE_SCATTER", steps.dst_at[steps.op == Op.REDUCE_SCATTER], TARGET, TARGET + 1),
        ):
            if len(column) and (column.min() < low or column.max() >= high):
                raise PlanError(f"column {name}: values must lie in {low} to {high - 1}, found {column.min()} to {column.max()}")
        if ((computes.mode != Mode.READ) & (computes.at == SOURCE)).any():
            raise PlanError("a COMPUTE writes to the destination weights and to slots, never to the source weights")

    @cached_property
    def tensor_class(self) -> NDArray[np.int32]:
        """The class of each tensor."""
        return classes_of(self.problem)

    @cached_property
    def entry_bytes(self) -> NDArray[np.int64]:
        """Bytes of each bundle entry's piece."""
        starts = np.cumsum([0, *(len(b.lo) for b in self.boxes)])
        piece_bytes = np.concatenate(
            [
                np.zeros(0, np.int64),
                *(b.n_elements * c.itemsize for b, c in zip(self.boxes, self.problem.classes, strict=True)),
            ]
        )
        return piece_bytes[starts[self.tensor_class[self.bundles.tensor]] + self.bundles.piece]

    @cached_property
    def bundle_bytes(self) -> NDArray[np.int64]:
        """Bytes of each bundle."""
        total: NDArray[np.int64] = np.concatenate([[0], np.cumsum(self.entry_bytes)])
        return total[self.bundles.ptr[1:]] - total[self.bundles.ptr[:-1]]

    @cached_property
    def step_bytes(self) -> NDArray[np.int64]:
        """Bytes of each step's bundle."""
        return self.bundle_bytes[self.steps.bundle]

    @cached_property
    def step_pieces(self) -> NDArray[np.int64]:
        """Pieces in each step's bundle."""
        return np.diff(self.bundles.ptr)[self.steps.bundle]

    def group(self, index: int) -> NDArray[np.int32]:
        """The ranks of group `index`, in ring order."""
        return self.group_ranks[self.group_ptr[index] : self.group_ptr[index + 1]]

    @cached_property
    def slot_users(self) -> NDArray[np.int64]:
        """Which (rank, slot) pairs exist, int64[n, 2], ascending."""
        steps = self.steps
        pairs = []
        for at, rank in ((steps.src_at, steps.src), (steps.dst_at, steps.dst)):
            rows = (at >= 0) & (rank >= 0)
            pairs.append(np.stack([rank[rows], at[rows]], axis=1).astype(np.int64))
        rows = (steps.op != Op.COPY) & (steps.dst_at >= 0)
        for group, src, slot in np.unique(np.stack([steps.group, steps.src, steps.dst_at], axis=1)[rows], axis=0).tolist():
            ranks = self.group(group).astype(np.int64)
            ranks = ranks[ranks != src]
            pairs.append(np.stack([ranks, np.full(len(ranks), slot)], axis=1))
        reduces = np.flatnonzero((steps.op == Op.REDUCE_SCATTER) & (steps.src_at >= 0))
        member, owner = ranges(self.group_ptr, steps.group[reduces])
        pairs.append(np.stack([self.group_ranks[member], steps.src_at[reduces][owner]], axis=1).astype(np.int64))
        operand, owner = ranges(self.computes.ptr, np.arange(len(self.computes)))
        staged = self.computes.at[operand] >= 0
        driver = self.group_ranks[self.group_ptr[steps.group[self.computes.step[owner[staged]]]]]
        pairs.append(np.stack([driver, self.computes.at[operand[staged]]], axis=1).astype(np.int64))
        return np.unique(np.concatenate(pairs), axis=0)

    @cached_property
    def peak_staging_bytes(self) -> int:
        """The most staging memory that any rank needs."""
        users = self.slot_users
        if not len(users):
            return 0
        return int(np.bincount(users[:, 0], weights=self.slot_bytes[users[:, 1]]).max())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all that the plan says; equal plans have equal digests on every machine."""
        from shardroute.planner.plan_files import column_mark, plan_parts

        sha = hashlib.sha256()
        header, columns = plan_parts(self)
        sha.update(header)
        for name, column in columns:
            sha.update(column_mark(name, column))
            sha.update(column.data)
        return sha.hexdigest()
