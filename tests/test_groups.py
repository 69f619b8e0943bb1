"""NCCL's groups in predictions: what a rank sends and receives in a round on one wire begins together, and the wire's next group
after all of it.

Copies here are between hosts, a host's ranks being 0 to 7, 8 to 15 and so on: a launch, the network's latency, bytes over a NIC.
"""

from dataclasses import replace

import numpy as np
import pytest
from hand_plans import HandPlan, lane_ordered, relay_chain, row_shards, rows_to_columns
from hypothesis import given, settings

from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.messages.messages import lay_messages
from shardroute.executors.messages.rounds import find_groups, find_rounds
from shardroute.planner.backends.channels import channel_law
from shardroute.planner.backends.groups import SYSTEMS, Kind
from shardroute.planner.critical_paths import Reason, critical_path
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.plans import TARGET, Backend, Lane, Plan, lane_of, queue_of, queued
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.simulator.refit import Prediction, predict
from shardroute.planner.testing import tensor_problems
from shardroute.planner.wires import QUEUES, wires_of
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

N = 10_000_000
COSTS = default_calibration("dgx-h100")
NIC_Bps = 50e9 * COSTS.nic.efficiency
START_S = COSTS.launch_s + COSTS.nic.latency_s
COPY_Bps = load_machine("dgx-h100").hbm_Bps * COSTS.memory.efficiency / 2  # a byte packed is read and written
FULL_S = N / NIC_Bps


def by_nccl(plan: Plan, n_ranks: int = 0) -> Plan:
    """The plan on H100, its steps carried by NCCL."""
    steps = replace(plan.steps, backend=np.full_like(plan.steps.backend, Backend.NCCL))
    topology = build_topology(load_machine("dgx-h100"), None, max(n_ranks, plan.problem.n_ranks))
    return replace(plan, steps=steps, topology=topology)


def vector(hand: HandPlan, source: int, targets: list[int], n: int = N) -> int:
    """A bundle of n bytes from one rank to others."""
    place_at = place((1, n), Mesh.of({"x": len(targets)}, targets), [Replicate()])
    return hand.bundle((hand.tensor((1, n), row_shards((1, n), [source]), place_at, "u8"), [(0, 1), (0, n)]))


def ends(plan: Plan, costs=COSTS) -> list[float]:
    return predict(plan, costs).timeline.end_s.tolist()


def a_small_and_a_large_message_then_another() -> Plan:
    """Rank 0 sends a small and a large message in queues of one wire, then one in the small one's queue."""
    hand = HandPlan()
    hand.copy(vector(hand, 0, [8], N), 0, 8)
    hand.copy(vector(hand, 0, [16], 3 * N), 0, 16, queue=QUEUES)
    hand.copy(vector(hand, 0, [8], 2 * N), 0, 8)
    return by_nccl(hand.build(17))


def test_a_rank_begins_its_next_group_when_the_largest_message_of_the_one_before_has_gone() -> None:
    """Rank 0 sends a small and a large message, then one in the small one's queue: it waits for the large one."""
    plan = a_small_and_a_large_message_then_another()

    found = predict(plan, COSTS)

    start_s = START_S + COSTS.message_s  # two messages of one group
    small_s, large_s = start_s + 2 * FULL_S, start_s + 4 * FULL_S
    assert found.timeline.end_s.tolist() == pytest.approx([small_s, large_s, large_s + START_S + 2 * FULL_S])
    assert found.timeline.start_s.tolist() == pytest.approx([0.0, 0.0, large_s])


@pytest.mark.parametrize("other", [{"queue": 1}, {"lane": Lane.RELAY}], ids=["queue", "lane"])
def test_another_queue_or_lane_goes_on_beside_a_large_message(other) -> None:
    """As above, but that the large message has a wire of its own: the third goes as soon as the first has gone."""
    hand = HandPlan()
    hand.copy(vector(hand, 0, [8], N), 0, 8)
    hand.copy(vector(hand, 0, [16], 9 * N), 0, 16, **other)
    hand.copy(vector(hand, 0, [8], 2 * N), 0, 8)
    plan = by_nccl(hand.build(17))

    found = predict(plan, COSTS)

    # All share the NIC; no launch has two messages.
    small_s = START_S + 2 * FULL_S
    third_s = small_s + START_S + 4 * FULL_S
    assert found.timeline.end_s[[0, 2]].tolist() == pytest.approx([small_s, third_s])
    assert found.timeline.start_s.tolist() == pytest.approx([0.0, 0.0, small_s])
    assert found.timeline.end_s[1] == pytest.approx(START_S + 12 * FULL_S)


def test_what_stays_in_a_rank_holds_up_no_message() -> None:
    hand = HandPlan()
    hand.copy(vector(hand, 0, [0], 10**9), 0, 0, lane=Lane.LOCAL)
    hand.copy(vector(hand, 0, [8], N), 0, 8)
    plan = by_nccl(hand.build(9))

    local_s, message_s = ends(plan)

    assert message_s == pytest.approx(START_S + FULL_S)
    assert local_s > 2 * message_s


def test_many_wires_share_the_sms_of_a_gpu() -> None:
    """Of 24 wires each has 4 channels; NVLink takes all of a lone wire's 32."""
    beside = {}
    for n_queues in (1, 8):
        hand = HandPlan()
        for lane in (Lane.INJECT, Lane.RELAY, Lane.HAND_OVER):
            for queue in range(n_queues):
                hand.copy(vector(hand, 0, [8], 1 + len(hand.rows)), 0, 8, lane=lane, queue=queue)
        first = hand.copy(vector(hand, 16, [17], 100 * N), 16, 17)
        beside[n_queues] = ends(by_nccl(hand.build(18)))[first]

    law = channel_law(load_machine("dgx-h100"), COSTS)
    assert law is not None
    start_s = float(law.start_s(100 * N))
    assert beside[1] == pytest.approx(start_s + 100 * N / law.cost.peak_Bps)
    assert beside[8] == pytest.approx(start_s + 100 * N / (4 * law.cost.channel_Bps))


def test_a_message_begins_when_the_groups_of_both_of_its_ends_do() -> None:
    """Rank 16 is still receiving from rank 8 when rank 0, which is done, sends to it."""
    hand = HandPlan()
    hand.copy(vector(hand, 0, [8], N), 0, 8)
    hand.copy(vector(hand, 24, [16], 5 * N), 24, 16)
    hand.copy(vector(hand, 0, [16], 2 * N), 0, 16)
    plan = by_nccl(hand.build(25))

    found = ends(plan)

    busy_s = START_S + 5 * FULL_S
    assert found == pytest.approx([START_S + FULL_S, busy_s, busy_s + START_S + 2 * FULL_S])


def test_a_group_waits_for_what_any_of_its_messages_needs() -> None:
    """Rank 8 passes on what comes from rank 0, and sends something of its own in the same round, which could go at once."""
    hand = HandPlan()
    passed = vector(hand, 0, [8, 16])
    first = hand.copy(passed, 0, 8)
    other = hand.copy(vector(hand, 8, [24], N + 1), 8, 24, queue=QUEUES)
    second = hand.copy(passed, 8, 16, [first], TARGET)
    beside = hand.copy(vector(hand, 8, [32], N + 2), 8, 32, queue=QUEUES)
    plan = by_nccl(hand.build(33))

    found = predict(plan, COSTS)

    # Round 0: 0 to 8, and 8 to 24 beside it. Round 1: 8 to 16 and 8 to 32, which share the NIC.
    round_0_s = START_S + (N + 1) / NIC_Bps
    start_s, end_s = found.timeline.start_s, found.timeline.end_s
    assert end_s[[first, other]].tolist() == pytest.approx([START_S + FULL_S, round_0_s])
    assert start_s[[second, beside]].tolist() == pytest.approx([round_0_s, round_0_s])
    assert end_s[beside] == pytest.approx(round_0_s + START_S + COSTS.message_s + (2 * N + 2) / NIC_Bps)
    last = critical_path(plan, found)[-1]
    assert (last.step, last.reason) == (beside, Reason.QUEUE)


def test_a_step_that_waits_for_another_message_of_its_group_says_so() -> None:
    hand = HandPlan()
    passed = vector(hand, 0, [8, 16], 2 * N)
    first = hand.copy(passed, 0, 8)
    hand.copy(vector(hand, 8, [24], N + 1), 8, 24, queue=QUEUES)
    hand.copy(passed, 8, 16, [first], TARGET)
    beside = hand.copy(vector(hand, 8, [32], 3 * N), 8, 32, queue=QUEUES)
    plan = by_nccl(hand.build(33))

    chain = critical_path(plan, predict(plan, COSTS))

    assert [(link.step, link.reason) for link in chain] == [(first, Reason.START), (beside, Reason.GROUP)]
    assert sum(link.end_s - link.begin_s for link in chain) == pytest.approx(max(ends(plan)))


def strided(n_targets: int) -> Plan:
    """Columns of one rank's tensor to two ranks of another host each; they are packed, and land in one run each."""
    shape = (1000, 10_000)
    whole = place(shape, Mesh.of({"x": 1}), [Replicate()])
    parts = place(shape, Mesh.of({"x": n_targets}, [8 * (i + 1) for i in range(n_targets)]), [Shard(1)])
    return make_plan(one_tensor(shape, "u8", whole, parts), build_topology(load_machine("dgx-h100"), None, 40), "direct", 20 * N)


def test_a_group_begins_when_all_that_it_sends_is_packed() -> None:
    plan = strided(2)
    one_wire = queued(lane_of(plan.steps.lane), QUEUES * queue_of(plan.steps.lane))
    plan = replace(plan, steps=replace(plan.steps, lane=one_wire))

    found = predict(plan, COSTS)

    assert found.timeline.start_s.tolist() == [0.0, 0.0]
    assert found.predicted_s == pytest.approx(N / COPY_Bps + START_S + COSTS.message_s + FULL_S)


def test_what_came_is_unpacked_beside_the_next_group() -> None:
    """Two halves of a matrix's columns go one after the other: strided at both ends, packed before and unpacked behind."""
    hand, shape = HandPlan(), (1000, 2000)
    source, target = (place(shape, Mesh.of({"x": 1}, [rank]), [Replicate()]) for rank in (0, 8))
    whole = hand.tensor(shape, source, target, "u8")
    for lo in (0, 1000):
        hand.copy(hand.bundle((whole, [(0, 1000), (lo, lo + 1000)])), 0, 8)
    plan = by_nccl(hand.build(9))

    found = predict(plan, COSTS)

    half = 1_000_000
    one_s = half / COPY_Bps + START_S + half / NIC_Bps  # packed, sent
    assert found.timeline.end_s.tolist() == pytest.approx([one_s + half / COPY_Bps, 2 * one_s + half / COPY_Bps])
    chain = critical_path(plan, found)
    assert sum(link.end_s - link.begin_s for link in chain) == pytest.approx(found.predicted_s)


def test_plans_of_what_other_systems_do_have_no_groups_of_ours() -> None:
    plan = a_small_and_a_large_message_then_another()

    free = predict(replace(plan, strategy="m2n-pack"), COSTS)

    assert (free.tasks.kind == Kind.ALONE).all()
    assert free.predicted_s < predict(plan, COSTS).predicted_s
    assert set(SYSTEMS) - {"m2n-window"} < set(STRATEGIES)


@pytest.mark.parametrize("make", [rows_to_columns, lane_ordered, lambda: relay_chain(6, n_chunks=3)])
def test_groups_are_those_of_the_transport(make) -> None:
    """As many begin as there are groups of the transport that a rank has messages in."""
    plan = by_nccl(make())
    programs, buffers = compile_plan(plan)
    messages = lay_messages(plan, programs, buffers)
    groups = find_groups(programs, messages)

    found = predict(plan, COSTS)

    parts = {(rank, group) for side in (messages.src, messages.dst) for rank, group in zip(side, groups.of_message, strict=True)}
    assert int((found.tasks.kind == Kind.BEGIN).sum()) == len(parts)


def in_turn(plan: Plan, found: Prediction, rounds: np.ndarray) -> bool:
    """Whether each rank's messages of a round on a wire begin after all of its earlier rounds there have ended."""
    tasks, steps = found.tasks, plan.steps
    at = {int(step): task for task, step in enumerate(tasks.step) if step >= 0}
    streams: dict[tuple[int, int], list[int]] = {}
    for i, wire in enumerate(wires_of(steps.lane).tolist()):
        for rank in (int(steps.src[i]), int(steps.dst[i])):
            if tasks.kind[at[i]] == Kind.MEMBER:
                streams.setdefault((rank, wire), []).append(i)
    for mine in streams.values():
        ended_s = 0.0
        for turn in sorted({int(rounds[i]) for i in mine}):
            group = [at[i] for i in mine if rounds[i] == turn]
            if min(found.result.ready_s[group]) < ended_s - 1e-12:
                return False
            ended_s = max(ended_s, *found.result.finish_s[group])
    return True


@settings(max_examples=25)
@given(tensor_problems(n_ranks=12))
def test_no_rank_has_two_groups_of_a_wire_at_a_time(problem) -> None:
    plan = make_plan(problem, build_topology(load_machine("dgx-h100"), min_gpus=12), "greedy", 16)
    programs, buffers = compile_plan(plan)
    rounds = find_rounds(programs, lay_messages(plan, programs, buffers))

    assert in_turn(plan, predict(plan, COSTS), rounds)
