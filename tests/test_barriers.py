"""Barriers: nobody who waits for one goes on before all ranks of its group have come; and what `check` concludes from that."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from executor_oracles import in_arenas, random_memory, run_plan_by_elements, run_programs
from hand_plans import HandPlan, row_shards
from hypothesis import given
from hypothesis import strategies as st

from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.run import run_plan
from shardroute.planner.check import check
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.plans import TARGET, Lane, Op, Plan
from shardroute.planner.simulator.refit import predict
from shardroute.topologies import build_topology, default_calibration, load_machine
from shardroute.topologies.errors import PlanError

ROUNDS, WIDTH = 3, 400


def through_one_slot(waits: bool = True, barrier_waits: bool = True) -> Plan:
    """A tensor a round from rank 0 through a slot of rank 1 to rank 2; the slot's next filling waits for all of it by a barrier.

    Rank 3 takes part in the barriers and in nothing else.
    """
    hand = HandPlan(slots=[WIDTH * 2])
    before: list[int] = []
    for k in range(ROUNDS):
        shape = (1, WIDTH - k)
        t = hand.tensor(shape, row_shards(shape, [0]), row_shards(shape, [2]))
        whole = hand.bundle((t, [(0, 1), (0, shape[1])]))
        fill = hand.copy(whole, 0, 1, before if waits else [], dst_at=0)
        out = hand.copy(whole, 1, 2, [fill], src_at=0, lane=Lane.RELAY)
        before = [hand.barrier([0, 1, 2, 3], [out] if barrier_waits else [])]
    return hand.build(4)


def test_a_slot_may_be_filled_anew_behind_a_barrier_that_waits_for_its_readers() -> None:
    proof = check(through_one_slot())

    assert proof.n_deliveries == ROUNDS


@pytest.mark.parametrize(("waits", "barrier_waits"), [(False, True), (True, False)])
def test_a_slot_that_is_filled_anew_too_early_is_found(waits: bool, barrier_waits: bool) -> None:
    with pytest.raises(PlanError, match="overwrites slot 0 of rank 1 without waiting for its last use"):
        check(through_one_slot(waits, barrier_waits))


def test_a_barrier_that_waits_for_what_none_of_its_ranks_sees_is_found() -> None:
    hand = HandPlan()
    t = hand.tensor((1, 8), row_shards((1, 8), [0]), row_shards((1, 8), [1]))
    copy = hand.copy(hand.bundle((t, [(0, 1), (0, 8)])), 0, 1)
    hand.barrier([2, 3], [copy])

    with pytest.raises(PlanError, match="step 1 waits for step 0, in which none of its driving ranks takes part"):
        check(hand.build(4))


def test_a_barrier_carries_nothing_and_comes_from_nobody() -> None:
    plan = through_one_slot()
    barrier = int(np.flatnonzero(plan.steps.op == Op.BARRIER)[0])

    def changed(column: str, value: int) -> Plan:
        values = getattr(plan.steps, column).copy()
        values[barrier] = value
        return replace(plan, steps=replace(plan.steps, **{column: values}))

    with pytest.raises(PlanError, match="carries an empty bundle"):
        changed("bundle", 0)
    with pytest.raises(PlanError, match="src"):
        changed("src", 0)
    with pytest.raises(PlanError, match="moves nothing"):
        changed("dst_at", 0)


def test_a_barrier_survives_its_file(tmp_path) -> None:
    plan = through_one_slot()

    save_plan(plan, tmp_path / "b.plan")

    assert load_plan(tmp_path / "b.plan").digest == plan.digest


@given(st.integers(0, 2**32), st.randoms(use_true_random=False))
def test_programs_with_barriers_end_alike_in_any_legal_order(seed: int, randomly: "st.random_module") -> None:
    plan = through_one_slot()
    programs, buffers = compile_plan(plan)
    memory = random_memory(buffers, seed)
    arenas = in_arenas(memory, buffers)

    run_programs(programs, arenas, lambda n: randomly.randrange(n))

    run_plan_by_elements(plan, memory)
    for arena, expected, end in zip(arenas, in_arenas(memory, buffers), buffers.slots_at.tolist(), strict=True):
        np.testing.assert_array_equal(arena[:end], expected[:end])


def test_processes_meet_at_a_barrier() -> None:
    plan = held_up(n_slow=200)

    found = run_plan(plan, timeout_s=60)

    assert found.verified.mismatches == 0
    barrier, after = len(plan.steps) - 2, len(plan.steps) - 1
    start_s, end_s = found.timeline.start_s, found.timeline.end_s
    assert end_s[:barrier].max() <= end_s[barrier]
    assert end_s[:barrier].max() <= start_s[after]


def held_up(n_slow: int) -> Plan:
    """Rank 0 sends many pieces to rank 1; ranks 0, 2 and 3 meet; then rank 2, which had nothing to do, sends to rank 3."""
    hand = HandPlan()
    shape, small = (n_slow, WIDTH), (1, WIDTH)
    t = hand.tensor(shape, row_shards(shape, [0]), row_shards(shape, [1]))
    late = hand.tensor(small, row_shards(small, [2]), row_shards(small, [3]))
    sent = [hand.copy(hand.bundle((t, [(i, i + 1), (0, WIDTH)])), 0, 1) for i in range(n_slow)]
    met = hand.barrier([0, 2, 3], sent[-1:])
    hand.copy(hand.bundle((late, [(0, 1), (0, WIDTH)])), 2, 3, [met])
    return hand.build(4)


@pytest.mark.parametrize(
    ("ranks", "near", "far"),
    [([0], 0, 0), ([0, 1], 1, 0), (range(5), 3, 0), (range(8), 3, 0), ([0, 8], 0, 1), (range(24), 3, 2), ([0, 1, 8], 1, 1)],
)
def test_a_barrier_takes_a_launch_and_rounds_of_signals(ranks: Sequence[int], near: int, far: int) -> None:
    costs = default_calibration("dgx-h100")
    hand = HandPlan()
    hand.tensor((1, 8), row_shards((1, 8), [0]), place((1, 8), Mesh.of({"x": 1}, [0]), [Replicate()]))
    hand.barrier(list(ranks))
    plan = replace(hand.build(24), topology=build_topology(load_machine("dgx-h100"), min_gpus=24))

    found = predict(plan, costs)

    assert found.predicted_s == pytest.approx(costs.launch_s + near * costs.nvlink.latency_s + far * costs.nic.latency_s)


def test_barriers_of_different_queues_do_not_wait_for_each_other() -> None:
    costs = default_calibration("dgx-h100")
    hand = HandPlan()
    hand.tensor((1, 8), row_shards((1, 8), [0]), row_shards((1, 8), [0]))
    first, second = hand.barrier([0, 1]), hand.barrier([0, 1])
    plan = replace(hand.build(8), topology=build_topology(load_machine("dgx-h100"), min_gpus=8))
    lane = plan.steps.lane.copy()
    lane[second] += 1 << 3
    apart = replace(plan, steps=replace(plan.steps, lane=lane))

    one_s = costs.launch_s + costs.nvlink.latency_s

    assert predict(plan, costs).timeline.end_s[[first, second]].tolist() == pytest.approx([one_s, 2 * one_s])
    assert predict(apart, costs).timeline.end_s[[first, second]].tolist() == pytest.approx([one_s, one_s])


def halves(overlap: int = 0, wait_for_both: bool = True) -> Plan:
    """Two ranks fill the two halves of a slot of rank 2, which reads both at once; `overlap` lets the second begin too early."""
    hand = HandPlan(slots=[WIDTH * 2])
    shape = (2, WIDTH // 2)
    t = hand.tensor(shape, row_shards(shape, [0, 1]), row_shards(shape, [2]))
    both = hand.bundle(*((t, [(r, r + 1), (0, shape[1])]) for r in (0, 1)))
    parts = [hand.bundle((t, [(r, r + 1), (0, shape[1])]), within=both) for r in (0, 1)]
    hand.bundles[parts[1]] = [(t, p, offset - overlap) for t, p, offset in hand.bundles[parts[1]]]
    fills = [hand.copy(part, r, 2, dst_at=0) for r, part in enumerate(parts)]
    hand.copy(both, 2, 2, fills if wait_for_both else fills[:1], 0, TARGET, Lane.LOCAL)
    return hand.build(3)


def test_two_steps_may_fill_different_bytes_of_a_slot_and_a_third_read_both() -> None:
    assert check(halves()).n_deliveries == 2
    assert run_plan(halves(), timeout_s=60).verified.mismatches == 0


def test_a_reader_that_waits_for_one_of_two_writers_is_found() -> None:
    with pytest.raises(PlanError, match="step 2 reads slot 0 of rank 2 without waiting for the step that fills it"):
        check(halves(wait_for_both=False))


def test_two_steps_that_fill_the_same_bytes_of_a_slot_are_found() -> None:
    with pytest.raises(PlanError, match="overwrites slot 0 of rank 2 without waiting for its last use"):
        check(halves(overlap=2))
