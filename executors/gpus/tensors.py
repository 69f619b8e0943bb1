"""Devices on whose memory torch can work."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from shardroute.topologies.errors import InputError

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Tensors(Protocol):
    """A device whose memory torch can work on."""

    def view(self, pointer: int, n_bytes: int) -> "torch.Tensor":
        """Bytes from a pointer, as a tensor of uint8."""

    def on(self, stream: int) -> "AbstractContextManager[object]":
        """A context in which torch puts its work on the stream."""


def tensors_of(device: object) -> Tensors:
    """The device as torch works on it. Raises InputError for one that torch can't."""
    if not isinstance(device, Tensors):
        raise InputError(f"{type(device).__name__} has no memory that torch works on")
    return device
