"""Lower bounds in hand-computed cases."""

import pytest

from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.bounds import cuts, demand
from shardroute.planner.routing.strategies import pieces_of
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

CALIBRATION = default_calibration("dgx-h100")


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
    tightest = cuts(needs, topology, CALIBRATION)[0]

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
    assert [c.name for c in cuts(needs, topology, CALIBRATION)] == ["ports into rank 4", "ports out of rank 0"]


def test_one_rank_that_holds_all_is_bounded_by_its_own_ports() -> None:
    # 99 ranks elsewhere need parts of what rank 0 alone holds: its NVLink and NIC (500 GB/s) against its domain's NICs (400
    # GB/s).
    shape = (96, 1000)
    problem = one_tensor(
        shape, "f32", place(shape, Mesh.of({"x": 1}), [Replicate()]), place(shape, Mesh.of({"x": 96}, range(8, 104)), [Shard(0)])
    )

    needs, topology = bounds(problem)
    tightest = cuts(needs, topology, CALIBRATION)[0]

    assert tightest.name == "NICs out of domain 0"
    assert tightest.seconds == pytest.approx(96 * 4000 / 400e9)


def test_nothing_to_move_has_no_bound() -> None:
    problem = one_tensor(
        (8,), "f32", place((8,), Mesh.of({"x": 1}), [Replicate()]), place((8,), Mesh.of({"x": 1}), [Replicate()])
    )

    needs, topology = bounds(problem)

    assert needs.local == 32
    assert cuts(needs, topology, CALIBRATION) == []


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
    problem = one_tensor((8,), "f32", place((8,), Mesh.of({"x": 8}), [Shard(0)]), place((8,), Mesh.of({"x": 2}, [8, 9]), [Shard(0)]))

    needs, topology = bounds(problem)
    tightest = cuts(needs, topology, CALIBRATION)[0]

    assert tightest.seconds == pytest.approx(32 / (2 * 50e9))
