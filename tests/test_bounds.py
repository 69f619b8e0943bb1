"""Lower bounds in hand-computed cases."""

from dataclasses import replace

import pytest

from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.bounds import cuts, demand
from shardroute.planner.routing.strategies import pieces_of
from shardroute.topologies.calibrations import default_calibration, least_start_s, nominal_calibration
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

NOMINAL = nominal_calibration(load_machine("dgx-h100"))


def bounds(problem, machine="dgx-h100"):
    topology = build_topology(load_machine(machine), None, problem.n_ranks)
    return demand(problem, pieces_of(problem), topology), topology


def test_a_domain_must_take_in_each_byte_that_it_needs_once() -> None:
    # 8 MB on domain 0; each of domains 1 and 2 needs all of it on two ranks.
    shape = (8, 1_000_000)
    problem = one_tensor(
        shape,
        "u8",
        place(shape, Mesh.of({"x": 8}), [Shard(0)]),
        place(shape, Mesh.of({"dp": 4}, [8, 9, 16, 23]), [Replicate()]),
    )

    needs, topology = bounds(problem)
    tightest = cuts(needs, topology, NOMINAL)[0]

    assert needs.into_domain.tolist() == [0, 8_000_000, 8_000_000]
    assert needs.out_of_domain.tolist() == [8_000_000, 0, 0]
    assert needs.into_rank[[8, 9, 16, 23]].tolist() == [8_000_000] * 4
    assert tightest.seconds == pytest.approx(8_000_000 / (8 * 50e9))


def test_what_a_domain_holds_needs_no_nic() -> None:
    problem = one_tensor(
        (8,), "f32", place((8,), Mesh.of({"x": 2}), [Shard(0)]), place((8,), Mesh.of({"x": 2}, [4, 5]), [Shard(0)])
    )

    needs, topology = bounds(problem)

    assert needs.n_bytes_cross_domain == 0
    assert [c.name for c in cuts(needs, topology, NOMINAL)] == ["ports into rank 4", "ports out of rank 0"]
    assert cuts(needs, topology, NOMINAL)[0].seconds == pytest.approx(16 / 450e9)  # no rank is elsewhere, so no NIC helps


def test_one_rank_that_holds_all_is_bounded_by_its_own_ports() -> None:
    # 99 ranks elsewhere need parts of what rank 0 alone holds: its NVLink and NIC (500 GB/s) against its domain's NICs (400
    # GB/s).
    shape = (96, 1000)
    problem = one_tensor(
        shape, "f32", place(shape, Mesh.of({"x": 1}), [Replicate()]), place(shape, Mesh.of({"x": 96}, range(8, 104)), [Shard(0)])
    )

    needs, topology = bounds(problem)
    tightest = cuts(needs, topology, NOMINAL)[0]

    assert tightest.name == "NICs out of domain 0"
    assert tightest.seconds == pytest.approx(96 * 4000 / 400e9)


def test_nothing_to_move_has_no_bound() -> None:
    problem = one_tensor(
        (8,), "f32", place((8,), Mesh.of({"x": 1}), [Replicate()]), place((8,), Mesh.of({"x": 1}), [Replicate()])
    )

    needs, topology = bounds(problem)

    assert needs.local == 32
    assert cuts(needs, topology, NOMINAL) == []


def test_processes_are_bounded_by_what_the_cores_copy() -> None:
    calibration = default_calibration("cpu-processes")
    problem = one_tensor(
        (8,), "f32", place((8,), Mesh.of({"x": 2}), [Shard(0)]), place((8,), Mesh.of({"x": 2}, [1, 2]), [Shard(0)])
    )

    needs, topology = bounds(problem, "cpu-processes")
    (only,) = cuts(needs, topology, calibration)

    assert only.n_bytes == 32
    assert only.seconds == pytest.approx(32 / (calibration.cores * calibration.copy_Bps))


def test_only_gpus_that_are_ranks_count() -> None:
    # Domain 1 has ranks 8 and 9 only: its other six NICs don't help.
    target = place((8,), Mesh.of({"x": 2}, [8, 9]), [Shard(0)])
    problem = one_tensor((8,), "f32", place((8,), Mesh.of({"x": 8}), [Shard(0)]), target)

    needs, topology = bounds(problem)
    tightest = cuts(needs, topology, NOMINAL)[0]

    assert tightest.seconds == pytest.approx(32 / (2 * 50e9))


def test_what_two_domains_hold_together_must_leave_one_of_them() -> None:
    # Ranks 0 and 8 hold all; domains 2 to 4 need it whole: 3 x 8 MB come in, 1 x 8 MB must leave domains 0 and 1.
    shape = (8, 1_000_000)
    source = place(shape, Mesh.of({"dp": 16}), [Replicate()])
    problem = one_tensor(shape, "u8", source, place(shape, Mesh.of({"dp": 24}, range(16, 40)), [Replicate()]))

    needs, topology = bounds(problem)
    found = {c.name: c for c in cuts(needs, topology, NOMINAL)}

    assert found["NICs out of domains 0, 1"].n_bytes == 8_000_000
    assert found["NICs out of domains 0, 1"].seconds == pytest.approx(8e6 / (16 * 50e9))
    assert found["NICs among domains 0, 1, 2, 3 and 1 more"].seconds == pytest.approx(24e6 / (40 * 50e9))


def test_an_oversubscribed_fabric_bounds_a_domain_by_its_uplink() -> None:
    machine = replace(load_machine("dgx-h100"), oversubscription=8.0, figures=())
    problem = one_tensor(
        (8,), "f32", place((8,), Mesh.of({"x": 8}), [Shard(0)]), place((8,), Mesh.of({"x": 2}, [8, 9]), [Shard(0)])
    )
    topology = build_topology(machine, None, 10)

    tightest = cuts(demand(problem, pieces_of(problem), topology), topology, nominal_calibration(machine))[0]

    assert tightest.name.startswith("uplinks")
    assert tightest.seconds == pytest.approx(32 / 50e9)  # 8 NICs of 50 GB/s over 8


def test_without_staging_bytes_enter_a_domain_at_the_ranks_that_need_them() -> None:
    # Rank 8 alone needs it all; with staging the 7 other NICs of its domain would help.
    shape = (8, 1_000_000)
    problem = one_tensor(
        shape, "u8", place(shape, Mesh.of({"x": 8}), [Shard(0)]), place(shape, Mesh.of({"x": 8}, range(8, 16)), [Replicate()])
    )
    target = place(shape, Mesh.of({"x": 1}, [15]), [Replicate()])
    alone = one_tensor(shape, "u8", place(shape, Mesh.of({"x": 8}), [Shard(0)]), target)

    every, one = (cuts(bounds(p)[0], bounds(p)[1], NOMINAL, staging=False) for p in (problem, alone))

    assert {c.name for c in every} >= {"NICs into ranks that need it 8, 9, 10, 11 and 4 more"}
    assert one[0].name == "NICs into ranks that need it 15"
    assert one[0].seconds == pytest.approx(8e6 / 50e9)


def test_a_small_move_is_bounded_by_the_latency_of_a_message() -> None:
    calibration = default_calibration("dgx-h100")
    source, target = (place((8,), Mesh.of({"x": 1}, [rank]), [Replicate()]) for rank in (0, 8))
    problem = one_tensor((8,), "f32", source, target)

    needs, topology = bounds(problem)
    tightest = cuts(needs, topology, calibration)[0]

    assert tightest.name == "latency of one message"
    # Some library starts after a launch at the soonest, none after less, and send and receive take the path's latency beside.
    assert tightest.seconds == pytest.approx(least_start_s(calibration, between_domains=True))
    assert calibration.launch_s <= tightest.seconds <= calibration.launch_s + calibration.nic.latency_s
