from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hand_plans import gathered, lane_ordered, relay_chain, rows_to_columns
from hypothesis import given
from hypothesis import strategies as st

from shardroute.executors.interpreting.interpret import Programs, compile_plan
from shardroute.executors.messages.messages import NO_ROWS, Messages, lay_messages
from shardroute.executors.messages.multicasts import find_multicasts
from shardroute.executors.messages.rounds import Ring, find_groups, find_rounds
from shardroute.executors.messages.signals import Tells, lay_signals
from shardroute.planner.plans import Backend, Op, Plan
from shardroute.planner.rounds import group_sizes, rounds_of

PLANS = {
    "rows to columns": rows_to_columns,
    "relays": lambda: relay_chain(6, n_chunks=3),
    "gathers": gathered,
    "queues": lane_ordered,
}


def compiled(plan: Plan) -> tuple[Programs, Messages]:
    programs, buffers = compile_plan(plan)
    return programs, lay_messages(plan, programs, buffers)


@given(st.integers(1, 40), st.lists(st.integers(1, 40), max_size=60))
def test_a_place_in_a_ring_is_given_again_only_when_those_that_overlap_it_have_left(n_bytes: int, sizes: list[int]) -> None:
    ring, held = Ring(n_bytes), dict[int, tuple[int, int]]()

    for who, size in enumerate(size for size in sizes if size <= n_bytes):
        peeked = ring.peek(size)
        start, leave = ring.take(size, who)

        assert (start, leave) == peeked
        assert 0 <= start <= n_bytes - size
        for gone in leave:
            del held[gone]
        assert not any(a < start + size and start < b for a, b in held.values())
        held[who] = (start, start + size)


def test_a_ring_uses_all_of_its_bytes_before_it_begins_anew() -> None:
    ring = Ring(10)

    places = [ring.take(n, who) for who, n in enumerate((4, 6, 4))]

    assert places == [(0, []), (4, []), (0, [0])]


@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_in_a_later_round_than_what_it_waits_for_and_what_is_before_it_in_its_queues(name: str) -> None:
    plan = PLANS[name]()
    programs, messages = compiled(plan)

    rounds = find_rounds(programs, messages)

    for step in range(len(plan.steps)):
        after = plan.steps.after[plan.steps.after_ptr[step] : plan.steps.after_ptr[step + 1]]
        assert (rounds[after] < rounds[step]).all()
    actions = programs.actions
    rank = np.repeat(np.arange(programs.n_ranks), np.diff(actions.ptr))
    for who, queue in {*zip(rank.tolist(), actions.queue.tolist(), strict=True)}:
        in_turn = rounds[actions.step[(rank == who) & (actions.queue == queue)]]
        assert (np.diff(in_turn) > 0).all()
    assert set(rounds.tolist()) == set(range(int(rounds.max()) + 1))


@given(st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=30))
def test_a_round_is_the_longest_chain_of_rows_that_a_row_waits_for(waits: list[list[int]]) -> None:
    deps = [[dep for dep in row if dep < i] for i, row in enumerate(waits)]

    found = rounds_of(np.cumsum([0, *map(len, deps)]), np.array([dep for row in deps for dep in row], dtype=np.int64))

    def chain(i: int) -> int:
        return max((1 + chain(dep) for dep in set(deps[i])), default=0)

    assert found.tolist() == [chain(i) for i in range(len(deps))]


def test_compiled_rounds_are_the_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    rng = np.random.default_rng(5)
    counts = np.minimum(rng.integers(0, 4, 3000), np.arange(3000))
    dep_ptr = np.cumsum([0, *counts])
    deps = (rng.random(dep_ptr[-1]) * np.repeat(np.arange(3000), counts)).astype(np.int32)
    plain = rounds_of(dep_ptr, deps)

    monkeypatch.setattr("shardroute.planner.rounds.COMPILED_FROM", 0)
    found = rounds_of(dep_ptr, deps)

    assert found.dtype == plain.dtype == np.int64
    assert found.tolist() == plain.tolist()
    assert plain.max() > 5


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_groups_count_what_a_rank_sends_and_receives_in_a_round_on_a_wire(make: Callable[[], Plan]) -> None:
    plan = make()
    plan = replace(plan, steps=replace(plan.steps, backend=np.full_like(plan.steps.backend, Backend.NCCL)))
    rounds, steps = find_rounds(*compiled(plan)), plan.steps
    wires = np.arange(len(steps)) % 3
    messages = [
        ((int(rounds[i]), int(wires[i])), int(steps.src[i]), int(steps.dst[i]))
        for i in range(len(steps))
        if steps.op[i] == Op.COPY and steps.src[i] != steps.dst[i]
    ]

    sizes = group_sizes(plan, rounds, wires)

    for i in range(len(steps)):
        message = (int(rounds[i]), int(wires[i])), int(steps.src[i]), int(steps.dst[i])
        together = [
            sum(other[0] == message[0] and other[side] == rank for other in messages) for rank in message[1:] for side in (1, 2)
        ]
        assert sizes[i] == (max(together) if message in messages and steps.op[i] == Op.COPY else 1)


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_what_a_group_packs_lies_apart_on_every_rank(make: Callable[[], Plan]) -> None:
    programs, messages = compiled(make())

    groups = find_groups(programs, messages)

    for at, rank, side in ((groups.out_at, messages.src, 0), (groups.in_at, messages.dst, 1)):
        for group, who in {*zip(groups.of_message.tolist(), rank.tolist(), strict=True)}:
            mine = np.flatnonzero((groups.of_message == group) & (rank == who) & (at != NO_ROWS))
            mine = mine[np.argsort(at[mine])]
            ends = at[mine] + messages.n_bytes[mine]
            assert (ends[:-1] <= at[mine][1:]).all()
            assert (ends <= messages.window_bytes[who, side]).all()


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("by_queue", [False, True])
def test_signals_come_after_what_they_wait_for_and_are_counted_on_their_channel(make: Callable[[], Plan], by_queue: bool) -> None:
    programs, messages = compiled(make())
    reaches = np.zeros((programs.n_ranks, programs.n_ranks), np.bool_)

    signals = lay_signals(programs, messages, reaches, by_queue=by_queue)

    data = np.flatnonzero(signals.tells == Tells.DATA)
    row_of = dict(zip(signals.message[data].tolist(), data.tolist(), strict=True))
    assert sorted(row_of) == list(range(len(messages.step)))
    for row in np.flatnonzero(signals.tells == Tells.FREE).tolist():
        message = int(signals.message[row])
        assert row < row_of[message]
        assert all(row_of[left] < row for left in signals.after_in[message])
    assert (np.diff(signals.step) >= 0).all()
    for channel in range(len(signals.channel_src)):
        of = signals.channel == channel
        assert signals.number[of].tolist() == list(range(1, int(of.sum()) + 1))
        assert {*signals.src[of].tolist()} == {int(signals.channel_src[channel])}


def test_a_gather_into_a_slot_and_its_broadcast_are_one_message_for_all_receivers() -> None:
    programs, messages = compiled(gathered(1))

    found = find_multicasts(programs, messages, find_groups(programs, messages))

    assert {each.ranks for each in found} == {(0, 2, 3)}
    assert all(each.src == 0 for each in found)
    assert sum(len(each.messages) for each in found) == int((messages.src == 0).sum()) - 1
