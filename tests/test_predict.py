"""Predictions in closed form: one copy takes launch + latency + bytes / rate; sharing, lanes, relays and collectives follow."""

from dataclasses import replace

import numpy as np
import pytest
from hand_plans import relay_chain

from shardroute.planner.backends.collectives import Collective, Group, collective_s
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.plans import Backend, lane_of, queue_of, queued
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.wires import QUEUES
from shardroute.topologies.calibrations import default_calibration, nominal_calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology, join_topologies

MB = 1_000_000
H100 = load_machine("dgx-h100")
COSTS = default_calibration("dgx-h100")
LAUNCH_S = COSTS.launch_s
NIC_Bps = 50e9 * COSTS.nic.efficiency
COPY_Bps = H100.hbm_Bps * COSTS.memory.efficiency / 2  # a byte copied is read and written


def copies(pairs, n_bytes, n_ranks, strategy="direct", costs=COSTS, only_plan=False):
    """Predict `n_bytes` from one rank to others: pairs = (source rank, destination ranks)."""
    source, targets = pairs
    shape = (n_bytes,)
    problem = one_tensor(
        shape,
        "u8",
        place(shape, Mesh.of({"x": 1}, [source]), [Replicate()]),
        place(shape, Mesh.of({"x": len(targets)}, targets), [Replicate()]),
    )
    plan = make_plan(problem, build_topology(H100, None, n_ranks), strategy, n_bytes)
    return plan if only_plan else predict(plan, costs)


def test_one_copy_between_domains_takes_launch_latency_and_bytes_over_the_nic() -> None:
    found = copies((0, [8]), 10 * MB, 16)

    assert found.predicted_s == pytest.approx(LAUNCH_S + COSTS.nic.latency_s + 10 * MB / NIC_Bps)


def test_one_copy_inside_a_domain_goes_by_nvlink() -> None:
    found = copies((0, [3]), 10 * MB, 8)

    # The communicator holds ranks 0 to 3: 32 channels, so 8 for each peer.
    assert found.predicted_s == pytest.approx(COSTS.p2p.start_s + 10 * MB / (8 * COSTS.p2p.channel_Bps))
    assert {r.name for r in found.resources} == {"NVLink out of GPU 0", "NVLink into GPU 3"}


def test_two_copies_from_one_nic_share_it() -> None:
    found = copies((0, [8, 16]), 10 * MB, 24)

    # Each has a queue, and so a launch, of its own.
    start_s = LAUNCH_S + COSTS.nic.latency_s
    assert found.predicted_s == pytest.approx(start_s + 20 * MB / NIC_Bps)
    assert found.resources[0].name == "NIC out of GPU 0"
    assert found.resources[0].n_bytes == 20 * MB
    assert found.resources[0].busy_s == pytest.approx(20 * MB / NIC_Bps)


def test_a_relay_starts_when_its_input_has_arrived() -> None:
    found = copies((0, [8, 16]), 10 * MB, 24, "domain-relay")

    hop = LAUNCH_S + COSTS.nic.latency_s + 10 * MB / NIC_Bps
    assert sorted(found.timeline.end_s.tolist()) == pytest.approx([hop, 2 * hop])


def test_a_hand_over_follows_the_arrival_in_the_domain() -> None:
    found = copies((0, [8, 9]), 10 * MB, 16, "domain-relay")

    across = LAUNCH_S + COSTS.nic.latency_s + 10 * MB / NIC_Bps
    # The communicator spans domains, so that a channel takes 512 KiB at most and 10 MB go by all 32.
    assert found.predicted_s == pytest.approx(across + COSTS.p2p.start_s + 10 * MB / COSTS.p2p.peak_Bps)


def test_a_local_copy_reads_and_writes_memory() -> None:
    found = copies((0, [0]), 10 * MB, 8)

    assert found.predicted_s == pytest.approx(LAUNCH_S + 10 * MB / COPY_Bps)


def test_without_costs_of_collectives_a_broadcast_is_one_pipelined_chain() -> None:
    # All-gather over one rank costs its launch; the broadcast walks rank 0 -> 8 -> 9 (one NIC hop, one NVLink hop), all hops
    # at once.
    bare = replace(COSTS, collectives=None, curves=(), figures=())
    found = copies((0, [8, 9]), 10 * MB, 16, "gather-broadcast", bare)

    gather = LAUNCH_S
    broadcast = LAUNCH_S + COSTS.nic.latency_s + COSTS.nvlink.latency_s + 10 * MB / NIC_Bps
    copy_out = LAUNCH_S + 10 * MB / COPY_Bps
    assert found.predicted_s == pytest.approx(gather + broadcast + copy_out)


def test_a_broadcast_alone_takes_what_nccl_takes_as_far_as_its_links_let_it() -> None:
    found = copies((0, [8, 9]), 10 * MB, 16, "gather-broadcast")

    broadcast = found.timeline.end_s[1] - found.timeline.start_s[1]
    alone, _ = collective_s(Collective.BROADCAST, 10 * MB, Group(3, 2), H100, COSTS)
    start, _ = collective_s(Collective.BROADCAST, 1, Group(3, 2), H100, COSTS)
    assert broadcast == pytest.approx(max(alone, start + 10 * MB / NIC_Bps))


@pytest.mark.parametrize("backend", [Backend.NCCL, Backend.NVSHMEM])
def test_what_a_rank_sends_and_receives_in_one_round_goes_in_one_group_and_puts_do_not(backend: Backend) -> None:
    shape = (16, 16, 64)
    sides = [place(shape, Mesh.of({"x": 16}, ranks), [Shard(dim)]) for ranks, dim in ((range(16), 0), (range(16, 32), 1))]
    plan = make_plan(one_tensor(shape, "u8", *sides), build_topology(H100, None, 32), "direct")
    # Queues of one wire: what a rank has of them in a round goes as one group.
    lane = queued(lane_of(plan.steps.lane), queue_of(plan.steps.lane) % 4 * QUEUES)
    steps = replace(plan.steps, backend=np.full_like(plan.steps.backend, backend), lane=lane)
    costs = [replace(COSTS, message_s=message_s, figures=()) for message_s in (0.0, 1e-3)]

    free, costly = (predict(replace(plan, steps=steps), cost).predicted_s for cost in costs)

    # Each of 16 ranks sends to 16 others, one message of each queue a round: as many as there are queues go together.
    rounds = len(steps) // 16 / len(np.unique(steps.lane))
    further = len(np.unique(steps.lane)) - 1
    expected = rounds * further * 1e-3 if backend is Backend.NCCL else 0.0
    assert costly - free == pytest.approx(expected, rel=0.05)


def test_a_message_waits_for_the_larger_group_of_its_two_ends() -> None:
    # Rank 8 receives from 7 others and rank 0 sends to 8 alone: the fan-in sets the start of all.
    shape = (8, MB)
    sides = place(shape, Mesh.of({"x": 8}, range(8)), [Shard(0)]), place(shape, Mesh.of({"x": 1}, [8]), [Replicate()])
    plan = make_plan(one_tensor(shape, "u8", *sides), build_topology(H100, None, 9), "direct")
    costs = replace(COSTS, message_s=1e-3, figures=())

    found = predict(plan, costs)

    assert len(plan.steps) == 8
    start_s = LAUNCH_S + COSTS.nic.latency_s + 7 * costs.message_s
    assert found.predicted_s == pytest.approx(start_s + 8 * MB / NIC_Bps)


def test_a_put_is_driven_by_a_copy_engine() -> None:
    plan = copies((0, [3]), 10 * MB, 8, only_plan=True)
    steps = replace(plan.steps, backend=np.full_like(plan.steps.backend, Backend.NCCL_PUT))

    found = predict(replace(plan, steps=steps), COSTS)

    NVLINK_Bps = 450e9 * COSTS.nvlink.efficiency
    assert found.predicted_s == pytest.approx(COSTS.put.start_s + 10 * MB / min(COSTS.put.bandwidth_Bps, NVLINK_Bps))


def test_a_copy_engine_carries_one_put_at_a_time() -> None:
    plan = copies((0, [3, 4]), 10 * MB, 8, only_plan=True)
    steps = replace(plan.steps, backend=np.full_like(plan.steps.backend, Backend.NVSHMEM))

    found = predict(replace(plan, steps=steps), COSTS)

    one_s = COSTS.put.start_s + 10 * MB / min(COSTS.put.bandwidth_Bps, 450e9 * COSTS.nvlink.efficiency)
    assert sorted(found.timeline.end_s.tolist()) == pytest.approx([one_s, 2 * one_s])


def test_what_lies_in_several_runs_is_packed_and_unpacked_through_memory() -> None:
    shape = (1000, 10_000)
    whole, half = place(shape, Mesh.of({"x": 1}), [Replicate()]), place(shape, Mesh.of({"x": 2}, [8, 9]), [Shard(1)])
    plan = make_plan(one_tensor(shape, "u8", whole, half), build_topology(H100, None, 10), "direct", 20 * MB)

    found = predict(plan, COSTS)

    # Columns of the source are packed, those of each in its own queue; they lie in one run at their destination. Both leave by
    # one NIC.
    start_s = LAUNCH_S + COSTS.nic.latency_s + 5 * MB / COPY_Bps
    assert found.predicted_s == pytest.approx(start_s + 10 * MB / NIC_Bps)


def test_an_all_gather_over_domains_uses_as_many_rings_as_nics() -> None:
    shape = (16, MB)
    problem = one_tensor(
        shape, "u8", place(shape, Mesh.of({"x": 16}), [Shard(0)]), place(shape, Mesh.of({"x": 1}, [16]), [Replicate()])
    )
    plan = make_plan(problem, build_topology(H100, None, 17), "gather-broadcast")

    found = predict(plan, nominal_calibration(H100))

    # 8 rings, each over both domains' NIC once: 16 MB * 15/16 / 8 a ring at 50 GB/s.
    assert found.timeline.end_s[0] == pytest.approx(15 * MB / 8 / 50e9)


def test_cores_are_shared_by_the_ranks_that_have_work() -> None:
    costs = default_calibration("cpu-processes")
    machine = load_machine("cpu-processes")
    shape = (8, MB)
    problem = one_tensor(
        shape, "u8", place(shape, Mesh.of({"x": 8}), [Shard(0)]), place(shape, Mesh.of({"x": 8}, range(8, 16)), [Shard(0)])
    )
    plan = make_plan(problem, build_topology(machine, None, 16), "direct")

    found = predict(plan, costs)

    work = 8 * (costs.launch_s + costs.piece_s + costs.run_s + MB / costs.copy_Bps)
    assert found.predicted_s == pytest.approx(work / costs.cores)
    assert found.resources[0].n_bytes == 8 * MB


def test_a_process_that_waits_for_another_pays_for_being_woken() -> None:
    costs = replace(default_calibration("cpu-processes"), check_s=0.0, wait_s=1e-3, figures=())
    shape = (10 * MB,)
    problem = one_tensor(
        shape, "u8", place(shape, Mesh.of({"x": 1}), [Replicate()]), place(shape, Mesh.of({"x": 2}, [8, 16]), [Replicate()])
    )
    plan = make_plan(problem, build_topology(H100, None, 17), "domain-relay", 10 * MB)

    found = predict(plan, costs, build_topology(load_machine("cpu-processes"), 17))

    copy_s = costs.launch_s + costs.piece_s + 10 * MB / costs.copy_Bps
    assert found.predicted_s == pytest.approx(2 * copy_s + 1e-3)


def test_a_process_that_finds_the_step_done_for_which_it_waits_pays_only_for_looking() -> None:
    # Rank 1 sleeps until its first chunk has come; from then on rank 0 is ahead of it.
    costs = replace(default_calibration("cpu-processes"), check_s=1e-4, wait_s=1e-3, cores=2.0, figures=())
    plan = relay_chain(3, 4 * MB, n_chunks=4)

    found = predict(plan, costs, build_topology(load_machine("cpu-processes"), 3))

    copy_s = costs.launch_s + costs.piece_s + costs.run_s + plan.step_bytes[0] / costs.copy_Bps
    assert found.predicted_s == pytest.approx(copy_s + 1e-3 + 4 * (1e-4 + copy_s))


def test_short_rows_cost_a_run_each_on_processes() -> None:
    costs = replace(default_calibration("cpu-processes"), run_s=1e-6, cores=2.0, figures=())
    machine = load_machine("cpu-processes")
    shape = (1000, 6)
    problem = one_tensor(
        shape, "u8", place(shape, Mesh.of({"x": 1}), [Replicate()]), place(shape, Mesh.of({"x": 1}, [1]), [Shard(1)])
    )
    columns = one_tensor(
        shape, "u8", place(shape, Mesh.of({"x": 2}), [Shard(1)]), place(shape, Mesh.of({"x": 1}, [2]), [Replicate()])
    )

    whole, halves = (
        predict(make_plan(p, build_topology(machine, None, 3), "direct"), costs).predicted_s for p in (problem, columns)
    )

    step_s = costs.launch_s + costs.piece_s
    assert whole == pytest.approx(step_s + 1e-6 + 6000 / costs.copy_Bps)
    assert halves == pytest.approx(step_s + 1000e-6 + 3000 / costs.copy_Bps)  # two ranks at once on two cores


def test_between_unlike_machines_a_message_has_the_channels_that_both_ends_give() -> None:
    one_nic = replace(H100, name="one-nic", nic_Bps=H100.nic_Bps / 8, figures=())
    whole = build_topology(H100, 1)
    costs = replace(COSTS, p2p=replace(COSTS.p2p, channel_Bps=COSTS.p2p.channel_Bps / 100), figures=())
    found = []
    for machine in (H100, one_nic):
        plan = copies((0, [8]), 10 * MB, 16, only_plan=True)
        found.append(predict(plan, costs, join_topologies([whole, build_topology(machine, 1)])).predicted_s)

    four, one = (10 * MB / (n * costs.p2p.channel_Bps) for n in (4, 1))
    start_s = LAUNCH_S + COSTS.nic.latency_s
    assert found == pytest.approx([start_s + four, start_s + one])


def test_another_machine_must_have_enough_gpus() -> None:
    problem = one_tensor(
        (8,), "u8", place((8,), Mesh.of({"x": 1}), [Replicate()]), place((8,), Mesh.of({"x": 1}, [9]), [Replicate()])
    )
    plan = make_plan(problem, build_topology(H100, None, 10), "direct")

    with pytest.raises(InputError, match="has 8 GPUs, the plan uses 10 ranks"):
        predict(plan, COSTS, build_topology(H100, 1))


def test_the_source_names_every_machine_of_the_topology() -> None:
    plan = copies((0, [3]), MB, 8, only_plan=True)
    joined = join_topologies([build_topology(H100, 1), build_topology(load_machine("dgx-b200"), 2)])

    found = predict(plan, COSTS, joined)

    assert found.timeline.source.startswith("dgx-h100 x 1 + dgx-b200 x 2, ")


def test_spans_are_one_a_step_and_never_end_before_they_start() -> None:
    found = copies((0, [8, 9, 16, 17, 24]), 100 * MB, 32, "domain-relay")

    assert np.all(found.timeline.end_s > found.timeline.start_s)
