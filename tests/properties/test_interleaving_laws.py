"""Two-sided runs in every order that a library may choose: right bytes, no rank waits for ever, nothing is overwritten early."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from executor_oracles import in_arenas, random_memory, run_plan_by_elements
from hand_plans import HandPlan, gathered, lane_ordered, relay_chain, row_shards, rows_to_columns
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from message_oracle import run_messages

from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.messages import messages
from shardroute.executors.messages.messages import lay_messages
from shardroute.executors.messages.rounds import find_rounds
from shardroute.executors.transports import exchanges
from shardroute.planner.plans import SOURCE, TARGET, Lane, Op, Plan
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.testing import fused_problems, tensor_problems
from shardroute.topologies import build_topology, load_machine
from shardroute.topologies.errors import PlanError

Choose = Callable[[int], int]

SMALL_WINDOW_BYTES = 64  # less than most collectives bring here, which then go in rounds


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of every strategy over two NVLink domains, in messages small enough that relays, credits and slots are used."""
    problem = draw(st.one_of(tensor_problems(n_ranks=10), fused_problems(n_ranks=10)))
    topology = build_topology(load_machine("dgx-h100"), n_units=2)
    strategy = draw(st.sampled_from([name for name in STRATEGIES if name != "optimal"]))
    options = Options(message_bytes=draw(st.integers(8, 256)), staging_bytes=draw(st.sampled_from([0, 512, 2**20])))
    return make_plan(problem, topology, strategy, options=options)


def met() -> Plan:
    """Three ranks that meet between two copies."""
    hand = HandPlan()
    t = hand.tensor((2, 8), row_shards((2, 8), [0, 1]), row_shards((2, 8), [1, 2]))
    first = hand.copy(hand.bundle((t, [(0, 1), (0, 8)])), 0, 1)
    nothing = hand.bundle()
    barrier = hand._step(Op.BARRIER, Lane.COLLECTIVE, nothing, -1, -1, hand._group([1, 2, 0]), SOURCE, TARGET, [first])
    hand.copy(hand.bundle((t, [(1, 2), (0, 8)])), 1, 2, [barrier])
    return hand.build(3)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows, messages and receives ahead so small that every limit is met."""
    monkeypatch.setattr(messages, "STRAIGHT_BYTES", 32)
    monkeypatch.setattr(messages, "PACKED_BYTES", 48)
    monkeypatch.setattr(exchanges, "_AHEAD", 3)


def run_and_compare(plan: Plan, choose: Choose, *, eager: bool) -> None:
    plan = replace(plan, window_bytes=SMALL_WINDOW_BYTES)
    programs, buffers = compile_plan(plan)
    memory = random_memory(buffers, 1)
    arenas = in_arenas(memory, buffers)

    laid = lay_messages(plan, programs, buffers)
    start_s, end_s = run_messages(programs, laid, arenas, choose, eager=eager)

    run_plan_by_elements(plan, memory)
    for rank, expected in enumerate(in_arenas(memory, buffers)):
        end = int(buffers.slots_at[rank])
        np.testing.assert_array_equal(arenas[rank][:end], expected[:end])
    for step in np.flatnonzero(plan.steps.op == Op.BARRIER).tolist():
        cells = slice(*programs.cells.ptr[[step, step + 1]].tolist())
        assert end_s[cells].min() >= start_s[cells].max(), f"a rank left barrier {step} before all had come"


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans(), st.randoms(use_true_random=False), st.booleans())
def test_messages_in_any_legal_order_leave_what_running_the_plan_element_by_element_leaves(
    small_windows: None, plan: Plan, randomly: "st.random_module", eager: bool
) -> None:
    run_and_compare(plan, randomly.randrange, eager=eager)  # type: ignore[attr-defined]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([rows_to_columns(), relay_chain(5, 10, 3), gathered(4), lane_ordered()]),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_hand_made_plans_end_alike_in_any_legal_order(
    small_windows: None, plan: Plan, randomly: "st.random_module", eager: bool
) -> None:
    run_and_compare(plan, randomly.randrange, eager=eager)  # type: ignore[attr-defined]


@pytest.mark.parametrize("eager", [False, True])
def test_no_rank_leaves_a_barrier_before_all_have_come(eager: bool) -> None:
    plan = met()

    for seed in range(150):
        run_and_compare(plan, random.Random(seed).randrange, eager=eager)


@given(plans())
def test_a_round_holds_only_steps_that_do_not_wait_for_each_other(plan: Plan) -> None:
    steps = plan.steps
    programs, buffers = compile_plan(plan)

    rounds = find_rounds(programs, lay_messages(plan, programs, buffers))

    waiter = np.repeat(np.arange(len(steps)), np.diff(steps.after_ptr))
    assert (rounds[waiter] > rounds[steps.after]).all()
    copies = np.flatnonzero(steps.op == Op.COPY)
    queues = set(zip(rounds[copies].tolist(), steps.src[copies].tolist(), steps.lane[copies].tolist(), strict=True))
    assert len(queues) == len(copies)  # a queue does one step a round
    writes = [(int(rounds[i]), int(steps.dst[i]), int(steps.dst_at[i])) for i in copies.tolist() if steps.dst_at[i] >= 0]
    assert len(set(writes)) == len(writes)  # a slot is written once a round


def test_a_copy_that_waits_for_what_its_rank_cannot_see_is_refused() -> None:
    hand = HandPlan()
    t = hand.tensor((2, 8), row_shards((2, 8), [0, 2]), row_shards((2, 8), [1, 3]))
    first = hand.copy(hand.bundle((t, [(0, 1), (0, 8)])), 0, 1)
    hand.copy(hand.bundle((t, [(1, 2), (0, 8)])), 2, 3, [first])
    plan = hand.build(4)
    programs, buffers = compile_plan(plan)

    with pytest.raises(PlanError, match="step 1 of rank 2 waits for step 0, in which that rank takes no part"):
        lay_messages(plan, programs, buffers)


def test_what_is_in_order_on_a_side_is_not_packed_there() -> None:
    hand = HandPlan(slots=[64])
    t = hand.tensor((4, 8), row_shards((4, 8), [0]), row_shards((4, 8), [2]))
    columns = [hand.bundle((t, [(0, 4), (4 * k, 4 * k + 4)])) for k in (0, 1)]
    staged = hand.copy(columns[0], 0, 1, dst_at=0)
    hand.copy(columns[0], 1, 2, [staged], src_at=0)
    hand.copy(columns[1], 0, 2)
    hand.copy(hand.bundle(), 2, 0, lane=Lane.CREDIT)
    plan = hand.build(3)
    programs, buffers = compile_plan(plan)

    found = lay_messages(plan, programs, buffers)

    assert (found.src_at >= 0).tolist() == [False, True, False, False]
    assert (found.dst_at >= 0).tolist() == [True, False, False, False]
    assert found.n_bytes.tolist() == [32, 32, 32, 0]
    assert found.window_bytes.tolist() == [[64, 0], [0, 0], [0, 64]]
