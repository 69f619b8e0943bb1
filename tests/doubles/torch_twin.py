"""`torch-nccl` with CPU tensors over gloo: the same groups, streams that do everything at once."""

from shardroute.executors.transports import gloo, torch_nccl
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.executors.transports.torch_nccl import TorchWorld

listen, preload, missing = gloo.listen, gloo.preload, gloo.missing


def connect(place: Place, deadline: Deadline) -> TorchWorld:
    return torch_nccl.over(gloo.connect(place, deadline), deadline, "cpu")
