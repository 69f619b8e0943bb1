"""Placements beyond plain shards: strided, partial, in any axis order, on parts of a mesh; and how they are written."""

import numpy as np
import pytest

from shardroute.planner.arguments import parse_placements, tensor_problem
from shardroute.planner.check import check
from shardroute.planner.layouts.fragments import MAX_ELEMENTS
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.overlaps import overlap
from shardroute.planner.layouts.placements import Partial, Replicate, Shard, StridedShard, parse_placement
from shardroute.planner.problems import one_tensor
from shardroute.planner.reports import traffic
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.errors import InfeasibleError, InputError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

H100 = load_machine("dgx-h100")


def rows_of(fragments):
    """Rows that each rank holds, in the order of its buffer."""
    held = {}
    for i in np.lexsort((fragments.offset, fragments.rank)).tolist():
        rows = range(int(fragments.lo[i, 0]), int(fragments.hi[i, 0]))
        held.setdefault(int(fragments.rank[i]), []).extend(rows)
    return held


def test_fsdp_over_tp_gives_the_rows_of_field_case_20() -> None:
    mesh = Mesh.of({"dp": 2, "tp": 2})

    found = rows_of(place((4,), mesh, [StridedShard(0, split_factor=2), Shard(0)]))

    assert found == {0: [0], 2: [1], 1: [2], 3: [3]}  # rank = 2 * dp + tp
    assert rows_of(place((4,), mesh, [Shard(0), Shard(0)])) == {0: [0], 1: [1], 2: [2], 3: [3]}  # the naive reading


def test_an_uneven_strided_shard_is_cut_as_torch_documents() -> None:
    found = rows_of(place((9,), Mesh.of({"x": 4}), [StridedShard(0, split_factor=2)]))

    # The worked example in torch 2.13's _StridedShard._to_replicate_tensor.
    assert found == {0: [0, 1, 5], 1: [2, 3, 6], 2: [4, 7], 3: [8]}


def test_axes_apply_in_the_order_that_is_asked_for() -> None:
    mesh = Mesh.of({"dp": 4, "tp": 2})

    first_tp = rows_of(place((9,), mesh, [Shard(0), Shard(0)], order=["tp", "dp"]))

    assert first_tp == {0: [0, 1], 2: [2, 3], 4: [4], 1: [5], 3: [6], 5: [7], 7: [8]}  # rank = 2 * dp + tp
    # DTensor's strided notation says the same for even sizes only: tp cuts what dp left, so row 8 lies on rank 6.
    strided = rows_of(place((9,), mesh, [StridedShard(0, 2), Shard(0)]))
    assert strided == {0: [0, 1], 2: [2, 3], 4: [4], 1: [5], 3: [6], 5: [7], 6: [8]}
    even = [place((16,), mesh, p, o) for p, o in (([Shard(0), Shard(0)], ["tp", "dp"]), ([StridedShard(0, 2), Shard(0)], None))]
    assert rows_of(even[0]) == rows_of(even[1])


def test_a_submesh_keeps_the_ranks_at_a_place_of_an_axis() -> None:
    mesh = Mesh.of({"dp": 2, "cp": 2, "tp": 2}, [7, 3, 5, 1, 6, 2, 4, 0])

    assert mesh.submesh(dp=1) == Mesh.of({"cp": 2, "tp": 2}, [6, 2, 4, 0])
    assert mesh.submesh(cp=0, tp=1) == Mesh.of({"dp": 2}, [3, 2])
    assert mesh.submesh(dp=0, cp=0, tp=0) == Mesh((), (), (7,))
    assert place((4,), mesh.submesh(dp=0, cp=0, tp=0), []).rank.tolist() == [7]


def test_a_partial_placement_is_refused_by_the_name_of_its_axis() -> None:
    with pytest.raises(InfeasibleError, match=r"axis tp is P\(sum\).*reduce over axis tp first"):
        place((4,), Mesh.of({"dp": 2, "tp": 2}), [Replicate(), Partial()])


def test_a_partial_destination_is_bad_input() -> None:
    with pytest.raises(InputError, match="a destination can't be partial"):
        tensor_problem("4", "bf16", "x=2", "S0", "y=2", "P")


def test_sizes_past_32_bits_are_exact() -> None:
    n = 2**36 + 1

    fragments = place((n, 3), Mesh.of({"x": 4}), [Shard(0)])

    assert fragments.n_elements.sum() == 3 * n
    assert fragments.hi[-1].tolist() == [n, 3]
    assert overlap(fragments, place((n, 3), Mesh.of({"x": 1}, [9]), [Replicate()])).n_elements.sum() == 3 * n


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3, 2), (1,), ()])
def test_empty_shards_dims_and_scalars_go_all_the_way(strategy, shape) -> None:
    source = place(shape, Mesh.of({"x": 3}), [Shard(0) if shape else Replicate()])
    target = place(shape, Mesh.of({"y": 5}, range(2, 7)), [StridedShard(0, 2) if shape else Replicate()])
    problem = one_tensor(shape, "bf16", source, target)

    plan = make_plan(problem, build_topology(H100, None, problem.n_ranks), strategy)

    assert check(plan).n_bytes == 2 * target.n_elements.sum()
    assert predict(plan, default_calibration("dgx-h100")).predicted_s >= 0


@pytest.mark.parametrize("strategy", ["direct", "domain-relay"])
def test_what_a_rank_holds_already_crosses_no_link(strategy) -> None:
    mesh = Mesh.of({"x": 8})
    source, target = place((64,), mesh, [Shard(0)]), place((64,), mesh, [StridedShard(0, 2)])
    problem = one_tensor((64,), "u8", source, target)
    held = {(r, row) for r, rows in rows_of(source).items() for row in rows}
    needed = {(r, row) for r, rows in rows_of(target).items() for row in rows}

    plan = make_plan(problem, build_topology(H100, None, 8), strategy)

    assert traffic(plan).n_bytes_moved == len(needed - held)
    assert needed & held


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("R", Replicate()),
        ("S0", Shard(0)),
        ("S(1)", Shard(1)),
        ("SS0:4", StridedShard(0, 4)),
        ("_S(0, 4)", StridedShard(0, 4)),
        ("P(avg)", Partial("avg")),
        ("P", Partial("sum")),
    ],
)
def test_a_placement_is_read_as_it_is_written(text, placement) -> None:
    assert parse_placement(text) == placement
    assert parse_placement(str(placement)) == placement


def test_a_list_of_placements_may_hold_commas_in_parentheses() -> None:
    assert parse_placements("--from-placements", "R,_S(0,4),S1") == [Replicate(), StridedShard(0, 4), Shard(1)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_placement("S0:4"), "isn't a placement; expected R"),
        (lambda: StridedShard(0, 0), "split factor must be at least 1"),
        (lambda: Mesh.of({"x": 2}).submesh(y=0), "has no axis y; its axes are x"),
        (lambda: Mesh.of({"x": 2}).submesh(x=2), "places 0 to 1, not 2"),
        (lambda: place((4,), Mesh.of({"x": 2}), [Shard(0)], ["y"]), "must name each of its axes once"),
        (lambda: place((MAX_ELEMENTS,), Mesh.of({"x": 2}), [Shard(0)]), "2\\^59 elements or more"),
        (lambda: place((2**40,), Mesh.of({"x": 64}), [StridedShard(0, 2**30)]), "runs; at most"),
    ],
)
def test_what_can_not_be_is_refused_with_the_reason(make, message) -> None:
    with pytest.raises(InputError, match=message):
        make()
