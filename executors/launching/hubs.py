"""Ranks that find each other over TCP with nothing but the standard library, and tell each other small things.

Rule: rank 0 is the hub; what all give goes to it and back to all. Only control data goes this way, never bytes of a plan.
"""

import os
import platform
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from shardroute.executors.launching.launches import host_and_port
from shardroute.executors.transports.seam import Deadline, LateError, Place
from shardroute.topologies.errors import InputError, RunError

_HELLO = struct.Struct("<8sI")  # magic, rank
_LENGTH = struct.Struct("<Q")
_MAGIC = b"shardhub"
_RETRY_S = 0.05  # between attempts to reach rank 0, which may not have started
_LOCAL = "127.0.0.1"


class Hub:
    """This rank's connection: to all others on rank 0, elsewhere to rank 0."""

    def __init__(self, rank: int, peers: Sequence[socket.socket | None]) -> None:
        self.rank, self._peers = rank, list(peers)

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """What every rank gave, by rank. Raises LateError with the ranks that were waited for, RunError when one is lost."""
        if self.rank:
            hub = self._peers[0]
            assert hub is not None
            _send(hub, payload, 0, deadline)
            sizes = struct.unpack(f"<{len(self._peers)}Q", _receive(hub, 0, deadline))
            everything = _receive(hub, 0, deadline)
            ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
            return [everything[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        given = [payload if peer is None else _receive(peer, k, deadline) for k, peer in enumerate(self._peers)]
        told = struct.pack(f"<{len(given)}Q", *map(len, given))
        for k, peer in enumerate(self._peers):
            if peer is not None:
                _send(peer, told, k, deadline)
                _send(peer, b"".join(given), k, deadline)
        return given

    def close(self) -> None:
        """Close all connections; a rank that still waits learns that this one is gone."""
        for peer in self._peers:
            if peer is not None:
                peer.close()


def listen() -> tuple[str, socket.socket]:
    """A rendezvous for ranks that will be forked from here, and its socket, which rank 0 inherits."""
    server = socket.create_server((_LOCAL, 0), backlog=1024)
    server.set_inheritable(True)
    return f"fd://{_LOCAL}:{server.getsockname()[1]}:{server.fileno()}", server


def meet(place: Place, deadline: Deadline) -> Hub:
    """Find the other ranks. Rendezvous are fd:// (see `listen`), tcp://HOST:PORT, file:///PATH, and "" for MASTER_ADDR and
    MASTER_PORT; under torchrun the port after that, for its own store listens on it.

    Raises RunError when not all ranks have come before the deadline.
    """
    try:
        return _gather_all(place, deadline) if place.rank == 0 else _reach_first(place, deadline)
    except (OSError, TimeoutError, LateError) as error:
        raise RunError(f"rank {place.rank} couldn't join the {place.size} ranks of the run: {_text(error)}") from error


def _gather_all(place: Place, deadline: Deadline) -> Hub:
    peers: list[socket.socket | None] = [None] * place.size
    with _server(place) as server:
        while any(peer is None for peer in peers[1:]):
            server.settimeout(deadline.limit_s)
            try:
                peer, _ = server.accept()
            except TimeoutError:
                raise LateError([k for k in range(1, place.size) if peers[k] is None]) from None
            peer.settimeout(deadline.limit_s)
            magic, rank = _HELLO.unpack(_read(peer, _HELLO.size))
            if magic != _MAGIC or not 0 < rank < place.size or peers[rank] is not None:
                peer.close()  # a stray visitor, or a second rank of that number, which its own deadline ends
                continue
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peers[rank] = peer
    return Hub(0, peers)


def _reach_first(place: Place, deadline: Deadline) -> Hub:
    while True:
        try:
            hub = socket.create_connection(_address(place), timeout=deadline.limit_s)
            break
        except InputError:  # a ValueError, too
            raise
        except (OSError, ValueError) as error:  # ValueError: a rendezvous file that is still empty
            if deadline.left_s <= 0:
                raise LateError([0]) from error
            time.sleep(min(_RETRY_S, deadline.limit_s))
    hub.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hub.sendall(_HELLO.pack(_MAGIC, place.rank))
    return Hub(place.rank, [hub, *[None] * (place.size - 1)])


def _server(place: Place) -> socket.socket:
    where = place.rendezvous
    if where.startswith("fd://"):
        return socket.socket(fileno=int(where.rpartition(":")[2]))
    if where.startswith("file://"):
        server = socket.create_server(("", 0), backlog=1024)
        path = Path(where.removeprefix("file://"))
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.write_text(f"{platform.node()} {server.getsockname()[1]}")
        draft.replace(path)
        return server
    return socket.create_server(("", _address(place)[1]), backlog=1024)


def _address(place: Place) -> tuple[str, int]:
    where = place.rendezvous
    if where.startswith("fd://"):
        host, port, _ = where.removeprefix("fd://").split(":")
        return host, int(port)
    if where.startswith("file://"):
        node, port = Path(where.removeprefix("file://")).read_text().split()
        return _LOCAL if node == platform.node() else node, int(port)
    if not where:
        told = os.environ
        if "MASTER_ADDR" not in told or "MASTER_PORT" not in told:
            raise InputError("nowhere to meet: MASTER_ADDR and MASTER_PORT are not set; give --rendezvous tcp://HOST:PORT")
        if not told["MASTER_PORT"].isdecimal():
            raise InputError(f"the environment says MASTER_PORT={told['MASTER_PORT']!r}; expected a number")
        return told["MASTER_ADDR"], int(told["MASTER_PORT"]) + (1 if "TORCHELASTIC_RUN_ID" in told else 0)
    return host_and_port(where)


def _send(peer: socket.socket, payload: bytes, rank: int, deadline: Deadline) -> None:
    try:
        peer.settimeout(deadline.limit_s)
        peer.sendall(_LENGTH.pack(len(payload)) + payload)
    except TimeoutError:
        raise LateError([rank]) from None
    except OSError as error:
        raise RunError(f"rank {rank} is lost: {_text(error)}") from error


def _receive(peer: socket.socket, rank: int, deadline: Deadline) -> bytes:
    try:
        peer.settimeout(deadline.limit_s)
        (length,) = _LENGTH.unpack(_read(peer, _LENGTH.size))
        return _read(peer, length)
    except TimeoutError:
        raise LateError([rank]) from None
    except OSError as error:
        if deadline.is_close:
            raise LateError([rank]) from error
        raise RunError(f"rank {rank} is lost: {_text(error)}") from error


def _read(peer: socket.socket, length: int) -> bytes:
    parts, n = [], 0
    while n < length:
        part = peer.recv(min(length - n, 1 << 20))
        if not part:
            raise ConnectionResetError("it closed its connection")
        parts.append(part)
        n += len(part)
    return b"".join(parts)


def _text(error: Exception) -> str:
    if isinstance(error, LateError):
        return f"it waited for rank {', '.join(map(str, error.peers))} until the deadline"
    return str(error) or type(error).__name__
