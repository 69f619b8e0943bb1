"""Messages on sockets: what one rank sends another in order, chunk by chunk, and what it has received of it.

On a socket a message is a head (step, part, bytes), then its bytes. The receiver answers each message that has arrived in full
with one byte, so that the sender knows when it may overwrite what it sent. Only bytes of messages wait for their turn at a port;
heads and answers, some bytes a message, go at once.
"""

import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from shardroute.executors.emulation.ports import Port
from shardroute.topologies.errors import RunError

_HEAD: Final = struct.Struct("<iiq")  # step, part, bytes
_ARRIVED: Final = b"\x01"
_MOST_ANSWERS: Final = 4096  # read at a time


@dataclass(slots=True, eq=False)
class Message:
    """What travels. `then` is called when all of it has arrived, at the other end where it is sent, here where it is received.

    came     bytes that are here, of a message that is received
    source   the message that this one passes on while it comes
    onward   the flows by which this one is passed on
    """

    step: int
    part: int
    data: memoryview
    then: Callable[[], None]
    came: int = 0
    source: "Message | None" = None
    onward: "tuple[Sending, ...]" = ()

    @property
    def ready(self) -> int:
        """Bytes that can be sent by now."""
        return len(self.data) if self.source is None else self.source.came


class Sending:
    """One channel's outgoing end."""

    def __init__(self, sock: socket.socket, peer: int, port: Port) -> None:
        self.sock, self.peer, self.queued, self._port = sock, peer, False, port
        self._messages: deque[Message] = deque()  # to be sent
        self._unanswered: deque[Message] = deque()
        self._head: bytes | None = None  # what is left of the first message's; None before it begins
        self._sent = 0  # bytes of the first message
        self._room = True  # the socket takes more

    def post(self, message: Message) -> None:
        """Send a message after those that were posted before."""
        self._messages.append(message)
        self.more()

    def has_room(self) -> None:
        """The socket takes more."""
        self._room = True
        self.more()

    def more(self) -> None:
        """Go on where it can: a message was posted, or more of it has come, or the socket has room."""
        while self._room and self._messages and self._begin():
            if self._sent < len(self._messages[0].data):
                if self._sent < self._messages[0].ready:
                    self._port.add(self)
                return
            self._sent_all()

    @property
    def waits(self) -> bool:
        """Whether the peer has still to take, or to answer, something."""
        return bool(self._messages or self._unanswered)

    def chunk(self, most: int) -> int:
        if not self._room or not self._messages or self._head != b"":
            return 0
        return min(most, self._messages[0].ready - self._sent)

    def move(self, most: int) -> int:
        message = self._messages[0]
        try:
            n = self.sock.send(message.data[self._sent : min(self._sent + most, message.ready)])
        except BlockingIOError:
            self._room = False
            return 0
        except OSError as error:
            raise _lost(self.peer, error) from error
        self._sent += n
        if self._sent == len(message.data):
            self._sent_all()
            self.more()
        return n

    def answered(self) -> None:
        """Read the answers that have come, and tell whoever waits for them."""
        try:
            answers = self.sock.recv(_MOST_ANSWERS)
        except BlockingIOError:
            return
        except OSError as error:
            raise _lost(self.peer, error) from error
        if not answers:
            raise _lost(self.peer)
        for _ in answers:
            self._unanswered.popleft().then()

    def _begin(self) -> bool:
        """Send the first message's head, if it hasn't been; False while the socket has no room for it."""
        message = self._messages[0]
        if self._head is None:
            self._head, self._sent = _HEAD.pack(message.step, message.part, len(message.data)), 0
        try:
            while self._head:
                # Together with the first bytes, where there are some: a packet of its own could overtake others.
                more = socket.MSG_MORE if message.data else 0
                self._head = self._head[self.sock.send(self._head, more) :]
        except BlockingIOError:
            self._room = False
        except OSError as error:
            raise _lost(self.peer, error) from error
        return not self._head

    def _sent_all(self) -> None:
        self._unanswered.append(self._messages.popleft())
        self._head = None


class Receiving:
    """One channel's incoming end. `expect` gives the message for a head, None while nothing may be taken in for it yet."""

    def __init__(
        self, sock: socket.socket, peer: int, port: Port, expect: "Callable[[Receiving, int, int, int], Message | None]"
    ) -> None:
        self.sock, self.peer, self.queued, self._port, self._expect = sock, peer, False, port, expect
        self._head = b""
        self._message: Message | None = None

    def more(self) -> None:
        """Go on where it can: something has come, or what held a message up is over."""
        try:
            while self._message is None:
                while len(self._head) < _HEAD.size:
                    part = self.sock.recv(_HEAD.size - len(self._head))
                    if not part:
                        raise _lost(self.peer)
                    self._head += part
                self._message = self._expect(self, *_HEAD.unpack(self._head))
                if self._message is None:
                    return
                if not len(self._message.data):
                    self._arrived(self._message)
        except BlockingIOError:
            return
        except OSError as error:
            raise _lost(self.peer, error) from error
        self._port.add(self)

    def chunk(self, most: int) -> int:
        return 0 if self._message is None else min(most, len(self._message.data) - self._message.came)

    def move(self, most: int) -> int:
        message = self._message
        assert message is not None
        try:
            n = self.sock.recv_into(message.data[message.came : message.came + most])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise _lost(self.peer, error) from error
        if not n:
            raise _lost(self.peer)
        message.came += n
        for flow in message.onward:
            flow.more()
        if message.came == len(message.data):
            self._arrived(message)
            self.more()
        return n

    def _arrived(self, message: Message) -> None:
        self._head, self._message = b"", None
        message.then()
        try:
            self.sock.send(_ARRIVED)
        except OSError as error:
            raise _lost(self.peer, error) from error


def _lost(peer: int, error: OSError | None = None) -> RunError:
    return RunError(f"rank {peer} is lost: {'it closed its connection' if error is None else error.strerror}")
