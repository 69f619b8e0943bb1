"""Memory that fragments share: destination elements that would be written twice, and buffers that both sides lie in.

Rule: refused unless shown to be safe. Regions are compared, never element data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.regions import Region, apart, region
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.problems import Problem
from shardroute.topologies.errors import InfeasibleError, InputError


@dataclass(frozen=True, slots=True)
class _Places:
    """Every fragment of some tensors: which tensor and row it is, and its buffer, numbered over all names."""

    names: tuple[str, ...]
    tensor: Ints
    row: Ints
    rank: Ints
    buffer: Ints

    def groups(self) -> list[Ints]:
        """Indices of the fragments of each (rank, buffer)."""
        order = np.lexsort((self.buffer, self.rank))
        new = (np.diff(self.rank[order]) != 0) | (np.diff(self.buffer[order]) != 0)
        return np.split(order, np.flatnonzero(new) + 1) if len(order) else []


def _places(layout: Layout) -> _Places:
    number: dict[str, int] = {}
    buffers = []
    for fragments, names in zip(layout.fragments, layout.buffers, strict=True):
        numbers = np.array([number.setdefault(name, len(number)) for name in names], dtype=np.int64)
        buffers.append(numbers[fragments.buffer])
    none = [np.zeros(0, dtype=np.int64)]
    return _Places(
        tuple(number),
        np.repeat(np.arange(len(layout.fragments)), [len(f) for f in layout.fragments]),
        np.concatenate([*none, *(np.arange(len(f)) for f in layout.fragments)]),
        np.concatenate([*none, *(f.rank.astype(np.int64) for f in layout.fragments)]),
        np.concatenate([*none, *buffers]),
    )


def check_memory(tensors: Sequence[Tensor], layout: Layout) -> None:
    """Raise InputError when two elements of a destination layout would be written to one place in memory.

    Buffers whose fragments lie alike are looked at once, and so are ranks within them: layers repeat, and so do replicas.
    """
    users: dict[str, list[tuple[int, int]]] = {}
    for tensor, names in enumerate(layout.buffers):
        for number, name in enumerate(names):
            users.setdefault(name, []).append((tensor, number))
    proved: set[tuple[tuple[int, int], ...]] = set()
    apart_already: set[bytes] = set()
    for name, members in users.items():
        alike = tuple((id(layout.fragments[tensor]), number) for tensor, number in members)
        if alike not in proved:
            proved.add(alike)
            _check_buffer(tensors, layout, name, members, apart_already)


def _check_buffer(
    tensors: Sequence[Tensor], layout: Layout, name: str, members: Sequence[tuple[int, int]], apart_already: set[bytes]
) -> None:
    """Check one buffer on every rank. What a rank has in it goes by how it lies, into `apart_already` once proved."""
    n_dims = max(len(layout.fragments[tensor].shape) for tensor, _ in members)
    parts: list[Ints] = []
    for tensor, number in members:
        fragments = layout.fragments[tensor]
        rows = np.flatnonzero(fragments.buffer == number)
        part = np.zeros((len(rows), 4 + 2 * n_dims), dtype=np.int64)
        part[:, 0], part[:, 1], part[:, 2], part[:, 3] = fragments.rank[rows], tensor, rows, fragments.offset[rows]
        part[:, 4 : 4 + n_dims] = 1
        part[:, 4 : 4 + len(fragments.shape)] = fragments.extent[rows]
        part[:, 4 + n_dims : 4 + n_dims + len(fragments.shape)] = fragments.strides[rows]
        parts.append(part)
    table = np.concatenate(parts)
    table = table[np.lexsort((table[:, 3], table[:, 0]))]
    for group in np.split(table, np.flatnonzero(np.diff(table[:, 0])) + 1):
        lies = group[:, 3:].tobytes()
        if len(group) and lies not in apart_already:
            _check_rank(tensors, layout, name, group[:, :3])
            apart_already.add(lies)


def _check_rank(tensors: Sequence[Tensor], layout: Layout, name: str, group: Ints) -> None:
    """Check one buffer of one rank, whose fragments `group` lists: rank, tensor, row."""
    where = f"buffer {name} of rank {group[0, 0]}"
    held = [(region(layout.fragments[tensor], row), tensor, row) for _, tensor, row in group.tolist()]
    held.sort(key=lambda entry: (entry[0].offset, *entry[1:]))
    for k, (first, i, _) in enumerate(held):
        if not first.is_injective:
            raise InputError(f"{where}: a fragment of tensor {tensors[i].name} puts two elements in one place (strides overlap)")
        for second, j, _ in held[k + 1 :]:
            if second.offset > first.last:
                break
            if not apart(first, second):
                raise InputError(
                    f"{where}: fragments of {tensors[i].name} and {tensors[j].name} overlap in memory; give each its own place"
                )


def bytes_in_place(problem: Problem, source_aliases: Mapping[str, str], target_aliases: Mapping[str, str]) -> int:
    """Bytes that lie where they must already, since a source and a destination buffer are one memory.

    Raises InfeasibleError when writing a destination fragment could destroy source elements that some rank still needs: a plan
    orders reads and writes of staging memory only.
    """
    shared = set(source_aliases.values()) & set(target_aliases.values())
    held = _in_memories(problem.source, source_aliases, shared)
    total = 0
    for place, written in sorted(_in_memories(problem.target, target_aliases, shared).items()):
        for target in written:
            for source in held.get(place, []):
                total += _in_place(problem, source, target, place[1])
    return total


def _in_memories(layout: Layout, aliases: Mapping[str, str], memories: set[str]) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """(tensor, row) of every fragment that lies in one of the memories, by rank and memory."""
    found: dict[tuple[int, str], list[tuple[int, int]]] = {}
    if not memories:
        return found
    places = _places(layout)
    for group in places.groups():
        memory = aliases.get(places.names[places.buffer[group[0]]])
        if memory in memories:
            rows = zip(places.tensor[group].tolist(), places.row[group].tolist(), strict=True)
            found.setdefault((int(places.rank[group[0]]), str(memory)), []).extend(rows)
    return found


def _in_place(problem: Problem, source: tuple[int, int], target: tuple[int, int], memory: str) -> int:
    """Bytes that two fragments of one memory have in the same place, 0 when they are apart. Raises InfeasibleError else."""
    (i, row), (j, target_row) = source, target
    held, written = problem.source.fragments[i], problem.target.fragments[j]
    n_held, n_written = problem.tensors[i].itemsize, problem.tensors[j].itemsize
    a, b = region(held, row), region(written, target_row)
    if apart(_in_bytes(a, n_held), _in_bytes(b, n_written)):
        return 0
    common = np.minimum(held.hi[row], written.hi[target_row]) - np.maximum(held.lo[row], written.lo[target_row])
    joint = np.maximum(held.hi[row], written.hi[target_row]) - np.minimum(held.lo[row], written.lo[target_row])
    strides = np.where(joint > 1, held.strides[row], 0)
    same_map = i == j and (strides == np.where(joint > 1, written.strides[target_row], 0)).all()
    origins = [int(f.offset[r] - (f.lo[r] * strides).sum()) for f, r in ((held, row), (written, target_row))]
    if same_map and origins[0] == origins[1] and (common > 0).all():
        steps = sorted(((int(n), abs(int(s))) for n, s in zip(joint, strides, strict=True) if n > 1), key=lambda x: -x[1])
        if Region(0, tuple(steps)).is_injective:
            return int(common.prod()) * n_held
    if _is_needed(problem, i, held.lo[row], held.hi[row]):
        raise InfeasibleError(
            f"memory {memory} of rank {held.rank[row]}: writing tensor {problem.tensors[j].name} there could destroy elements of "
            f"{problem.tensors[i].name} that are still needed; give the destination its own memory, or lay both sides alike there"
        )
    return 0


def _in_bytes(found: Region, itemsize: int) -> Region:
    steps = tuple((n, stride * itemsize) for n, stride in found.steps)
    if steps and steps[-1][1] == itemsize:
        return Region(found.offset * itemsize, (*steps[:-1], (steps[-1][0] * itemsize, 1)))
    return Region(found.offset * itemsize, (*steps, (itemsize, 1)) if itemsize > 1 else steps)


def _is_needed(problem: Problem, tensor: int, lo: Ints, hi: Ints) -> bool:
    target = problem.target.fragments[tensor]
    return bool(((target.lo < hi) & (target.hi > lo)).all(axis=1).any())
