"""Ranks that find each other over TCP with nothing but the standard library, and tell each other small things.

Rule: rank 0 is the hub; what all give goes to it and back to all. Only control data goes this way, never bytes of a plan. Who
joins proves that it has the run's token, and so does the hub (see `tokens`); whoever else knocks is shown out and delays nobody.
"""

import ipaddress
import os
import platform
import re
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from shardroute.executors.launching.introductions import NotOursError, Visit, introduced, read_whole
from shardroute.executors.launching.launches import file_of_host, host_and_port
from shardroute.executors.launching.tokens import MAC_BYTES, VARIABLE, Seal, how_to_set, new_token, token_of
from shardroute.executors.transports.seam import Deadline, LateError, Place
from shardroute.topologies.errors import InputError, RunError

_LENGTH: Final = struct.Struct("<Q")
_RETRY_S: Final = 0.05  # between attempts to reach rank 0, which may not have started
_LOCAL: Final = "127.0.0.1"
_MOST_VISITORS: Final = 4096  # who haven't proved anything yet; more are turned away at once
# Attempts after which a token that isn't accepted at a named address is called wrong: until then it may be an earlier run's hub
# that is about to end.
_REFUSALS: Final = 20


class Hub:
    """This rank's connection: to all others on rank 0, elsewhere to rank 0."""

    def __init__(self, rank: int, peers: Sequence[tuple[socket.socket, Seal] | None]) -> None:
        self.rank, self._peers = rank, list(peers)
        self._names: Sequence[int] = range(len(peers))

    def rename(self, names: Sequence[int]) -> None:
        """Call rank i names[i] in errors from now on."""
        self._names = list(names)

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """What every rank gave, by rank. Raises LateError with the ranks that were waited for, RunError when one is lost."""
        first, *_ = self._names
        if self.rank:
            hub = self._peers[0]
            assert hub is not None
            send(hub, payload, first, deadline)
            sizes = struct.unpack(f"<{len(self._peers)}Q", receive(hub, first, deadline))
            everything = receive(hub, first, deadline)
            ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
            return [everything[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        named = list(zip(self._names, self._peers, strict=True))
        given = [payload if peer is None else receive(peer, name, deadline) for name, peer in named]
        told = struct.pack(f"<{len(given)}Q", *map(len, given))
        for name, peer in named:
            if peer is not None:
                send(peer, told, name, deadline)
                send(peer, b"".join(given), name, deadline)
        return given

    def close(self) -> None:
        """Close all connections; a rank that still waits learns that this one is gone."""
        for peer in self._peers:
            if peer is not None:
                peer[0].close()


@contextmanager
def left_on_failure(hub: Hub) -> Iterator[Hub]:
    """Close it if the block raises."""
    try:
        yield hub
    except BaseException:
        hub.close()
        raise


def listen() -> tuple[str, socket.socket]:
    """A rendezvous for ranks that will be forked from here, with a token of their own, and its socket, which rank 0 inherits."""
    server = socket.create_server((_LOCAL, 0), backlog=1024)
    server.set_inheritable(True)
    return f"fd://{_LOCAL}:{server.getsockname()[1]}:{server.fileno()}:{new_token().decode()}", server


def meet(place: Place, deadline: Deadline) -> Hub:
    """Find the other ranks. Rendezvous are fd:// (see `listen`), tcp://HOST:PORT, file:///PATH, and "" for MASTER_ADDR and
    MASTER_PORT; under torchrun the port after that, for its own store listens on it.

    Rank 0 listens at HOST alone; for a file on all addresses of its host, and leaves the run's token in the file, which only its
    owner can read. At an address of more than this host SHARDROUTE_TOKEN must be set, the same on all ranks.

    Raises RunError when not all ranks have come before the deadline, InputError where there is no token.
    """
    try:
        return _gather_all(place, deadline) if place.rank == 0 else _reach_first(place, deadline)
    except InputError:
        raise
    except (OSError, TimeoutError, LateError) as error:
        raise RunError(f"rank {place.rank} couldn't join the {place.size} ranks of the run: {_text(error)}") from error


def _gather_all(place: Place, deadline: Deadline) -> Hub:
    peers: list[tuple[socket.socket, Seal] | None] = [None] * place.size
    n_refused = 0
    with server_at(place) as (server, token), selectors.DefaultSelector() as waiting:
        server.setblocking(False)
        waiting.register(server, selectors.EVENT_READ)
        visits: dict[socket.socket, Visit] = {}
        try:
            while any(peer is None for peer in peers[1:]):
                if not deadline.left_s:
                    raise LateError([k for k in range(1, place.size) if peers[k] is None])
                for key, _ in waiting.select(min(1.0, deadline.limit_s)):
                    if key.fileobj is server:
                        if (visit := let_in(server, len(visits))) is not None:
                            visits[visit.peer] = visit
                            waiting.register(visit.peer, selectors.EVENT_READ)
                        continue
                    visit = visits[key.fileobj]  # type: ignore[index]  # what was registered above
                    if visit.hears_all():
                        waiting.unregister(visit.peer)
                        del visits[visit.peer]
                        joined = visit.joins(token, peers)
                        n_refused += not joined
                for visit in [v for v in visits.values() if time.monotonic() > v.until_s]:
                    waiting.unregister(visit.peer)
                    visits.pop(visit.peer).peer.close()
        except LateError as late:
            if not n_refused:
                raise
            raise TimeoutError(
                f"{_text(late)}, and turned {n_refused} visitors away that didn't have its token ({VARIABLE} must be the same on "
                "all ranks)"
            ) from late
        finally:
            for visit in visits.values():
                visit.peer.close()
    return Hub(0, peers)


def let_in(server: socket.socket, n_visitors: int) -> Visit | None:
    """Who knocks, if it may come in while so many others do."""
    try:
        peer, _ = server.accept()
    except OSError:  # it is gone already
        return None
    if n_visitors < _MOST_VISITORS:
        with suppress(OSError):
            return Visit(peer)
    peer.close()
    return None


def _reach_first(place: Place, deadline: Deadline) -> Hub:
    n_refused = 0
    while True:
        hub: socket.socket | None = None
        try:
            address, token = address_of(place), token_at(place)
            hub = socket.create_connection(address, timeout=deadline.limit_s)
            return Hub(place.rank, [(hub, introduced(hub, place.rank, token)), *[None] * (place.size - 1)])
        except InputError:  # a ValueError, too
            raise
        except (OSError, ValueError) as error:  # ValueError: a rendezvous file that is still empty
            if hub is not None:
                hub.close()
            n_refused += isinstance(error, NotOursError)
            if n_refused >= _REFUSALS and not place.rendezvous.startswith("file://"):
                raise
            if deadline.left_s <= 0:
                raise LateError([0]) from error
            time.sleep(min(_RETRY_S, deadline.limit_s))


@contextmanager
def server_at(place: Place) -> Iterator[tuple[socket.socket, bytes]]:
    """Where rank 0 listens, and the run's token."""
    where = place.rendezvous
    if where.startswith("fd://"):
        *_, fd, text = where.split(":")
        with socket.socket(fileno=int(fd)) as server:
            yield server, text.encode()
    elif where.startswith("file://"):
        path = Path(where.removeprefix("file://"))
        # Only ranks of this host know the file that `file_of_host` names.
        with socket.create_server((_LOCAL if where == file_of_host() else "", 0), backlog=1024) as server:
            secret = new_token()
            _write_privately(path, f"{platform.node()} {server.getsockname()[1]} {secret.hex()}")
            yield server, secret
    else:
        host, port = address_of(place)
        token = token_at(place)
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            server = socket.create_server((str(address[0]), port), family=family, backlog=1024)
        except OSError as error:
            raise OSError(f"rank 0 can't listen at {host}:{port}, which must be an address of its own host ({error})") from error
        with server:
            yield server, token


def _write_privately(path: Path, text: str) -> None:
    """A file that its owner alone can read; it appears whole."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)


def address_of(place: Place) -> tuple[str, int]:
    """Where rank 0 listens. Raises InputError where nothing says it, OSError or ValueError while its file isn't there."""
    where = place.rendezvous
    if where.startswith("fd://"):
        host, port, *_ = where.removeprefix("fd://").split(":")
        return host, int(port)
    if where.startswith("file://"):
        node, port, _ = Path(where.removeprefix("file://")).read_text().split()
        return _LOCAL if node == platform.node() else node, int(port)
    if not where:
        told = os.environ
        if "MASTER_ADDR" not in told or "MASTER_PORT" not in told:
            raise InputError("nowhere to meet: MASTER_ADDR and MASTER_PORT are not set; give --rendezvous tcp://HOST:PORT")
        if re.fullmatch(r"[0-9]{1,5}", told["MASTER_PORT"]) is None:
            raise InputError(f"the environment says MASTER_PORT={told['MASTER_PORT'][:40]!r}; expected a port")
        return told["MASTER_ADDR"], int(told["MASTER_PORT"]) + (1 if "TORCHELASTIC_RUN_ID" in told else 0)
    return host_and_port(where)


def token_at(place: Place) -> bytes:
    """The run's token as a rank finds it. Raises InputError where strangers could knock and none is set."""
    where = place.rendezvous
    if where.startswith("fd://"):
        return where.rpartition(":")[2].encode()
    if where.startswith("file://"):
        return bytes.fromhex(Path(where.removeprefix("file://")).read_text().split()[2])
    token = token_of()
    host, _ = address_of(place)
    if not token and not _is_local(host):
        raise InputError(f"others can reach {host} too: set a secret that all ranks know, {how_to_set()}")
    return token


def _is_local(host: str) -> bool:
    """Whether only processes of this host can connect to it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def send(to: tuple[socket.socket, Seal], payload: bytes, rank: int, deadline: Deadline) -> None:
    """Send a message, sealed. Raises LateError, or RunError when the rank is lost."""
    peer, seal = to
    try:
        peer.settimeout(deadline.limit_s)
        peer.sendall(_LENGTH.pack(len(payload)) + seal.mark(payload) + payload)
    except TimeoutError:
        raise LateError([rank]) from None
    except OSError as error:
        raise RunError(f"rank {rank} is lost: {_text(error)}") from error


def receive(given: tuple[socket.socket, Seal], rank: int, deadline: Deadline) -> bytes:
    """The next message, if its seal is right. Raises as `send`, and RunError if it isn't."""
    peer, seal = given
    try:
        peer.settimeout(deadline.limit_s)
        (length,) = _LENGTH.unpack(read_whole(peer, _LENGTH.size))
        mark = read_whole(peer, MAC_BYTES)
        payload = read_whole(peer, length)
    except TimeoutError:
        raise LateError([rank]) from None
    except OSError as error:
        if deadline.is_close:
            raise LateError([rank]) from error
        raise RunError(f"rank {rank} is lost: {_text(error)}") from error
    seal.check(mark, payload)
    return payload


def _text(error: Exception) -> str:
    if isinstance(error, LateError):
        return f"it waited for rank {', '.join(map(str, error.peers))} until the deadline"
    return str(error) or type(error).__name__
