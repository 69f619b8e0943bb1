"""The transport `mpi`: MPI by mpi4py, two-sided; mpirun or srun start its ranks, or we do with `mpiexec` (see `mpiexec`).

Rule: no blocking call of MPI is made while ranks may still fail, since none of them has a deadline; requests are tested instead.
"""

import atexit
import contextlib
import importlib.util
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.packing import Pool
from shardroute.executors.launching.couriers import knows_where
from shardroute.executors.launching.witnesses import Witness
from shardroute.executors.messages.messages import Messages
from shardroute.executors.reasons import first_line
from shardroute.executors.transports.exchanges import MessageTransport
from shardroute.executors.transports.roll_calls import GAVE_UP, SMALL_BYTES, RollCall
from shardroute.executors.transports.seam import Deadline, LateError, LostError, Place, Silent
from shardroute.topologies.errors import InputError, RunError

if TYPE_CHECKING:
    from mpi4py import MPI

# Tests before a rank that waits gives up its core, and the longest that it then sleeps: messages of a few KiB take some 5 us, and
# with more ranks than cores whoever spins keeps others from sending.
_SPINS = 20
_MOST_SLEEP_S = 0.0005
_LAST_WORDS_S = 2.0  # for others to say why they fail, where nothing tells when they have
# As /proc/PID/maps names one that is still there; removed ones end in " (deleted)".
_SEGMENT = re.compile(r" (/dev/shm/mpich_\S+)$")


def missing() -> str | None:
    """Why MPI can't be used here."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install 'shardroute[mpi]')"
    return None


def preload() -> None:
    """Nothing: MPI must not be imported before ranks are forked, and they aren't."""


def connect(place: Place, deadline: Deadline, at_step: NDArray[np.int64] | None = None) -> "MpiWorld":
    """Join MPI's world. Raises InputError where it isn't the one that the launcher or the flags told of. `at_step`
    (int64[n_ranks]) is where this rank notes its step, if that is to lie where others look, too.

    MPI's start waits for all ranks, has no deadline, and lets no other thread of Python run; so another process watches it.
    """
    witness = Witness(place, deadline, at_step, lambda process: remove_segments(shared_segments(process)))
    try:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # mpi4py raises either when it finds no MPI library
            raise InputError(f"mpi4py finds no MPI library ({error}); pip install 'shardroute[mpi]' brings one") from error
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (place.rank, place.size):
            raise InputError(
                f"MPI says that this is rank {world.rank} of {world.size}, the launcher or --rank and --world-size that it is "
                f"rank {place.rank} of {place.size}; start the ranks with the mpirun of the MPI that mpi4py was built for"
            )
        joined = MpiWorld(world, witness)  # which all ranks make together, so all of this host have mapped what they share
    except BaseException:
        witness.close()
        raise
    witness.started()
    remove_segments(shared_segments())
    if not knows_where(place):
        try:
            witness.tell_where(joined.exchange(witness.where, deadline)[0])
        except LateError as error:
            joined.abandon()
            who = f"rank {', '.join(map(str, error.peers))} was waited for until the deadline"
            raise RunError(f"rank {place.rank} couldn't join the {place.size} ranks of the run: {who}") from error
    return joined


def join(group: object) -> "MpiWorld | None":
    """The ranks of a communicator; without one, of MPI's world if this program has started MPI."""
    if "mpi4py.MPI" not in sys.modules:
        return None
    from mpi4py import MPI

    if group is not None and not isinstance(group, MPI.Intracomm):
        raise InputError(f"group: expected an mpi4py.MPI.Intracomm, found {type(group).__name__}")
    return MpiWorld(MPI.COMM_WORLD if group is None else group)


def shared_segments(process: int | None = None) -> list[str]:
    """The files in /dev/shm that MPICH has mapped into that process (none given: this one), as far as the system tells: Linux
    does.
    """
    with contextlib.suppress(OSError), open(f"/proc/{process or 'self'}/maps") as maps:
        return sorted({found[1] for line in maps if (found := _SEGMENT.search(line))})
    return []


def remove_segments(segments: Iterable[str]) -> None:
    """Take names of shared memory away; who has it mapped keeps it. MPICH does so itself when it ends, and doesn't mind if it is
    done (5.0.2), but a rank that is killed, or that ends all others, doesn't let it come to that.
    """
    for segment in segments:
        with contextlib.suppress(OSError):
            os.unlink(segment)


class MpiWorld:
    """The ranks of a communicator; with the witness of this rank, if it has one."""

    def __init__(self, communicator: "MPI.Intracomm", witness: Witness | None = None) -> None:
        self._communicator, self._witness = communicator.Dup(), witness  # so that nobody else's messages match ours
        self.rank, self.size, self.key = communicator.rank, communicator.size, id(self)
        self.at_step = np.full(self.size, -1, dtype=np.int64) if witness is None else witness.at_step
        self.pools = (Pool(), Pool())
        self.wire = MpiWire(self._communicator, _nobody if witness is None else witness.failed)
        self.call_tag = self.wire.most_tag
        self._calls = RollCall(self.wire, self.rank, range(self.size), self.call_tag)

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        sizes = np.array(self._calls.lengths(len(payload), deadline), dtype=np.int64)
        if sizes.sum() <= SMALL_BYTES:
            return self._calls.gather(payload, sizes.tolist(), deadline)
        mine = np.frombuffer(payload, np.uint8)
        every = np.zeros(int(sizes.sum()), dtype=np.uint8)
        starts = np.cumsum(sizes) - sizes
        self.wire.wait(self._communicator.Iallgatherv(mine, (every, sizes.tolist(), starts.tolist(), _byte())), deadline)
        return [every[a : a + n].tobytes() for a, n in zip(starts.tolist(), sizes.tolist(), strict=True)]

    def open(self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline) -> "MessageTransport[MPI.Request]":
        wire = self.wire
        if len(messages.tag) and int(messages.tag.max()) >= wire.most_tag:  # whose last tag is for calls
            raise RunError(f"two ranks exchange {int(messages.tag.max()) + 1} messages; this MPI numbers {wire.most_tag}")
        return MessageTransport(wire, self._line_up, programs, messages, arena, self.rank, deadline, self.pools)

    def close(self) -> None:
        """End the witness. mpi4py ends MPI with the process; MPICH's mpiexec kills the others of a rank that ends without it."""
        if self._witness is not None:
            self._witness.close()

    def abandon(self) -> None:
        """End all ranks when this process ends, as MPI's own end would wait for those that wait for this one; not at once, since
        others that fail at this moment must be able to say why.
        """
        atexit.register(self._abort)

    def _abort(self) -> None:
        if self._witness is None:
            time.sleep(_LAST_WORDS_S)
        else:
            self._witness.leave()
        self._communicator.Abort(1)

    def give_up(self, words: str) -> None:
        if self._witness is not None:
            # Where another rank has given up before, this one passes on why.
            self._witness.fail(words if GAVE_UP in words else f"rank {self.rank}{GAVE_UP}{words}")
        self._calls.give_up(words)

    def silent(self) -> Sequence[Silent]:
        return () if self._witness is None else self._witness.silent()

    def _line_up(self, deadline: Deadline) -> None:
        self._calls.lengths(0, deadline)


class MpiWire:
    """Sends and receives over the communicator. `failed` says why another rank gave up, if one has."""

    def __init__(self, communicator: "MPI.Intracomm", failed: Callable[[], str]) -> None:
        from mpi4py import MPI

        self._communicator, self._failed = communicator, failed
        most_tag = communicator.Get_attr(MPI.TAG_UB)
        assert most_tag is not None  # which the standard has every MPI say
        self.most_tag = int(most_tag)

    def send(self, data: NDArray[np.uint8], to: int, tag: int) -> "MPI.Request":
        return self._communicator.Isend((data, _byte()), to, tag)

    def receive(self, data: NDArray[np.uint8], source: int, tag: int) -> "MPI.Request":
        return self._communicator.Irecv((data, _byte()), source, tag)

    def wait(self, handle: "MPI.Request", deadline: Deadline) -> None:
        from mpi4py import MPI

        n_tests = 0
        try:
            while not handle.Test():
                n_tests += 1
                if n_tests > _SPINS:
                    if deadline.left_s <= 0:
                        raise LateError()
                    if not deadline.is_close and (why := self._failed()):  # else this rank's own deadline says more
                        raise RunError(why)
                    time.sleep(min(_MOST_SLEEP_S, 1e-6 * n_tests))
        except MPI.Exception as error:
            raise LostError(None, f"MPI failed ({first_line(error)})") from error


def _nobody() -> str:
    """No rank is known to have given up."""
    return ""


def _byte() -> "MPI.Datatype":
    from mpi4py import MPI

    return MPI.BYTE


