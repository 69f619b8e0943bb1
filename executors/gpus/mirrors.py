"""A plan's weights on a device beside the host memory that they are filled and verified in.

Rule: only source fragments and target buffers cross, before and after a run, never within one.
"""

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.gpus.devices import Device, Memory
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.planner.layouts.fragments import Ints

Region = tuple[int, int]  # address and length


class Mirror:
    """Both copies of one rank's memory."""

    def __init__(self, device: Device, programs: Programs, rank: int, arena: Arena, memory: Memory, stream: int) -> None:
        self._device, self._arena, self._memory, self._stream = device, arena, memory, stream
        self._sources = source_regions(programs, rank)
        self._target = (int(programs.target_at[rank]), int(programs.slots_at[rank]))

    def upload(self) -> None:
        """Bring source fragments, and what lies in the target buffers, to the device; host memory must stay until `done`."""
        for address, n in self._inside(self._sources) + self._targets():
            self._device.upload(self._memory.at(address), self._arena.bytes(address, n), self._stream)

    def download(self) -> None:
        """Bring the target buffers back."""
        for address, n in self._targets():
            self._device.download(self._arena.bytes(address, n), self._memory.at(address), self._stream)

    def _targets(self) -> list[Region]:
        first, last = self._target
        return self._inside([(first, last - first)])

    def _inside(self, regions: list[Region]) -> list[Region]:
        """The parts of regions that buffers have."""
        found = []
        for start, length in self._arena.spans():
            for address, n in regions:
                first, last = max(start, address), min(start + length, address + n)
                if first < last:
                    found.append((first, last - first))
        return found


def source_regions(programs: Programs, rank: int) -> list[Region]:
    """Where the rank's source fragments lie, as few regions as they make."""
    holdings = programs.holdings
    rows = np.arange(int(holdings.ptr[rank]), int(holdings.ptr[rank + 1]))
    rows = rows[~holdings.target[rows]]
    first, last = _reach(programs, rows)
    order = np.argsort(first, kind="stable")
    first, last = first[order], np.maximum.accumulate(last[order]) if len(last) else last
    if not len(first):
        return []
    opens = np.concatenate([[True], first[1:] > last[:-1]])
    starts = np.flatnonzero(opens)
    ends = last[np.append(starts[1:], len(first)) - 1]
    return [(a, b - a) for a, b in zip(first[starts].tolist(), ends.tolist(), strict=True)]


def _reach(programs: Programs, rows: NDArray[np.int64]) -> tuple[Ints, Ints]:
    holdings = programs.holdings
    box = holdings.box[rows]
    empty = (holdings.extent[box] == 0).any(axis=1)
    steps = (holdings.extent[box] - 1) * holdings.stride[box]
    first = holdings.address[rows] + np.minimum(steps, 0).sum(axis=1)
    last = holdings.address[rows] + np.maximum(steps, 0).sum(axis=1) + holdings.itemsize[box]
    return first[~empty], last[~empty]
