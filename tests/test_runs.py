"""Runs of a strided piece: counted as a person would, by walking its elements through memory."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.backends.containers import first_containing
from shardroute.planner.backends.runs import piece_runs, step_runs
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.plans import Boxes
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology


@st.composite
def a_box_in_a_dense_buffer(draw: st.DrawFn):
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    edges = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return shape, [a for a, _ in edges], [b for _, b in edges]


@given(a_box_in_a_dense_buffer())
def test_the_runs_of_a_box_are_its_unbroken_stretches_of_memory(case) -> None:
    shape, lo, hi = case
    whole = Fragments.dense(shape, [0], np.zeros((1, len(shape)), np.int64), np.array([shape]))
    addresses = [
        int(np.ravel_multi_index(e, shape)) for e in itertools.product(*(range(a, b) for a, b in zip(lo, hi, strict=True)))
    ]

    found = piece_runs(whole, Boxes(np.array([lo]), np.array([hi])))

    walked = 1 + sum(b != a + 1 for a, b in itertools.pairwise(addresses))
    # Runs are counted to whole dims: a stretch that by chance goes on from one row into the next counts as two.
    assert found[0] >= walked
    assert found[0] in {int(np.prod(np.array(hi[:d]) - lo[:d])) for d in range(len(shape) + 1)}


@pytest.mark.parametrize(("placement", "runs"), [(Shard(0), 1), (Shard(1), 8)])
def test_rows_are_one_run_and_columns_one_a_row(placement, runs) -> None:
    shape = (8, 6)
    problem = one_tensor(
        shape, "f32", place(shape, Mesh.of({"x": 1}), [Replicate()]), place(shape, Mesh.of({"x": 2}, [1, 2]), [placement])
    )
    plan = make_plan(problem, build_topology(load_machine("cpu-processes"), None, 3), "direct")

    assert step_runs(plan).tolist() == [runs, runs]


@st.composite
def containers_and_boxes(draw: st.DrawFn):
    n_dims = draw(st.integers(0, 3))

    def some(n: int):
        edges = st.lists(st.integers(0, 6), min_size=2, max_size=2, unique=True).map(sorted)
        found = draw(st.lists(st.lists(edges, min_size=n_dims, max_size=n_dims), max_size=n))
        table = np.array(found, dtype=np.int64).reshape(len(found), n_dims, 2)
        return table[:, :, 0], table[:, :, 1]

    return some(12), Boxes(*some(8))


@given(containers_and_boxes())
def test_a_box_is_found_in_the_first_of_all_that_contain_it(case) -> None:
    (lo, hi), boxes = case

    found = first_containing(lo, hi, boxes)

    inside = [
        [k for k in range(len(lo)) if (lo[k] <= a).all() and (b <= hi[k]).all()] for a, b in zip(boxes.lo, boxes.hi, strict=True)
    ]
    assert found.tolist() == [min(every, default=-1) for every in inside]


def test_a_thousand_boxes_nested_in_each_other_are_found_like_any_others() -> None:
    lo = np.arange(1000)[:, None]
    hi = 2000 - lo

    found = first_containing(lo, hi, Boxes(np.full((1, 1), 990), np.full((1, 1), 1010)))

    assert found.tolist() == [0]


def test_runs_of_65536_shards_are_counted_in_no_time() -> None:
    n = 2**16
    edges = np.arange(n, dtype=np.int64)[:, None] * 4
    shards = Fragments.dense((4 * n,), np.arange(n), edges, edges + 4)

    runs = piece_runs(shards, Boxes(np.repeat(edges, 4, axis=0), np.repeat(edges, 4, axis=0) + 1))

    assert runs.tolist() == [1] * (4 * n)
