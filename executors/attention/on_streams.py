"""What a rank of a GPU transport computes, put on the transport's streams by torch.

Rule: nothing here waits. Tensors are views of the rank's memory on its device, made anew when that has moved.
"""

import importlib.util
from typing import TYPE_CHECKING, Final

from shardroute.executors.attention import torch_kernels
from shardroute.executors.attention.contents import Contents
from shardroute.executors.gpus.devices import Memory
from shardroute.executors.gpus.tensors import Tensors
from shardroute.executors.interpreting.computers import Computer
from shardroute.executors.interpreting.interpret import Programs

if TYPE_CHECKING:
    import torch

_TORCH_DTYPES: Final = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


class TorchComputing:
    """A Computing of `seam`: the calls of one rank, by torch."""

    def __init__(self, programs: Programs, contents: Contents, rank: int, device: Tensors) -> None:
        self._programs, self._contents, self._rank, self._device = programs, contents, rank, device
        self._computer: Computer[torch.Tensor] | None = None
        self._laid: object = None

    def put(self, step: int, memory: Memory, stream: int) -> None:
        """Put what the rank computes in a step on a stream, if anything."""
        if self._computer is None or self._laid != memory.layout:
            self._computer, self._laid = self._made(memory), memory.layout
        with self._device.on(stream):
            self._computer.run(step)

    def _made(self, memory: Memory) -> "Computer[torch.Tensor]":
        import torch

        contents = self._contents

        def view(
            owner: int, address: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]
        ) -> "torch.Tensor":
            of: torch.dtype = getattr(torch, _TORCH_DTYPES[dtype])
            size = of.itemsize
            n_bytes = size + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
            numbers = self._device.view(memory.at(address), n_bytes).view(of)
            return numbers.as_strided(shape, [stride // size for stride in strides])

        return Computer(self._programs.calls, contents.attention, contents.tensors, self._rank, view, torch_kernels)


def why_no_attention() -> str | None:
    """Why attention can't be computed on this machine's GPUs, None if it can. Imports torch, which tells by its build."""
    if importlib.util.find_spec("torch") is None:
        return "attention on GPUs is computed by torch, which isn't installed (pip install torch, a build for CUDA)"
    import torch

    if torch.version.cuda is None:
        return f"attention on GPUs is computed by torch, and torch {torch.__version__} was built without CUDA"
    return None
