"""Transports that also take the checksums of what their rank sends, and say after a trial which piece isn't what was sent.

Rule: it moves nothing itself and changes nothing of what the transport below does; checksums travel once a trial, after bytes.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.gpus.device_sums import DeviceSums, check_sums_on
from shardroute.executors.gpus.tensors import tensors_of
from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.piece_sums import PieceRows, PieceSums, Sums, first_wrong
from shardroute.executors.transports.seam import Deadline, Enqueuing, Transport, World

Share = Callable[[], None]


class FollowedTransport:
    """The Transport of a rank, followed. `wrong_piece` compares once all ranks have ended the trial."""

    def __init__(
        self, transport: Transport, programs: Programs, rows: PieceRows, sums: PieceSums, rank: int, share: Share
    ) -> None:
        """`share` brings what all ranks have put into `sums.sent` to each of them; all ranks call it together."""
        self._transport, self._sums, self._rows, self._rank, self._share = transport, sums, rows, rank, share
        self._step: list[int] = programs.actions.step.tolist()
        self.overlaps = transport.overlaps

    @property
    def deadline(self) -> Deadline:
        return self._transport.deadline

    @deadline.setter
    def deadline(self, deadline: Deadline) -> None:
        self._transport.deadline = deadline

    def begin(self, trial: int) -> None:
        self._transport.begin(trial)

    def enter(self, step: int) -> None:
        self._transport.enter(step)

    def wait(self, step: int) -> None:
        self._transport.wait(step)

    def meet(self, action: int, *, all_ready: bool) -> None:
        self._transport.meet(action, all_ready=all_ready)

    def post(self, action: int) -> None:
        """Begin the copies, then sum what they read while they are under way: nothing may overwrite it before `finish`."""
        self._transport.post(action)
        self._sums.take_sent(self._step[action])

    def finish(self, action: int) -> None:
        self._transport.finish(action)

    def mark(self, action: int) -> None:
        self._transport.mark(action)

    def drain(self) -> None:
        self._transport.drain()

    def barrier(self) -> None:
        self._transport.barrier()

    def wrong_piece(self) -> int:
        """The row of the first piece that came to this rank and isn't what was sent, NONE if all are. All ranks call it."""
        self._sums.take_kept()
        self._share()
        return first_wrong(self._rows, self._sums.sent, self._sums.kept, self._rank)


class FollowedOnDevice:
    """What an Enqueuing's checksums, which it takes on its device as it runs, come to."""

    def __init__(self, rows: PieceRows, sums: Sums, rank: int, share: Share) -> None:
        self._rows, self._sums, self._rank, self._share = rows, sums, rank, share

    def wrong_piece(self) -> int:
        """As of a FollowedTransport."""
        self._share()
        return first_wrong(self._rows, self._sums.sent, self._sums.kept, self._rank)


def follow_on_device(
    world: World, transport: Enqueuing, programs: Programs, rows: PieceRows, deadline: Deadline
) -> FollowedOnDevice:
    """The checksums of a rank whose transport works on a device. Raises InputError where torch can't take them there."""
    sums = sums_on(transport, programs, rows, world.rank)
    return FollowedOnDevice(rows, sums, world.rank, lambda: _share_over(world, rows, sums, deadline))


def sums_on(transport: Enqueuing, programs: Programs, rows: PieceRows, rank: int) -> DeviceSums:
    """Have a transport take checksums on its device from the next run on; where it leaves them. Raises InputError where torch
    can't.
    """
    made: list[DeviceSums] = []

    def make(device: object) -> DeviceSums:
        check_sums_on(device)
        made.append(DeviceSums(rows, programs.forms, rank, tensors_of(device)))
        return made[0]

    transport.follow_by(make)
    return made[0]


def follow_over(
    world: World, transport: Transport, programs: Programs, rows: PieceRows, arena: Arena, deadline: Deadline
) -> FollowedTransport:
    """The rank's transport, followed, where ranks have memory of their own and exchange checksums over their world."""
    sums = PieceSums(rows, programs.forms, arena, world.rank, _zeros(rows), _zeros(rows))

    return FollowedTransport(transport, programs, rows, sums, world.rank, lambda: _share_over(world, rows, sums, deadline))


def _share_over(world: World, rows: PieceRows, sums: Sums, deadline: Deadline) -> None:
    unpack_sums(rows, sums.sent, world.exchange(pack_sums(sums), deadline))


def pack_sums(sums: Sums) -> bytes:
    """What a rank has taken of what it sent."""
    return sums.sent[sums.mine].tobytes()


def unpack_sums(rows: PieceRows, sent: NDArray[np.uint64], given: list[bytes]) -> None:
    """Put what every rank packed in its place; ranks that the plan doesn't know have sent nothing."""
    for rank, data in enumerate(given[: len(rows.ptr) - 1]):
        first, last = int(rows.ptr[rank]), int(rows.ptr[rank + 1])
        if first < last:  # of a rank that sends nothing there may be none
            sent[first:last] = np.frombuffer(data, np.uint64)


def _zeros(rows: PieceRows) -> NDArray[np.uint64]:
    return np.zeros(len(rows.step), dtype=np.uint64)
