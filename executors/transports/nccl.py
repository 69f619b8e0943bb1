"""The transport `nccl`: NCCL's grouped sends and receives, by NVIDIA's nccl4py. One rank a GPU.

The bindings are called with plain pointers, so that memory is the driver's and no tensor library is needed. Calls that may block
in NCCL (the first group with a peer connects to it) are made under the run's deadline, see `devices.within`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

import numpy as np

from shardroute.executors.gpus.areas import Areas
from shardroute.executors.gpus.cuda import CudaDevice, device_ids
from shardroute.executors.gpus.gpu_stack import why_no_nccl
from shardroute.executors.gpus.local_devices import local_device
from shardroute.executors.interpreting.adding import CODES, HOST_DTYPES
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.launching import hubs
from shardroute.executors.launching.hubs import Hub
from shardroute.executors.messages.library_sums import Shape, Summation
from shardroute.executors.messages.messages import Messages
from shardroute.executors.transports.communicators import Communicator, make_communicator, translated
from shardroute.executors.transports.grouped import GroupedTransport, Part
from shardroute.executors.transports.numbers import Numbers
from shardroute.executors.transports.seam import Deadline, LateError, Place
from shardroute.executors.transports.summing import Sum
from shardroute.planner.wires import MOST_CHANNELS, channels_of
from shardroute.topologies.errors import RunError

if TYPE_CHECKING:
    from nccl.bindings import nccl

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
    with hubs.left_on_failure(hubs.meet(place, deadline)) as hub:
        return NcclWorld(hub, place.size, deadline)


def join(group: object) -> None:
    """None: nccl4py has no ranks that a program shares without saying so."""


class NcclWorld:
    """The ranks of a communicator. `hub` carries what isn't of a plan. `before` is the world that this rank was in, if any: it
    keeps its GPU and its memory there, and the communicator serves again where NCCL can shrink or grow it.
    """

    def __init__(self, hub: Hub, size: int, deadline: Deadline, before: "NcclWorld | None" = None) -> None:
        self._hub = hub
        self.rank, self.size, self.key = hub.rank, size, id(self)
        self.numbers = Numbers(range(size))
        self.is_aborted = self._is_left = False
        if before is None:
            ids = device_ids()
            ordinal = local_device(self, ids, deadline)
            self._device_id, self.device = ids[ordinal], CudaDevice(ordinal)
            self._areas = Areas(self.device)
        else:
            self._device_id, self.device, self._areas = before._device_id, before.device, before._areas
            local_device(self, [self._device_id], deadline)  # so that those who come take others
        had: Communicator | None = None if before is None or before.is_aborted else before._made
        self._made: Communicator = make_communicator(self, had, deadline)
        self.communicator = self._made.handle
        self.parts: dict[tuple[int, ...], nccl.Comm | None] = {}  # communicators of some of the ranks; None where this one isn't
        # Communicators of all of them, by the place of a wire in its plan, and its channels.
        self.wires: dict[tuple[int, int], nccl.Comm] = {(0, MOST_CHANNELS): self.communicator}

    @property
    def parts_s(self) -> Mapping[str, float]:
        """Seconds that each part of making its communicator took."""
        return self._made.parts_s

    def again(self, place: Place, deadline: Deadline) -> Self:
        """The world of the ranks that are there now, with what they can keep of this one, which is left. Those that come call
        `connect`.
        """
        self._hub.close()
        with hubs.left_on_failure(hubs.meet(place, deadline)) as hub:
            world = type(self)(hub, place.size, deadline, self)
        self._is_left = True
        self._destroy(keep=world.communicator, together=place.size >= self.size)
        return world

    def leave(self) -> None:
        """Go without waiting for those that stay, who call `again`."""
        self.abort()
        self._is_left = True
        self._hub.close()

    def rename(self, numbers: Sequence[int]) -> None:
        """Call rank i numbers[i], in plans that are opened and in errors from now on."""
        self.numbers = Numbers(numbers)
        self._hub.rename(numbers)

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        return self._hub.exchange(payload, deadline)

    def open(self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline) -> GroupedTransport:
        pairs = NcclBroadcasts(self) if self.numbers.are_in(programs.n_ranks) else NcclPairs(self)
        return GroupedTransport(
            self.device, pairs, self.line_up, programs, messages, arena, self.numbers.of[self.rank], deadline, self._areas
        )

    def close(self) -> None:
        if self._is_left:
            return
        together = True
        try:
            self.line_up(Deadline.after(_CLOSE_S))  # a communicator is destroyed when nobody uses it
        except (RunError, LateError):
            together = False
        self._destroy(together=together)
        self._hub.close()

    def _destroy(self, *, keep: "nccl.Comm | None" = None, together: bool) -> None:
        """Destroy all communicators, but the one that is kept. That takes all ranks of a host; without them, abort each."""
        from nccl.bindings import nccl

        if self.is_aborted:
            return
        for communicator in (*self.parts.values(), *self.wires.values()):
            if communicator is not None and communicator is not keep:
                (nccl.comm_destroy if together else nccl.comm_abort)(communicator)

    def abort(self) -> None:
        """End what waits on streams for other ranks; the communicators serve no more."""
        from nccl.bindings import nccl

        self.is_aborted = True
        for communicator in (*self.parts.values(), *self.wires.values()):
            if communicator is not None:
                nccl.comm_abort(communicator)

    def abandon(self) -> None:
        self._hub.close()

    def line_up(self, deadline: Deadline) -> None:
        """Return when all ranks have called it."""
        self._hub.exchange(b"", deadline)


_CLOSE_S = 30.0


class NcclPairs:
    """Groups by ncclSend and ncclRecv, all on one communicator: NCCL runs them one after the other, whichever wire they are of.
    That is for plans that some ranks of the world have no part in, without whom no communicator can be split off.
    """

    def __init__(self, world: NcclWorld) -> None:
        self._world = world
        self._wires: list[nccl.Comm] = []

    def connect(self, wires: Sequence[int]) -> None:
        self._wires = [self._world.communicator] * len(wires)

    def exchange(self, sends: Sequence[Part], receives: Sequence[Part], wire: int, stream: int) -> None:
        from nccl.bindings import nccl

        at, communicator = self._world.numbers.at, self._wires[wire]

        def put() -> None:
            nccl.group_start()
            try:
                for pointer, n_bytes, peer in sends:
                    nccl.send(pointer, n_bytes, _UINT8, at(peer), communicator, stream)
                for pointer, n_bytes, peer in receives:
                    nccl.recv(pointer, n_bytes, _UINT8, at(peer), communicator, stream)
            finally:
                nccl.group_end()

        translated(put, f"a group of {len(sends)} sends and {len(receives)} receives")

    def check(self) -> None:
        for communicator in self._wires:
            check_communicator(communicator)

    def abandon(self) -> None:
        self._world.abort()


class NcclSums:
    """Reductions among some of the ranks. A world splits a communicator off for each set of ranks, once."""

    def __init__(self, world: NcclWorld) -> None:
        self._world = world

    def prepare(self, ranks: Sequence[tuple[int, ...]]) -> None:
        from nccl.bindings import nccl

        world = self._world
        world.device.use()
        for members in map(world.numbers.all_at, ranks):
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

    def why_not(self, sums: Sequence[Summation]) -> None:
        """None: NCCL reduces any run of the dtypes that are added up."""

    def add_up(self, sums: Sequence[Sum], stream: int) -> None:
        from nccl.bindings import nccl

        def put() -> None:
            nccl.group_start()
            try:
                for each in sums:
                    members, dtype = self._world.numbers.all_at(each.ranks), _DTYPES[each.code]
                    communicator = self._world.parts[members]
                    n = each.n_bytes // np.dtype(HOST_DTYPES[each.code]).itemsize
                    match each.shape:
                        case Shape.ALL:
                            nccl.all_reduce(each.src, each.dst, n, dtype, _SUM, communicator, stream)
                        case Shape.SCATTER:
                            nccl.reduce_scatter(each.src, each.dst, n, dtype, _SUM, communicator, stream)
                        case Shape.ROOT:
                            root = members.index(self._world.numbers.at(each.root))
                            nccl.reduce(each.src, each.dst, n, dtype, _SUM, root, communicator, stream)
            finally:
                nccl.group_end()

        translated(put, f"a group of {len(sums)} reductions")


class NcclBroadcasts(NcclSums, NcclPairs):
    """Groups, each wire's on a communicator of its own, which a world splits off once; and broadcasts and reductions among some
    of the ranks.
    """

    def __init__(self, world: NcclWorld) -> None:
        NcclSums.__init__(self, world)
        NcclPairs.__init__(self, world)

    def connect(self, wires: Sequence[int]) -> None:
        from nccl.bindings import nccl

        world = self._world
        world.device.use()
        self._wires = []
        for key in enumerate(channels_of(wires, world.device.n_sms)):
            if key not in world.wires:
                config = nccl.Config()
                config.max_ctas = key[1]
                split = partial(nccl.comm_split, world.communicator, 0, world.rank, config.ptr)
                world.wires[key] = translated(split, f"a communicator of {key[1]} channels")
            self._wires.append(world.wires[key])

    def broadcast(self, parts: Sequence[tuple[int, int, int, tuple[int, ...]]], stream: int) -> None:
        from nccl.bindings import nccl

        def put() -> None:
            nccl.group_start()
            try:
                for pointer, n_bytes, root, ranks in parts:
                    numbers = self._world.numbers
                    members = numbers.all_at(ranks)
                    at, communicator = members.index(numbers.at(root)), self._world.parts[members]
                    nccl.broadcast(pointer, pointer, n_bytes, _UINT8, at, communicator, stream)
            finally:
                nccl.group_end()

        translated(put, f"a group of {len(parts)} broadcasts")

    def check(self) -> None:
        super().check()
        self.check_parts()


def check_communicator(communicator: "nccl.Comm") -> None:
    """Raise RunError if NCCL has failed since it was asked last."""
    from nccl.bindings import nccl

    code = int(nccl.comm_get_async_error(communicator))
    if code not in (0, 7):  # ncclSuccess, ncclInProgress of nccl.h
        raise RunError(f"NCCL failed (ncclResult {code}): {nccl.get_last_error(communicator)}")
