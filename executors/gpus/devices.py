"""What a GPU library offers for one rank's memory: allocations by pointer, copies on streams, events.

Rule: no library is named here. Pointers, streams and events are numbers that only their device reads; everything that is put on
a stream returns at once.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import Lent
from shardroute.executors.interpreting.blocks import LINEAR, Blocks, Forms
from shardroute.executors.transports.seam import Deadline, LateError

Result = TypeVar("Result")

_SPINS = 200  # looks at an event before the host sleeps between them
# How long it sleeps: a fiftieth of what it has waited, within these. So it learns of an end late by 2 % at most, or 50 us, and
# ranks that wait for long leave their cores to others.
_NAP_SHARE, _LEAST_NAP_S, _MOST_NAP_S = 0.02, 50e-6, 2e-3


@dataclass(frozen=True, slots=True)
class Box:
    """A strided box of bytes: runs of `run` bytes, repeated along dims (outermost first); strides in bytes, maybe negative."""

    run: int
    count: tuple[int, ...]
    src_stride: tuple[int, ...]
    dst_stride: tuple[int, ...]


class Device(Protocol):
    """One rank's device. A thread calls `use` before anything else."""

    @property
    def name(self) -> str:
        """What it is, for reports."""

    def use(self) -> None:
        """Make it the current device of this thread."""

    def allocate(self, n_bytes: int) -> int:
        """A pointer to so many bytes, aligned to at least 256. Raises RunError when there is no room."""

    def free(self, pointer: int) -> None:
        """Give back what `allocate` gave."""

    def adopt(self, lent: Sequence[Lent]) -> None:
        """Know these buffers of the caller's, and none that were lent before."""

    def stream(self) -> int:
        """A new stream, which doesn't wait for the default stream."""

    def event(self) -> int:
        """A new event, which keeps time."""

    def record(self, event: int, stream: int) -> None:
        """Mark a point on a stream."""

    def follow(self, stream: int, event: int) -> None:
        """What comes next on the stream waits for the event as it was recorded last."""

    def is_done(self, event: int) -> bool:
        """Whether what was recorded last has been reached. Raises RunError for a failure on the device."""

    def elapsed_s(self, first: int, last: int) -> float:
        """Seconds between two events that have been reached."""

    def copy(self, dst: int, src: int, n_bytes: int, stream: int) -> None:
        """Copy bytes on the device."""

    def copy_box(self, dst: int, src: int, box: Box, stream: int) -> None:
        """Copy a strided box on the device."""

    def upload(self, dst: int, data: NDArray[np.uint8], stream: int) -> None:
        """Copy from host memory, which must stay until the stream has passed."""

    def download(self, data: NDArray[np.uint8], src: int, stream: int) -> None:
        """Copy to host memory."""


@runtime_checkable
class Capturing(Device, Protocol):
    """A device that can record what is put on streams, and launch it again as a whole."""

    def begin_capture(self, stream: int) -> None:
        """Put what comes next on the stream, and on those that follow it, into a graph instead."""

    def end_capture(self, stream: int) -> int:
        """The graph, ready to launch. Raises RunError when a stream that was forked off doesn't join this one again."""

    def launch(self, graph: int, stream: int) -> None:
        """Put the graph on a stream."""


class Streaming(Protocol):
    """What a library that puts work on streams says of it, whatever the work is."""

    def check(self) -> None:
        """Raise RunError if the library has failed since."""

    def abandon(self) -> None:
        """End what is on streams and can't complete."""


class Memory:
    """A rank's addresses on a device: `starts`, ascending, are where its buffers begin, `pointers` where these lie."""

    def __init__(self, starts: Sequence[int], pointers: Sequence[int]) -> None:
        self._starts, self._pointers = list(starts), list(pointers)

    def bind(self, starts: Sequence[int], pointers: Sequence[int]) -> None:
        """Lay out anew."""
        self._starts, self._pointers = list(starts), list(pointers)

    @property
    def layout(self) -> object:
        """What is equal for memory that lies in the same place."""
        return tuple(self._starts), tuple(self._pointers)

    def at(self, address: int) -> int:
        """The pointer to an address."""
        number = bisect_right(self._starts, address) - 1
        return self._pointers[number] + address - self._starts[number]


class Gathering:
    """Rows of blocks packed, unpacked and copied on a device. Both sides of a message walk the same rows in the same order."""

    def __init__(self, device: Device, blocks: Blocks, forms: Forms, memory: Memory) -> None:
        self._device, self._blocks, self._forms, self._memory = device, blocks, forms, memory
        self._known: dict[tuple[int, str], Box] = {}

    def pack(self, first: int, last: int, into: int, stream: int) -> None:
        """Gather rows first to last into contiguous bytes at a pointer."""
        for src, _, n, form in self._rows(first, last):
            self._copy(into, self._memory.at(src), n, form, "pack", stream)
            into += n

    def unpack(self, first: int, last: int, packed: int, stream: int) -> None:
        """Scatter what `pack` gathered into the places of rows first to last."""
        for _, dst, n, form in self._rows(first, last):
            self._copy(self._memory.at(dst), packed, n, form, "unpack", stream)
            packed += n

    def copy(self, first: int, last: int, place: Callable[[int], int], stream: int) -> None:
        """Copy rows from here to wherever their destinations lie: `place` gives the pointer to an address there."""
        for src, dst, n, form in self._rows(first, last):
            self._copy(place(dst), self._memory.at(src), n, form, "copy", stream)

    def _rows(self, first: int, last: int) -> list[tuple[int, int, int, int]]:
        blocks, rows = self._blocks, slice(first, last)
        return list(
            zip(*(c[rows].tolist() for c in (blocks.src, blocks.dst, blocks.n_bytes, blocks.form)), strict=True)
        )

    def _copy(self, dst: int, src: int, n_bytes: int, form: int, way: str, stream: int) -> None:
        if form == LINEAR:
            self._device.copy(dst, src, n_bytes, stream)
        else:
            self._device.copy_box(dst, src, self._box(form, way), stream)

    def _box(self, form: int, way: str) -> Box:
        if (form, way) not in self._known:
            self._known[form, way] = box_of(self._forms, form, way)
        return self._known[form, way]


def box_of(forms: Forms, form: int, way: str) -> Box:
    """The box of a form: as it lies on both sides ("copy"), or with one side contiguous ("pack", "unpack")."""
    count, src, dst = (x[form].tolist() for x in (forms.count, forms.src_stride, forms.dst_stride))
    dims = [d for d, n in enumerate(count) if n > 1]
    run = int(forms.run[form])
    shape = tuple(count[d] for d in dims)
    dense = tuple(run * int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(len(dims)))
    return Box(
        run, shape,
        dense if way == "unpack" else tuple(src[d] for d in dims),
        dense if way == "pack" else tuple(dst[d] for d in dims),
    )  # fmt: skip


def along(counts: Sequence[int], src_strides: Sequence[int], dst_strides: Sequence[int]) -> list[tuple[int, int]]:
    """Source and destination offsets of every position along some dims."""
    return [
        (sum(i * s for i, s in zip(at, src_strides, strict=True)), sum(i * s for i, s in zip(at, dst_strides, strict=True)))
        for at in product(*(range(n) for n in counts))
    ]


def within(deadline: Deadline, call: Callable[[], Result], peers: Sequence[int] = ()) -> Result:
    """What a call that may block in a library returns; LateError once the deadline has passed, though it may go on."""
    found: list[Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # whatever it is, it belongs to who called
            failure.append(error)

    thread = threading.Thread(target=run, name="shardroute-enqueue", daemon=True)
    thread.start()
    thread.join(deadline.left_s)
    if thread.is_alive():
        raise LateError(peers)
    if failure:
        raise failure[0]
    return found[0]


def wait_for(device: Device, event: int, library: Streaming, deadline: Deadline, peers: Sequence[int]) -> None:
    """Return when an event has been reached. Past the deadline abandons what is on streams, and raises LateError."""
    looks, began_s = 0, time.monotonic()
    while not device.is_done(event):
        looks += 1
        if looks > _SPINS:
            library.check()
            if deadline.left_s <= 0:
                library.abandon()
                raise LateError(peers)
            time.sleep(min(max(_NAP_SHARE * (time.monotonic() - began_s), _LEAST_NAP_S), _MOST_NAP_S))
