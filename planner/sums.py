"""Proof that a plan adds up its problem: every needed element once, as the sum of the addends of all ranks that hold one.

Rule: as in `check`, nothing that planning worked out is trusted.
"""

import numpy as np

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.ownership import reduced_to
from shardroute.planner.piece_tables import PieceTables
from shardroute.planner.plans import SOURCE, TARGET, Op, Plan
from shardroute.topologies.errors import PlanError


def summed_deliveries(plan: Plan, tables: PieceTables) -> tuple[Ints, Ints, Ints]:
    """Step, rank and piece of everything that lands in destination weights.

    Raises PlanError for a step that adds up too few or too many addends, or gathers what no step before it has added up.
    """
    steps, bundles = plan.steps, plan.bundles
    held, needed, column = tables.held, tables.needed, tables.column
    entry_piece = tables.entry_piece.astype(np.int64)
    entry_row = tables.class_row[entry_piece]
    found: list[tuple[Ints, Ints, Ints]] = [(np.zeros(0, np.int64),) * 3]
    for step in range(len(steps)):
        op = Op(int(steps.op[step]))
        if op is Op.BARRIER:
            continue
        if op not in (Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_GATHER):
            raise PlanError(f"step {step}: a {op.name} carries addends as if they were sums; they are only added up")
        group = plan.group(int(steps.group[step]))
        members = np.zeros(held.n_columns, dtype=bool)
        members[column[group]] = True
        entries = np.arange(bundles.ptr[steps.bundle[step]], bundles.ptr[steps.bundle[step] + 1])
        rows = entry_row[entries]
        gets = needed.rows(rows)[:, column[group]]  # [entry, member]
        owner = reduced_to(plan, step) if op is not Op.ALL_REDUCE else np.zeros(0, np.int64)
        if op is Op.ALL_GATHER:
            _check_gathered(plan, step)
            gets[np.arange(len(entries)), owner] = False
        else:
            wrong = (held.rows(rows) != members).any(axis=1)
            if wrong.any():
                where = f"of entry {int(np.argmax(wrong))} of its bundle"
                raise PlanError(f"step {step}: its group is not the ranks that hold addends {where}, each once")
            if op is Op.REDUCE_SCATTER:
                gets[...] = False
                gets[np.arange(len(entries)), owner] = True
        entry, member = np.nonzero(gets)
        found.append((np.full(len(entry), step), group[member].astype(np.int64), entry_piece[entries[entry]]))
    steps_of, ranks, pieces = (np.concatenate(each) for each in zip(*found, strict=True))
    return steps_of, ranks, pieces


def _check_gathered(plan: Plan, step: int) -> None:
    """An ALL_GATHER of sums has the bundle and the group of a REDUCE_SCATTER that it waits for."""
    steps = plan.steps
    for before in steps.after[steps.after_ptr[step] : steps.after_ptr[step + 1]].tolist():
        if (
            steps.op[before] == Op.REDUCE_SCATTER
            and steps.bundle[before] == steps.bundle[step]
            and np.array_equal(plan.group(int(steps.group[before])), plan.group(int(steps.group[step])))
        ):
            return
    raise PlanError(f"step {step} gathers sums, but waits for no REDUCE_SCATTER of the same bundle over the same ranks")


def check_places(plan: Plan) -> None:
    """Raise PlanError where a step of a plan that adds up reads or writes anything but weights."""
    steps = plan.steps
    gather = steps.op == Op.ALL_GATHER
    if (steps.dst_at != TARGET).any() or (steps.src_at[gather] != TARGET).any() or (steps.src_at[~gather] != SOURCE).any():
        raise PlanError("a plan that adds up reads addends from the source weights and sums from the destination weights")
    for group in np.unique(steps.group).tolist():
        ranks = plan.group(group)
        if len(np.unique(ranks)) < len(ranks):
            raise PlanError(f"group {group} names a rank twice, whose addends would count twice")
