"""The transport `nvshmem`: one-sided puts with signals between symmetric heaps, by NVIDIA's nvshmem4py. One rank a GPU.

Where `nvshmem_ptr` reaches a peer (one NVLink domain), boxes are written straight into its memory by copy engines, strided ones
too, and a signal follows on the stream. Elsewhere messages are packed and put. Signals are words that only grow, set and never
added to, so that a wait is a wait for a value on the stream.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from shardroute.executors.gpus.cuda import CudaDevice, device_ids
from shardroute.executors.gpus.devices import within
from shardroute.executors.gpus.gpu_stack import why_no_nvshmem
from shardroute.executors.gpus.local_devices import local_device
from shardroute.executors.interpreting.adding import CODES, HOST_DTYPES
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.launching import hubs
from shardroute.executors.launching.hubs import Hub
from shardroute.executors.messages.library_sums import Shape, Summation, find_summations
from shardroute.executors.messages.messages import Messages
from shardroute.executors.messages.signals import lay_signals
from shardroute.executors.transports.numbers import Numbers
from shardroute.executors.transports.puts import Heap, Parts, PutTransport
from shardroute.executors.transports.seam import Deadline, LateError, Place
from shardroute.executors.transports.summing import Sum
from shardroute.topologies.errors import InputError, RunError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ID_BYTES: Final = 128  # nvshmemx_uniqueid_t of nvshmem_api_types.h
_VERSION_1: Final = 1 << 16  # NVSHMEM_INIT_ATTR_V1_IDENTIFIER of nvshmem_types.h, which has the size added
_WORD: Final = 8
# NVSHMEM's names, TYPENAMEs of nvshmemx_TYPENAME_sum_reduce_on_stream.
_DTYPES: Final = {CODES["f16"]: "half", CODES["f32"]: "float", CODES["f64"]: "double", CODES["bf16"]: "bfloat16"}

missing = why_no_nvshmem
listen = hubs.listen


def preload() -> None:
    """Import nvshmem4py's bindings, which load NVSHMEM. They initialise nothing, so ranks may be forked afterwards."""
    import nvshmem.bindings.nvshmem  # noqa: F401  # for its effect


def connect(place: Place, deadline: Deadline) -> "NvshmemWorld":
    """Find the other ranks, take the GPU of this rank's place on its host, and start NVSHMEM."""
    with hubs.left_on_failure(hubs.meet(place, deadline)) as hub:
        return NvshmemWorld(hub, place.size, deadline)


_is_started = False


def _check_first_start(world: "NvshmemWorld", deadline: Deadline) -> None:
    """Raise InputError on all ranks where NVSHMEM has been started before in the process of one. Its documentation calls what a
    second start does undefined; by its sources 3.x goes on with the ranks of the first, say users (NVIDIA/nvshmem issue 68).
    """
    started = [rank for rank, told in enumerate(world.exchange(bytes([_is_started]), deadline)) if told == b"\1"]
    if started:
        raise InputError(
            f"rank {started[0]} has used NVSHMEM before in its process, and NVSHMEM keeps the ranks that it was started with: "
            "start a new process for each rank that is there now, or use transport nccl or nccl-put, whose ranks may change"
        )


def join(group: object) -> None:
    """None: a program that uses NVSHMEM itself shares its heap with nobody who doesn't ask for it."""


class NvshmemWorld:
    """The processing elements, numbered as the ranks. `hub` carries what isn't of a plan."""

    def __init__(self, hub: Hub, size: int, deadline: Deadline) -> None:
        self._hub = hub
        self.rank, self.size, self.key = hub.rank, size, id(self)
        self.numbers = Numbers(range(size))
        _check_first_start(self, deadline)
        self.device = CudaDevice(local_device(self, device_ids(), deadline))
        self.heap = Heap()
        self.peers: list[int] = []
        self.teams: dict[tuple[int, ...], int] = {}
        self.reaches: NDArray[np.bool_] = np.zeros((size, size), np.bool_)
        self._start(deadline)

    def rename(self, numbers: Sequence[int]) -> None:
        """Call rank i numbers[i], in plans that are opened and in errors from now on."""
        self.numbers = Numbers(numbers)
        self._hub.rename(numbers)

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        return self._hub.exchange(payload, deadline)

    def open(self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline) -> PutTransport:
        if not self.numbers.are_in(programs.n_ranks):
            raise InputError(f"transport nvshmem takes plans for all its {self.size} ranks, this one is for {programs.n_ranks}")
        shares = [each.n_bytes for each in find_summations(programs) if each.shape is Shape.SCATTER]
        parts = Parts(programs, messages, max(shares, default=0))
        if parts.n_bytes > self.heap.n_bytes:
            self._grow(parts.n_bytes, deadline)
        reaches: NDArray[np.bool_] = np.zeros((programs.n_ranks,) * 2, dtype=np.bool_)
        reaches[np.ix_(self.numbers.of, self.numbers.of)] = self.reaches
        signals = lay_signals(programs, messages, reaches, by_queue=True)
        words = self._allocate(_WORD * max(len(signals.channel_src), 1), deadline)
        self._clear(words, _WORD * len(signals.channel_src), deadline)
        self.line_up(deadline)  # nobody signals before all words are clear
        puts = NvshmemPuts(self, words, len(signals.channel_src), parts.common)
        return PutTransport(
            self.device, puts, self.line_up, programs, messages, arena, self.numbers.of[self.rank], deadline, self.heap, parts,
            signals, reaches,
        )  # fmt: skip

    def close(self) -> None:
        from nvshmem.bindings import nvshmem

        nvshmem.hostlib_finalize()
        self._hub.close()

    def abandon(self) -> None:
        self._hub.close()

    def line_up(self, deadline: Deadline) -> None:
        """Return when all ranks have called it."""
        self._hub.exchange(b"", deadline)

    def split(self, ranks: tuple[int, ...]) -> None:
        """Make a team of ranks that are evenly apart, once. All ranks call it with the same."""
        from nvshmem.bindings import nvshmem

        if ranks in self.teams:
            return
        if len(ranks) == self.size:
            self.teams[ranks] = int(nvshmem.Team_id.TEAM_WORLD)
            return
        made = ctypes.c_int32(int(nvshmem.Team_id.TEAM_INVALID))
        world, apart = int(nvshmem.Team_id.TEAM_WORLD), ranks[1] - ranks[0]
        try:
            nvshmem.team_split_strided(world, ranks[0], apart, len(ranks), 0, 0, ctypes.addressof(made))
        except nvshmem.NVSHMEMError as error:
            raise RunError(f"NVSHMEM made no team of {len(ranks)} ranks: {error}; NVSHMEM_MAX_TEAMS allows more") from error
        self.teams[ranks] = made.value

    def _start(self, deadline: Deadline) -> None:
        from nvshmem.bindings import nvshmem

        shared = nvshmem.uniqueid()
        if self.rank == 0:
            _check(nvshmem.get_uniqueid(shared.ptr), "making a unique id")
        told = self.exchange(ctypes.string_at(shared.ptr, _ID_BYTES) if self.rank == 0 else b"", deadline)[0]
        ctypes.memmove(shared.ptr, told, _ID_BYTES)
        attributes = nvshmem.InitAttr()  # whose memory is left as it was found
        ctypes.memset(attributes.ptr, 0, attributes._data.itemsize)
        attributes.version = _VERSION_1 + attributes._data.itemsize

        def start() -> None:
            self.device.use()
            global _is_started
            _is_started = True
            try:
                nvshmem.set_attr_uniqueid_args(self.rank, self.size, shared.ptr, attributes.ptr)
                _check(nvshmem.hostlib_init_attr(nvshmem.Flags.INIT_WITH_UNIQUEID, attributes.ptr), "starting")
            except nvshmem.NVSHMEMError as error:
                raise RunError(f"NVSHMEM couldn't start: {error}; NVSHMEM_DEBUG=INFO says more") from error

        within(deadline, start)

    def _allocate(self, n_bytes: int, deadline: Deadline) -> int:
        """Memory at one offset of every heap. All ranks call it with the same size."""
        from nvshmem.bindings import nvshmem

        def allocate() -> int:
            self.device.use()
            return int(nvshmem.malloc(n_bytes))

        pointer = within(deadline, allocate)
        if not pointer:
            raise RunError(
                f"NVSHMEM has no {n_bytes} bytes of symmetric memory; raise NVSHMEM_SYMMETRIC_SIZE or plan with --scale"
            )
        return pointer

    def _clear(self, pointer: int, n_bytes: int, deadline: Deadline) -> None:
        stream, event = self.device.stream(), self.device.event()
        self.device.upload(pointer, np.zeros(n_bytes, np.uint8), stream)
        self.device.record(event, stream)
        while not self.device.is_done(event):
            if deadline.left_s <= 0:
                raise LateError()

    def _grow(self, n_bytes: int, deadline: Deadline) -> None:
        """Take a larger heap, and learn which ranks reach which. All ranks call it with the same size."""
        from nvshmem.bindings import nvshmem

        if self.heap.n_bytes:
            within(deadline, lambda: nvshmem.free(self.heap.pointer))
        self.heap.n_bytes = 0
        self.heap.pointer, self.heap.n_bytes = self._allocate(n_bytes, deadline), n_bytes
        self.peers = [int(nvshmem.ptr(self.heap.pointer, peer) or 0) for peer in range(self.size)]
        told = self.exchange(bytes(pointer != 0 for pointer in self.peers), deadline)
        self.reaches = np.array([list(row) for row in told], dtype=np.bool_)


class NvshmemPuts:
    """Puts into the peers' heaps; a channel's word lies at the same offset of every heap."""

    def __init__(self, world: NvshmemWorld, words: int, n_words: int, common: int) -> None:
        from nvshmem.bindings import nvshmem

        self._nvshmem, self._world, self._words, self._n_words, self._common = nvshmem, world, words, n_words, common
        self._set, self._at_least = int(nvshmem.Signal_op.SIGNAL_SET), int(nvshmem.Cmp_type.CMP_GE)

    def put(self, peer: int, offset: int, src: int, n_bytes: int, word: int, value: int, stream: int) -> None:
        at = self._world.numbers.at(peer)
        self._nvshmem.putmem_signal_on_stream(
            self._world.heap.pointer + offset, src, n_bytes, self._words + _WORD * word, value, self._set, at, stream
        )

    def signal(self, peer: int, word: int, value: int, stream: int) -> None:
        at = self._world.numbers.at(peer)
        self._nvshmem.signal_op_on_stream(self._words + _WORD * word, value, self._set, at, stream)

    def wait(self, peer: int, word: int, value: int, stream: int) -> None:
        self._nvshmem.signal_wait_until_on_stream(self._words + _WORD * word, self._at_least, value, stream)

    def at_peer(self, peer: int, offset: int) -> int:
        return self._world.peers[self._world.numbers.at(peer)] + offset

    def why_not(self, sums: Sequence[Summation]) -> str | None:
        """NVSHMEM adds up what lies at one address of all heaps, among ranks that are evenly apart."""
        for each in sums:
            if len(set(np.diff(each.ranks).tolist())) > 1:
                return f"NVSHMEM's teams are ranks that are evenly apart, and {each.ranks} are not"
            if not each.is_symmetric:
                return "NVSHMEM adds up what lies at one address on all its ranks, and theirs differ"
            if each.shape is Shape.ROOT:
                return "NVSHMEM scatters sums in equal parts that lie in one run, and these don't"
        return None

    def prepare(self, ranks: Sequence[tuple[int, ...]]) -> None:
        self._world.device.use()
        for members in map(self._world.numbers.all_at, ranks):
            self._world.split(members)

    def add_up(self, sums: Sequence[Sum], stream: int) -> None:
        for each in sums:
            team, dtype = self._world.teams[self._world.numbers.all_at(each.ranks)], _DTYPES[each.code]
            n = each.n_bytes // np.dtype(HOST_DTYPES[each.code]).itemsize
            if each.shape is Shape.ALL:
                getattr(self._nvshmem, f"{dtype}_sum_reduce_on_stream")(team, each.dst, each.src, n, stream)
                continue
            # Its destination must be at one address everywhere, which shares of a whole are not.
            common = self._world.heap.pointer + self._common
            getattr(self._nvshmem, f"{dtype}_sum_reducescatter_on_stream")(team, common, each.src, n, stream)
            self._world.device.copy(each.dst, common, each.n_bytes, stream)

    def check(self) -> None:
        """Nothing: NVSHMEM ends the process when it fails."""

    def abandon(self) -> None:
        """Let every wait of this rank pass, so that its streams end."""
        released = np.full(_WORD * self._n_words, 0xFF, np.uint8)
        device = self._world.device
        device.upload(self._words, released, device.stream())


def _check(status: object, what: str) -> None:
    if status not in (None, 0):
        raise RunError(f"NVSHMEM failed at {what} (status {status}); NVSHMEM_DEBUG=INFO says more")
