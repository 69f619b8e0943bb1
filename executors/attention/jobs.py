"""The job of a rank in a plan that computes attention: contents and calls over its memory, from what the caller shared."""

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.attention.contents import Contents
from shardroute.executors.interpreting.computers import Computer
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.patterns import Finding
from shardroute.executors.launching.shared_files import SharedFile


class Attending:
    """A Job. Both drivers of a rank have one over the same memory."""

    def __init__(self, shared: SharedFile, programs: Programs, contents: Contents, rank: int) -> None:
        self._arena, self._programs, self._contents, self._rank = shared.arena(rank), programs, contents, rank

        def view(
            owner: int, address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]
        ) -> NDArray[np.generic]:
            return np.ndarray(shape, dtype, shared.memory.data, int(shared.arena_at[owner]) + address, strides)

        self._computer = Computer(programs.calls, contents.attention, contents.tensors, rank, view)

    def fill(self) -> None:
        """Write q, k, v and what else is given into the source buffers."""
        self._contents.fill(self._arena, self._programs.holdings, self._rank)

    def compute(self, step: int) -> None:
        """Do what the rank computes in a step, if anything."""
        self._computer.run(step)

    def verify(self) -> tuple[Finding, float]:
        """Compare the outputs with attention on one device."""
        programs, rank = self._programs, self._rank
        return self._contents.verify(
            self._arena, programs.holdings, rank, int(programs.target_at[rank]), int(programs.slots_at[rank])
        )


def attending(shared: SharedFile, programs: Programs, rank: int) -> Attending | None:
    """The rank's job, or None when the plan computes nothing."""
    contents = Contents.of(shared.columns)
    return None if contents is None else Attending(shared, programs, contents, rank)
