"""One side of a transfer as a user or a framework describes it: named tensors and what every rank holds of them.

Rule: two sides are joined by tensor name; ranks are numbered alike on both, so a rank that is on both is one GPU.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from shardroute.planner.exchange.shardings import Sharding
from shardroute.planner.layouts.fragments import Fragments, Ints, Ranks
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
    """Raise InputError where tensors of one buffer disagree on its dtype or, rank by rank, on its size."""
    n_users: dict[str, int] = {}
    for names in layout.buffers:
        for name in names:
            n_users[name] = n_users.get(name, 0) + 1
    sizes: dict[tuple[int, int], tuple[Ranks, Ints]] = {}
    seen: dict[str, tuple[Tensor, dict[int, int]]] = {}
    for tensor, fragments, names in zip(tensors, layout.fragments, layout.buffers, strict=True):
        for number, name in enumerate(names):
            if (id(fragments), number) not in sizes:
                sizes[id(fragments), number] = _sizes(tensor, fragments, number, name)
            if n_users[name] == 1:
                continue
            first, known = seen.setdefault(name, (tensor, {}))
            if first.dtype != tensor.dtype:
                raise InputError(f"buffer {name}: {first.dtype} for tensor {first.name}, {tensor.dtype} for {tensor.name}")
            for rank, size in zip(*(column.tolist() for column in sizes[id(fragments), number]), strict=True):
                if known.setdefault(rank, size) != size:
                    raise InputError(
                        f"buffer {name} of rank {rank}: {known[rank]} elements for tensor {first.name}, {size} for {tensor.name}"
                    )


def _sizes(tensor: Tensor, fragments: Fragments, number: int, name: str) -> tuple[Ranks, Ints]:
    rows = fragments.buffer == number
    ranks, at, inverse = np.unique(fragments.rank[rows], return_index=True, return_inverse=True)
    size = fragments.buffer_size[rows]
    differs = size != size[at][inverse.ravel()]
    if differs.any():
        i = int(np.argmax(differs))
        rank = int(fragments.rank[rows][i])
        raise InputError(f"buffer {name} of rank {rank}: fragments of tensor {tensor.name} give it different sizes")
    return ranks, size[at]
