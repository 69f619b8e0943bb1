"""Which GPU of its host is whose."""

import platform
from collections.abc import Sequence

from shardroute.executors.transports.seam import Deadline, World
from shardroute.topologies.errors import InputError

_ONE = 2  # entries of a rank that sees one GPU: its host, and that


def local_device(world: World, ids: Sequence[str], deadline: Deadline) -> int:
    """The GPU of this rank, as its place in `ids`, the GPUs that this process sees: the first that no earlier rank there has.

    So ranks that all see the same GPUs take one each in turn, and those to which a launcher shows one each take that, before the
    others choose. Raises InputError on all ranks when one finds none, for two ranks of NCCL can't share a GPU.
    """
    told = [text.decode().split("\0") for text in world.exchange("\0".join([platform.node(), *ids]).encode(), deadline)]
    taken: dict[tuple[str, str], int] = {}
    for rank, (host, *seen) in sorted(enumerate(told), key=lambda each: len(each[1]) > _ONE):
        free = next((number for number in seen if (host, number) not in taken), None)
        if free is None:
            n_ranks = sum(other == host for other, *_ in told)
            raise InputError(
                f"host {host} has {n_ranks} ranks and {len(seen)} GPUs that rank {rank} can use; start one rank a GPU, and look "
                "at CUDA_VISIBLE_DEVICES"
            )
        taken[host, free] = rank
    mine = next(number for (_, number), rank in taken.items() if rank == world.rank)
    return list(ids).index(mine)
