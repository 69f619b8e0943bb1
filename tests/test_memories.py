"""Memory that fragments share, against sets of positions; and what two layouts come to when they meet."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_oracle import fragment_elements

from shardroute.planner.coverage import Lack, coverage
from shardroute.planner.exchange import parse_layout, problem_between
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.overlaps import overlap
from shardroute.planner.layouts.regions import MAX_COMPARED, Region, apart
from shardroute.planner.memories import bytes_in_place, check_memory
from shardroute.planner.problems import Problem
from shardroute.planner.testing import fused_problems, tensor_problems
from shardroute.topologies.errors import InfeasibleError, InputError


def positions(found):
    return [found.offset + sum(i) for i in itertools.product(*(range(0, n * stride, stride) for n, stride in found.steps))]


@st.composite
def regions(draw):
    steps = draw(st.lists(st.tuples(st.integers(2, 4), st.integers(1, 12)), max_size=3))
    return Region(draw(st.integers(0, 30)), tuple(sorted(steps, key=lambda step: -step[1])))


@given(regions(), regions())
def test_regions_are_apart_exactly_when_no_position_is_in_both(a, b) -> None:
    assert apart(a, b) == set(positions(a)).isdisjoint(positions(b))


@given(regions())
def test_a_region_is_injective_exactly_when_no_position_is_named_twice(found) -> None:
    assert found.is_injective == (len(set(positions(found))) == len(positions(found)))


def test_large_interleaved_regions_are_told_apart_without_their_elements() -> None:
    n = 2**30
    gate, up = Region(0, ((n, 2),)), Region(1, ((n, 2),))
    left, right = Region(0, ((n, 8), (4, 1))), Region(4, ((n, 8), (4, 1)))

    assert n > MAX_COMPARED
    assert apart(gate, up)
    assert apart(left, right)
    assert not apart(left, Region(3, ((n, 8), (4, 1))))


@given(tensor_problems() | fused_problems())
def test_layouts_that_the_strategies_draw_put_no_two_elements_in_one_place(problem) -> None:
    check_memory(problem.tensors, problem.target)


def one(*fragments, shape=(8,), name="w", **more):
    tensors = [{"name": name, "shape": list(shape), "dtype": "bf16", "layout": {"fragments": list(fragments)}, **more}]
    return document(tensors)


def document(tensors, memory=None):
    aliases = [] if memory is None else [{"buffer": buffer, "memory": memory} for buffer in ({t["name"] for t in tensors})]
    return parse_layout({"format": "shardroute-layout", "version": 1, "tensors": tensors, "aliases": aliases})


def test_elements_that_would_be_written_to_one_place_are_refused() -> None:
    halves = [{"rank": 3, "lo": [a], "hi": [a + 4], "offset": at, "buffer_size": 8} for a, at in ((0, 0), (4, 3))]
    found = one(*halves)

    with pytest.raises(InputError, match="buffer w of rank 3: fragments of w and w overlap in memory"):
        check_memory(found.tensors, found.layout)


def test_strides_that_fold_a_fragment_onto_itself_are_refused() -> None:
    found = one({"rank": 0, "lo": [0, 0], "hi": [2, 4], "strides": [2, 1], "buffer_size": 8}, shape=(2, 4))

    with pytest.raises(InputError, match="puts two elements in one place"):
        check_memory(found.tensors, found.layout)


@given(tensor_problems(), st.data())
def test_coverage_counts_and_names_exactly_what_sets_of_elements_say(problem, data) -> None:
    source, target = problem.source.fragments[0], problem.target.fragments[0]
    kept = sorted(data.draw(st.sets(st.integers(0, len(source) - 1))))
    columns = {f.name: getattr(source, f.name)[kept] for f in dataclasses.fields(Fragments) if f.name not in ("shape", "_key")}
    less = Fragments(shape=source.shape, **columns)
    layout = dataclasses.replace(problem.source, fragments=(less,))

    found = coverage(Problem(problem.tensors, layout, problem.target, problem.n_ranks))

    held, needed = set(fragment_elements(less)), set(fragment_elements(target))
    anyone = {element for _, element in held}
    lacking = {(rank, e) for rank, e in needed if e not in anyone}
    named = [(r, e) for lack in found.lacks for e in itertools.product(*map(range, lack.lo, lack.hi)) for r in lack.ranks]
    itemsize = problem.tensors[0].itemsize
    assert (len(named), set(named)) == (len(lacking), lacking)
    assert found.n_bytes_needed == len(needed) * itemsize
    assert found.n_bytes_held == len(needed & held) * itemsize
    assert found.n_bytes_unneeded == problem.n_bytes - len({e for _, e in needed}) * itemsize
    if not lacking:
        assert found.n_pieces == len(overlap(less, target))


def test_a_lack_is_text_that_a_person_can_follow() -> None:
    assert str(Lack(("a", "b"), (3,), (0, 4), (2, 8))) == "a[0:2, 4:8] (and 1 more tensors)"


def rows(name, lo, hi, *, rank=0, offset=0, size=8):
    fragment = {"rank": rank, "lo": [lo], "hi": [hi], "offset": offset, "buffer_size": size}
    return {"name": name, "shape": [8], "dtype": "bf16", "layout": {"fragments": [fragment]}}


def meet(source, target):
    return bytes_in_place(problem_between(source, target), source.aliases, target.aliases)


def test_bytes_that_lie_alike_in_one_memory_are_in_place() -> None:
    source, target = document([rows("w", 0, 8)], "m"), document([rows("w", 2, 6, offset=2)], "m")

    assert meet(source, target) == 4 * 2


def test_memory_that_no_alias_joins_is_never_the_same() -> None:
    assert meet(document([rows("w", 0, 8)]), document([rows("w", 2, 6)])) == 0
    assert meet(document([rows("w", 0, 8)], "a"), document([rows("w", 2, 6)], "b")) == 0
    assert meet(document([rows("w", 0, 8)], "m"), document([rows("w", 2, 6, rank=1)], "m")) == 0


def test_a_write_over_what_is_still_needed_is_refused() -> None:
    shifted = document([rows("w", 2, 6, offset=0)], "m")

    with pytest.raises(InfeasibleError, match="memory m of rank 0: writing tensor w there could destroy elements of w"):
        meet(document([rows("w", 0, 8)], "m"), shifted)


def test_a_write_over_what_nobody_needs_is_allowed() -> None:
    other = document([rows("v", 0, 8), rows("w", 0, 8, size=16, offset=8)])
    aliased = dataclasses.replace(other, aliases={"v": "m"})

    assert meet(aliased, document([rows("w", 0, 8)], "m")) == 0
