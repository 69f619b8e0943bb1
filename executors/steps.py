"""Steps of a plan in words, for errors."""

import numpy as np

from shardroute.planner.plans import Kind, Op, Plan
from shardroute.topologies.units import format_bytes


def describe_place(plan: Plan, step: int) -> str:
    """Where a rank is that has come to a step; -1 is before the first, the number of steps after the last."""
    if step < 0:
        return "before its first step"
    return "after its last step" if step >= len(plan.steps) else f"at step {step} ({describe_step(plan, step)})"


def describe_step(plan: Plan, step: int) -> str:
    """A step in words: `copy of 12 pieces, 1.20 MB, rank 3 -> rank 5`."""
    steps = plan.steps
    op = Op(int(steps.op[step]))
    group = f"the {len(plan.group(int(steps.group[step])))} ranks of group {steps.group[step]}" if op is not Op.COPY else ""
    n_pieces = int(plan.step_pieces[step])
    what = f"{n_pieces} piece{'s' if n_pieces != 1 else ''}, {format_bytes(int(plan.step_bytes[step]))}"
    match op:
        case Op.COPY:
            return f"copy of {what}, rank {steps.src[step]} -> rank {steps.dst[step]}"
        case Op.BROADCAST:
            return f"broadcast of {what}, rank {steps.src[step]} -> {group}"
        case Op.ALL_GATHER:
            return f"all-gather of {what}, {group}"
        case Op.BARRIER:
            return f"barrier of {group}"
        case Op.REDUCE_SCATTER:
            return f"reduce-scatter of {what}, {group}"
        case Op.ALL_REDUCE:
            return f"all-reduce of {what}, {group}"
        case Op.COMPUTE:
            row = int(np.searchsorted(plan.computes.step, step))
            operands = slice(int(plan.computes.ptr[row]), int(plan.computes.ptr[row + 1]))
            n_pieces = int(np.diff(plan.bundles.ptr)[plan.computes.bundle[operands]].sum())
            kind = Kind(int(plan.computes.kind[row])).name.lower()
            return f"{kind} on {n_pieces} pieces, rank {plan.group(int(steps.group[step]))[0]}"
