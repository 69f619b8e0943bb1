"""What all ranks of a world tell each other over its Wire, so that whoever is missing has a name.

Rule: the first rank hears every other in turn and tells all what it heard, also when that is who is missing. A collective of the
library would say only that someone is. Only small things go this way; bytes of a plan never do.

The first rank gives up a little before the deadline, so that the others still hear whom it waited for and don't miss it instead.
"""

import contextlib
from collections.abc import Sequence
from typing import Final, Generic

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.transports.seam import Deadline, Handle, LateError, LostError, Remembering, Wire
from shardroute.topologies.errors import RunError

# Up to so many bytes from all ranks together go by the first rank; more, by a collective of the library.
SMALL_BYTES: Final = 2**16
# How much sooner the first rank gives up: this share of what is left, at most so long.
_SOONER_SHARE: Final = 0.1
_MOST_SOONER_S: Final = 0.5
_FINE: Final = -1
_GAVE_UP: Final = -1  # in place of a length
GAVE_UP: Final = " gave up: "  # in the words of a rank that did
_WORDS_BYTES: Final = 1024  # of why a rank is lost; they go in a message of a known length


class RollCall(Generic[Handle]):
    """One rank's part in the calls of a world with these ranks, ascending or not: the first of them hears and tells. `tag` is one
    that no message of a plan has.
    """

    def __init__(self, wire: Wire[Handle], rank: int, ranks: Sequence[int], tag: int) -> None:
        self._wire, self._rank, self._tag = wire, rank, tag
        self._first, self._others, self._size = ranks[0], list(ranks[1:]), len(ranks)
        self._at = list(ranks).index(rank)
        self._told: list[tuple[Handle, NDArray[np.uint8]]] = []  # sent without waiting; kept, for the library reads it

    def lengths(self, n_bytes: int, deadline: Deadline) -> list[int]:
        """Line up, and learn how long what every rank has to tell is. Raises LateError or RunError, which name who is missing."""
        if self._size == 1:
            return [n_bytes]
        if self._rank == self._first:
            heard = self._hear(n_bytes, (), self._sooner(deadline))
            self._tell(heard, None, deadline)
            return [int(n) for n in heard]
        return self._be_heard(n_bytes, None, deadline)

    def gather(self, payload: bytes, sizes: Sequence[int], deadline: Deadline) -> list[bytes]:
        """What every rank gave, in their order; `sizes` from `lengths`, and raises as that. The first sends all of it to each."""
        ends = np.cumsum(sizes).tolist()
        everything = np.zeros(ends[-1], dtype=np.uint8)
        parts = [everything[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        parts[self._at][...] = np.frombuffer(payload, np.uint8)
        if not len(everything) or self._size == 1:
            return [payload] * self._size
        if self._rank == self._first:
            self._hear(len(payload), parts[1:], self._sooner(deadline))
            self._tell(np.zeros(self._size, dtype=np.int64), everything, deadline)
        else:
            self._be_heard(len(payload), parts[self._at].copy(), deadline)
            self._wait(self._wire.receive(everything, self._first, self._tag), self._first, deadline)
        return [part.tobytes() for part in parts]

    def give_up(self, words: str) -> None:
        """Tell whoever calls the roll next that this rank doesn't answer any more, and why; waits for nobody."""
        told = f"rank {self._rank}{GAVE_UP}{words}"
        if self._rank == self._first:
            self._tell_of(self._rank, told)
            return
        for data in (np.array([_GAVE_UP]).view(np.uint8), _text(told)):
            with contextlib.suppress(RunError):  # the first rank is gone, and the others will see that
                self._told.append((self._wire.send(data, self._first, self._tag), data))

    def _sooner(self, deadline: Deadline) -> Deadline:
        return Deadline(deadline.at_s - min(_MOST_SOONER_S, _SOONER_SHARE * deadline.left_s), deadline.allowed_s)

    def _hear(self, n_bytes: int, parts: Sequence[NDArray[np.uint8]], deadline: Deadline) -> NDArray[np.int64]:
        """Hear of each other rank how many bytes it has, or that it gave up; and these bytes, where there are parts for them.

        A part comes behind the word for it, so that a rank that gave up meanwhile isn't taken for one that told something.
        """
        heard = np.zeros(self._size, dtype=np.int64)
        heard[0] = n_bytes
        handles = [
            self._wire.receive(heard[at : at + 1].view(np.uint8), rank, self._tag) for at, rank in enumerate(self._others, 1)
        ]
        for at, (rank, handle) in enumerate(zip(self._others, handles, strict=True), 1):
            try:
                self._wait(handle, rank, deadline)
                if heard[at] == _GAVE_UP:
                    words = _text("")
                    self._wait(self._wire.receive(words, rank, self._tag), rank, deadline)
                    raise RunError(_read(words))
                if parts and len(parts[at - 1]):
                    self._wait(self._wire.receive(parts[at - 1], rank, self._tag), rank, deadline)
            except (LateError, RunError) as error:
                self._tell_of(rank, "" if isinstance(error, LateError) else str(error))
                raise
        return heard

    def _tell(self, lengths: NDArray[np.int64], everything: NDArray[np.uint8] | None, deadline: Deadline) -> None:
        """Tell all others that nobody is missing, and what there is."""
        told = self._report(_FINE, "", lengths)
        data = [told] if everything is None else [told, everything]
        for rank, handle in [(rank, self._wire.send(each, rank, self._tag)) for rank in self._others for each in data]:
            self._wait(handle, rank, deadline)

    def _be_heard(self, n_bytes: int, part: NDArray[np.uint8] | None, deadline: Deadline) -> list[int]:
        """Say how many bytes there are here, and the bytes; how many all ranks have, once the first has heard them all."""
        mine = np.array([n_bytes], dtype=np.int64).view(np.uint8)
        told = self._report(_FINE, "", np.zeros(self._size, dtype=np.int64))
        arrives = self._wire.receive(told, self._first, self._tag)
        self._wait(self._wire.send(mine, self._first, self._tag), self._first, deadline)
        if part is not None and len(part):
            self._wait(self._wire.send(part, self._first, self._tag), self._first, deadline)
        self._wait(arrives, self._first, deadline)
        missing = int(told[:8].view(np.int64)[0])
        if missing != _FINE:
            words = _read(told[8 : 8 + _WORDS_BYTES])
            raise RunError(words) if words else LateError((missing,))
        return [int(n) for n in told[8 + _WORDS_BYTES :].view(np.int64)]

    def _report(self, missing: int, words: str, lengths: NDArray[np.int64]) -> NDArray[np.uint8]:
        report = np.zeros(8 + _WORDS_BYTES + 8 * self._size, dtype=np.uint8)
        report[:8].view(np.int64)[0] = missing
        report[8 : 8 + _WORDS_BYTES] = _text(words)
        report[8 + _WORDS_BYTES :].view(np.int64)[:] = lengths
        return report

    def _tell_of(self, missing: int, words: str) -> None:
        """Tell the others who is missing, without waiting for any of them."""
        report = self._report(missing, words, np.zeros(self._size, dtype=np.int64))
        for rank in self._others:
            if rank != missing:
                with contextlib.suppress(RunError):  # it is gone, too
                    self._told.append((self._wire.send(report, rank, self._tag), report))

    def _wait(self, handle: Handle, peer: int, deadline: Deadline) -> None:
        try:
            self._wire.wait(handle, deadline)
        except LateError:
            raise late(peer, self._wire) from None
        except RunError as error:
            raise named(error, peer, self._wire) from error


def _text(words: str) -> NDArray[np.uint8]:
    found = np.zeros(_WORDS_BYTES, dtype=np.uint8)
    data = words.encode()[:_WORDS_BYTES]
    found[: len(data)] = np.frombuffer(data, np.uint8)
    return found


def _read(text: NDArray[np.uint8]) -> str:
    data: bytes = text.tobytes()
    return data.rstrip(b"\0").decode(errors="replace")


def named(error: RunError, peer: int, wire: object) -> RunError:
    """What it means that a rank couldn't be heard: that it is lost, or what it said when it gave up."""
    told = wire.last_words(peer) if isinstance(error, LostError) and isinstance(wire, Remembering) else ""
    if told:
        return RunError(told)
    return LostError(peer, error.why) if isinstance(error, LostError) else error


def late(peer: int, wire: object) -> Exception:
    """What it means that a rank wasn't heard by the deadline: that it is late, or what it said if it gave up a moment before."""
    told = wire.last_words(peer) if isinstance(wire, Remembering) else ""
    return RunError(told) if GAVE_UP in told else LateError((peer,))
