"""How a rank and the hub prove to each other that they belong to one run, before anything else is said.

Rule: until then the hub reads so many bytes and no more, and waits for nobody: strangers cost it a socket for some seconds.
"""

import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Final

from shardroute.executors.launching.tokens import MAC_BYTES, NONCE_BYTES, VARIABLE, Seal, is_same, proof

_HELLO: Final = struct.Struct(f"<8sI{NONCE_BYTES}s{MAC_BYTES}s")  # magic, rank, its challenge, its answer to the hub's
_MAGIC: Final = b"shardhb2"
# A rank answers within a round trip, and then some, of a busy host; a visitor who says nothing isn't waited for longer.
_VISIT_S: Final = 10.0


class NotOursError(OSError):
    """Who answered isn't the hub of this run."""


class Visit:
    """Someone who has connected to rank 0 and hasn't proved to be a rank yet."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer, self.until_s = peer, time.monotonic() + _VISIT_S
        self._challenge = secrets.token_bytes(NONCE_BYTES)
        self._said = b""
        peer.setblocking(False)
        peer.send(self._challenge)  # fits into the buffer of a new connection

    def hears_all(self) -> bool:
        """Take in what has come; whether that is all, or the visitor is gone."""
        try:
            part = self.peer.recv(_HELLO.size - len(self._said))
        except BlockingIOError:
            return False
        except OSError:
            return True
        self._said += part
        return not part or len(self._said) == _HELLO.size

    def joins(self, token: bytes, peers: list[tuple[socket.socket, Seal] | None]) -> bool:
        """Put it among the peers if it is a rank of this run that isn't there yet; else, False, close its connection."""
        if len(self._said) == _HELLO.size:
            magic, rank, nonce, answer = _HELLO.unpack(self._said)
            wanted = proof(token, b"rank", rank.to_bytes(4, "little"), self._challenge, nonce)
            if magic == _MAGIC and is_same(answer, wanted) and 0 < rank < len(peers) and peers[rank] is None:
                with suppress(OSError):
                    self.peer.setblocking(True)
                    _at_once(self.peer)
                    self.peer.sendall(proof(token, b"hub", rank.to_bytes(4, "little"), nonce, self._challenge))
                    peers[rank] = self.peer, Seal(_key(token, self._challenge, nonce), is_hub=True)
                    return True
        self.peer.close()
        return False


def introduced(hub: socket.socket, rank: int, token: bytes) -> Seal:
    """Prove to the hub that this is a rank of the run, and have it prove itself. Raises NotOursError if it doesn't."""
    _at_once(hub)
    challenge, nonce = read_whole(hub, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    number = rank.to_bytes(4, "little")
    hub.sendall(_HELLO.pack(_MAGIC, rank, nonce, proof(token, b"rank", number, challenge, nonce)))
    try:
        answer = read_whole(hub, MAC_BYTES)
    except ConnectionResetError:
        answer = b""
    if not is_same(answer, proof(token, b"hub", number, nonce, challenge)):
        raise NotOursError(f"who answers there has another token ({VARIABLE} must be the same on all ranks), or is no rank 0")
    return Seal(_key(token, challenge, nonce))


def _at_once(connection: socket.socket) -> None:
    """Let small messages go at once, which only TCP holds back."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _key(token: bytes, challenge: bytes, nonce: bytes) -> bytes:
    return proof(token, b"messages", challenge, nonce)


def read_whole(peer: socket.socket, length: int) -> bytes:
    """So many bytes. Raises ConnectionResetError where there are fewer, TimeoutError as the socket says."""
    parts, n = [], 0
    while n < length:
        part = peer.recv(min(length - n, 1 << 20))
        if not part:
            raise ConnectionResetError("it closed its connection")
        parts.append(part)
        n += len(part)
    return b"".join(parts)
