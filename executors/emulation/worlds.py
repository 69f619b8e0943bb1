"""The ranks of an emulated cluster, found and joined: control goes over a hub that knows no rates, bytes of plans over channels.

Where the ranks keep to the rates themselves, channels are sockets of this host. Where the kernel does, each rank works in a
network namespace of its own (see `namespaces`), and channels are TCP connections between these.
"""

import contextlib
import json
import os
import secrets
import socket
import struct
from typing import Final

import numpy as np

from shardroute.executors.emulation.namespaces import URGENT, address_of, enter
from shardroute.executors.emulation.ports import Port
from shardroute.executors.emulation.transport import EmulatedTransport
from shardroute.executors.emulation.wirings import SIGNALS, Wiring, channels_of
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.launching import hubs
from shardroute.executors.launching.tokens import NONCE_BYTES, is_same
from shardroute.executors.messages.messages import Messages
from shardroute.executors.transports.seam import Deadline, LateError, Place
from shardroute.topologies.errors import RunError

_HELLO: Final = struct.Struct(f"<{NONCE_BYTES}sii")  # the receiver's token, which it told the others at the hub; sender, what for
# What a port moves at a time: as much as takes it 2 ms. With 16 NICs busy that is 8,000 chunks a second, each of which takes some
# 0.1 ms of CPU time to send and to receive (profiled on a 2-core Xeon); a message of `cases` has sixteen. With four, ports that
# are shared unevenly waste less than links on which messages share each moment: plans came up to 8 % sooner than predicted.
_TURN_S: Final = 0.002
_LEAST_QUANTUM, _MOST_QUANTUM = 2**10, 2**16
# Chunks that a socket of this host holds between the two ports: less, and a port idles whenever the other end is late; more, and
# a sender gets ahead of a receiver that is shared. Linux holds twice of what it is asked for (socket(7)).
_CHUNKS_BETWEEN: Final = 2
_LINUX_HOLDS: Final = 2
# Where the kernel keeps to the rates: bytes that a TCP sender holds, what takes its link so long, and bytes that a receiver
# announces room for, what takes NVLink so long: some packets are under way. With twice as many a whole message was, and
# plans came up to 11 % sooner than predicted.
_SENDER_HOLDS_S, _RECEIVER_HOLDS_S = 0.004, 0.0032
_LEAST_RECEIVED: Final = 2**15


class EmulatedLibrary:
    """What the ranks of an emulated cluster are forked with; a `Library` for `ranks`."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring

    def missing(self) -> str | None:
        """Nothing: `emulate` has looked before ranks are forked."""
        return None

    def preload(self) -> None:
        """Nothing is left to import."""

    def listen(self) -> tuple[str, socket.socket]:
        """Where ranks meet, see `hubs`."""
        return hubs.listen()

    def connect(self, place: Place, deadline: Deadline) -> "EmulatedWorld":
        """Find the other ranks."""
        with contextlib.suppress(OSError):  # only root may
            # Hardware doesn't wait for other programs: on a machine with four others a core, times come out as on an idle one.
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
        hub = hubs.meet(place, deadline)
        if self._wiring.namespace[place.rank] >= 0:
            enter(int(self._wiring.namespace[place.rank]))
        return EmulatedWorld(place.rank, place.size, hub, self._wiring)

    def join(self, group: object) -> None:
        """No program outside of a run is part of an emulated cluster."""
        return None


class EmulatedWorld:
    """A World of the seam."""

    def __init__(self, rank: int, size: int, hub: hubs.Hub, wiring: Wiring) -> None:
        self.rank, self.size, self.key = rank, size, 0
        self._hub, self._wiring = hub, wiring
        self._transport: EmulatedTransport | None = None

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        return self._hub.exchange(payload, deadline)

    def open(self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline) -> EmulatedTransport:
        """All ranks make their channels at once: each listens, tells where, connects to whom it sends, and accepts."""
        wiring, rank = self._wiring, self.rank
        ports = _ports(wiring, rank)
        transport = self._transport = EmulatedTransport(programs, wiring, arena, rank, deadline, self._line_up, ports)
        channels = channels_of(wiring, programs)
        n_into = sum(dst == rank for _, dst, _ in channels)
        namespaced = int(wiring.namespace[rank]) >= 0
        with _listener(wiring, rank, n_into) as listener:
            name = listener.getsockname()
            token = secrets.token_bytes(NONCE_BYTES)
            told = [name.hex() if isinstance(name, bytes) else list(name), token.hex()]
            where = [json.loads(each) for each in self.exchange(json.dumps(told).encode(), deadline)]
            try:
                for src, dst, use in channels:
                    if src == rank:
                        listens, theirs = where[dst]
                        at = bytes.fromhex(listens) if isinstance(listens, str) else tuple(listens)
                        connection = _connect(at, namespaced, deadline, _between(wiring, rank, dst), use)
                        connection.sendall(_HELLO.pack(bytes.fromhex(theirs), rank, use))
                        transport.add_sending(connection, dst, use)
                while n_into:
                    listener.settimeout(deadline.limit_s)
                    connection, _ = listener.accept()
                    connection.settimeout(deadline.limit_s)
                    hello = connection.recv(_HELLO.size, socket.MSG_WAITALL)
                    if len(hello) < _HELLO.size or not is_same(hello[:NONCE_BYTES], token):
                        connection.close()  # a stranger
                        continue
                    _, source, use = _HELLO.unpack(hello)
                    transport.add_receiving(connection, source, use)
                    n_into -= 1
            except TimeoutError:
                raise LateError() from None
            except OSError as error:
                raise RunError(f"rank {rank} couldn't make its channels: {error.strerror}") from error
        return transport

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._hub.close()

    def abandon(self) -> None:
        self.close()

    def _line_up(self, deadline: Deadline) -> None:
        self._hub.exchange(b"", deadline)


def _ports(wiring: Wiring, rank: int) -> list[Port]:
    """NVLink out and in, NIC out and in."""
    found = []
    for rate_Bps in (float(wiring.nvlink_Bps[rank]), float(wiring.nic_Bps[rank])):
        kept = float("inf") if wiring.namespace[rank] >= 0 else rate_Bps
        found += [Port(kept, quantum_bytes(rate_Bps), outgoing=outgoing) for outgoing in (True, False)]
    return found


def quantum_bytes(rate_Bps: float) -> int:
    """What a port of this rate moves at a time."""
    return int(np.clip(rate_Bps * _TURN_S, _LEAST_QUANTUM, _MOST_QUANTUM))


def _between(wiring: Wiring, rank: int, peer: int) -> int:
    """Bytes to ask Linux to hold for what a rank sends another."""
    near = wiring.domain[rank] == wiring.domain[peer]
    rate_Bps = float((wiring.nvlink_Bps if near else wiring.nic_Bps)[rank])
    if wiring.namespace[rank] >= 0:
        return int(rate_Bps * _SENDER_HOLDS_S)
    return _CHUNKS_BETWEEN * quantum_bytes(rate_Bps) // _LINUX_HOLDS


def _listener(wiring: Wiring, rank: int, n_into: int) -> socket.socket:
    if wiring.namespace[rank] >= 0:
        listener = socket.create_server((address_of(rank), 0), backlog=n_into + 1)
        room = max(int(wiring.nvlink_Bps[rank] * _RECEIVER_HOLDS_S), _LEAST_RECEIVED)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        listener.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, URGENT)  # of what the connections that it accepts say
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind("")  # Linux then chooses a name, which no file bears
        listener.listen(n_into + 1)
    return listener


def _connect(
    at: bytes | tuple[object, ...], namespaced: bool, deadline: Deadline, room: int, use: int
) -> socket.socket:
    connection = socket.socket(socket.AF_INET if namespaced else socket.AF_UNIX)
    connection.settimeout(deadline.limit_s)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
    connection.connect(at)
    if namespaced:
        if use == SIGNALS:
            connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, URGENT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
