"""One GPU by NVIDIA's cuda-bindings: the driver's API, so that no CUDA toolkit is needed beside the driver.

Strided boxes go by cuMemcpy2D and 3D on the copy engines: one call moves up to two dims of a box, further dims are loops.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.gpus.devices import Box, along
from shardroute.executors.interpreting.arenas import Lent
from shardroute.executors.reasons import first_line
from shardroute.topologies.errors import InputError, RunError

if TYPE_CHECKING:
    import torch
    from cuda.bindings import driver

_MOST_PITCH = 2**31 - 1  # CU_DEVICE_ATTRIBUTE_MAX_PITCH of every device since compute capability 2.0
_ALIGNMENT = 256
_CONNECTIONS = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # 1 to 32, and 8 by default


def count_devices() -> int:
    """GPUs that this process can use. Raises InputError with the reason where the driver can't be used at all."""
    try:
        from cuda.bindings import driver

        _start()
        return int(_check(driver.cuDeviceGetCount(), "cuDeviceGetCount")[0])
    except (ImportError, RuntimeError) as error:  # cuda-bindings raises the latter where there is no libcuda.so.1
        raise InputError(f"the NVIDIA driver can't be used ({first_line(error)})") from error


def _start() -> None:
    """Start the driver, which reads then how many streams a device runs beside each other."""
    from cuda.bindings import driver

    os.environ.setdefault(*_CONNECTIONS)
    _check(driver.cuInit(0), "cuInit")


def device_ids() -> list[str]:
    """What tells the GPUs that this process can use from each other, also between processes that see others."""
    from cuda.bindings import driver

    found = []
    for ordinal in range(count_devices()):
        device = _check(driver.cuDeviceGet(ordinal), "cuDeviceGet")[0]
        found.append(bytes(_check(driver.cuDeviceGetUuid(device), "cuDeviceGetUuid")[0].bytes).hex())
    return found


class CudaDevice:
    """A Device on one GPU, in its primary context, which NCCL, NVSHMEM and torch share."""

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        _start()
        self.ordinal = ordinal
        self._device = _check(driver.cuDeviceGet(ordinal), "cuDeviceGet")[0]
        self._context = _check(driver.cuDevicePrimaryCtxRetain(self._device), "cuDevicePrimaryCtxRetain")[0]
        self.use()

    @property
    def name(self) -> str:
        found = _check(self._driver.cuDeviceGetName(128, self._device), "cuDeviceGetName")[0]
        return str(bytes(found).split(b"\0")[0].decode())

    @property
    def n_sms(self) -> int:
        """Its multiprocessors."""
        which = self._driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(_check(self._driver.cuDeviceGetAttribute(which, self._device), "cuDeviceGetAttribute")[0])

    def use(self) -> None:
        _check(self._driver.cuCtxSetCurrent(self._context), "cuCtxSetCurrent")

    def allocate(self, n_bytes: int) -> int:
        return int(_check(self._driver.cuMemAlloc(max(n_bytes, _ALIGNMENT)), f"cuMemAlloc of {n_bytes} bytes")[0])

    def free(self, pointer: int) -> None:
        _check(self._driver.cuMemFree(pointer), "cuMemFree")

    def adopt(self, lent: Sequence[Lent]) -> None:
        """Nothing: a pointer is all that it takes."""

    def stream(self) -> int:
        flags = self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(_check(self._driver.cuStreamCreate(flags), "cuStreamCreate")[0])

    def event(self) -> int:
        return int(_check(self._driver.cuEventCreate(0), "cuEventCreate")[0])

    def record(self, event: int, stream: int) -> None:
        _check(self._driver.cuEventRecord(event, stream), "cuEventRecord")

    def follow(self, stream: int, event: int) -> None:
        _check(self._driver.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent")

    def is_done(self, event: int) -> bool:
        (code,) = self._driver.cuEventQuery(event)
        if code == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        _check((code,), "cuEventQuery")
        return True

    def elapsed_s(self, first: int, last: int) -> float:
        return 1e-3 * float(_check(self._driver.cuEventElapsedTime(first, last), "cuEventElapsedTime")[0])

    def copy(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        _check(self._driver.cuMemcpyAsync(dst, src, n_bytes, stream), "cuMemcpyAsync")

    def copy_box(self, dst: int, src: int, box: Box, stream: int) -> None:
        row, layer = _engine_dims(box)
        rest = [d for d in range(len(box.count)) if d not in (row, layer)]
        count, a, b = ([x[d] for d in rest] for x in (box.count, box.src_stride, box.dst_stride))
        for src_offset, dst_offset in along(count, a, b):
            if row is None:
                self.copy(dst + dst_offset, src + src_offset, box.run, stream)
            elif layer is None:
                self._copy_2d(dst + dst_offset, src + src_offset, box, row, stream)
            else:
                self._copy_3d(dst + dst_offset, src + src_offset, box, row, layer, stream)

    def upload(self, dst: int, data: NDArray[np.uint8], stream: int) -> None:
        _check(self._driver.cuMemcpyHtoDAsync(dst, data.ctypes.data, data.nbytes, stream), "cuMemcpyHtoDAsync")

    def download(self, data: NDArray[np.uint8], src: int, stream: int) -> None:
        _check(self._driver.cuMemcpyDtoHAsync(data.ctypes.data, src, data.nbytes, stream), "cuMemcpyDtoHAsync")

    def view(self, pointer: int, n_bytes: int) -> "torch.Tensor":
        """Bytes from a pointer, as a tensor of torch's: both work in the primary context."""
        import torch

        return torch.as_tensor(_Bytes(pointer, n_bytes), device=torch.device("cuda", self.ordinal))

    def on(self, stream: int) -> "torch.cuda.StreamContext":
        """A context in which torch puts its work on the stream."""
        import torch

        device = torch.device("cuda", self.ordinal)
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device))  # type: ignore[no-untyped-call]  # torch's

    def begin_capture(self, stream: int) -> None:
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _check(self._driver.cuStreamBeginCapture(stream, mode), "cuStreamBeginCapture")

    def end_capture(self, stream: int) -> int:
        graph = _check(self._driver.cuStreamEndCapture(stream), "cuStreamEndCapture")[0]
        return int(_check(self._driver.cuGraphInstantiate(graph, 0), "cuGraphInstantiate")[0])

    def launch(self, graph: int, stream: int) -> None:
        _check(self._driver.cuGraphLaunch(graph, stream), "cuGraphLaunch")

    def _copy_2d(self, dst: int, src: int, box: Box, row: int, stream: int) -> None:
        task = self._driver.CUDA_MEMCPY2D()
        self._fill(task, dst, src, box, row)
        _check(self._driver.cuMemcpy2DAsync(task, stream), "cuMemcpy2DAsync")

    def _copy_3d(self, dst: int, src: int, box: Box, row: int, layer: int, stream: int) -> None:
        task = self._driver.CUDA_MEMCPY3D()
        self._fill(task, dst, src, box, row)
        task.srcHeight = box.src_stride[layer] // box.src_stride[row]
        task.dstHeight = box.dst_stride[layer] // box.dst_stride[row]
        task.Depth = box.count[layer]
        _check(self._driver.cuMemcpy3DAsync(task, stream), "cuMemcpy3DAsync")

    def _fill(self, task: "driver.CUDA_MEMCPY2D | driver.CUDA_MEMCPY3D", dst: int, src: int, box: Box, row: int) -> None:
        kind = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        task.srcMemoryType = task.dstMemoryType = kind
        task.srcDevice, task.dstDevice = src, dst
        task.srcPitch, task.dstPitch = box.src_stride[row], box.dst_stride[row]
        task.WidthInBytes, task.Height = box.run, box.count[row]


class _Bytes:
    """Memory on a device, as the CUDA array interface describes it."""

    def __init__(self, pointer: int, n_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (n_bytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3
        }  # fmt: skip


def _engine_dims(box: Box) -> tuple[int | None, int | None]:
    """The dims that one call walks as rows and as layers: those that leave the fewest calls."""
    best: tuple[int, int | None, int | None] = (1, None, None)
    dims = range(len(box.count))
    for row in dims:
        strides = (box.src_stride[row], box.dst_stride[row])
        if not all(box.run <= stride <= _MOST_PITCH for stride in strides):
            continue
        if box.count[row] > best[0]:
            best = (box.count[row], row, None)
        for layer in dims:
            layers = (box.src_stride[layer], box.dst_stride[layer])
            fits = layer != row and all(
                big % small == 0 and big // small >= box.count[row] for big, small in zip(layers, strides, strict=True)
            )
            if fits and box.count[row] * box.count[layer] > best[0]:
                best = (box.count[row] * box.count[layer], row, layer)
    return best[1], best[2]


def _check(result: tuple[object, ...], what: str) -> "tuple[driver.Any, ...]":
    code, *values = result
    if int(code):  # type: ignore[call-overload]  # an enum of cuda-bindings, which has no types
        raise RunError(f"{what} failed: {getattr(code, 'name', code)}")
    return tuple(values)
