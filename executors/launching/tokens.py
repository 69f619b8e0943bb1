"""The secret that the ranks of a run share, and how two of them prove to each other that they have it.

Rule: the secret itself never crosses a connection. Both sides send a random challenge and answer the other's with an HMAC; what
is said later carries an HMAC under a key of these challenges, so that nobody can put in, change, drop or repeat a message.
"""

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shardroute.topologies.errors import InputError, RunError

VARIABLE: Final = "SHARDROUTE_TOKEN"
NONCE_BYTES: Final = 32
MAC_BYTES: Final = 32  # SHA-256
_LEAST_CHARACTERS: Final = 16  # fewer can be tried out; `openssl rand -hex 16` gives 32


def new_token() -> bytes:
    """A secret that nobody can foresee, for ranks of one caller. It has no bytes that end a line or a word."""
    return secrets.token_hex(NONCE_BYTES).encode()


def token_of(environment: Mapping[str, str] = os.environ) -> bytes:
    """What the user has set for all ranks; empty if nothing. Raises InputError for a secret that is too short to be one."""
    text = environment.get(VARIABLE, "")
    if text and len(text) < _LEAST_CHARACTERS:
        raise InputError(f"{VARIABLE} has {len(text)} characters; expected {_LEAST_CHARACTERS} or more, {how_to_set()}")
    return text.encode(errors="surrogateescape")


def how_to_set() -> str:
    """The command by which a user makes a secret, to be given to all ranks."""
    return f"such as `export {VARIABLE}=$(openssl rand -hex 16)`, the same on all ranks"


def proof(token: bytes, *parts: bytes) -> bytes:
    """The HMAC of these parts; where each of them ends is part of it."""
    whole = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(token, whole, "sha256")


def is_same(one: bytes, other: bytes) -> bool:
    """Whether two proofs are the same, in a time that doesn't tell where they differ."""
    return hmac.compare_digest(one, other)


@dataclass(slots=True)
class Seal:
    """Marks messages of one connection, in their order, by a key that both ends have made of their challenges."""

    key: bytes
    _n_sent: int = field(default=0, init=False)
    _n_got: int = field(default=0, init=False)
    is_hub: bool = False

    def mark(self, payload: bytes) -> bytes:
        """The mark of the next message that goes out."""
        self._n_sent += 1
        return self._of(self.is_hub, self._n_sent, payload)

    def check(self, mark: bytes, payload: bytes) -> None:
        """Raise RunError unless it is the mark of the next message that comes in."""
        self._n_got += 1
        if not is_same(mark, self._of(not self.is_hub, self._n_got, payload)):
            raise RunError("a message of the control plane was changed or put in on its way")

    def _of(self, from_hub: bool, number: int, payload: bytes) -> bytes:
        return proof(self.key, b"hub" if from_hub else b"rank", number.to_bytes(8, "little"), payload)
