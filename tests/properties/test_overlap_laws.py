"""The law of overlaps, against a deliberately stupid oracle: sets of element indices.

For any two layouts, every needed element arrives exactly once, from a rank that holds it, and nothing else moves.
"""

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.layouts.meshes import Mesh, Placement, Shard, place
from shardroute.planner.layouts.overlaps import overlap, split_large
from shardroute.planner.testing import meshes, placements, shapes


def chunks(indices: list[int], n_parts: int) -> list[list[int]]:
    """torch.chunk on a list, padded with empty parts: written from its documentation, not from ours."""
    size = (len(indices) + n_parts - 1) // n_parts
    parts = [indices[i : i + size] for i in range(0, len(indices), size)] if size else []
    return parts + [[] for _ in range(n_parts - len(parts))]


def elements(shape: tuple[int, ...], mesh: Mesh, placed: list[Placement]) -> dict[int, set[tuple[int, ...]]]:
    """Which elements each rank holds, by applying the placements one axis after the other to lists of indices."""
    held = {}
    for place_number, where in enumerate(itertools.product(*(range(n) for n in mesh.sizes))):
        rows = [list(range(n)) for n in shape]
        for axis, placement in enumerate(placed):
            if isinstance(placement, Shard):
                rows[placement.dim] = chunks(rows[placement.dim], mesh.sizes[axis])[where[axis]]
        held[mesh.ranks[place_number]] = set(itertools.product(*rows))
    return held


@st.composite
def two_layouts(draw: st.DrawFn):
    shape = draw(shapes())
    sides = []
    for _ in range(2):
        mesh = draw(meshes())
        sides.append((mesh, draw(placements(len(mesh.axes), len(shape)))))
    return shape, *sides


@given(two_layouts())
def test_fragments_are_the_elements_that_the_placements_say(case) -> None:
    shape, (mesh, placed), _ = case

    fragments = place(shape, mesh, placed)

    found = {rank: set() for rank in mesh.ranks}
    for rank, lo, hi in zip(fragments.rank.tolist(), fragments.lo.tolist(), fragments.hi.tolist(), strict=True):
        found[rank] |= set(itertools.product(*(range(a, b) for a, b in zip(lo, hi, strict=True))))
    assert found == elements(shape, mesh, placed)


@given(two_layouts(), st.integers(1, 40))
def test_every_needed_element_arrives_once_from_a_holder_and_nothing_else_moves(case, largest) -> None:
    shape, source, target = case

    pieces = split_large(overlap(place(shape, *source), place(shape, *target)), largest)

    held, needed = elements(shape, *source), elements(shape, *target)
    arrivals: dict[int, Counter] = {rank: Counter() for rank in needed}
    for lo, hi, pattern in zip(pieces.lo.tolist(), pieces.hi.tolist(), pieces.pattern.tolist(), strict=True):
        box = set(itertools.product(*(range(a, b) for a, b in zip(lo, hi, strict=True))))
        assert 0 < len(box) <= largest
        for holder in pieces.holders[pattern].tolist():
            assert box <= held[holder]
        assert set(pieces.holders[pattern].tolist()) == {r for r, e in held.items() if box <= e}
        for needer in pieces.needers[pattern].tolist():
            arrivals[needer].update(box)
    for rank, wanted in needed.items():
        assert arrivals[rank] == Counter(dict.fromkeys(wanted, 1))
