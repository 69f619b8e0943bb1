"""SMs that collectives hold: how many by NCCL's rules, and that what is computed beside them goes without."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from shardroute.planner.backends.channels import channel_law
from shardroute.planner.backends.collective_sms import collective_sms
from shardroute.planner.backends.collectives import collective_s
from shardroute.planner.backends.computes import gpu_seconds
from shardroute.planner.backends.groups import Kind
from shardroute.planner.backends.rates import load_rates, shipped_channels
from shardroute.planner.backends.tuning import Algorithm, Group, tuned_choice
from shardroute.planner.plans import Op
from shardroute.planner.ring.strategies import Options, ring_plan
from shardroute.planner.ring.workloads import Attention, SequenceLayout
from shardroute.planner.simulator import simulate
from shardroute.planner.simulator.refit import predict
from shardroute.planner.steps.graphs import Builder
from shardroute.planner.steps.transfers import Flow, Link, collective, in_turn, network
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.collectives import Collective
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

H100, COSTS = load_machine("dgx-h100"), default_calibration("dgx-h100")
KiB, MiB = 2**10, 2**20
_WEIGHTS = 2  # the lane of gathers


def held(op: Collective, n_bytes: int, group: Group) -> int | None:
    return collective_sms(op, n_bytes, group, H100, COSTS, shipped_channels("dgx-h100"))


@pytest.mark.parametrize(
    ("n_bytes", "group", "n_sms"),
    [
        (64 * MiB, Group(8), 24),
        (768 * KiB, Group(8), 24),
        (512 * KiB, Group(8), 16),
        (64 * MiB, Group(16, 2), 16),
        (1, Group(8), 1),
    ],
)
def test_a_ring_has_the_channels_of_its_communicator_and_fewer_for_few_bytes(n_bytes: int, group: Group, n_sms: int) -> None:
    assert held(Collective.ALL_GATHER, n_bytes, group) == n_sms


def test_a_large_all_reduce_by_switches_holds_the_channels_of_nvls() -> None:
    asked = (Collective.ALL_REDUCE, 256 * MiB, Group(8))

    assert tuned_choice(*asked, H100, COSTS)[0] is Algorithm.NVLS
    assert held(*asked) == 16


def test_an_all_to_all_holds_the_channels_of_its_messages_up_to_those_of_the_communicator() -> None:
    law = channel_law(H100, COSTS)
    assert law is not None

    assert held(Collective.ALL_TO_ALL, 64 * KiB, Group(8)) == 7
    assert held(Collective.ALL_TO_ALL, 2**30, Group(8)) == law.p2p_channels
    assert held(Collective.PERMUTE, 2**30, Group(8)) == int(law.channels(2**30, 8))


def test_one_rank_alone_holds_none_and_a_machine_that_nobody_asked_an_unknown_number() -> None:
    asked = (Collective.ALL_GATHER, 64 * MiB)

    assert held(*asked, Group(1)) == 0
    assert shipped_channels("a-machine-of-mine") is None
    assert collective_sms(*asked, Group(8), H100, COSTS, None) is None


def test_choose_says_how_many_sms_a_collective_holds_or_that_nobody_knows(cli, repo, tmp_path) -> None:
    machine, costs = tmp_path / "mine.toml", tmp_path / "costs.toml"
    shutil.copy(repo / "topologies/machines/dgx-h100.toml", machine)
    costs.write_text((repo / "topologies/calibrations/dgx-h100.toml").read_text().replace('"dgx-h100"', '"mine"', 1))
    asked = ("choose", "--op", "all-gather", "--bytes", "64MiB", "--ranks", "8", "--machine")

    _, known, _ = cli(*asked, "dgx-h100", "--json")
    _, unknown, _ = cli(*asked, str(machine), "--calibration", str(costs), "--json")
    _, text, _ = cli(*asked, str(machine), "--calibration", str(costs))

    by_way = [{o["backend"]: o["sms"] for o in json.loads(found)["options"]} for found in (known, unknown)]
    assert [found["nccl"] for found in by_way] == [24, None]
    assert by_way[1]["nccl-copy-engine"] == 0
    assert "unknown" in text


def test_attention_goes_without_the_sms_of_the_heads_gathered_meanwhile() -> None:
    """All-gather of two KV heads, one at a time: the second is gathered while the first is computed with."""
    topology, costs = build_topology(load_machine("gb200-nvl72"), min_gpus=2), default_calibration("gb200-nvl72")
    call = Attention((65536,), 2, 8, 2, 128, causal=False, layout=SequenceLayout.CONTIGUOUS)
    plan = ring_plan(call, topology, "all-gather", options=Options(head_stride=1))

    found = predict(plan, costs)

    gathers = np.flatnonzero(plan.steps.op == Op.ALL_GATHER)
    n_bytes = int(plan.step_bytes[gathers[0]])
    rates, group = load_rates("gb200-nvl72"), Group(2)
    n_sms = collective_sms(Collective.ALL_GATHER, n_bytes, group, topology.machine, costs, rates.channels)
    assert n_sms == 32
    alone_s = collective_s(Collective.ALL_GATHER, n_bytes, group, topology.machine, costs)[0]
    computed_s = gpu_seconds(plan, topology.machine).sum() / 2  # of one rank
    assert int((found.tasks.kind == Kind.HELD).sum()) == 2 * len(gathers)
    behind_s = (len(gathers) - 1) * n_sms / rates.n_sms * alone_s
    assert found.predicted_s == pytest.approx(alone_s + computed_s + behind_s, rel=1e-6)


def test_a_product_goes_without_the_sms_of_weights_gathered_beside_it() -> None:
    build = Builder(n_sms=132)
    build.compute(0.0)
    build.move(Flow(0.1, 40.0, 100.0, Link.NVLINK, n_sms=33), _WEIGHTS, 0)
    build.move(Flow(0.0, 10.0, 100.0, Link.NVLINK, n_sms=66), _WEIGHTS, 0)
    build.compute(2.0, 0)

    result = simulate(build.graph((100.0, 100.0)))

    # A quarter of the SMs for 0.5 s, then half of them for 0.1 s.
    assert result.makespan_s == pytest.approx(2.0 + 0.25 * 0.5 + 0.5 * 0.1)


def test_a_flow_of_a_step_holds_what_its_collective_does_and_two_in_turn_the_more_of_theirs() -> None:
    net = network(H100, COSTS, 8)

    gather = collective(net, Collective.ALL_GATHER, 64 * MiB, Group(8))

    assert gather.n_sms == 24
    assert in_turn(replace(gather, n_sms=8), gather).n_sms == 24
