"""Steps of plans as operations to choose for."""

import json
from dataclasses import replace

import pytest
from attention_plans import planned
from hand_plans import HandPlan, row_shards
from typer.testing import CliRunner

from shardroute.planner.choice import plan_steps as module
from shardroute.planner.choice.plan_steps import plan_steps
from shardroute.planner.cli import app
from shardroute.planner.plan_files import save_plan
from shardroute.planner.ring.strategies import Options
from shardroute.planner.ring.tensors import Pass
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError


def test_the_hops_of_a_ring_are_one_permute_and_its_number_of_hops() -> None:
    plan = planned(what=Pass.FORWARD, causal=False)

    found = plan_steps(plan)

    (hop,) = found.operations
    assert found.counts == (3,)
    assert (hop.op, hop.pairs) == (Collective.PERMUTE, ((0, 1), (1, 2), (2, 3), (3, 0)))
    assert hop.n_bytes == 2 * 16 * 4 * 8 * 8  # keys and values of 16 tokens, 4 heads of 8 float64
    assert (hop.dtype, hop.n_devices) == ("f64", 4)


def test_collectives_are_counted_by_kind_and_local_copies_and_credits_left_out() -> None:
    plan = planned("all-gather", options=Options(head_stride=2))

    found = plan_steps(plan)

    assert [(o.op, n) for o, n in zip(found.operations, found.counts, strict=True)] == [
        (Collective.ALL_GATHER, 2), (Collective.REDUCE_SCATTER, 2),  # both groups of heads stay gathered for the backward pass
    ]  # fmt: skip
    assert found.operations[1].output_bytes == found.operations[1].n_bytes // 4


def test_copies_that_one_rank_sends_at_once_are_no_permute() -> None:
    hand = HandPlan()
    shape = (6, 4)
    tensor = hand.tensor(shape, row_shards(shape, [0]), row_shards(shape, [1, 2, 3]))
    for k in range(3):
        hand.copy(hand.bundle((tensor, [(2 * k, 2 * k + 2), (0, 4)])), 0, k + 1)

    found = plan_steps(hand.build(4))

    assert [o.pairs for o in found.operations] == [((0, 1),), ((0, 2),), ((0, 3),)]


def test_operations_stand_in_the_order_in_which_they_first_come() -> None:
    hand = HandPlan()
    shape = (6, 4)
    tensor = hand.tensor(shape, row_shards(shape, [0, 1]), row_shards(shape, [1, 0]))
    hand.copy(hand.bundle((tensor, [(0, 3), (0, 4)])), 0, 1)
    gathered = hand.bundle((tensor, [(0, 3), (0, 4)]), (tensor, [(3, 6), (0, 4)]))
    hand.slots.append(48)
    hand.gather(gathered, [0, 1], 0)

    found = plan_steps(hand.build(2))

    assert [o.op for o in found.operations] == [Collective.PERMUTE, Collective.ALL_GATHER]


def test_a_plan_of_too_many_kinds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OPERATIONS", 1)

    with pytest.raises(InputError, match="2 different steps to choose for, and at most 1"):
        plan_steps(planned("all-gather"))


def test_choose_takes_a_plan(tmp_path) -> None:
    path = tmp_path / "r.plan"
    save_plan(planned(dtype="f32"), path)
    command = ["choose", "--plan", str(path), "--machine", "gb200-nvl72"]

    told = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    table = CliRunner().invoke(app, command)
    both = CliRunner().invoke(app, [*command, "--op", "all-reduce"])

    assert {row["op"] for row in told["steps"]} == {"collective-permute"}
    assert told["n_ranks"] == 4
    assert all(row["backend"] in ("nccl", "nccl-put", "nvshmem-put") and row["count"] > 0 for row in told["steps"])
    assert table.exit_code == 0
    assert "collective-permute" in table.stdout
    assert "don't go together" in str(both.exception)
    assert replace(planned(dtype="f32")).digest == told["digest"]
