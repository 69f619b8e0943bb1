"""The steps of a plan as operations to choose a backend for: its collectives, and its copies as permutes.

Rule: copies of one size that follow each other in the plan are one permute as long as no rank sends or receives twice, which is
what a hop of a ring is. Steps that are alike are one operation, with their number.
"""

from dataclasses import dataclass
from typing import Final

from shardroute.planner.choice.operations import Operation, permute
from shardroute.planner.plans import Op, Plan
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError

# Each takes milliseconds to choose for, and a person reads them.
MOST_OPERATIONS: Final = 1000
_COLLECTIVES: Final = {
    Op.ALL_GATHER: Collective.ALL_GATHER, Op.BROADCAST: Collective.BROADCAST, Op.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    Op.ALL_REDUCE: Collective.ALL_REDUCE,
}  # fmt: skip
# XLA's names of dtypes where ours differ.
_XLA_DTYPES: Final = {
    "bool": "pred", "i8": "s8", "i16": "s16", "i32": "s32", "i64": "s64", "f8_e4m3": "f8e4m3fn", "f8_e5m2": "f8e5m2",
    "f8_e8m0": "f8e8m0fnu",
}  # fmt: skip

_Key = tuple[Collective, int, str, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True, slots=True)
class PlanSteps:
    """What a plan moves, in the order in which each first comes, and how many steps (of permutes, rounds) each stands for."""

    operations: tuple[Operation, ...]
    counts: tuple[int, ...]


def plan_steps(plan: Plan, devices_per_process: int = 1) -> PlanSteps:
    """The operations of a plan over its ranks. Raises InputError for one with more than MOST_OPERATIONS different ones."""
    steps, n_ranks = plan.steps, plan.problem.n_ranks
    first = plan.bundles.tensor[plan.bundles.ptr[steps.bundle].clip(max=max(len(plan.bundles.tensor) - 1, 0))].tolist()
    counts: dict[_Key, int] = {}
    rounds: list[tuple[int, str, dict[int, int]]] = []
    latest: dict[tuple[int, str], dict[int, int]] = {}
    for step, op in enumerate(steps.op.tolist()):
        n_bytes = int(plan.step_bytes[step])
        if not n_bytes:
            continue
        dtype = _xla(plan.problem.tensors[first[step]].dtype)
        if op == Op.COPY:
            src, dst = int(steps.src[step]), int(steps.dst[step])
            if src == dst:
                continue
            pairs = latest.get((n_bytes, dtype))
            if pairs is None or src in pairs or dst in pairs.values():
                pairs = latest[n_bytes, dtype] = {}
                rounds.append((n_bytes, dtype, pairs))
            pairs[src] = dst
        elif Op(op) in _COLLECTIVES:
            group = tuple(sorted(plan.group(int(steps.group[step])).tolist()))
            if len(group) > 1:
                key: _Key = (_COLLECTIVES[Op(op)], n_bytes, dtype, (group,))
                counts[key] = counts.get(key, 0) + 1
    for n_bytes, dtype, pairs in rounds:
        key = (Collective.PERMUTE, n_bytes, dtype, tuple(sorted(pairs.items())))
        counts[key] = counts.get(key, 0) + 1
    if len(counts) > MOST_OPERATIONS:
        raise InputError(
            f"the plan has {len(counts)} different steps to choose for, and at most {MOST_OPERATIONS} are chosen for at once"
        )
    found = tuple(_operation(key, n_ranks, devices_per_process) for key in counts)
    return PlanSteps(found, tuple(counts.values()))


def _operation(key: _Key, n_ranks: int, devices_per_process: int) -> Operation:
    op, n_bytes, dtype, ranks = key
    if op is Collective.PERMUTE:
        pairs = tuple((src, dst) for src, dst in ranks)
        return permute(n_bytes, pairs, dtype=dtype, n_devices=n_ranks, devices_per_process=devices_per_process)
    output = n_bytes // len(ranks[0]) if op is Collective.REDUCE_SCATTER else n_bytes
    return Operation(
        op=op, n_bytes=n_bytes, dtype=dtype, groups=ranks, n_devices=n_ranks, xla_bytes=output,
        devices_per_process=devices_per_process,
    )  # fmt: skip


def _xla(dtype: str) -> str:
    return _XLA_DTYPES.get(dtype, dtype)
