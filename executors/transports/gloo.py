"""The transport `gloo`: torch.distributed's CPU backend, two-sided, between processes of one or many machines.

Receives are begun before the sends that go with them wherever the plan allows: with the same peer, the other order takes twice as
long (321 ms against 164 ms for one message each way, torch 2.13, 2-core Xeon).
"""

import contextlib
import importlib.util
import os
import re
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.packing import Pool
from shardroute.executors.launching.launches import file_of_host
from shardroute.executors.messages.messages import Messages
from shardroute.executors.reasons import first_line
from shardroute.executors.transports.exchanges import MessageTransport
from shardroute.executors.transports.roll_calls import GAVE_UP, SMALL_BYTES, RollCall, named
from shardroute.executors.transports.seam import Deadline, LateError, LostError, Place
from shardroute.executors.transports.stores import LastWords, check_in, couldnt_join, open_store, words_of, words_of_run
from shardroute.topologies.errors import InputError, RunError

_CALL_TAG: Final = 2**31 - 1  # torch takes tags of 31 bits; a pair's messages are numbered from 0
_READ_S: Final = 0.5  # for last words to be read by those that have seen this rank disconnect
_HEARD_S: Final = 0.05  # for last words to be heard by who listens: far more than a message takes

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def missing() -> str | None:
    """Why gloo can't be used here."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed (pip install 'shardroute[torch]')"
    return None


def preload() -> None:
    """Import torch with one thread, which processes that are forked then share; and let it say less: what it prints of lost
    connections, with the frames of its C++ code, comes back to us as errors.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    if not torch.distributed.is_gloo_available():
        raise InputError("this torch was built without gloo; expected torch.distributed.is_gloo_available()")


def connect(place: Place, deadline: Deadline) -> "GlooWorld":
    """Join the default process group of torch.distributed. Raises RunError when the others can't be found before the deadline."""
    preload()
    import torch.distributed as dist

    if dist.is_initialized():
        raise InputError("torch.distributed is initialised already; give its group to a Resharder instead")
    _choose_interface(place)
    store = open_store(place, deadline)
    check_in(store, place, deadline)
    timeout = timedelta(seconds=deadline.limit_s)
    try:
        dist.init_process_group(
            "gloo", store=store, rank=place.rank, world_size=place.size, timeout=timeout,  # type: ignore[arg-type]  # see Store
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise couldnt_join(place, f"they lost each other while they connected (torch says: {first_line(error)})") from error
    return GlooWorld(dist.group.WORLD, owned=True, words=words_of_run(store, place))


def join(group: object) -> "GlooWorld | None":
    """The ranks of a torch process group; without one, of a new group of all ranks, so that nobody else's messages match ours."""
    import torch.distributed as dist

    if not dist.is_initialized():
        if group is not None:
            raise InputError("a process group was given, but torch.distributed is not initialised")
        return None
    if group is None:
        return GlooWorld(dist.new_group(backend="gloo"), owned=True)
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(f"group: expected a torch.distributed.ProcessGroup, found {type(group).__name__}")
    if "gloo" not in str(dist.get_backend(group)):
        raise InputError(f"the group's backend is {dist.get_backend(group)}; transport gloo needs one that moves CPU tensors")
    return GlooWorld(group, owned=False)


def listen() -> tuple[str, socket.socket]:
    """A rendezvous for ranks that will be forked from here, and its socket, which rank 0 inherits."""
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server.set_inheritable(True)
    return f"fd://127.0.0.1:{server.getsockname()[1]}:{server.fileno()}", server


def _choose_interface(place: Place) -> None:
    """Where ranks meet on this host, let them talk over its loopback device: else gloo asks what the host's name stands for."""
    where = place.rendezvous or os.environ.get("MASTER_ADDR", "")
    here = ("fd://", "tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:", file_of_host())
    if (where.startswith(here) or where in ("127.0.0.1", "localhost", "::1")) and os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class GlooWorld:
    """The ranks of a process group of torch.distributed whose backend moves CPU tensors."""

    def __init__(self, group: "dist.ProcessGroup | None", *, owned: bool, words: LastWords | None = None) -> None:
        import torch.distributed as dist

        self._group, self._owned = group, owned
        self._words = words_of(group) if words is None else words
        self.key = id(group)
        self.pools = (Pool(), Pool())
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.wire, self.call_tag = GlooWire(group, self._words), _CALL_TAG
        self._calls = RollCall(self.wire, self.rank, range(self.size), self.call_tag)

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        sizes = self._calls.lengths(len(payload), deadline)
        if sum(sizes) <= SMALL_BYTES:
            return self._calls.gather(payload, sizes, deadline)
        padded = np.zeros(max(1, *sizes), dtype=np.uint8)
        padded[: len(payload)] = np.frombuffer(payload, np.uint8)
        found = self._all_gather(padded, deadline)
        return [data[:size].tobytes() for data, size in zip(found, sizes, strict=True)]

    def open(self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline) -> "MessageTransport[dist.Work]":
        return MessageTransport(self.wire, self._line_up, programs, messages, arena, self.rank, deadline, self.pools)

    def close(self) -> None:
        import torch.distributed as dist

        if self._owned and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # of peers that are gone
                dist.destroy_process_group(self._group)

    def abandon(self) -> None:
        """Nothing: connections end with the process, and that is what the others see."""

    def give_up(self, words: str) -> None:
        # Where another rank has given up before, this one passes on why.
        self._words.leave(self.rank, words if GAVE_UP in words else f"rank {self.rank}{GAVE_UP}{words}")
        self._calls.give_up(words)
        if self._owned and self.size > 1:
            time.sleep(_HEARD_S)
            self._disconnect()
            if self.rank == 0:  # whose process keeps what all have left
                time.sleep(_READ_S)

    def _disconnect(self) -> None:
        """Close all connections of the group: gloo does so when a wait for a rank that is there times out, and has no other way
        while handles are held. Who waits for this rank then sees it now, and not at the deadline.
        """
        nothing = np.zeros(1, dtype=np.uint8)
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(RunError, LateError):
                    self.wire.wait(self.wire.receive(nothing, peer, self.call_tag - 1), Deadline.after(0.0))

    def _line_up(self, deadline: Deadline) -> None:
        self._calls.lengths(0, deadline)

    def _all_gather(self, mine: NDArray[np.uint8], deadline: Deadline) -> list[NDArray[np.uint8]]:
        import torch.distributed as dist

        data = _tensor(mine.copy())
        found = [data.new_empty(len(mine)) for _ in range(self.size)]
        try:
            _wait(dist.all_gather(found, data, group=self._group, async_op=True), deadline)
        except RuntimeError as error:
            raise _lost(error, deadline) from error
        return [each.numpy() for each in found]


class GlooWire:
    """Sends and receives over the group; peers are ranks of it."""

    def __init__(self, group: "dist.ProcessGroup | None", words: LastWords) -> None:
        self._group, self._words = group, words

    def send(self, data: NDArray[np.uint8], to: int, tag: int) -> "dist.Work":
        import torch.distributed as dist

        try:
            work = dist.isend(_tensor(data), group=self._group, group_dst=to, tag=tag)
        except RuntimeError as error:
            raise named(LostError(None, _why(error)), to, self) from error
        assert work is not None  # for ranks outside of the group only
        return work

    def receive(self, data: NDArray[np.uint8], source: int, tag: int) -> "dist.Work":
        import torch.distributed as dist

        try:
            work = dist.irecv(_tensor(data), group=self._group, group_src=source, tag=tag)
        except RuntimeError as error:
            raise named(LostError(None, _why(error)), source, self) from error
        assert work is not None
        return work

    def wait(self, handle: "dist.Work", deadline: Deadline) -> None:
        try:
            _wait(handle, deadline)
        except RuntimeError as error:
            raise _lost(error, deadline) from error

    def last_words(self, rank: int) -> str:
        return self._words.of(rank)


def _wait(work: "dist.Work | None", deadline: Deadline) -> None:
    assert work is not None
    work.wait(timedelta(seconds=deadline.limit_s))


def _lost(error: RuntimeError, deadline: Deadline) -> Exception:
    if deadline.is_close:
        return LateError()
    return LostError(None, _why(error))


def _why(error: RuntimeError) -> str:
    """What became of a connection, in our words, and of torch's the first sentence, without where in its sources it says that."""
    said = str(error)
    closed = any(text in said for text in ("Connection closed", "closed by peer", "reset by peer", "Broken pipe"))
    what = "its connection closed" if closed else "its connection failed"
    sentence = re.sub(r"^\[\S+\] ", "", first_line(error)).partition(". ")[0]
    return f"{what} (torch says: {sentence})"


def _tensor(data: NDArray[np.uint8]) -> "torch.Tensor":
    import torch

    return torch.from_numpy(data)
