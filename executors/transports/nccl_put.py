"""The transport `nccl-put`: NCCL's put and signal (2.29.2 and later), between windows that all ranks register together.

A put reads and writes windows only, so the plan's weights, its slots and the memory to pack in lie in one window a rank. Up to
2.30.7 a pair of ranks has one signal and one context, which is all that is used here: signals of a pair arrive in order and are
counted. Over NVLink puts are copy-engine copies, over a network the CPU's proxy sends them; neither takes SMs.
"""

from typing import TYPE_CHECKING, Self

import numpy as np

from shardroute.executors.gpus.devices import within
from shardroute.executors.gpus.gpu_stack import why_no_put
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.launching import hubs
from shardroute.executors.launching.hubs import Hub
from shardroute.executors.messages.messages import Messages
from shardroute.executors.messages.signals import lay_signals
from shardroute.executors.transports.communicators import translated
from shardroute.executors.transports.nccl import NcclSums, NcclWorld, check_communicator
from shardroute.executors.transports.nccl import preload as preload
from shardroute.executors.transports.puts import Heap, Parts, PutTransport
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.topologies.errors import InputError

if TYPE_CHECKING:
    from nccl.bindings import nccl

_UINT8 = 1  # ncclUint8 of nccl.h
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC of nccl.h

missing = why_no_put
listen = hubs.listen


def connect(place: Place, deadline: Deadline) -> "NcclPutWorld":
    """As `nccl` does. Raises InputError on all ranks where NCCL says that these GPUs have no host-side put."""
    with hubs.left_on_failure(hubs.meet(place, deadline)) as hub:
        world = NcclPutWorld(hub, place.size, deadline)
        _check_support(world, deadline)
    return world


def join(group: object) -> None:
    """None: nccl4py has no ranks that a program shares without saying so."""


class NcclPutWorld(NcclWorld):
    """The ranks of a communicator, with a window each, as large as the largest plan that was opened needs."""

    def __init__(self, hub: Hub, size: int, deadline: Deadline, before: NcclWorld | None = None) -> None:
        super().__init__(hub, size, deadline, before)
        self.heap = Heap()
        self.window: nccl.Window | None = None

    def again(self, place: Place, deadline: Deadline) -> Self:
        """As of a NcclWorld. Windows are made anew: they are of one communicator."""
        from nccl.bindings import nccl

        world = super().again(place, deadline)
        if self.heap.n_bytes:
            if world.communicator is self.communicator:
                nccl.comm_window_deregister(self.communicator, self.window)
            nccl.mem_free(self.heap.pointer)  # of a communicator that is gone by now
            self.heap.n_bytes = 0
        _check_support(world, deadline)
        return world

    def open(  # type: ignore[override]  # another Enqueuing than NcclWorld's
        self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline
    ) -> PutTransport:
        if not self.numbers.are_in(programs.n_ranks):
            raise InputError(f"transport nccl-put takes plans for all its {self.size} ranks, this one is for {programs.n_ranks}")
        reaches = np.zeros((programs.n_ranks,) * 2, dtype=np.bool_)  # its windows are written by NCCL only
        parts, signals = Parts(programs, messages), lay_signals(programs, messages, reaches, by_queue=False)
        if parts.n_bytes > self.heap.n_bytes:
            within(deadline, lambda: translated(lambda: self._grow(parts.n_bytes), f"a window of {parts.n_bytes} bytes"))
        return PutTransport(
            self.device, NcclPuts(self), self.line_up, programs, messages, arena, self.numbers.of[self.rank], deadline, self.heap,
            parts, signals, reaches,
        )  # fmt: skip

    def _grow(self, n_bytes: int) -> None:
        """Register a larger window. All ranks call it with the same size."""
        from nccl.bindings import nccl

        self.device.use()
        if self.window is not None:
            nccl.comm_window_deregister(self.communicator, self.window)
            nccl.mem_free(self.heap.pointer)
            self.heap.n_bytes = 0
        self.heap.pointer = nccl.mem_alloc(n_bytes)
        self.window = nccl.comm_window_register(self.communicator, self.heap.pointer, n_bytes, _SYMMETRIC)
        self.heap.n_bytes = n_bytes


def _check_support(world: NcclPutWorld, deadline: Deadline) -> None:
    from nccl.bindings import nccl

    try:
        supported = bool(nccl.comm_query_properties(world.communicator).host_rma_support)
    except Exception as error:  # of a library older than the query, which the bindings tell by an exception of their loader
        if "unctionNotFound" not in type(error).__name__:
            raise
        supported = True  # then the first put tells
    lacking = [rank for rank, told in enumerate(world.exchange(bytes([supported]), deadline)) if told == b"\0"]
    if lacking:
        raise InputError(
            f"NCCL has no put and signal between these GPUs, says rank {lacking[0]}: it needs peer access between all GPUs of a "
            "domain, and between domains a network plugin with GPUDirect RDMA; use transport nccl"
        )


class NcclPuts(NcclSums):
    """Puts into the peers' windows; all go by one signal a pair. And NCCL's reductions."""

    def __init__(self, world: NcclPutWorld) -> None:
        from nccl.bindings import nccl

        super().__init__(world)
        self._nccl, self._communicator, self._windows = nccl, world.communicator, world
        self._wait = nccl.WaitSignalDesc()
        self._wait.op_cnt, self._wait.sig_idx, self._wait.ctx = 1, 0, 0

    def put(self, peer: int, offset: int, src: int, n_bytes: int, word: int, value: int, stream: int) -> None:
        at = self._windows.numbers.at(peer)

        def put() -> None:
            self._nccl.put_signal(src, n_bytes, _UINT8, at, self._windows.window, offset, 0, 0, 0, self._communicator, stream)

        translated(put, f"a put of {n_bytes} bytes to rank {peer}")

    def signal(self, peer: int, word: int, value: int, stream: int) -> None:
        at = self._windows.numbers.at(peer)
        translated(lambda: self._nccl.signal(at, 0, 0, 0, self._communicator, stream), f"a signal to rank {peer}")

    def wait(self, peer: int, word: int, value: int, stream: int) -> None:
        self._wait.peer = self._windows.numbers.at(peer)
        translated(lambda: self._nccl.wait_signal(1, self._wait, self._communicator, stream), f"a wait for rank {peer}")

    def at_peer(self, peer: int, offset: int) -> int:
        raise AssertionError("NCCL's windows are written by puts only")

    def check(self) -> None:
        check_communicator(self._communicator)
        self.check_parts()

    def abandon(self) -> None:
        self._windows.abort()
