"""Plans whose reduce-scatters are copies and sums: proved, and of the same outputs."""

import numpy as np
import pytest
from attention_plans import planned

from shardroute.executors.interpreting.reductions import NO_STEP, without_reductions
from shardroute.executors.messages.separate import compile_separate
from shardroute.planner.check import check
from shardroute.planner.plans import Op
from shardroute.planner.ring.strategies import Options
from shardroute.planner.ring.workloads import SequenceLayout


@pytest.mark.parametrize("layout", SequenceLayout)
@pytest.mark.parametrize(("n_ranks", "stride"), [(1, 1), (2, 4), (3, 2), (8, 1)])
def test_what_comes_out_is_proved_and_has_no_reduction(n_ranks: int, stride: int, layout: SequenceLayout) -> None:
    plan = planned("all-gather", options=Options(head_stride=stride), n_ranks=n_ranks, lengths=(48,), layout=layout)

    run, of_step = without_reductions(plan)

    check(run)
    assert Op.REDUCE_SCATTER in plan.steps.op
    assert Op.REDUCE_SCATTER not in run.steps.op
    assert set(of_step.tolist()) - {NO_STEP} == set(range(len(plan.steps)))
    assert run.problem is plan.problem


def test_each_rank_sends_what_a_reduce_scatter_must_and_takes_one_slot_more() -> None:
    plan = planned("all-gather", options=Options(head_stride=1), causal=False)

    run, of_step = without_reductions(plan)

    reduces = np.flatnonzero(plan.steps.op == Op.REDUCE_SCATTER)
    for step in reduces.tolist():
        copies = np.flatnonzero((of_step == step) & (run.steps.op == Op.COPY))
        sent = np.bincount(run.steps.src[copies], weights=run.step_bytes[copies])
        assert sent.tolist() == [plan.step_bytes[step] * 3 / 4] * 4
    slots = {int(plan.slot_bytes[s]) for s in plan.steps.src_at[reduces]}
    assert run.peak_staging_bytes == plan.peak_staging_bytes + max(slots)
    assert len(reduces) == 4


def test_plans_without_reductions_stay_as_they_are() -> None:
    plan = planned("ring")

    separate = compile_separate(plan)

    assert separate.plan is plan
    cells, ptr = separate.cells_of(len(plan.steps))
    assert (cells == np.arange(len(separate.programs.cells.rank))).all()
    assert (ptr == separate.programs.cells.ptr).all()
