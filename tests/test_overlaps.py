"""Overlaps: the pieces between two layouts, in hand-checked cases."""

import numpy as np
import pytest

from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.overlaps import overlap, split_large
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.topologies.errors import InfeasibleError, InputError


def test_rows_over_two_to_columns_over_four_gives_each_destination_a_4_x_2_region_from_each_source() -> None:
    source = place((8, 8), Mesh.of({"row": 2}), [Shard(0)])
    target = place((8, 8), Mesh.of({"column": 4}, range(2, 6)), [Shard(1)])

    pieces = overlap(source, target)

    found = {
        (tuple(pieces.holders[p].tolist()), tuple(pieces.needers[p].tolist())): (hi - lo).tolist()
        for lo, hi, p in zip(pieces.lo, pieces.hi, pieces.pattern, strict=True)
    }
    assert found == {((s,), (d,)): [4, 2] for s in (0, 1) for d in (2, 3, 4, 5)}
    assert pieces.n_elements.sum() == 64


def test_a_piece_names_all_of_its_holders_and_needers() -> None:
    source = place((4,), Mesh.of({"dp": 2, "tp": 2}), [Replicate(), Shard(0)])
    target = place((4,), Mesh.of({"dp": 3}, range(4, 7)), [Replicate()])

    pieces = overlap(source, target)

    assert pieces.lo.tolist() == [[0], [2]]
    assert [h.tolist() for h in pieces.holders] == [[0, 2], [1, 3]]
    assert [n.tolist() for n in pieces.needers] == [[4, 5, 6], [4, 5, 6]]


def test_source_boxes_that_overlap_in_part_are_cut_where_the_holders_change() -> None:
    source = Fragments.dense((6,), [0, 1], np.array([[0], [2]]), np.array([[4], [6]]))
    target = Fragments.dense((6,), [2], np.array([[0]]), np.array([[6]]))

    pieces = overlap(source, target)

    assert pieces.lo.ravel().tolist() == [0, 2, 4]
    assert [pieces.holders[p].tolist() for p in pieces.pattern] == [[0], [0, 1], [1]]


def test_what_nobody_needs_does_not_appear() -> None:
    source = place((8,), Mesh.of({"x": 2}), [Shard(0)])
    target = Fragments.dense((8,), [2], np.array([[5]]), np.array([[6]]))

    pieces = overlap(source, target)

    assert (pieces.lo.tolist(), pieces.hi.tolist()) == ([[5]], [[6]])


def test_a_needed_element_that_nobody_holds_is_infeasible_and_named() -> None:
    source = Fragments.dense((8,), [0], np.array([[0]]), np.array([[6]]))
    target = Fragments.dense((8,), [3], np.array([[0]]), np.array([[8]]))

    with pytest.raises(InfeasibleError, match=r"rank 3 needs \[6:8\]"):
        overlap(source, target)


def test_a_scalar_moves_whole() -> None:
    none = np.zeros((1, 0), dtype=np.int64)
    source, target = Fragments.dense((), [0], none, none), Fragments.dense((), [1], none, none)

    pieces = overlap(source, target)

    assert len(pieces) == 1
    assert pieces.n_elements.tolist() == [1]


def test_splitting_keeps_every_element_and_the_limit() -> None:
    source = place((5, 7, 3), Mesh.of({"x": 1}), [Replicate()])
    target = place((5, 7, 3), Mesh.of({"x": 1}, [1]), [Replicate()])

    pieces = split_large(overlap(source, target), 10)

    assert pieces.n_elements.max() <= 10
    covered = np.zeros((5, 7, 3), dtype=int)
    for lo, hi in zip(pieces.lo, pieces.hi, strict=True):
        covered[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))] += 1
    assert (covered == 1).all()


def test_fragments_too_scattered_to_cut_by_are_refused_before_memory_is_taken() -> None:
    n = 20_000
    corner = np.repeat(np.arange(n)[:, None], 2, axis=1)
    scattered = Fragments.dense((n, n), np.zeros(n, dtype=np.int32), corner, corner + 1)

    with pytest.raises(InputError, match=r"into 400000000 cells, above 134217728"):
        overlap(scattered, scattered)
