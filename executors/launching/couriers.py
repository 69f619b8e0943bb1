"""Accounts of ranks, carried between their witnesses: each tells rank 0's, which tells all others once a run is ending.

Rule: nothing here holds up a run, or fails one. Who can't be reached isn't heard, and `trouble` says why.
"""

import hashlib
import os
import secrets
import selectors
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

import numpy as np

from shardroute.executors.launching.accounts import Accounts, Stage
from shardroute.executors.launching.hubs import address_of, let_in, receive, send, server_at, token_at
from shardroute.executors.launching.introductions import NotOursError, Visit, introduced
from shardroute.executors.launching.launches import file_of_host
from shardroute.executors.launching.tokens import NONCE_BYTES, Seal, token_of
from shardroute.executors.transports.seam import Deadline, LateError, Place
from shardroute.topologies.errors import InputError, RunError

_PATIENCE_S: Final = 1.0  # for one message of a few hundred bytes, or one connection
_RETRY_S, _MOST_RETRY_S = 0.1, 1.0  # between attempts to reach rank 0; each takes twice as long as the one before
_MOST_REFUSALS: Final = 20
_NOWHERE: Final = "--rendezvous tcp://HOST:PORT, HOST being rank 0's, lets ranks of several hosts say who"
_CREDENTIALS: Final = struct.Struct("3i")  # of SO_PEERCRED: process, user, group


class Courier:
    """A witness's connections: rank 0's to all others, another's to rank 0's. `events` calls back what is registered with it.
    `on_one_host`: one launcher has started all ranks here, by what the rank itself finds (`is_on_one_host`).

    `opened` is where rank 0's witness listens, with its token, if that was chosen already; others then come once they are told of
    it (`look_at`). Else they meet where `place` says. `trouble` is why nothing can be heard, or "".
    """

    def __init__(
        self, place: Place, accounts: Accounts, events: selectors.BaseSelector, opened: tuple[socket.socket, bytes] | None,
        *, on_one_host: bool,
    ) -> None:  # fmt: skip
        self._place, self._accounts, self._events, self._on_one_host = place, accounts, events, on_one_host
        self._others = np.arange(place.size) != place.rank
        self._peers: list[tuple[socket.socket, Seal] | None] = [None] * place.size
        self._visits: dict[socket.socket, Visit] = {}
        self._due: set[int] = set()  # rows that others haven't been told of
        self._n_refused, self._next_s, self._retry_s = 0, 0.0, _RETRY_S
        self._told_of: tuple[str, int, bytes] | None = None
        self._held = ExitStack()
        self.trouble = "" if knows_where(place) else _NOWHERE
        if place.rank == 0:
            try:
                self._server, self._token = opened if opened is not None else self._open()
            except (OSError, ValueError) as error:  # InputError is a ValueError
                self.trouble = str(error)
                accounts.hears[0] = -1
            else:
                self._server.setblocking(False)
                events.register(self._server, selectors.EVENT_READ, self._accept)
                accounts.hears[0] = 1

    def look_at(self, host: str, port: int, token: bytes) -> None:
        """Reach rank 0's witness there."""
        self._told_of, self._next_s, self.trouble = (host, port, token), 0.0, ""

    def go_on(self) -> None:
        """Do what is due: reach rank 0, show visitors out that say nothing, tell others what is new."""
        if self._place.rank:
            known = self._told_of is not None or knows_where(self._place)
            if known and self._peers[0] is None and self._n_refused < _MOST_REFUSALS and time.monotonic() >= self._next_s:
                self._reach_first()
            return
        for visit in [v for v in self._visits.values() if time.monotonic() > v.until_s]:
            self._events.unregister(visit.peer)
            self._visits.pop(visit.peer).peer.close()
        if self._due and self._accounts.is_ending:
            rows, self._due = b"".join(map(self._accounts.row, sorted(self._due))), set()
            for rank in range(1, self._place.size):
                self._send(rank, rows)

    def tell(self) -> None:
        """Tell others of this rank."""
        if self._place.rank:
            self._send(0, self._accounts.row(self._place.rank))
        else:
            self._due.add(0)

    def _send(self, rank: int, rows: bytes) -> None:
        peer = self._peers[rank]
        if peer is not None:
            try:
                send(peer, rows, rank, Deadline.after(_PATIENCE_S))
            except (LateError, RunError):
                self._lose(rank)

    def _hear(self, rank: int) -> None:
        peer = self._peers[rank]
        assert peer is not None
        theirs = self._others if self._place.rank else np.arange(self._place.size) == rank
        try:
            self._due.update(self._accounts.take(receive(peer, rank, Deadline.after(_PATIENCE_S)), theirs))
        except (LateError, RunError, ValueError):
            self._lose(rank)

    def _lose(self, rank: int) -> None:
        peer = self._peers[rank]
        assert peer is not None
        self._peers[rank] = None
        self._events.unregister(peer[0])
        peer[0].close()
        if self._place.rank:
            self._accounts.hears[0], self._next_s = -1, np.inf
            self.trouble = "rank 0 is lost"
        elif self._accounts.stage[rank] < Stage.CLOSED:
            self._accounts.stage[rank] = Stage.GONE
            self._due.add(rank)

    def _accept(self) -> None:
        visit = let_in(self._server, len(self._visits))
        if visit is None:
            return
        if not _is_ours(visit.peer):
            visit.peer.close()
            return
        self._visits[visit.peer] = visit
        self._events.register(visit.peer, selectors.EVENT_READ, partial(self._hear_visitor, visit))

    def _hear_visitor(self, visit: Visit) -> None:
        if not visit.hears_all():
            return
        self._events.unregister(visit.peer)
        del self._visits[visit.peer]
        if visit.joins(self._token, self._peers):
            rank = next(k for k, peer in enumerate(self._peers) if peer is not None and peer[0] is visit.peer)
            self._events.register(visit.peer, selectors.EVENT_READ, partial(self._hear, rank))
            self._due.update(np.flatnonzero(self._accounts.stage).tolist())

    def _reach_first(self) -> None:
        self._next_s, self._retry_s = time.monotonic() + self._retry_s, min(2 * self._retry_s, _MOST_RETRY_S)
        hub: socket.socket | None = None
        try:
            if self._told_of is not None:
                host, port, token = self._told_of
                hub = socket.create_connection((host, port), timeout=_PATIENCE_S)
            elif self._on_one_host:
                hub, token = socket.socket(socket.AF_UNIX), token_of()
                hub.settimeout(_PATIENCE_S)
                hub.connect(_name(self._place))
                if not _is_ours(hub):
                    raise NotOursError("who answers there is another user")
            else:
                token = token_at(self._place)
                hub = socket.create_connection(address_of(self._place), timeout=_PATIENCE_S)
            self._peers[0] = hub, introduced(hub, self._place.rank, token)
        except (OSError, ValueError) as error:
            if hub is not None:
                hub.close()
            self._n_refused += isinstance(error, NotOursError)
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            self.trouble = str(error) if isinstance(error, InputError) else f"rank 0's host can't be reached{self._at()}: {why}"
            return
        self._events.register(hub, selectors.EVENT_READ, partial(self._hear, 0))
        self._accounts.hears[0], self.trouble = 1, ""
        self.tell()

    def _at(self) -> str:
        return f" at {self._place.rendezvous}" if self._place.rendezvous and self._told_of is None else ""

    def _open(self) -> tuple[socket.socket, bytes]:
        if not self._on_one_host:
            return self._held.enter_context(server_at(self._place))
        token = token_of()
        server = socket.socket(socket.AF_UNIX)
        server.bind(_name(self._place))
        server.listen(self._place.size)
        return server, token


def open_anywhere() -> tuple[socket.socket, bytes]:
    """Where a witness listens if nothing says where: on all addresses of its host, with a token that others are told."""
    return socket.create_server(("", 0), backlog=1024), secrets.token_bytes(NONCE_BYTES)


def knows_where(place: Place) -> bool:
    """Whether the ranks know where to meet before their library has started."""
    return bool(place.rendezvous) or {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def is_on_one_host(place: Place) -> bool:
    """Whether one launcher has started all ranks here, on a system where sockets need no name in a folder. Not for a process that
    a rank has forked.
    """
    return sys.platform == "linux" and place.rendezvous == file_of_host()


def _name(place: Place) -> str:
    """An abstract address, which Linux frees with the process."""
    return f"\0shardroute-witnesses-{hashlib.sha256(place.rendezvous.encode()).hexdigest()[:32]}"


def _is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end is this user's, as far as its kind of socket tells; others prove it by the token."""
    if peer.family != socket.AF_UNIX:
        return True
    with suppress(OSError):
        _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        return bool(user == os.getuid())
    return False
