"""The law of overlaps, against a deliberately stupid oracle: lists and sets of element indices.

For any two layouts, every needed element arrives exactly once, from a rank that holds it, and nothing else moves. What a rank
holds is compared element by element in its buffer's order: a comparison of sets would pass for shuffled rows.
"""

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from plan_oracle import box_elements, fragment_elements

from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.overlaps import overlap, split_large
from shardroute.planner.layouts.placements import Placement, Replicate, StridedShard
from shardroute.planner.testing import fused_problems, layouts, meshes, placements, shapes


def chunks(indices: list[int], n_parts: int) -> list[list[int]]:
    """torch.chunk on a list, padded with empty parts: written from its documentation, not from ours."""
    size = (len(indices) + n_parts - 1) // n_parts
    parts = [indices[i : i + size] for i in range(0, len(indices), size)] if size else []
    return parts + [[] for _ in range(n_parts - len(parts))]


def elements(shape: tuple[int, ...], mesh: Mesh, placed: list[Placement], order=None) -> dict[int, list[tuple[int, ...]]]:
    """What each rank holds, in memory order, by applying the placements one axis after the other to lists of indices."""
    held = {}
    axes = mesh.axes if order is None else order
    for place_number, where in enumerate(itertools.product(*(range(n) for n in mesh.sizes))):
        rows = [list(range(n)) for n in shape]
        for axis in (mesh.axes.index(name) for name in axes):
            placement = placed[axis]
            if isinstance(placement, Replicate):
                continue
            n_parts = placement.split_factor if isinstance(placement, StridedShard) else 1
            parts = chunks(rows[placement.dim], n_parts)
            rows[placement.dim] = [i for part in parts for i in chunks(part, mesh.sizes[axis])[where[axis]]]
        held[mesh.ranks[place_number]] = list(itertools.product(*rows))
    return held


@st.composite
def placed_tensors(draw: st.DrawFn):
    shape = draw(shapes(min_dims=0, min_size=0, max_dims=3))
    mesh = draw(meshes())
    return shape, mesh, draw(placements(len(mesh.axes), len(shape))), draw(st.permutations(mesh.axes))


@given(placed_tensors())
def test_a_rank_holds_the_elements_that_the_placements_say_in_that_order_and_nothing_between(case) -> None:
    shape, mesh, placed, order = case

    fragments = place(shape, mesh, placed, order)

    found: dict[int, dict[int, tuple[int, ...]]] = {rank: {} for rank in mesh.ranks}
    for (rank, element), places in fragment_elements(fragments).items():
        assert len(places) == 1
        found[rank][places[0][1]] = element
    in_order = {rank: [held[at] for at in sorted(held)] for rank, held in found.items()}
    assert in_order == elements(shape, mesh, placed, order)
    sizes = dict(zip(fragments.rank.tolist(), fragments.buffer_size.tolist(), strict=True))
    assert all(sizes.get(rank, 0) == len(held) for rank, held in in_order.items())


@st.composite
def two_layouts(draw: st.DrawFn):
    shape = draw(shapes())
    return draw(layouts(shape)), draw(layouts(shape))


def arrives_once(source, target, pieces) -> None:
    """Assert that the pieces bring every element that each rank needs once, from all that hold it, and nothing else."""
    held, needed = (Counter(fragment_elements(side).keys()) for side in (source, target))
    holders_of, arrivals = {}, Counter()
    for rank, element in held:
        holders_of.setdefault(element, set()).add(rank)
    for lo, hi, pattern in zip(pieces.lo.tolist(), pieces.hi.tolist(), pieces.pattern.tolist(), strict=True):
        for element in box_elements(lo, hi):
            assert set(pieces.holders[pattern].tolist()) == holders_of[element]
            arrivals.update((rank, element) for rank in pieces.needers[pattern].tolist())
    assert arrivals == needed


@given(two_layouts(), st.integers(1, 40))
def test_every_needed_element_arrives_once_from_a_holder_and_nothing_else_moves(case, largest) -> None:
    source, target = case

    pieces = split_large(overlap(source, target), largest)

    assert (pieces.n_elements <= largest).all()
    arrives_once(source, target, pieces)


@given(fused_problems())
def test_fused_rows_arrive_once_and_fill_the_fused_buffer_without_a_gap(problem) -> None:
    filled: dict[int, list[int]] = {}
    for source, target in zip(problem.source.fragments, problem.target.fragments, strict=True):
        arrives_once(source, target, overlap(source, target))
        for (rank, _), places in fragment_elements(target).items():
            filled.setdefault(rank, []).extend(at for _, at in places)

    size = {int(r): int(n) for f in problem.target.fragments for r, n in zip(f.rank, f.buffer_size, strict=True)}
    assert {rank: sorted(at) for rank, at in filled.items()} == {rank: list(range(n)) for rank, n in size.items()}
