"""Runs of a strided piece: counted as a person would, by walking its elements through memory."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
