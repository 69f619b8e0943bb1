"""Meshes and placements give every rank the box that DTensor gives it."""

import numpy as np
import pytest

from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.topologies.errors import InputError


def boxes(fragments):
    return {
        int(rank): list(zip(lo.tolist(), hi.tolist(), strict=True))
        for rank, lo, hi in zip(fragments.rank, fragments.lo, fragments.hi, strict=True)
    }


def test_rows_over_two_ranks_are_halves() -> None:
    found = place((8, 8), Mesh.of({"x": 2}), [Shard(0)])

    assert boxes(found) == {0: [(0, 4), (0, 8)], 1: [(4, 8), (0, 8)]}


def test_an_uneven_shard_follows_torch_chunk() -> None:
    found = place((7,), Mesh.of({"x": 4}), [Shard(0)])

    assert boxes(found) == {0: [(0, 2)], 1: [(2, 4)], 2: [(4, 6)], 3: [(6, 7)]}


def test_ranks_beyond_the_last_chunk_hold_nothing() -> None:
    found = place((5,), Mesh.of({"x": 4}), [Shard(0)])

    assert boxes(found) == {0: [(0, 2)], 1: [(2, 4)], 2: [(4, 5)]}


def test_two_axes_on_one_dim_split_what_the_first_left() -> None:
    found = place((8,), Mesh.of({"dp": 2, "tp": 2}), [Shard(0), Shard(0)])

    assert boxes(found) == {0: [(0, 2)], 1: [(2, 4)], 2: [(4, 6)], 3: [(6, 8)]}


def test_rank_order_says_who_sits_where() -> None:
    found = place((4,), Mesh.of({"tp": 2}, [9, 3]), [Shard(0)])

    assert boxes(found) == {9: [(0, 2)], 3: [(2, 4)]}


def test_replicas_hold_the_same_box_densely() -> None:
    found = place((4, 6), Mesh.of({"dp": 2, "tp": 3}), [Replicate(), Shard(1)])

    assert boxes(found)[0] == boxes(found)[3] == [(0, 4), (0, 2)]
    assert found.strides[0].tolist() == [2, 1]
    assert np.all(found.buffer_size == 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(("x",), (2,), (0, 1, 2)), "2 places, but 3 ranks"),
        (lambda: Mesh(("x", "x"), (1, 1), (0,)), "axis names must be different"),
        (lambda: Mesh(("x",), (2,), (1, 1)), "ranks must be different"),
        (lambda: Mesh(("x",), (0,), ()), "size of at least 1"),
        (lambda: place((4,), Mesh.of({"x": 2}), [Shard(1)]), r"placement S1 on axis x: .* dims 0 to 0"),
        (lambda: place((4,), Mesh.of({"x": 2}), []), "1 axes, but 0 placements"),
    ],
)
def test_what_can_not_be_is_refused_with_the_reason(make, message) -> None:
    with pytest.raises(InputError, match=message):
        make()
