"""The job of a rank in a plan that computes attention on CPUs: contents, and calls over host memory."""

import ctypes
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.attention import kernels
from shardroute.executors.attention.contents import Contents
from shardroute.executors.attention.floats import HOST_DTYPES
from shardroute.executors.attention.kernels import Floats
from shardroute.executors.attention.seam import Arithmetic
from shardroute.executors.interpreting.computers import Computer
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.patterns import Finding
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.shares import Told

if TYPE_CHECKING:
    import torch


# Options of mallopt (malloc.h): one arena for all threads, blocks up to 32 MiB (its most) from the heap, the heap never trimmed.
_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1
_KEEP: Final = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 32 * 2**20), (_TRIM_THRESHOLD, 2**31 - 1))


class Attending:
    """A Job. `memory` has the arenas, each from its place in `arena_at` on; of another rank's only what is added up is read."""

    def __init__(
        self, memory: NDArray[np.uint8], arena_at: Ints, programs: Programs, contents: Contents, rank: int
    ) -> None:
        first = int(arena_at[rank])
        self._arena = memory[first : first + int(programs.arena_bytes[rank])]
        self._programs, self._contents, self._rank = programs, contents, rank

        def view(owner: int, address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> Floats:
            return np.ndarray(shape, HOST_DTYPES[dtype], memory.data, int(arena_at[owner]) + address, strides)

        def torch_view(
            owner: int, address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]
        ) -> "torch.Tensor":
            import torch

            tensor = torch.from_numpy(view(owner, address, dtype, shape, strides))
            return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor

        call = (programs.calls, contents.attention, contents.tensors, rank)
        self._computer: Computer[Floats] | Computer[torch.Tensor]
        if contents.arithmetic is Arithmetic.NUMPY:
            self._computer = Computer(*call, view, kernels)
        else:
            from shardroute.executors.attention import torch_kernels

            self._computer = Computer(*call, torch_view, torch_kernels)

    @classmethod
    def alone(cls, memory: NDArray[np.uint8], programs: Programs, contents: Contents, rank: int) -> "Attending":
        """The job of a rank whose memory is its own."""
        return cls(memory, np.zeros_like(programs.arena_bytes), programs, contents, rank)

    def fill(self, told: Told) -> None:
        """Write q, k, v and what else is given into the source buffers."""
        self._contents.fill(self._arena, self._programs.holdings, self._rank, told)

    def computes(self, step: int) -> bool:
        """Whether the rank computes anything in a step."""
        return self._computer.computes(step)

    def compute(self, step: int) -> None:
        """Do what the rank computes in a step, if anything."""
        self._computer.run(step)

    def verify(self, told: Told) -> tuple[Finding, float]:
        """Compare the outputs with attention on one device."""
        programs, rank = self._programs, self._rank
        ends = int(programs.target_at[rank]), int(programs.slots_at[rank])
        return self._contents.verify(self._arena, programs.holdings, rank, *ends, told)


def load_arithmetic(arithmetic: Arithmetic) -> None:
    """Import what computes, with one thread a process, before processes are forked, and keep the memory of its scores.

    Left alone, glibc gives the blocks of scores back to the system after every operation, and up to a fifth of the time of
    attention goes into getting them again page by page.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; elsewhere malloc does as it does
    for option, value in _KEEP:
        if set_option is not None:
            set_option(option, value)
    if arithmetic is Arithmetic.TORCH:
        import torch

        torch.set_num_threads(1)
