"""The plan itself: its columns over one problem on one topology, checked when made, and what follows from them."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.plans.columns import Boxes, Bundles, Computes, Steps, check_boxes, check_ptr, ranges
from shardroute.planner.plans.words import SOURCE, TARGET, Backend, Kind, Lane, Mode, Op, lane_of
from shardroute.planner.problems import Problem
from shardroute.planner.ring.workloads import KEY_SIDE, LSE, QUERY_SIDE, Attention
from shardroute.topologies.errors import PlanError
from shardroute.topologies.topologies import Topology

# Memory that a rank may take to pack in, each way, where the library sends and receives: four of the messages of 4 MiB that rows
# are packed into, so that some travel while the next is packed.
WINDOW_BYTES = 16 * 2**20
# What all steps together carry, and what a slot or an offset in it may come to, stays below this: the sum of two fits int64.
MAX_PLAN_BYTES = 2**62


def classes_of(problem: Problem) -> NDArray[np.int32]:
    """The class of each tensor of the problem."""
    of = np.zeros(len(problem.tensors), dtype=np.int32)
    for i, cls in enumerate(problem.classes):
        of[cls.members] = i
    return of


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that an interpreter needs: the problem, the machine that it was planned for, and the steps.

    boxes       one a class of the problem: the pieces that bundles refer to
    group_ptr, group_ranks   CSR: the ranks of each collective's group, in ring order
    slot_bytes  int64[n_slots]: size of each staging slot; a slot exists on every rank that a step uses it on
    attention   the attention call that it computes, if it does; `computes` then has its COMPUTE steps
    window_bytes  the most that a rank may take beside its slots to pack what it sends, and as much for what it receives, where
                ranks send and receive (see `stagings`)

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
    window_bytes: int = WINDOW_BYTES

    def __post_init__(self) -> None:
        problem, steps, bundles = self.problem, self.steps, self.bundles
        if problem.n_ranks > self.topology.n_gpus:
            raise PlanError(f"the problem has {problem.n_ranks} ranks, the topology {self.topology.n_gpus} GPUs")
        if len(self.boxes) != len(problem.classes):
            raise PlanError(f"pieces are given for {len(self.boxes)} classes, the problem has {len(problem.classes)}")
        for boxes, cls in zip(self.boxes, problem.classes, strict=True):
            check_boxes(boxes, cls.shape)
        if not 0 <= self.window_bytes < MAX_PLAN_BYTES:
            raise PlanError(f"window_bytes: expected 0 or more bytes, below 2^62, found {self.window_bytes}")
        check_ptr("group_ptr", self.group_ptr, None, len(self.group_ranks))
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
        # One number a pair: to sort rows, 2 million steps took NumPy 3 s.
        rank, slot = np.concatenate(pairs).T
        keys = np.sort(rank * len(self.slot_bytes) + slot)
        return np.stack(np.divmod(keys[np.diff(keys, prepend=-1) != 0], max(len(self.slot_bytes), 1)), axis=1)

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
