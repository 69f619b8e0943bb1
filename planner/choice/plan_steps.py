"""The steps of a plan as operations to choose a backend for: its collectives, and its copies as permutes.

Rule: copies of one size that follow each other in the plan are one permute as long as no rank sends or receives twice, which is
what a hop of a ring is. Steps that are alike are one operation, with their number.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from shardroute.planner.backends.group_steps import COLLECTIVES
from shardroute.planner.choice.operations import Operation, permute
from shardroute.planner.plans import Op, Plan
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError

# Each takes milliseconds to choose for, and a person reads them.
MOST_OPERATIONS: Final = 1000
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
    moved: list[tuple[Collective, int, str, tuple[int, ...] | dict[int, int]]] = []  # by a group, or from sources to targets
    latest: dict[tuple[int, str], dict[int, int]] = {}
    for step, op in enumerate(steps.op.tolist()):
        n_bytes = int(plan.step_bytes[step])
        if not n_bytes:
            continue
        first = plan.bundles.tensor[plan.bundles.ptr[steps.bundle[step]]]
        dtype = _xla(plan.problem.tensors[first].dtype)
        if op == Op.COPY:
            src, dst = int(steps.src[step]), int(steps.dst[step])
            if src == dst:
                continue
            pairs = latest.get((n_bytes, dtype))
            if pairs is None or src in pairs or dst in pairs.values():
                pairs = latest[n_bytes, dtype] = {}
                moved.append((Collective.PERMUTE, n_bytes, dtype, pairs))
            pairs[src] = dst
        elif op in COLLECTIVES:
            group = tuple(sorted(plan.group(int(steps.group[step])).tolist()))
            if len(group) > 1:
                moved.append((COLLECTIVES[op], n_bytes, dtype, group))
    counts: Counter[_Key] = Counter()
    for kind, n_bytes, dtype, who in moved:
        counts[kind, n_bytes, dtype, tuple(sorted(who.items())) if isinstance(who, dict) else (who,)] += 1
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
