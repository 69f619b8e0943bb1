"""Spare memory in which new weights arrive, until they are complete and take the place of the old ones at once.

Rule: only fragments are taken over, so gaps between them in the caller's buffers stay what they are. The memory is one piece a
rank, as large as the largest bucket needs; buckets take turns in it.
"""

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.gpus.devices import Box, Device
from shardroute.executors.interpreting.arenas import Lent
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.memories import ALIGNMENT
from shardroute.executors.transports.seam import Deadline, LateError

_NAP_S = 50e-6  # between looks at a copy on a device, which takes far longer


@dataclass(frozen=True, slots=True)
class _Region:
    """Bytes of one buffer that fragments cover: runs of `run` bytes from `offset` on, repeated along dims."""

    buffer: int
    offset: int
    run: int
    count: tuple[int, ...]
    stride: tuple[int, ...]


class Spares:
    """Where in spare memory each buffer of a bucket that is a destination (True in `targets`) arrives.

    offsets   of each buffer, None for those that aren't one
    n_bytes   what all of them take together
    """

    def __init__(
        self, programs: Programs, rank: int, starts: Sequence[int], sizes: Sequence[int], targets: Sequence[bool]
    ) -> None:
        taken = [-(-n // ALIGNMENT) * ALIGNMENT if target else 0 for n, target in zip(sizes, targets, strict=True)]
        ends = np.cumsum([0, *taken]).tolist()
        self.n_bytes: int = ends[-1]
        self.offsets: list[int | None] = [end if target else None for end, target in zip(ends, targets, strict=False)]
        self._sizes = list(sizes)
        self._regions = _regions(programs, rank, starts, sizes)

    def views(self, memory: NDArray[np.uint8], buffers: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        """The buffers, with those of the destination in spare memory instead."""
        return [
            buffer if at is None else memory[at : at + n]
            for buffer, at, n in zip(buffers, self.offsets, self._sizes, strict=True)
        ]

    def take_over(self, memory: NDArray[np.uint8], buffers: Sequence[NDArray[np.uint8]]) -> None:
        """Copy what has arrived into the caller's buffers."""
        arrived = self.views(memory, buffers)
        for each in self._regions:
            src, dst = arrived[each.buffer], buffers[each.buffer]
            if not each.count:
                dst[each.offset : each.offset + each.run] = src[each.offset : each.offset + each.run]
                continue
            shape, strides = (*each.count, each.run), (*each.stride, 1)
            np.copyto(
                np.ndarray(shape, np.uint8, dst.data, each.offset, strides),
                np.ndarray(shape, np.uint8, src.data, each.offset, strides),
            )

    def lent(self, pointer: int, given: Sequence[Lent | None]) -> list[Lent]:
        """What is lent to a transport on a GPU, with the buffers of the destination in spare memory there instead."""
        return [
            each if at is None else Lent(each.start, each.n_bytes, pointer + at, each.owner, each.is_target)
            for each, at in zip(given, self.offsets, strict=True)
            if each is not None
        ]

    def take_over_on(self, device: Device, pointer: int, given: Sequence[Lent | None], deadline: Deadline) -> None:
        """Copy what has arrived into the caller's buffers on a GPU, and return when it is there. Raises LateError."""
        device.use()
        stream, done = device.stream(), device.event()
        for each in self._regions:
            owner, at = given[each.buffer], self.offsets[each.buffer]
            assert owner is not None
            assert at is not None
            src, dst = pointer + at + each.offset, owner.pointer + each.offset
            if each.count:
                device.copy_box(dst, src, Box(each.run, each.count, each.stride, each.stride), stream)
            else:
                device.copy(dst, src, each.run, stream)
        device.record(done, stream)
        while not device.is_done(done):
            if deadline.left_s <= 0:
                raise LateError()
            time.sleep(_NAP_S)


def _regions(programs: Programs, rank: int, starts: Sequence[int], sizes: Sequence[int]) -> list[_Region]:
    """What the rank's destination fragments cover; a buffer that they fill is one region."""
    holdings = programs.holdings
    found: list[list[_Region]] = [[] for _ in sizes]
    covered = [0] * len(sizes)
    for row in holdings.rows(rank, target=True) if rank < programs.n_ranks else ():
        box, address = int(holdings.box[row]), int(holdings.address[row])
        extent, stride = holdings.extent[box].tolist(), holdings.stride[box].tolist()
        if 0 in extent:
            continue
        run = int(holdings.itemsize[box])
        covered_bytes = run * int(np.prod(extent, dtype=np.int64))
        dims = [(n, s) for n, s in zip(extent, stride, strict=True) if n > 1]
        while dims and dims[-1][1] == run:
            run *= dims.pop()[0]
        buffer = bisect_right(starts, address) - 1
        counts, strides = tuple(n for n, _ in dims), tuple(s for _, s in dims)
        found[buffer].append(_Region(buffer, address - starts[buffer], run, counts, strides))
        covered[buffer] += covered_bytes
    whole = [[_Region(k, 0, n, (), ())] if covered[k] == n else found[k] for k, n in enumerate(sizes)]
    return [region for regions in whole for region in regions]
