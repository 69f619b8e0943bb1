"""Hypothesis strategies for layouts, for shardroute's own laws and for users who test their layout functions.

    from hypothesis import given
    from shardroute.planner.testing import tensor_problems

    @given(tensor_problems())
    def test_my_layout_function(problem): ...

Needs the extra `test` (hypothesis). Sizes are small by default, so that a test can compare element by element.
"""

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, Placement, Replicate, Shard, place
from shardroute.planner.layouts.tensors import DTYPES
from shardroute.planner.problems import Problem, one_tensor

__all__ = ["dtypes", "mesh_layouts", "meshes", "placements", "shapes", "tensor_problems"]


def shapes(*, max_dims: int = 4, max_size: int = 9) -> st.SearchStrategy[tuple[int, ...]]:
    """Tensor shapes of 1 to `max_dims` dims, each of 1 to `max_size`; sizes that nothing divides are as likely as others."""
    return st.lists(st.integers(1, max_size), min_size=1, max_size=max_dims).map(tuple)


def dtypes() -> st.SearchStrategy[str]:
    """Names of dtypes."""
    return st.sampled_from(sorted(DTYPES))


@st.composite
def meshes(draw: st.DrawFn, *, ranks: Sequence[int] = range(12), max_axes: int = 3) -> Mesh:
    """Meshes of 1 to `max_axes` named axes over some of `ranks`, in any rank order."""
    n_axes = draw(st.integers(1, max_axes))
    sizes: list[int] = []
    for _ in range(n_axes):
        sizes.append(draw(st.integers(1, max(1, len(ranks) // math.prod(sizes)))))
    order = draw(st.permutations(list(ranks)))
    return Mesh(tuple(f"axis{i}" for i in range(n_axes)), tuple(sizes), tuple(order[: math.prod(sizes)]))


def placements(n_axes: int, n_dims: int) -> st.SearchStrategy[list[Placement]]:
    """One placement an axis: replicated or sharding any dim; several axes may shard one dim."""
    one: st.SearchStrategy[Placement] = st.one_of(st.just(Replicate()), st.integers(0, n_dims - 1).map(Shard))
    return st.lists(one, min_size=n_axes, max_size=n_axes)


@st.composite
def mesh_layouts(draw: st.DrawFn, shape: Sequence[int], *, ranks: Sequence[int] = range(12)) -> Fragments:
    """Fragments of a tensor of `shape` on a random mesh over some of `ranks`."""
    mesh = draw(meshes(ranks=ranks))
    return place(shape, mesh, draw(placements(len(mesh.axes), len(shape))))


@st.composite
def tensor_problems(draw: st.DrawFn, *, n_ranks: int = 12, disjoint: bool = False) -> Problem:
    """Problems of one tensor between two random mesh layouts over ranks 0 to n_ranks - 1.

    The sides may share ranks, unless `disjoint`: then the first half of the ranks sends and the second half receives.
    """
    shape = draw(shapes())
    half = n_ranks // 2
    source = draw(mesh_layouts(shape, ranks=range(half) if disjoint else range(n_ranks)))
    target = draw(mesh_layouts(shape, ranks=range(half, n_ranks) if disjoint else range(n_ranks)))
    return one_tensor(shape, draw(dtypes()), source, target)
