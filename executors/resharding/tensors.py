"""The bytes of a caller's tensors: NumPy arrays, torch tensors, and the local parts of DTensors. Never copies.

Rule: torch is imported only when the caller has handed in something of torch's.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardroute.topologies.errors import InputError


@runtime_checkable
class HasLocalTensor(Protocol):
    """A DTensor, or NeMo RL's DTensorRef."""

    _local_tensor: object


def local_bytes(name: str, tensor: object, n_bytes: int) -> NDArray[np.uint8]:
    """A tensor's memory as bytes. Raises InputError unless it is contiguous, on the CPU, and of exactly so many bytes."""
    if isinstance(tensor, HasLocalTensor):
        tensor = tensor._local_tensor
    if isinstance(tensor, np.ndarray):
        if not tensor.flags.c_contiguous or not tensor.flags.writeable:
            raise InputError(f"tensor {name}: expected a contiguous, writable array; make it one with np.ascontiguousarray")
        found: NDArray[np.uint8] = tensor.reshape(-1).view(np.uint8)
    else:
        found = _torch_bytes(name, tensor)
    if len(found) != n_bytes:
        raise InputError(f"tensor {name}: this rank's part has {len(found)} bytes, and the layout gives it {n_bytes}")
    return found


def device_pointer(tensor: object) -> int | None:
    """Where a tensor's memory on a GPU begins, by torch or by the CUDA array interface; None for one that lies elsewhere."""
    if isinstance(tensor, HasLocalTensor):
        tensor = tensor._local_tensor
    if getattr(tensor, "is_cuda", False) and hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    described = getattr(tensor, "__cuda_array_interface__", None)
    return int(described["data"][0]) if isinstance(described, dict) else None


def finish_writes(tensors: Sequence[object]) -> None:
    """Return when what torch's current streams were asked to do before is done: then other streams may read torch's tensors."""
    devices = {tensor.device for tensor in tensors if getattr(tensor, "is_cuda", False) and hasattr(tensor, "device")}
    if devices:
        import torch

        for device in sorted(devices, key=str):
            torch.cuda.current_stream(device).synchronize()


def check_on_device(name: str, tensor: object, n_bytes: int) -> None:
    """Raise InputError unless a tensor on a GPU is contiguous and of exactly so many bytes."""
    if isinstance(tensor, HasLocalTensor):
        tensor = tensor._local_tensor
    if hasattr(tensor, "is_contiguous") and hasattr(tensor, "nbytes"):
        contiguous, found = bool(tensor.is_contiguous()), int(tensor.nbytes)
    else:
        described = getattr(tensor, "__cuda_array_interface__")  # noqa: B009  # no type has it
        contiguous = described.get("strides") is None
        found = int(np.prod(described["shape"], dtype=np.int64)) * np.dtype(described["typestr"]).itemsize
    if not contiguous:
        raise InputError(f"tensor {name}: expected a contiguous tensor, whose own memory can be read and written")
    if found != n_bytes:
        raise InputError(f"tensor {name}: this rank's part has {found} bytes, and the layout gives it {n_bytes}")


def _torch_bytes(name: str, tensor: object) -> NDArray[np.uint8]:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InputError(f"tensor {name}: expected a torch tensor, a DTensor or a NumPy array, found {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise InputError(f"tensor {name} lies on {tensor.device}; this transport moves CPU tensors")
    if not tensor.is_contiguous():
        raise InputError(f"tensor {name}: expected a contiguous tensor, whose own memory can be read and written")
    flat: NDArray[np.uint8] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat
