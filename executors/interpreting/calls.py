"""What COMPUTE and REDUCE_SCATTER steps work on, as columns: for each action its pieces, with addresses and strides.

Rule: columns only, like all programs, so that ranks find them in memory that they share; `computers` turns them into arrays.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.memories import Memory, Part
from shardroute.planner.layouts.fragments import Ints, dense_strides
from shardroute.planner.plans import SOURCE, TARGET, Kind, Mode, Op, Plan, ranges
from shardroute.planner.ring.workloads import LSE
from shardroute.topologies.errors import PlanError

# The kind of a call that sums up a rank's part of a REDUCE_SCATTER, beside the Kinds of a COMPUTE.
REDUCE: Final = len(Kind)
# The dims that every piece is seen with: batch, rows, heads, width.
N_DIMS: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """One row a call, ordered by step, then rank; `operand` rows (CSR) are its pieces, in the plan's order.

    step, rank   whose action it belongs to
    kind         a Kind, or REDUCE
    tensor       int32[m]      of each piece
    mode         uint8[m]      a Mode
    lo, hi       int64[m, 2]   its rows in the token dims (the second is 0 to 1 where there is one dim)
    first_head   int64[m]
    owner        int32[m]      in whose arena it lies; a call reads from its own but for REDUCE
    address      int64[m]
    extent, stride   int64[m, 4]: batch, rows, heads, width; strides in bytes
    """

    step: Ints
    rank: NDArray[np.int32]
    kind: NDArray[np.uint8]
    ptr: Ints
    tensor: NDArray[np.int32]
    mode: NDArray[np.uint8]
    lo: Ints
    hi: Ints
    first_head: Ints
    owner: NDArray[np.int32]
    address: Ints
    extent: Ints
    stride: Ints

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A call's pieces before they have addresses: the row of its call, bundle entry, place, mode, and whose arena."""

    call: Ints
    entry: Ints
    at: Ints
    mode: Ints
    owner: Ints


def lay_calls(plan: Plan, memory: Memory) -> Calls:
    """The calls of all ranks. Raises PlanError when a piece isn't where a step reads or writes it."""
    computes = plan.computes
    driver = plan.group_ranks[plan.group_ptr[plan.steps.group[computes.step]]].astype(np.int64)
    operand, row = ranges(computes.ptr, np.arange(len(computes)))
    entry, of = ranges(plan.bundles.ptr, computes.bundle[operand])
    at, mode = (column[operand][of].astype(np.int64) for column in (computes.at, computes.mode))
    rows = [_Rows(row[of], entry, at, mode, driver[row[of]])]
    steps, ranks, kinds = [computes.step.astype(np.int64)], [driver], [computes.kind.astype(np.int64)]
    n_calls = len(computes)
    for reduce in np.flatnonzero(plan.steps.op == Op.REDUCE_SCATTER).tolist():
        found, homes = _reduce(plan, memory, reduce, n_calls)
        rows.append(found)
        n_calls += len(homes)
        steps.append(np.full(len(homes), reduce))
        ranks.append(homes)
        kinds.append(np.full(len(homes), REDUCE))
    step, rank, kind = (np.concatenate(x) for x in (steps, ranks, kinds))
    order = np.lexsort((rank, step))
    place = np.empty(n_calls, dtype=np.int64)
    place[order] = np.arange(n_calls)
    joined = _Rows(*(np.concatenate([getattr(r, name) for r in rows]) for name in _Rows.__slots__))
    by_call = np.argsort(place[joined.call], kind="stable")
    joined = _Rows(*(getattr(joined, name)[by_call] for name in _Rows.__slots__))
    counts = np.bincount(place[joined.call], minlength=n_calls)
    return _with_addresses(
        plan, memory, joined, step[order], rank[order].astype(np.int32), kind[order].astype(np.uint8),
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
    )  # fmt: skip


def _reduce(plan: Plan, memory: Memory, step: int, first_call: int) -> tuple[_Rows, Ints]:
    """The pieces of a REDUCE_SCATTER for each rank that some of them are for: its own, then those of all members."""
    steps, bundles = plan.steps, plan.bundles
    members = plan.group(int(steps.group[step])).astype(np.int64)
    entries = np.arange(bundles.ptr[steps.bundle[step]], bundles.ptr[steps.bundle[step] + 1])
    pair_entry, pair_rank = (x.ravel() for x in np.meshgrid(entries, members, indexing="ij"))
    row, _, _ = memory.locate(Part.TARGET, pair_rank, bundles.tensor[pair_entry], bundles.piece[pair_entry])
    row = np.unique(row)
    entry, home = pair_entry[row], pair_rank[row]
    homes, call = np.unique(home, return_inverse=True)
    n, slot = len(members), int(steps.src_at[step])
    at = np.concatenate([np.full(len(entry), TARGET), np.full(len(entry) * n, slot)])
    mode = np.concatenate([np.full(len(entry), Mode.WRITE), np.full(len(entry) * n, Mode.READ)])
    call = call.ravel() + first_call
    return _Rows(
        np.concatenate([call, np.repeat(call, n)]), np.concatenate([entry, np.repeat(entry, n)]), at, mode,
        np.concatenate([home, np.tile(members, len(entry))]),
    ), homes  # fmt: skip


def _with_addresses(
    plan: Plan, memory: Memory, rows: _Rows, step: Ints, rank: NDArray[np.int32], kind: NDArray[np.uint8], ptr: Ints
) -> Calls:
    bundles = plan.bundles
    tensor, piece = bundles.tensor[rows.entry], bundles.piece[rows.entry]
    number = memory.piece_number(tensor, piece)
    extent, lo = memory.piece_extent[number], memory.piece_lo[number]
    itemsize = memory.itemsize[tensor][:, None]
    address = np.full(len(tensor), -1, dtype=np.int64)
    stride = dense_strides(extent) * itemsize
    staged = np.flatnonzero(rows.at >= 0)
    address[staged] = memory.slot_address(rows.owner[staged], rows.at[staged]) + bundles.offset[rows.entry[staged]]
    for place, part in ((SOURCE, Part.SOURCE), (TARGET, Part.TARGET)):
        asked = np.flatnonzero(rows.at == place)
        found, at, box = memory.locate(part, rows.owner[asked], tensor[asked], piece[asked])
        first = np.flatnonzero(np.diff(found, prepend=-1))
        address[asked[found[first]]] = at[first]
        stride[asked[found[first]]] = memory.box_strides[box[first]] * itemsize[asked[found[first]]]
    if (address < 0).any():
        i = int(np.argmax(address < 0))
        call = int(np.searchsorted(ptr, i, side="right")) - 1
        name = plan.problem.tensors[int(tensor[i])].name
        raise PlanError(f"step {step[call]}: rank {rows.owner[i]} works on a piece of {name} that none of its fragments contains")
    dims = _dims(plan, memory.n_dims)[tensor]
    token = dims[:, 1:3]
    n = np.arange(len(tensor))[:, None]
    used = dims >= 0
    shown = np.where(used, extent[n, dims], 1)
    steps_of = np.where(used, stride[n, dims], itemsize)
    lows = np.where(token >= 0, lo[n, token], 0)
    keep = [0, 1, 3, 4]  # without the second token dim, of which a piece has one
    return Calls(
        step, rank, kind, ptr, tensor.astype(np.int32), rows.mode.astype(np.uint8), lows, lows + shown[:, 1:3],
        lo[n[:, 0], dims[:, 3]], rows.owner.astype(np.int32), address, shown[:, keep], steps_of[:, keep],
    )  # fmt: skip


def _dims(plan: Plan, n_dims: int) -> Ints:
    """For each tensor its batch, token, second token, head and width dims among the `n_dims` of memory; -1 where it has none."""
    assert plan.attention is not None
    tokens = len(plan.attention.seq_shape())
    found = []
    for tensor in plan.problem.tensors:
        first = n_dims - len(tensor.shape)
        second = first + 2 if tokens > 1 else -1
        found.append([first, first + 1, second, first + 1 + tokens, -1 if tensor.name == LSE else first + 2 + tokens])
    return np.array(found, dtype=np.int64).reshape(-1, 5)


def no_calls() -> Calls:
    """Of a plan that only moves."""
    none, table = np.zeros(0, np.int64), np.zeros((0, N_DIMS), np.int64)
    return Calls(
        none, none.astype(np.int32), none.astype(np.uint8), np.zeros(1, np.int64), none.astype(np.int32), none.astype(np.uint8),
        table[:, :2], table[:, :2], none, none.astype(np.int32), none, table, table,
    )  # fmt: skip
