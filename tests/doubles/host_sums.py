"""Checksums of pieces over doubles: streams of the double of CUDA call torch on the host (cuLaunchHostFunc), for there is no GPU.

Device memory of the double is host memory, so torch sees it as CPU tensors.
"""

import ctypes
from contextlib import AbstractContextManager, nullcontext

import torch

from shardroute.executors.gpus.device_sums import DeviceSums
from shardroute.executors.transports import following

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class HostMemory:
    """The Tensors of the double's memory."""

    def view(self, pointer: int, n_bytes: int) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * n_bytes).from_address(pointer), dtype=torch.uint8)

    def on(self, stream: int) -> AbstractContextManager[object]:
        return nullcontext()


class HostSums(DeviceSums):
    """The same, on the double's streams."""

    def __init__(self, rows, forms, rank, device) -> None:
        super().__init__(rows, forms, rank, HostMemory())
        self._kept: list[object] = []  # a stream may still call them

    def _put(self, row: int, pointer: int, place: int, stream: int, *, sending: bool) -> None:
        if self._tables is None:
            self._tables = self._made(torch.device("cpu"))
        run = _HOST_FUNCTION(lambda _: self._take(self._tables, row, pointer, place, sending=sending))
        self._kept.append(run)
        code = ctypes.CDLL("libcuda.so.1").cuLaunchHostFunc(ctypes.c_void_p(stream), run, None)
        assert code == 0


def take_sums_on_the_host() -> None:
    """Have checksums taken so by every rank that is forked from here, but those of the twin of `torch-nccl`."""
    torch.set_num_threads(1)

    def made(rows, forms, rank, device):
        return DeviceSums(rows, forms, rank, device) if getattr(device, "is_host", False) else HostSums(rows, forms, rank, device)

    following.DeviceSums, following.check_sums_on = made, lambda device: None
