"""The transport `nccl`: NCCL's grouped sends and receives, by NVIDIA's nccl4py. One rank a GPU.

The bindings are called with plain pointers, so that memory is the driver's and no tensor library is needed. Calls that may block
in NCCL (the first group with a peer connects to it) are made under the run's deadline, see `devices.within`.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardroute.executors.gpus.areas import Areas
from shardroute.executors.gpus.cuda import CudaDevice, device_ids
from shardroute.executors.gpus.devices import within
from shardroute.executors.gpus.gpu_stack import why_no_nccl
from shardroute.executors.gpus.local_devices import local_device
from shardroute.executors.interpreting.adding import CODES, HOST_DTYPES
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.launching import hubs
from shardroute.executors.launching.hubs import Hub
from shardroute.executors.messages.library_sums import Shape, Summation
from shardroute.executors.messages.messages import Messages
from shardroute.executors.transports.grouped import GroupedTransport, Part
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.executors.transports.summing import Sum
from shardroute.topologies.errors import RunError

if TYPE_CHECKING:
    from nccl.bindings import nccl

Result = TypeVar("Result")

_ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES of nccl.h
_UINT8 = 1  # ncclUint8 of nccl.h
_DTYPES = {CODES["f16"]: 6, CODES["f32"]: 7, CODES["f64"]: 8, CODES["bf16"]: 9}  # ncclDataType_t of nccl.h
_SUM = 0  # ncclSum of nccl.h
_NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR of nccl.h

missing = why_no_nccl
listen = hubs.listen


def preload() -> None:
    """Import nccl4py, which loads NCCL. It initialises nothing, so ranks may be forked afterwards."""
    import nccl.bindings.nccl  # noqa: F401  # for its effect


def connect(place: Place, deadline: Deadline) -> "NcclWorld":
    """Find the other ranks, take the GPU of this rank's place on its host, and make a communicator."""
    hub = hubs.meet(place, deadline)
    return NcclWorld(hub, place.size, deadline)


def join(group: object) -> None:
    """None: nccl4py has no ranks that a program shares without saying so."""


class NcclWorld:
    """The ranks of a communicator. `hub` carries what isn't of a plan."""

    def __init__(self, hub: Hub, size: int, deadline: Deadline) -> None:
        self._hub = hub
        self.rank, self.size, self.key = hub.rank, size, id(self)
        self.device = CudaDevice(local_device(self, device_ids(), deadline))
        self.communicator = _make_communicator(self, deadline)
        self._areas = Areas(self.device)
        self.parts: dict[tuple[int, ...], nccl.Comm | None] = {}  # communicators of some of the ranks; None where this one isn't

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        return self._hub.exchange(payload, deadline)

    def open(self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline) -> GroupedTransport:
        pairs = NcclBroadcasts(self) if programs.n_ranks == self.size else NcclPairs(self.communicator)
        return GroupedTransport(
            self.device, pairs, self.line_up, programs, messages, arena, self.rank, deadline, self._areas
        )

    def close(self) -> None:
        from nccl.bindings import nccl

        self.line_up(Deadline.after(_CLOSE_S))  # a communicator is destroyed when nobody uses it
        for communicator in (*self.parts.values(), self.communicator):
            if communicator is not None:
                nccl.comm_destroy(communicator)
        self._hub.close()

    def abandon(self) -> None:
        self._hub.close()

    def line_up(self, deadline: Deadline) -> None:
        """Return when all ranks have called it."""
        self._hub.exchange(b"", deadline)


_CLOSE_S = 30.0


def _make_communicator(world: NcclWorld, deadline: Deadline) -> "nccl.Comm":
    from nccl.bindings import nccl

    mine = nccl.get_unique_id() if world.rank == 0 else None
    told = world.exchange(ctypes.string_at(mine.ptr, _ID_BYTES) if mine is not None else b"", deadline)[0]
    shared = nccl.UniqueId.from_buffer(bytearray(told))

    def make() -> "nccl.Comm":
        world.device.use()
        return nccl.comm_init_rank_config(world.size, shared, world.rank, nccl.Config())

    return within(deadline, lambda: translated(make, "making a communicator"))


class NcclPairs:
    """Groups by ncclSend and ncclRecv."""

    def __init__(self, communicator: "nccl.Comm") -> None:
        self._communicator = communicator

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], stream: int) -> None:
        from nccl.bindings import nccl

        def put() -> None:
            nccl.group_start()
            try:
                for pointer, n_bytes, peer in sends:
                    nccl.send(pointer, n_bytes, _UINT8, peer, self._communicator, stream)
                for pointer, n_bytes, peer in receives:
                    nccl.recv(pointer, n_bytes, _UINT8, peer, self._communicator, stream)
            finally:
                nccl.group_end()

        translated(put, f"a group of {len(sends)} sends and {len(receives)} receives")

    def check(self) -> None:
        check_communicator(self._communicator)

    def abandon(self) -> None:
        from nccl.bindings import nccl

        nccl.comm_abort(self._communicator)


class NcclSums:
    """Reductions among some of the ranks. A world splits a communicator off for each set of ranks, once."""

    def __init__(self, world: NcclWorld) -> None:
        self._world = world

    def prepare(self, ranks: Sequence[tuple[int, ...]]) -> None:
        from nccl.bindings import nccl

        world = self._world
        world.device.use()
        for members in ranks:
            if members in world.parts:
                continue
            color, config = 0 if world.rank in members else _NO_COLOR, nccl.Config()
            split = partial(nccl.comm_split, world.communicator, color, world.rank, config.ptr)
            made = translated(split, f"a communicator of {len(members)} ranks")
            world.parts[members] = made if color == 0 else None

    def check_parts(self) -> None:
        """Raise RunError if one of these communicators has failed."""
        for communicator in self._world.parts.values():
            if communicator is not None:
                check_communicator(communicator)

    def abandon_parts(self) -> None:
        """End what waits among some of the ranks."""
        from nccl.bindings import nccl

        for communicator in self._world.parts.values():
            if communicator is not None:
                nccl.comm_abort(communicator)

    def why_not(self, sums: Sequence[Summation]) -> None:
        """None: NCCL reduces any run of the dtypes that are added up."""

    def add_up(self, sums: Sequence[Sum], stream: int) -> None:
        from nccl.bindings import nccl

        def put() -> None:
            nccl.group_start()
            try:
                for each in sums:
                    communicator, dtype = self._world.parts[each.ranks], _DTYPES[each.code]
                    n = each.n_bytes // np.dtype(HOST_DTYPES[each.code]).itemsize
                    match each.shape:
                        case Shape.ALL:
                            nccl.all_reduce(each.src, each.dst, n, dtype, _SUM, communicator, stream)
                        case Shape.SCATTER:
                            nccl.reduce_scatter(each.src, each.dst, n, dtype, _SUM, communicator, stream)
                        case Shape.ROOT:
                            root = each.ranks.index(each.root)
                            nccl.reduce(each.src, each.dst, n, dtype, _SUM, root, communicator, stream)
            finally:
                nccl.group_end()

        translated(put, f"a group of {len(sums)} reductions")


class NcclBroadcasts(NcclSums, NcclPairs):
    """Groups, and broadcasts and reductions among some of the ranks."""

    def __init__(self, world: NcclWorld) -> None:
        NcclSums.__init__(self, world)
        NcclPairs.__init__(self, world.communicator)

    def broadcast(self, parts: Sequence[tuple[int, int, int, tuple[int, ...]]], stream: int) -> None:
        from nccl.bindings import nccl

        def put() -> None:
            nccl.group_start()
            try:
                for pointer, n_bytes, root, ranks in parts:
                    communicator = self._world.parts[ranks]
                    nccl.broadcast(pointer, pointer, n_bytes, _UINT8, ranks.index(root), communicator, stream)
            finally:
                nccl.group_end()

        translated(put, f"a group of {len(parts)} broadcasts")

    def check(self) -> None:
        super().check()
        self.check_parts()

    def abandon(self) -> None:
        self.abandon_parts()
        super().abandon()


def check_communicator(communicator: "nccl.Comm") -> None:
    """Raise RunError if NCCL has failed since it was asked last."""
    from nccl.bindings import nccl

    code = int(nccl.comm_get_async_error(communicator))
    if code not in (0, 7):  # ncclSuccess, ncclInProgress of nccl.h
        raise RunError(f"NCCL failed (ncclResult {code}): {nccl.get_last_error(communicator)}")


def translated(call: Callable[[], Result], what: str) -> Result:
    """What a call of the bindings returns; RunError in place of what they raise."""
    from nccl.bindings import nccl

    try:
        return call()
    except nccl.NCCLError as error:
        raise RunError(f"NCCL failed at {what}: {error}; NCCL_DEBUG=INFO says more") from error
