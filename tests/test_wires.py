"""Which stream and communicator a step's messages go by, and how many SMs the communicators take together."""

import json
from pathlib import Path

import numpy as np
import pytest
from gpu_doubles import need, run_over_doubles
from hand_plans import HandPlan, row_shards
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate
from shardroute.planner.plan_files import save_plan
from shardroute.planner.plans import Lane, queued
from shardroute.planner.wires import MOST_CHANNELS, QUEUES, channels_of, is_credit, wires_of

EVERY = [(lane, queue) for lane in Lane for queue in range(32)]
columns = st.lists(st.sampled_from(EVERY), min_size=1, max_size=60)


def wire(lane: Lane, queue: int) -> int:
    return int(wires_of(queued(np.array([lane]), np.array([queue])))[0])


def test_lanes_and_their_first_queues_have_wires_of_their_own() -> None:
    found = {wire(lane, queue): (lane, queue % QUEUES) for lane, queue in EVERY}

    assert len(found) == len(Lane) * QUEUES
    assert all(found[wire(lane, queue)] == (lane, queue % QUEUES) for lane, queue in EVERY)
    assert {lane for (lane, _), number in ((of, number) for number, of in found.items()) if is_credit(number)} == {Lane.CREDIT}


@given(columns, st.integers(132, 200))
def test_kernels_of_all_wires_fit_a_gpu(asked: list[tuple[Lane, int]], n_sms: int) -> None:
    wires = sorted({wire(lane, queue) for lane, queue in asked if lane is not Lane.COLLECTIVE})

    channels = channels_of(wires, n_sms)

    assert sum(channels) < n_sms
    assert all(n in (1, 2, 4, 8, 16, MOST_CHANNELS) for n in channels)
    data = {n for each, n in zip(wires, channels, strict=True) if not is_credit(each)}
    assert len(data) <= 1
    if data and data != {MOST_CHANNELS}:  # twice as many wouldn't fit
        assert sum(n if is_credit(each) else 2 * n for each, n in zip(wires, channels, strict=True)) > n_sms - 5


@pytest.mark.parametrize(("n_wires", "expected"), [(1, 32), (4, 32), (5, 16), (8, 16), (16, 8), (24, 4), (32, 4)])
def test_channels_on_an_h100(n_wires: int, expected: int) -> None:
    wires = [wire(lane, queue) for lane in (Lane.INJECT, Lane.RELAY, Lane.HAND_OVER, Lane.LOCAL) for queue in range(8)]

    assert channels_of(wires[:n_wires], 132) == [expected] * n_wires


def test_what_collectives_take_is_left_to_them() -> None:
    wires = [wire(Lane.COLLECTIVE, 0), wire(Lane.CREDIT, 0), *(wire(Lane.INJECT, queue) for queue in range(8))]

    assert channels_of(wires, 132) == [32, 1, *[8] * 8]


@pytest.mark.slow
@pytest.mark.parametrize(("queue", "waits"), [(QUEUES, True), (1, False)], ids=["one wire", "two wires"])
def test_a_large_message_holds_up_those_of_its_wire_only(queue: int, waits: bool, tmp_path: Path) -> None:
    """Over doubles that move the bytes: a small message, a large one in another queue, and another small one in the first's."""
    need("cuda", "nccl")
    hand = HandPlan()
    for target, n, of in ((1, 1000, 0), (2, 2**25, queue), (1, 2000, 0)):
        needed = place((1, n), Mesh.of({"x": 1}, [target]), [Replicate()])
        tensor = hand.tensor((1, n), row_shards((1, n), [0]), needed, "u8")
        hand.copy(hand.bundle((tensor, [(0, 1), (0, n)])), 0, target, queue=of)
    save_plan(hand.build(3), tmp_path / "a.plan")

    told = str(tmp_path / "told.json")
    run = ["-m", "shardroute.executors", "run", str(tmp_path / "a.plan"), "--transport", "nccl", "--spawn", "--repeats", "1"]
    done = run_over_doubles(*run, "-o", told)

    assert done.returncode == 0, done.stderr
    end_s = json.loads(Path(told).read_text())["end_s"]
    assert (end_s[2] > end_s[1]) is waits
