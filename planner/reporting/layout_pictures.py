"""The report's picture of a tensor: which ranks hold which box of it, before and after."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from shardroute.planner.arguments import ranges_text
from shardroute.planner.layouts.fragments import Fragments, box_text
from shardroute.planner.problems import Problem
from shardroute.planner.reporting.charts import COLOURS, Value, boxes
from shardroute.planner.reporting.sections import Cell, Section, count, size, table
from shardroute.topologies.errors import InputError

# Boxes of a side that are drawn and listed, and those that still have room for their ranks' numbers.
_MOST_BOXES: Final = 256
_MOST_LABELLED: Final = 40
_MOST_RANGES: Final = 4


def tensor_index(problem: Problem, name: str | None) -> int:
    """The tensor of that name, or the largest (ties by name). Raises InputError when there is none (of that name)."""
    tensors = problem.tensors
    if not tensors:
        raise InputError("the plan has no tensors, so there is nothing to draw; plan for layouts that have some")
    if name is None:
        return min(range(len(tensors)), key=lambda i: (-tensors[i].n_bytes, tensors[i].name))
    for i, tensor in enumerate(tensors):
        if tensor.name == name:
            return i
    near = ", ".join(sorted((t.name for t in tensors), key=lambda other: (-_alike(name, other), other))[:3])
    more = ", ..." if len(tensors) > 3 else ""
    raise InputError(f"--tensor {name!r}: the plan has no such tensor; it has {near}{more}")


def layout_section(problem: Problem, name: str | None) -> Section:
    """The boxes of a tensor on both sides, with the ranks that hold them; `name` as for `tensor_index`."""
    tensors, index = problem.tensors, tensor_index(problem, name)
    tensor = tensors[index]
    sides = {"before": problem.source.fragments[index], "after": problem.target.fragments[index]}
    across, down = _cut_dims(len(tensor.shape), list(sides.values()))
    values: list[dict[str, Value]] = []
    rows, words, labelled = [], [f"{tensor.name}, {' x '.join(map(str, tensor.shape))} {tensor.dtype}."], True
    for side, fragments in sides.items():
        held = _boxes_of(fragments)
        labelled = labelled and len(held) <= _MOST_LABELLED
        for i, (lo, hi, ranks) in enumerate(held[:_MOST_BOXES]):
            x, x2 = (lo[across], hi[across]) if across is not None else (0, 1)
            y, y2 = (lo[down], hi[down]) if down is not None else (0, 1)
            text = _ranks_text(ranks)
            values.append({"side": side, "x": x, "x2": x2, "y": y, "y2": y2, "text": text, "shade": i % len(COLOURS)})
            n_elements = int(np.prod([b - a for a, b in zip(lo, hi, strict=True)]))
            box = Cell(box_text(np.array(lo), np.array(hi)))
            rows.append([Cell(side), box, count(len(ranks)), Cell(text), size(n_elements * tensor.itemsize)])
        if len(held) > _MOST_BOXES:
            words.append(f"{side.capitalize()}: the first {_MOST_BOXES} of {len(held):,} boxes are shown.")
    if len(tensor.shape) > 2:
        shown = " and ".join(str(dim) for dim in (down, across) if dim is not None)
        words.append(f"Drawn along dims {shown}, which are cut most; boxes that differ in other dims lie over each other.")
    chart = None
    if values:
        ends = [tensor.shape[dim] if dim is not None else 1 for dim in (across, down)]
        titles = ["" if dim is None else f"dim {dim}" for dim in (across, down)]
        chart = boxes(values, titles[0], titles[1], ends[0], ends[1], labelled=labelled)
    about = "boxes of the tensor with the ranks that hold each, before and after"
    columns = ("side", "box", "held by", "ranks", "bytes")
    return Section("layout", "Layout of a tensor", tuple(words), chart, about, table(columns, rows))


def _boxes_of(fragments: Fragments) -> list[tuple[tuple[int, ...], tuple[int, ...], list[int]]]:
    """Each box once, ascending, with the ranks that hold it."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
    for lo, hi, rank in zip(fragments.lo.tolist(), fragments.hi.tolist(), fragments.rank.tolist(), strict=True):
        found.setdefault((tuple(lo), tuple(hi)), set()).add(rank)
    return [(lo, hi, sorted(ranks)) for (lo, hi), ranks in sorted(found.items())]


def _cut_dims(n_dims: int, sides: Sequence[Fragments]) -> tuple[int | None, int | None]:
    """The dims to draw across and down: the two with most edges, the earlier of them down; None where there are fewer dims."""
    edges = [len(np.unique(np.concatenate([f.lo[:, dim] for f in sides]))) for dim in range(n_dims)]
    first_two = sorted(sorted(range(n_dims), key=lambda dim: (-edges[dim], dim))[:2])
    if not first_two:
        return None, None
    return (first_two[1], first_two[0]) if len(first_two) == 2 else (first_two[0], None)


def _ranks_text(ranks: Sequence[int]) -> str:
    found = ranges_text(ranks).split(",")
    return ",".join([*found[:_MOST_RANGES], *(["..."] if len(found) > _MOST_RANGES else [])])


def _alike(name: str, other: str) -> int:
    """How many parts between dots both names have."""
    return len(set(name.split(".")) & set(other.split(".")))
