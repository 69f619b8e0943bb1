"""What the COMPUTE steps of an attention plan take: CPU time by tiles, GPU time by operations and memory traffic.

On a CPU machine the calibration's tables attend_*, grad_* and sums say what the parts of a tile cost. On a GPU machine `rates`
do: operations at attention's own rate, and the traffic of merging, conversions and copies that a step of a ring has beside them,
at the nominal memory bandwidth.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.rates import load_rates
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.tensors import DTYPES
from shardroute.planner.plans import Kind, Mode, Plan
from shardroute.planner.ring.chunks import rows_of
from shardroute.planner.ring.tiles import Work, work_between
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.shares import Told, untold
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.costs import COST_TABLES, TileCost
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine

# An output that is merged, or a gradient that is added, is read twice and written once.
_TOUCHES = 3
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5
# Steps between two shares that are told: some milliseconds.
_TOLD = 100

# A piece of q or of k: its document, its first row, how far apart rows are, how many aren't padding, its first head and the one
# behind its last.
_Piece = tuple[int, int, int, int, int, int]
_FIRST = 4


def cpu_seconds(plan: Plan, calibration: Calibration, progress: Told = untold) -> NDArray[np.float64]:
    """CPU seconds of each COMPUTE step (rows of `plan.computes`); progress is told the share of them that is done. Raises
    InputError when the calibration has no such costs.
    """
    read, updated = (_over_operands(plan, plan.entry_bytes, mode).tolist() for mode in (Mode.READ, Mode.UPDATE))
    kinds = map(Kind, plan.computes.kind.tolist())
    seconds = [
        _cpu_s(plan, calibration, *of_step) for of_step in zip(kinds, works_of(plan, progress), read, updated, strict=True)
    ]
    return calibration.compute_s + np.array(seconds)


def works_of(plan: Plan, progress: Told = untold) -> list[Work]:
    """The work of each COMPUTE step, nothing for those that only add up; progress is told the share of them that is done."""
    attention = plan.attention

    @cache
    def pieces(name: str, bundle: int) -> tuple[_Piece, ...]:
        return _pieces(plan, name, bundle)

    @cache
    def work_of(queries: tuple[_Piece, ...], keys: tuple[_Piece, ...]) -> Work:
        assert attention is not None
        return _work_of(attention, queries, keys)

    computes = plan.computes
    known: dict[tuple[int, ...], Work] = {}
    works: list[Work] = []
    ptr, bundles, reads = computes.ptr.tolist(), computes.bundle.tolist(), (computes.mode == Mode.READ).tolist()
    for row, kind in enumerate(computes.kind.tolist()):
        if row % _TOLD == 0:
            progress(row / len(computes))
        if kind not in (Kind.ATTEND, Kind.GRAD):
            works.append(Work())
            continue
        read = tuple(bundles[i] for i in range(ptr[row], ptr[row + 1]) if reads[i])
        if read not in known:
            assert attention is not None
            queries, keys = ([piece for b in read for piece in pieces(name, b)] for name in ("q", "k"))
            # Counted from the first head of k: ranks that work on other heads of the same rows have as much to do.
            head = keys[0][_FIRST]
            served = attention.n_heads // attention.n_kv_heads
            known[read] = work_of(_numbered_from(queries, head * served), _numbered_from(keys, head))
        works.append(known[read])
    return works


def _cpu_s(plan: Plan, calibration: Calibration, kind: Kind, found: Work, read_bytes: int, updated_bytes: int) -> float:
    attention = plan.attention
    assert attention is not None
    if kind in (Kind.ADD, Kind.MERGE):
        if calibration.sums is None:
            raise _lacks(calibration, "sums")
        return read_bytes / (calibration.sums.add_Bps if kind is Kind.ADD else calibration.sums.merge_Bps)
    table = f"{'attend' if kind is Kind.ATTEND else 'grad'}_{attention.dtype}"
    cost: TileCost | None = getattr(calibration, table, None)
    if cost is None:
        raise _lacks(calibration, table)
    seconds = found.n_scores * (cost.score_s + attention.head_dim * cost.product_s) + found.n_masked * cost.mask_s
    seconds += found.n_edges * attention.head_dim * cost.edge_s + found.n_tiles * cost.tile_s
    if kind is Kind.ATTEND and updated_bytes:
        if calibration.sums is None:
            raise _lacks(calibration, "sums")
        seconds += found.n_rows * attention.head_dim * DTYPES[attention.dtype] / calibration.sums.merge_Bps
    return seconds


def _lacks(calibration: Calibration, table: str) -> InputError:
    fix = "measure them with `shardroute calibrate --here`" if table in COST_TABLES else "only f32 and f64 are predicted"
    return InputError(
        f"calibration of {calibration.machine} ({calibration.library}) has no costs {table}, which attention takes on CPUs; {fix}"
    )


def gpu_seconds(plan: Plan, machine: Machine, progress: Told = untold) -> NDArray[np.float64]:
    """Seconds of each COMPUTE step on a GPU of the machine; progress is told the share of them that is done. Raises InputError
    when no rates of computation ship for it.
    """
    rates = load_rates(machine.name)
    attention = plan.attention
    assert attention is not None
    kind, read_bytes = plan.computes.kind, _over_operands(plan, plan.entry_bytes, Mode.READ)
    operations = 2.0 * attention.head_dim * np.array([found.n_pairs for found in works_of(plan, progress)], dtype=np.float64)
    outputs = _output_elements(plan) if attention.n_ranks > 1 else np.zeros(len(kind), np.int64)
    forward_s = operations * _FORWARD_PRODUCTS / rates.forward_Fps + outputs * rates.forward_bytes / machine.hbm_Bps
    backward_s = operations * _BACKWARD_PRODUCTS / rates.backward_Fps + outputs * rates.backward_bytes / machine.hbm_Bps
    adding_s = _TOUCHES * read_bytes / machine.hbm_Bps
    return np.select([kind == Kind.ATTEND, kind == Kind.GRAD], [forward_s, backward_s], adding_s)


def _over_operands(plan: Plan, of_entries: Ints, mode: Mode) -> Ints:
    """For each COMPUTE step the sum of what bundle entries have, over those of its operands in this mode."""
    computes = plan.computes
    of_bundles = _row_sums(plan.bundles.ptr, of_entries)
    return _row_sums(computes.ptr, np.where(computes.mode == mode, of_bundles[computes.bundle], 0))


def _row_sums(ptr: Ints, items: Ints) -> Ints:
    """The sum of the items of each CSR row."""
    total = np.concatenate([[0], np.cumsum(items, dtype=np.int64)])
    return np.asarray(total[ptr[1:]] - total[ptr[:-1]])


def _output_elements(plan: Plan) -> Ints:
    """Elements of the queries of each COMPUTE step: as many as its outputs have."""
    tensor = _tensor(plan, "q")
    of_queries = np.where(plan.bundles.tensor == tensor, plan.entry_bytes, 0)
    return _over_operands(plan, of_queries, Mode.READ) // plan.problem.tensors[tensor].itemsize


def _tensor(plan: Plan, name: str) -> int:
    return next(i for i, tensor in enumerate(plan.problem.tensors) if tensor.name == name)


def _pieces(plan: Plan, name: str, bundle: int) -> tuple[_Piece, ...]:
    """A bundle's pieces of q or of k."""
    attention, tensor = plan.attention, _tensor(plan, name)
    assert attention is not None
    entries = slice(int(plan.bundles.ptr[bundle]), int(plan.bundles.ptr[bundle + 1]))
    pieces = plan.bundles.piece[entries][plan.bundles.tensor[entries] == tensor]
    boxes = plan.boxes[int(plan.tensor_class[tensor])]
    lo, hi = boxes.lo[pieces], boxes.hi[pieces]
    token_dims = slice(1, 1 + len(attention.seq_shape()))
    rows = rows_of(attention, lo[:, token_dims], hi[:, token_dims])
    columns = rows.document, rows.start, np.full(len(pieces), rows.stride), rows.n_real, lo[:, -2], hi[:, -2]
    return tuple(zip(*(column.tolist() for column in columns), strict=True))


def _numbered_from(pieces: Sequence[_Piece], head: int) -> tuple[_Piece, ...]:
    return tuple(
        (document, start, stride, n, first - head, end - head) for document, start, stride, n, first, end in pieces
    )


def _work_of(attention: Attention, queries: Sequence[_Piece], keys: Sequence[_Piece]) -> Work:
    """The work of all pieces of q with all pieces of k that they meet."""
    served = attention.n_heads // attention.n_kv_heads
    known: dict[tuple[int, int, int, int], Work] = {}
    times: dict[tuple[int, int, int, int], int] = {}
    n_rows_seen = 0
    for document, q_start, stride, n_rows, q_first, q_end in queries:
        n_heads, first, end = q_end - q_first, q_first // served, -(-q_end // served)
        sees_any = False
        for k_document, k_start, _, n_keys, k_first, k_end in keys:
            shared = min(end, k_end) - max(first, k_first)
            if shared <= 0 or k_document != document:
                continue
            pair = n_rows, n_keys, (q_start - k_start) // stride + 1, min(served, n_heads)
            if pair not in known:
                known[pair] = work_between(attention, *pair)
            times[pair] = times.get(pair, 0) + shared * attention.batch
            sees_any |= known[pair].n_tiles > 0
        n_rows_seen += sees_any * n_rows * n_heads * attention.batch
    return sum((known[pair].times(n) for pair, n in times.items()), Work(n_rows=n_rows_seen))
