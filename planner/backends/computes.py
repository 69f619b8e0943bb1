"""What the COMPUTE steps of an attention plan take: CPU time by tiles, GPU time by operations and memory traffic.

On a CPU machine the calibration's tables attend_*, grad_* and sums say what the parts of a tile cost. On a GPU machine `rates`
do: operations at attention's own rate, and the traffic of merging, conversions and copies that a step of a ring has beside them,
at the nominal memory bandwidth.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.rates import load_rates
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.tensors import DTYPES
from shardroute.planner.plans import Kind, Mode, Plan
from shardroute.planner.ring.chunks import Rows, rows_of
from shardroute.planner.ring.tiles import Work, work
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.costs import COST_TABLES, TileCost
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine

# An output that is merged, or a gradient that is added, is read twice and written once.
_TOUCHES = 3
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5


def cpu_seconds(plan: Plan, calibration: Calibration) -> NDArray[np.float64]:
    """CPU seconds of each COMPUTE step (rows of `plan.computes`). Raises InputError when the calibration has no such costs."""
    return calibration.compute_s + np.array([_cpu_s(plan, calibration, row, found) for row, found in enumerate(works_of(plan))])


def works_of(plan: Plan) -> list[Work]:
    """The work of each COMPUTE step; nothing for those that only add up."""
    known: dict[tuple[int, ...], Work] = {}
    works = []
    for row, kind in enumerate(plan.computes.kind.tolist()):
        if kind not in (Kind.ATTEND, Kind.GRAD):
            works.append(Work())
            continue
        read = plan.computes.mode[plan.computes.ptr[row] : plan.computes.ptr[row + 1]] == Mode.READ
        key = tuple(plan.computes.bundle[plan.computes.ptr[row] : plan.computes.ptr[row + 1]][read].tolist())
        if key not in known:
            known[key] = _work_of(plan, row)
        works.append(known[key])
    return works


def _cpu_s(plan: Plan, calibration: Calibration, row: int, found: Work) -> float:
    attention, kind = plan.attention, Kind(int(plan.computes.kind[row]))
    assert attention is not None
    if kind in (Kind.ADD, Kind.MERGE):
        if calibration.sums is None:
            raise _lacks(calibration, "sums")
        return _read_bytes(plan, row) / (calibration.sums.add_Bps if kind is Kind.ADD else calibration.sums.merge_Bps)
    table = f"{'attend' if kind is Kind.ATTEND else 'grad'}_{attention.dtype}"
    cost: TileCost | None = getattr(calibration, table, None)
    if cost is None:
        raise _lacks(calibration, table)
    seconds = found.n_scores * (cost.score_s + attention.head_dim * cost.product_s) + found.n_masked * cost.mask_s
    seconds += found.n_edges * attention.head_dim * cost.edge_s + found.n_tiles * cost.tile_s
    if kind is Kind.ATTEND and len(_operands(plan, row, [Mode.UPDATE])):
        if calibration.sums is None:
            raise _lacks(calibration, "sums")
        seconds += found.n_rows * attention.head_dim * DTYPES[attention.dtype] / calibration.sums.merge_Bps
    return seconds


def _lacks(calibration: Calibration, table: str) -> InputError:
    fix = "measure them with `shardroute calibrate --here`" if table in COST_TABLES else "only f32 and f64 are predicted"
    return InputError(
        f"calibration of {calibration.machine} ({calibration.library}) has no costs {table}, which attention takes on CPUs; {fix}"
    )


def gpu_seconds(plan: Plan, machine: Machine) -> NDArray[np.float64]:
    """Seconds of each COMPUTE step on a GPU of the machine. Raises InputError when no rates of computation ship for it."""
    rates = load_rates(machine.name)
    attention = plan.attention
    assert attention is not None
    rounds = attention.n_ranks > 1
    works = works_of(plan)
    seconds = np.zeros(len(works))
    for row, found in enumerate(works):
        operations = 2.0 * attention.head_dim * found.n_pairs
        outputs = _output_elements(plan, row) if rounds else 0
        match Kind(int(plan.computes.kind[row])):
            case Kind.ATTEND:
                seconds[row] = operations * _FORWARD_PRODUCTS / rates.forward_Fps
                seconds[row] += outputs * rates.forward_bytes / machine.hbm_Bps
            case Kind.GRAD:
                seconds[row] = operations * _BACKWARD_PRODUCTS / rates.backward_Fps
                seconds[row] += outputs * rates.backward_bytes / machine.hbm_Bps
            case Kind.ADD | Kind.MERGE:
                seconds[row] = _TOUCHES * _read_bytes(plan, row) / machine.hbm_Bps
    return seconds


def _operands(plan: Plan, row: int, modes: Iterable[Mode]) -> Ints:
    """The bundle entries of a COMPUTE's operands in these modes."""
    computes, ptr = plan.computes, plan.bundles.ptr
    rows = slice(int(computes.ptr[row]), int(computes.ptr[row + 1]))
    bundles = computes.bundle[rows][np.isin(computes.mode[rows], [int(mode) for mode in modes])]
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(ptr[b], ptr[b + 1]) for b in bundles.tolist())])


def _read_bytes(plan: Plan, row: int) -> int:
    return int(plan.entry_bytes[_operands(plan, row, [Mode.READ])].sum())


def _output_elements(plan: Plan, row: int) -> int:
    """Elements of the queries of a COMPUTE: as many as its outputs have."""
    entries = _operands(plan, row, [Mode.READ])
    tensor = next(i for i, t in enumerate(plan.problem.tensors) if t.name == "q")
    queries = entries[plan.bundles.tensor[entries] == tensor]
    return int(plan.entry_bytes[queries].sum()) // plan.problem.tensors[tensor].itemsize


def _sides(plan: Plan, row: int) -> dict[str, tuple[Rows, tuple[Ints, Ints]]]:
    """The rows and boxes of the pieces of q and of k that a COMPUTE reads."""
    attention = plan.attention
    assert attention is not None
    entries = _operands(plan, row, [Mode.READ])
    tensors, pieces = plan.bundles.tensor[entries], plan.bundles.piece[entries]
    token_dims = slice(1, 1 + len(attention.seq_shape()))
    found = {}
    for name in ("q", "k"):
        tensor = next(i for i, t in enumerate(plan.problem.tensors) if t.name == name)
        boxes, mine = plan.boxes[int(plan.tensor_class[tensor])], pieces[tensors == tensor]
        lo, hi = boxes.lo[mine], boxes.hi[mine]
        found[name] = rows_of(attention, lo[:, token_dims], hi[:, token_dims]), (lo, hi)
    return found


def _work_of(plan: Plan, row: int) -> Work:
    attention = plan.attention
    assert attention is not None
    sides = _sides(plan, row)
    (queries, (q_lo, q_hi)), (keys, (k_lo, k_hi)) = sides["q"], sides["k"]
    served = attention.n_heads // attention.n_kv_heads
    q_first, q_end, k_first, k_end = (corners[:, -2].tolist() for corners in (q_lo, q_hi, k_lo, k_hi))
    total = Work()
    for q in range(len(queries)):
        n_heads = q_end[q] - q_first[q]
        first, end = q_first[q] // served, -(-q_end[q] // served)
        n_tiles = total.n_tiles
        for k in np.flatnonzero(keys.document == queries.document[q]).tolist():
            shared = min(end, k_end[k]) - max(first, k_first[k])
            if shared > 0:
                total += work(attention, queries, q, keys, k, min(served, n_heads)).times(shared * attention.batch)
        if total.n_tiles > n_tiles:
            total += Work(n_rows=int(queries.n_real[q]) * n_heads * attention.batch)
    return total
