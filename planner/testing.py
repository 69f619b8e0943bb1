"""Hypothesis strategies for layouts, for shardroute's own laws and for users who test their layout functions.

    from hypothesis import given
    from shardroute.planner.testing import tensor_problems

    @given(tensor_problems())
    def test_my_layout_function(problem): ...

Needs the extra `test` (hypothesis). Sizes are small, so that a test can compare element by element. Layouts are whole: some
rank holds every element.
"""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from shardroute.planner.layouts.conventions.buffers import Cut, intervals, keep, spread
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.models import FAMILIES, Model
from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.placements import Placement, Replicate, Shard, StridedShard
from shardroute.planner.layouts.tensors import DTYPES, Layout, Tensor
from shardroute.planner.problems import Problem, one_tensor

__all__ = [
    "dtypes",
    "explicit_fragments",
    "fused_problems",
    "grouped_layouts",
    "layouts",
    "mesh_layouts",
    "meshes",
    "models",
    "placements",
    "shapes",
    "tensor_problems",
]


def shapes(*, max_dims: int = 4, max_size: int = 9, min_dims: int = 1, min_size: int = 1) -> st.SearchStrategy[tuple[int, ...]]:
    """Tensor shapes; sizes that nothing divides are as likely as others. `min_dims` 0 allows scalars, `min_size` 0 empty dims."""
    return st.lists(st.integers(min_size, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


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
    """One placement an axis: replicated, sharding or strided-sharding any dim; several axes may shard one dim."""
    one: st.SearchStrategy[Placement] = st.just(Replicate())
    if n_dims:
        dims = st.integers(0, n_dims - 1)
        one = st.one_of(one, dims.map(Shard), st.builds(StridedShard, dims, st.integers(1, 5)))
    return st.lists(one, min_size=n_axes, max_size=n_axes)


@st.composite
def mesh_layouts(draw: st.DrawFn, shape: Sequence[int], *, ranks: Sequence[int] = range(12)) -> Fragments:
    """Fragments of a tensor of `shape` on a random mesh over some of `ranks`; its axes apply in any order."""
    mesh = draw(meshes(ranks=ranks))
    return place(shape, mesh, draw(placements(len(mesh.axes), len(shape))), draw(st.permutations(mesh.axes)))


@st.composite
def explicit_fragments(draw: st.DrawFn, shape: Sequence[int], *, ranks: Sequence[int] = range(12), copies: int = 2) -> Fragments:
    """Fragments that no mesh gives: the tensor cut anywhere, each box on 1 to `copies` ranks, in any order of dims in memory,
    reversed along some, with room before and behind, and several boxes in one buffer.
    """
    boxes = _boxes(draw, shape)
    rows: list[tuple[int, list[int], list[int], int, list[int]]] = []
    used: dict[int, int] = {}
    for lo, hi in boxes:
        for rank in draw(st.lists(st.sampled_from(list(ranks)), min_size=1, max_size=copies, unique=True)):
            strides, n_elements = [0] * len(shape), 1
            for dim in draw(st.permutations(range(len(shape)))):
                strides[dim] = n_elements * draw(st.sampled_from([1, 1, -1]))
                n_elements *= hi[dim] - lo[dim]
            reversed_by = sum(-stride * (hi[dim] - lo[dim] - 1) for dim, stride in enumerate(strides) if stride < 0)
            start = used.get(rank, 0) + draw(st.integers(0, 2))
            used[rank] = start + n_elements
            rows.append((rank, lo, hi, start + reversed_by, strides))
    behind = draw(st.integers(0, 2))
    n_dims = len(shape)

    def column(values: Sequence[Sequence[int]]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        return np.array(values, dtype=np.int64).reshape(len(rows), n_dims)

    return Fragments(
        shape=tuple(shape),
        rank=np.array([row[0] for row in rows], dtype=np.int32),
        lo=column([row[1] for row in rows]),
        hi=column([row[2] for row in rows]),
        buffer=np.zeros(len(rows), dtype=np.int32),
        offset=np.array([row[3] for row in rows], dtype=np.int64),
        strides=column([row[4] for row in rows]),
        buffer_size=np.array([used[row[0]] + behind for row in rows], dtype=np.int64),
    )


@st.composite
def grouped_layouts(draw: st.DrawFn, shape: Sequence[int], *, ranks: Sequence[int] = range(12)) -> Fragments:
    """Fragments of a tensor whose dim 0 is dealt out in groups (experts, heads) in any order: a rank holds any number of groups,
    stacked in one buffer, and others may hold the same ones.
    """
    groups = _edges(draw, shape[0])
    n_parts = draw(st.integers(1, len(ranks)))
    owners = [draw(st.integers(0, n_parts - 1)) for _ in groups]
    at, filled = [], [0] * n_parts
    for (lo, hi), owner in zip(groups, owners, strict=True):
        at.append(filled[owner])
        filled[owner] += hi - lo
    lows, highs = (np.array([group[side] for group in groups], dtype=np.int64) for side in (0, 1))
    part = np.array(owners, dtype=np.int64)
    cut = intervals(lows, highs, np.array(at, dtype=np.int64), np.array(filled, dtype=np.int64)[part], part, n_parts)
    n_copies = draw(st.integers(1, len(ranks) // n_parts))
    order = draw(st.permutations(list(ranks)))[: n_parts * n_copies]
    table = np.array(order, dtype=np.int64).reshape(n_parts, n_copies)
    return spread([cut, *(keep(size) for size in shape[1:])], tuple(shape), table, np.zeros(n_copies, dtype=np.int64))


def layouts(shape: Sequence[int], *, ranks: Sequence[int] = range(12)) -> st.SearchStrategy[Fragments]:
    """Any of the layouts of this module for a tensor of `shape` (1 dim or more, none of them empty)."""
    kinds = (mesh_layouts, explicit_fragments, grouped_layouts)
    return st.one_of(*(kind(shape, ranks=ranks) for kind in kinds))


@st.composite
def tensor_problems(draw: st.DrawFn, *, n_ranks: int = 12, disjoint: bool = False) -> Problem:
    """Problems of one tensor between two random layouts over ranks 0 to n_ranks - 1.

    The sides may share ranks, unless `disjoint`: then the first half of the ranks sends and the second half receives.
    """
    shape = draw(shapes())
    half = n_ranks // 2
    source = draw(layouts(shape, ranks=range(half) if disjoint else range(n_ranks)))
    target = draw(layouts(shape, ranks=range(half, n_ranks) if disjoint else range(n_ranks)))
    return one_tensor(shape, draw(dtypes()), source, target)


@st.composite
def fused_problems(draw: st.DrawFn, *, n_ranks: int = 12) -> Problem:
    """Problems of q, k and v matrices: each on a mesh of its own on the source side, on the destination side fused by rows in one
    buffer a rank, cut by heads; k and v heads are replicated where there are fewer of them than ranks.
    """
    n_kv, per_kv, head_dim, width = (draw(st.integers(1, most)) for most in (3, 3, 2, 3))
    n_parts = draw(st.sampled_from([n for n in range(1, n_ranks + 1) if not (n_kv % n and n % n_kv) and n_kv * per_kv % n == 0]))
    rows = {"q": n_kv * per_kv * head_dim, "k": n_kv * head_dim, "v": n_kv * head_dim}
    held = {"q": rows["q"] // n_parts, "k": max(n_kv // n_parts, 1) * head_dim, "v": max(n_kv // n_parts, 1) * head_dim}
    n_copies = draw(st.integers(1, n_ranks // n_parts))
    order = draw(st.permutations(range(n_ranks)))[: n_parts * n_copies]
    table = np.array(order, dtype=np.int64).reshape(n_parts, n_copies)
    dtype = draw(dtypes())
    tensors, source, target = [], [], []
    before = 0
    for name, n_rows in rows.items():
        copies = held[name] * n_parts // n_rows
        lo = np.arange(n_parts) // copies * held[name]
        cut: list[Cut] = [intervals(lo, lo + held[name], before, sum(held.values())), keep(width)]
        tensors.append(Tensor(name, (n_rows, width), dtype))
        source.append(draw(mesh_layouts((n_rows, width), ranks=range(n_ranks))))
        target.append(spread(cut, (n_rows, width), table, np.zeros(n_copies, dtype=np.int64)))
        before += held[name]
    return Problem(
        tuple(tensors), Layout(tuple(source), (("q",), ("k",), ("v",))), Layout(tuple(target), (("qkv",),) * 3), n_ranks
    )


def _edges(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """The intervals that a dim of `size` is cut in."""
    inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    return list(itertools.pairwise([0, *sorted(inner), size]))


def _boxes(draw: st.DrawFn, shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Boxes that tile a tensor: cut along one dim, then each part along another."""
    parts: list[tuple[list[int], list[int]]] = [([0] * len(shape), list(shape))]
    for _ in range(2):
        found = []
        for lo, hi in parts:
            dim = draw(st.integers(0, len(shape) - 1))
            for a, b in _edges(draw, hi[dim] - lo[dim]):
                low, high = list(lo), list(hi)
                low[dim], high[dim] = lo[dim] + a, lo[dim] + b
                found.append((low, high))
        parts = found
    return parts


@st.composite
def models(draw: st.DrawFn, *, families: Sequence[str] = ("llama", "qwen3", "qwen3_moe"), max_layers: int = 3) -> Model:
    """Small models with random dims, counts and tying, of these families; any tensor- or expert-parallel degree may fail to fit.

    Every parameter has its Hugging Face name, so a convention of your own can be tried on it.
    """
    n_kv = draw(st.integers(1, 4))
    config = {
        "model_type": draw(st.sampled_from(list(families))),
        "num_hidden_layers": draw(st.integers(1, max_layers)),
        "hidden_size": draw(st.integers(1, 9)),
        "num_attention_heads": n_kv * draw(st.integers(1, 4)),
        "num_key_value_heads": n_kv,
        "head_dim": draw(st.integers(1, 4)),
        "intermediate_size": draw(st.integers(1, 12)),
        "moe_intermediate_size": draw(st.integers(1, 12)),
        "num_experts": draw(st.integers(1, 8)),
        "vocab_size": draw(st.integers(1, 40)),
        "tie_word_embeddings": draw(st.booleans()),
        "torch_dtype": "bfloat16",
    }
    return FAMILIES[str(config["model_type"])]("random", Config(config, "random/config.json"))
