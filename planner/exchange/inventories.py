"""One side of a transfer as a user or a framework describes it: named tensors and what every rank holds of them.

Rule: two sides are joined by tensor name; ranks are numbered alike on both, so a rank that is on both is one GPU.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from shardroute.planner.exchange.shardings import Sharding
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.problems import Problem
from shardroute.topologies.errors import InfeasibleError, InputError


@dataclass(frozen=True, slots=True)
class Inventory:
    """Tensors with how they lie.

    `aliases` maps a buffer's name to the name of a memory. Where a source and a destination buffer on one rank name the same
    memory, they are the same bytes; buffers without an alias never are.

    Raises InputError when the layout doesn't match the tensors, when tensors that share a buffer disagree on its dtype or size,
    and for an alias of a buffer that isn't there.
    """

    tensors: tuple[Tensor, ...]
    layout: Layout
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "aliases", MappingProxyType(dict(self.aliases)))
        Problem(self.tensors, self.layout, self.layout, self.n_ranks)  # names, shapes
        _check_buffers(self.tensors, self.layout)
        known = {name for names in self.layout.buffers for name in names}
        for buffer in self.aliases:
            if buffer not in known:
                raise InputError(f"alias of buffer {buffer}: no tensor has a buffer of that name")

    @property
    def n_ranks(self) -> int:
        """One more than the highest rank that holds something."""
        ranks = self.layout.ranks
        return int(ranks[-1]) + 1 if len(ranks) else 0


def inventory_of(shardings: Iterable[tuple[Tensor, Sharding]]) -> Inventory:
    """The inventory of tensors that each lie by a sharding, in a buffer of their own; equal ones share their fragments."""
    pairs = list(shardings)
    shared: dict[tuple[tuple[int, ...], Sharding], Fragments] = {}
    for tensor, sharding in pairs:
        key = (tensor.shape, sharding)
        if key not in shared:
            shared[key] = sharding.fragments(tensor.shape)
    fragments = tuple(shared[tensor.shape, sharding] for tensor, sharding in pairs)
    return Inventory(tuple(tensor for tensor, _ in pairs), Layout(fragments, tuple((tensor.name,) for tensor, _ in pairs)))


def problem_between(source: Inventory, target: Inventory) -> Problem:
    """The problem of giving `target` all that it holds from what `source` holds; tensors that only the source has are left out.

    Raises InfeasibleError for tensors that the source lacks, InputError for those that differ in shape or dtype.
    """
    have = {tensor.name: i for i, tensor in enumerate(source.tensors)}
    lacking = [tensor.name for tensor in target.tensors if tensor.name not in have]
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise InfeasibleError(f"the source has no tensor {', '.join(lacking[:3])}{more}, which the destination needs")
    taken = [have[tensor.name] for tensor in target.tensors]
    for i, wanted in zip(taken, target.tensors, strict=True):
        held = source.tensors[i]
        if held.shape != wanted.shape:
            raise InputError(f"tensor {held.name}: shape {held.shape} in the source, {wanted.shape} in the destination")
        if held.dtype != wanted.dtype:
            raise InputError(
                f"tensor {held.name}: {held.dtype} in the source, {wanted.dtype} in the destination; a plan moves bytes, so cast "
                "on one side and describe that"
            )
    layout = Layout(tuple(source.layout.fragments[i] for i in taken), tuple(source.layout.buffers[i] for i in taken))
    return Problem(target.tensors, layout, target.layout, max(source.n_ranks, target.n_ranks, 1))


def _check_buffers(tensors: tuple[Tensor, ...], layout: Layout) -> None:
    """Raise InputError where tensors of one buffer disagree on its dtype or, rank by rank, on its size.

    Buffers whose fragments lie alike are looked at once.
    """
    users: dict[str, list[tuple[int, int]]] = {}
    for i, names in enumerate(layout.buffers):
        for number, name in enumerate(names):
            users.setdefault(name, []).append((i, number))
    agreed: set[tuple[tuple[int, int], ...]] = set()
    for name, members in users.items():
        first = tensors[members[0][0]]
        for i, _ in members:
            if tensors[i].dtype != first.dtype:
                raise InputError(
                    f"buffer {name}: {first.dtype} for tensor {first.name}, {tensors[i].dtype} for {tensors[i].name}"
                )
        alike = tuple((id(layout.fragments[i]), number) for i, number in members)
        if alike not in agreed:
            agreed.add(alike)
            _check_sizes(tensors, layout, name, members)


def _check_sizes(tensors: tuple[Tensor, ...], layout: Layout, name: str, members: list[tuple[int, int]]) -> None:
    rows = [np.flatnonzero(layout.fragments[i].buffer == number) for i, number in members]
    rank = np.concatenate([layout.fragments[i].rank[row] for (i, _), row in zip(members, rows, strict=True)])
    size = np.concatenate([layout.fragments[i].buffer_size[row] for (i, _), row in zip(members, rows, strict=True)])
    _, at, inverse = np.unique(rank, return_index=True, return_inverse=True)
    differs = size != size[at][inverse.ravel()]
    if differs.any():
        k = int(np.argmax(differs))
        known = int(at[inverse.ravel()[k]])
        owner = np.repeat([i for i, _ in members], [len(row) for row in rows])
        one, other = (tensors[int(owner[row])].name for row in (known, k))
        if one == other:
            raise InputError(f"buffer {name} of rank {rank[k]}: fragments of tensor {one} give it different sizes")
        raise InputError(f"buffer {name} of rank {rank[k]}: {size[known]} elements for tensor {one}, {size[k]} for {other}")
