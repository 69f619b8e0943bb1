"""`torch-nccl` with CPU tensors over gloo: the same groups, streams that do everything at once."""

from shardroute.executors import gloo, torch_nccl
from shardroute.executors.torch_nccl import TorchWorld
from shardroute.executors.transports import Deadline, Place

listen, preload, missing = gloo.listen, gloo.preload, gloo.missing


def connect(place: Place, deadline: Deadline) -> TorchWorld:
    return torch_nccl.over(gloo.connect(place, deadline), deadline, "cpu")
