"""Tensors cut into buckets whose destination buffers fit some memory, on every rank.

Rule: tensors that share a destination buffer stay together, and buckets follow the order of the tensors. A buffer counts as what
it takes in spare memory, which is whole cache lines.
"""

from collections import defaultdict

from shardroute.executors.interpreting.memories import ALIGNMENT
from shardroute.planner.exchange import Inventory
from shardroute.planner.layouts.tensors import Layout
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import format_bytes


def cut_into_buckets(target: Inventory, most_bytes: int | None) -> list[Inventory]:
    """The inventory in as few runs of its tensors as fit; in one, without a limit. Raises InputError for a limit that is too low,
    with what is needed.
    """
    sizes = [_buffer_bytes(target, k) for k in range(len(target.tensors))]
    if most_bytes is None:
        return [target]
    buckets: list[list[int]] = []
    held: dict[tuple[int, str], int] = {}
    for group in _groups(target):
        mine = {key: n for k in group for key, n in sizes[k].items()}
        need = _fullest(mine)
        if need > most_bytes:
            name = target.tensors[group[0]].name
            more = f" and {len(group) - 1} tensors that share its buffers" if len(group) > 1 else ""
            raise InputError(
                f"spare_bytes={most_bytes}: {name}{more} take {format_bytes(need)} on one rank; give at least {need}, or 0 to "
                "write in place"
            )
        if not buckets or _fullest(held | mine) > most_bytes:
            buckets.append([])
            held = {}
        buckets[-1] += group
        held |= mine
    return [_of(target, sorted(bucket)) for bucket in buckets]


def _groups(target: Inventory) -> list[list[int]]:
    """Tensors that share buffers, straight or by others; ordered by the first of each."""
    group_of: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    owner: dict[str, int] = {}
    for k, buffers in enumerate(target.layout.buffers):
        group_of[k], members[k] = k, [k]
        for name in buffers:
            other = group_of[owner.setdefault(name, k)]
            mine = group_of[k]
            if other != mine:
                low, high = min(other, mine), max(other, mine)
                for tensor in members[high]:
                    group_of[tensor] = low
                members[low] += members.pop(high)
    return [sorted(members[k]) for k in sorted(members)]


def _buffer_bytes(target: Inventory, k: int) -> dict[tuple[int, str], int]:
    fragments, names = target.layout.fragments[k], target.layout.buffers[k]
    columns = zip(fragments.rank.tolist(), fragments.buffer.tolist(), fragments.buffer_size.tolist(), strict=True)
    itemsize = target.tensors[k].itemsize
    return {(rank, names[buffer]): -(-size * itemsize // ALIGNMENT) * ALIGNMENT for rank, buffer, size in columns}


def _fullest(buffers: dict[tuple[int, str], int]) -> int:
    by_rank: dict[int, int] = defaultdict(int)
    for (rank, _), n in buffers.items():
        by_rank[rank] += n
    return max(by_rank.values(), default=0)


def _of(target: Inventory, tensors: list[int]) -> Inventory:
    layout = Layout(tuple(target.layout.fragments[k] for k in tensors), tuple(target.layout.buffers[k] for k in tensors))
    names = {name for k in tensors for name in target.layout.buffers[k]}
    aliases = {buffer: memory for buffer, memory in target.aliases.items() if buffer in names}
    return Inventory(tuple(target.tensors[k] for k in tensors), layout, aliases)
