"""The libraries that carry plans between ranks with memory of their own, by name; each is imported when it is asked for.

Rule: the one place where transports are listed. A new one is a module and a line here.
"""

import socket
from collections.abc import Mapping
from importlib import import_module
from typing import Final, Protocol, cast

from shardroute.executors.transports.seam import Deadline, Place, World
from shardroute.topologies.errors import InputError

MPI: Final = "mpi"  # whose ranks can't be forked: its own launcher starts them
LIBRARIES: Final[Mapping[str, str]] = {
    "gloo": "shardroute.executors.transports.gloo",
    MPI: "shardroute.executors.transports.mpi",
    "nccl": "shardroute.executors.transports.nccl",
    "nccl-put": "shardroute.executors.transports.nccl_put",
    "nvshmem": "shardroute.executors.transports.nvshmem",
    "torch-nccl": "shardroute.executors.transports.torch_nccl",
}

ON_GPUS: Final = frozenset({"nccl", "nccl-put", "nvshmem", "torch-nccl"})  # one rank a GPU


class Library(Protocol):
    """What the module of a library offers, see `seam`."""

    def missing(self) -> str | None:
        """Why it can't run here, None if it can; imports nothing heavy."""

    def preload(self) -> None:
        """Import it, before ranks are forked."""

    def listen(self) -> tuple[str, socket.socket]:
        """A rendezvous for ranks that are forked from this process, and what rank 0 must keep open."""

    def connect(self, place: Place, deadline: Deadline) -> World:
        """Find the other ranks."""

    def join(self, group: object) -> World | None:
        """The ranks of a caller's group, or of the library if it is initialised (group None); None if it isn't."""


def load_library(name: str) -> Library:
    """The module of a library. Raises InputError for one that isn't known or can't run here, with the reason."""
    if name not in LIBRARIES:
        raise InputError(f"transport {name!r} is not known; expected one of {', '.join(LIBRARIES)}")
    library = cast(Library, import_module(LIBRARIES[name]))
    reason = library.missing()
    if reason is not None:
        raise InputError(f"transport {name} can't run here: {reason}")
    return library
