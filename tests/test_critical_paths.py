"""The critical path in closed form, and the law that its parts add up to the prediction."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hand_plans import HandPlan, row_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.planner.critical_paths import Reason, critical_path, reasons, summarise
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate
from shardroute.planner.plans import TARGET, Lane, Plan
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.testing import tensor_problems
from shardroute.topologies import build_topology, default_calibration, load_machine

H100 = load_machine("dgx-h100")
COSTS = default_calibration("dgx-h100")
START_S = COSTS.launch_s + COSTS.nic.latency_s
NIC_Bps = 50e9 * COSTS.nic.efficiency
N = 10_000_000


def on_h100(hand: HandPlan, n_ranks: int = 24) -> Plan:
    return replace(hand.build(n_ranks), topology=build_topology(H100, min_gpus=24))


def vector(hand: HandPlan, source: int, targets, n: int = N) -> int:
    """A bundle with a vector of bytes that `source` holds and all targets need."""
    shape = (1, n)
    mesh = Mesh.of({"x": len(targets)}, targets)
    return hand.bundle(
        (hand.tensor(shape, row_shards(shape, [source]), place(shape, mesh, [Replicate()]), "u8"), [(0, 1), (0, n)])
    )


def test_one_copy_is_startup_and_bytes_through_its_slowest_link() -> None:
    hand = HandPlan()
    hand.copy(vector(hand, 0, [8]), 0, 8)
    plan = on_h100(hand)

    (link,) = critical_path(plan, predict(plan, COSTS))

    assert (link.step, link.reason, link.begin_s) == (0, Reason.START, 0.0)
    assert link.startup_s == pytest.approx(START_S)
    assert link.alone_s == pytest.approx(N / NIC_Bps)
    assert link.shared_s == 0
    assert link.resource == "NIC out of GPU 0"


def test_a_relay_waits_for_what_it_needs() -> None:
    hand = HandPlan()
    bundle = vector(hand, 0, [8, 16])
    first = hand.copy(bundle, 0, 8)
    hand.copy(bundle, 8, 16, [first], TARGET, lane=Lane.RELAY)
    plan = on_h100(hand)

    chain = critical_path(plan, predict(plan, COSTS))

    assert [(link.step, link.reason) for link in chain] == [(0, Reason.START), (1, Reason.NEEDS)]
    assert chain[1].resource == "NIC out of GPU 8"


def test_a_step_behind_another_waits_for_its_queue() -> None:
    hand = HandPlan()
    for target in (8, 16):
        hand.copy(vector(hand, 0, [target], N + target), 0, target)
    plan = on_h100(hand)

    chain = critical_path(plan, predict(plan, COSTS))

    assert [(link.step, link.reason) for link in chain] == [(0, Reason.START), (1, Reason.QUEUE)]


def test_two_senders_to_one_rank_share_its_nic() -> None:
    hand = HandPlan()
    for source in (0, 8):
        hand.copy(vector(hand, source, [16], N + source), source, 16)
    plan = on_h100(hand)

    (link,) = critical_path(plan, predict(plan, COSTS))

    assert link.step == 1
    assert link.shared_s == pytest.approx(N / NIC_Bps)
    assert link.resource == "NIC into GPU 16"
    assert [part.what for part in summarise(plan, [link])] == [
        "bytes through NIC into GPU 16", "sharing NIC into GPU 16 with others", "starting copies, latency",
    ]  # fmt: skip


def test_a_barrier_and_a_credit_are_named() -> None:
    hand = HandPlan(slots=[N])
    first, second = vector(hand, 0, [16]), vector(hand, 0, [16], N - 1)
    fill = hand.copy(first, 0, 8, dst_at=0)
    out = hand.copy(first, 8, 16, [fill], src_at=0, lane=Lane.RELAY)
    credit = hand.copy(hand.bundle(), 8, 0, [out], lane=Lane.CREDIT)
    again = hand.copy(second, 0, 8, [credit], dst_at=0)
    met = hand.barrier([8, 16], [again])
    hand.copy(second, 8, 16, [again, met], src_at=0, lane=Lane.RELAY)
    plan = on_h100(hand)

    chain = critical_path(plan, predict(plan, COSTS))

    assert [link.reason for link in chain] == [
        Reason.START, Reason.NEEDS, Reason.NEEDS, Reason.CREDIT, Reason.NEEDS, Reason.BARRIER,
    ]  # fmt: skip
    assert {part.what: part.n_steps for part in reasons(chain)}["a barrier"] == 1


def test_a_plan_without_steps_has_no_critical_path() -> None:
    hand = HandPlan()
    hand.tensor((1, 8), row_shards((1, 8), [0]), row_shards((1, 8), [0]))
    plan = on_h100(hand)

    assert critical_path(plan, predict(plan, COSTS)) == []


@settings(max_examples=40)
@given(
    tensor_problems(n_ranks=20),
    st.sampled_from([*STRATEGIES]),
    st.sampled_from(["dgx-h100", "gb200-nvl72", "cpu-processes"]),
    st.integers(1, 200),
)
def test_the_chain_has_no_gaps_and_its_parts_add_up_to_the_prediction(problem, strategy, machine, message_bytes) -> None:
    topology = build_topology(load_machine(machine), min_gpus=20)
    plan = make_plan(problem, topology, strategy, message_bytes)
    prediction = predict(plan, default_calibration(machine))

    chain = critical_path(plan, prediction)

    total_s = prediction.predicted_s
    if not len(plan.steps):
        assert chain == []
        return
    assert chain[0].begin_s == 0
    assert chain[-1].end_s == total_s
    assert all(a.end_s == b.begin_s for a, b in itertools.pairwise(chain))
    for link in chain:
        assert min(link.startup_s, link.alone_s, link.shared_s) >= 0
        assert link.startup_s + link.alone_s + link.shared_s == pytest.approx(link.end_s - link.begin_s, abs=1e-12)
        assert prediction.timeline.start_s[link.step] <= link.begin_s + 1e-12
    assert sum(part.seconds for part in summarise(plan, chain)) == pytest.approx(total_s)
    assert sum(part.n_steps for part in reasons(chain)) == len(chain)
    assert np.isclose(sum(part.seconds for part in reasons(chain)), total_s)
