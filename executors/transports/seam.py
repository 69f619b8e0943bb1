"""The seam between running a plan and the library that moves its bytes.

Rule: above it no library is named, below it no plan is known. `drive` runs a rank's program through its `Transport`; there are
four ways to write one:

- One-sided (shared memory, NVSHMEM, NCCL's put and signal): implement `Transport` straight. `post` writes into other ranks'
  arenas, `mark` raises a signal for those who wait for the step, `meet` tells and learns that a collective's ranks are ready.
- Two-sided with tags (gloo, MPI): implement `Wire`, which is begin to send, begin to receive, wait. `exchanges.MessageTransport`
  is the Transport over any Wire.
- Two-sided in order (NCCL's grouped send and receive, which have no tags and must be matched group by group): take the
  messages of `messages.lay_messages` in the groups of `rounds`, which are the same on every rank.
- On streams (GPUs): implement `Enqueuing`, which puts all of a rank's program on streams and then waits. `grouped` is one for
  libraries that match grouped sends and receives, `puts` one for those that put and signal, both over a `devices.Device`.

How ranks come to be: `processes` forks them over one shared memory. The ranks of all other transports have memory of their own
and find each other through a `World`, whoever started them: torchrun, srun, mpirun (see `launches`), or `--spawn`. A library
is one module in `libraries.LIBRARIES`, with these functions:

    missing() -> str | None                              why it can't run here, None if it can; imports nothing heavy
    preload() -> None                                    import it, before ranks are forked
    connect(place: Place, deadline: Deadline) -> World   as a rank that a launcher, or --spawn, has started
    join(group: object) -> World | None                  in a program that has initialised the library, for a `Resharder`
    listen() -> tuple[str, socket]                       only where forked ranks can find each other: a rendezvous, and what to
                                                         keep open for rank 0

A World's `exchange` is the control plane: digests are compared, findings gathered and ranks lined up by it before and after
any byte of a plan moves, so a library that needs a handle of its own (a unique id, a window) can pass it by `exchange` in
`World.open`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import Arena, Lent
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.packing import Pool
from shardroute.executors.interpreting.patterns import Finding
from shardroute.executors.messages.messages import Messages
from shardroute.topologies.errors import RunError

if TYPE_CHECKING:  # devices imports this module
    from shardroute.executors.gpus.devices import Device, Memory

Progress = Callable[[float], None]
Handle = TypeVar("Handle")

_LEAST_LIMIT_S = 0.001
_SHORTLY_S = 1.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """When everything must have ended, on the monotonic clock of this machine, and the seconds that were allowed for it."""

    at_s: float
    allowed_s: float

    @classmethod
    def after(cls, seconds: float) -> Self:
        """The deadline that many seconds from now."""
        return cls(time.monotonic() + seconds, seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then; 0 once it has passed."""
        return max(0.0, self.at_s - time.monotonic())

    @property
    def limit_s(self) -> float:
        """The same for calls that take 0 for "no limit" or "don't block": never below a millisecond."""
        return max(self.left_s, _LEAST_LIMIT_S)

    @property
    def is_close(self) -> bool:
        """Whether it has passed or is about to. Who gives up at the deadline closes its connections, which ends the waits of its
        peers moments earlier or later than their own deadline would: a connection lost then is the deadline too.
        """
        return self.left_s < _SHORTLY_S


class LateError(Exception):
    """The deadline passed while a rank waited. `peers` are the ranks that it waited for, as far as it knows them."""

    def __init__(self, peers: Sequence[int] = ()) -> None:
        super().__init__(peers)
        self.peers = tuple(peers)


class LostError(RunError):
    """A rank is lost: its process has ended, or the connection to it. `rank` is None where only who waited for it knows which
    (`roll_calls.named`).
    """

    def __init__(self, rank: int | None, why: str) -> None:
        super().__init__(f"rank {rank} is lost: {why}" if rank is not None else f"a rank is lost: {why}")
        self.rank, self.why = rank, why


class Transport(Protocol):
    """One rank's way to move bytes. `drive` calls it from one thread; every wait has a deadline and raises LateError past it.

    deadline   may be replaced before a trial
    overlaps   whether copies go on after `post` has returned. Then `drive` begins the actions of other queues meanwhile, and
               asks for `finish` when the next action of the queue, or one that depends on it, is due.
    """

    overlaps: bool
    deadline: Deadline

    def begin(self, trial: int) -> None:
        """From now on all is about this trial. A transport that writes where other ranks may still read what the last trial
        brought returns when all ranks have begun.
        """

    def enter(self, step: int) -> None:
        """The rank has come to this step; a two-sided transport begins to receive what comes before it."""

    def wait(self, step: int) -> None:
        """Return when the step is complete as far as the rank takes part in it, and what it wrote here can be read."""

    def meet(self, action: int, *, all_ready: bool) -> None:
        """Say that this rank is ready for the collective of its action; with all_ready, return when all its ranks are."""

    def post(self, action: int) -> None:
        """Begin the block copies of the action; one without blocks may still have to tell its receiver."""

    def finish(self, action: int) -> None:
        """Return when what was posted may be overwritten here, and will be seen at its destination before any later signal."""

    def mark(self, action: int) -> None:
        """Mark the action's cell and wake the ranks that wait for its step."""

    def drain(self) -> None:
        """Return when everything that the trial brings to this rank has arrived."""

    def barrier(self) -> None:
        """Return when all ranks have called it."""


class Computing(Protocol):
    """What a rank computes on a device."""

    def put(self, step: int, memory: "Memory", stream: int) -> None:
        """Put what the rank computes in a step on a stream, if anything; `memory` says where its addresses lie."""


class Following(Protocol):
    """What takes checksums on a device."""

    def put_sent(self, step: int, memory: "Memory", stream: int) -> None:
        """Put on a stream those of what the rank sends in a step; `memory` says where its addresses lie."""

    def put_kept(self, memory: "Memory", stream: int) -> None:
        """Put on a stream those of what has landed in the rank's destination weights."""

    def collect(self) -> None:
        """Bring to the host what was taken, once the streams have passed."""


@runtime_checkable
class Enqueuing(Protocol):
    """What stands in for a Transport where a library works on streams: it runs the rank's whole program itself.

    begin, barrier and deadline are those of a Transport.
    """

    deadline: Deadline
    use_graphs: bool  # replay a CUDA graph from the second run on, where `why_not_capturable` gives no reason

    def why_not_capturable(self, *, first: bool = False) -> str | None:
        """Why a run can't be captured as a CUDA graph, None if it can; with `first`, why it never can."""

    def begin(self, trial: int) -> None:
        """As of a Transport."""

    def compute_by(self, make: "Callable[[object], Computing]") -> None:
        """Compute by what `make` makes of the rank's device, a `devices.Device`."""

    def follow_by(self, make: "Callable[[object], Following]") -> None:
        """Take checksums, in every run from the next on, by what `make` makes of the rank's device, a `devices.Device`."""

    def adopt(self, lent: Sequence[Lent] | None) -> None:
        """From the next run on work on these buffers on the device, in place of the arena in host memory; None for that again."""

    def run(self, start_s: NDArray[np.float64], end_s: NDArray[np.float64], at_step: NDArray[np.int64]) -> None:
        """What `drive` does. Times are the device's, brought to the host's clock."""

    def barrier(self) -> None:
        """As of a Transport. The first after `begin` also brings what the host has filled to the device, the second what has
        arrived back.
        """


@runtime_checkable
class OnDevice(Enqueuing, Protocol):
    """An Enqueuing whose rank has a device of its own, which callers' tensors may lie on."""

    device: "Device"


class Wire(Protocol[Handle]):
    """What a library with tagged messages offers one rank. Those of one pair and tag arrive in the order in which they were
    sent.
    """

    def send(self, data: NDArray[np.uint8], to: int, tag: int) -> Handle:
        """Begin to send contiguous bytes, perhaps none; they stay untouched until `wait` has returned."""

    def receive(self, data: NDArray[np.uint8], source: int, tag: int) -> Handle:
        """Begin to receive exactly so many bytes."""

    def wait(self, handle: Handle, deadline: Deadline) -> None:
        """Return when it is done. Raises LateError past the deadline, LostError when the peer is lost."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank of how many this process is, and where it finds the others: `rendezvous` as --rendezvous takes it, or "" for
    what the launcher has set.
    """

    rank: int
    size: int
    rendezvous: str = ""
    local_rank: int = 0


class World(Protocol):
    """The ranks of a run, found and connected. All ranks call all methods in one order.

    key   the same for worlds whose messages could be taken for each other's: one plan at a time moves over these
    """

    rank: int
    size: int
    key: int

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        """What every rank gave, by rank. Raises LateError, or RunError when a rank is lost."""

    def open(self, programs: Programs, messages: Messages, arena: Arena, deadline: Deadline) -> Transport | Enqueuing:
        """The rank's transport for these programs, over its own memory."""

    def close(self) -> None:
        """Leave, when all ranks are done with it."""

    def abandon(self) -> None:
        """Leave after a failure, without waiting for any rank."""


@runtime_checkable
class Wired(Protocol):
    """A World whose transports send tagged messages over one Wire, which `exchanges.MessageTransport` is made of.

    call_tag   one that no message of a plan has
    pools      memory for windows, which transports share of which one runs at a time
    """

    wire: "Wire[object]"
    call_tag: int
    pools: "tuple[Pool, Pool]"


@runtime_checkable
class Renaming(Protocol):
    """A World that can call its ranks by the numbers that they have in a plan, though its library counts them without gaps."""

    def rename(self, numbers: Sequence[int]) -> None:
        """Call rank i numbers[i], in plans that are opened and in errors from now on. All ranks call it with the same."""


@runtime_checkable
class Changing(Protocol):
    """A World whose ranks may meet anew, fewer or more of them, and keep some of what connects them. `parts_s`: what was done to
    connect this one, and the seconds that it took.
    """

    @property
    def parts_s(self) -> Mapping[str, float]: ...

    def again(self, place: "Place", deadline: Deadline) -> "World":
        """The world of the ranks that are there now; those that come call the library's `connect`. This one is closed."""

    def leave(self) -> None:
        """Go without waiting for those that stay, who call `again`."""


@runtime_checkable
class Gapped(Protocol):
    """A World in which some numbers below its size are nobody's. `present` are those that are some rank's, ascending."""

    present: Sequence[int]


@runtime_checkable
class GivingUp(Protocol):
    """A World by which a rank that fails tells the others so, who would else wait for it until the deadline."""

    def give_up(self, words: str) -> None:
        """Tell them, without waiting for any of them. Nothing else may be called after it but `close` and `abandon`."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A rank that hasn't said where it was when a run ended, as others last saw it: at a step (see `steps.describe_place`),
    stopped by a signal, gone.
    """

    rank: int
    step: int
    is_stopped: bool
    is_gone: bool


@runtime_checkable
class Witnessed(Protocol):
    """A World whose ranks hear of each other beside its library. `at_step` (int64[n_ranks]) is where a rank notes its step for
    that.
    """

    at_step: NDArray[np.int64]

    def silent(self) -> Sequence[Silent]:
        """After `give_up`: wait a short time until all ranks have said where they were; those that then haven't."""


@runtime_checkable
class Remembering(Protocol):
    """A Wire by which a rank learns why another one gave up, whose connection it has lost."""

    def last_words(self, rank: int) -> str:
        """What the rank said when it gave up: that it did, and why; nothing if it said nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """One run of the programs: when each cell's copies began and ended, and what verifying found on each rank.

    began_s    when the first rank was let go; start_s, end_s float64[n_cells] on the same clock, one for all ranks
    wrong_pieces   what checksums found: for each rank the first row of `PieceRows` that isn't what was sent, -1 for none
    """

    began_s: float
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    findings: Sequence[Finding]
    worst: float = 0.0
    wrong_pieces: Sequence[int] = ()


class Session(Protocol):
    """Ranks that have been started for one plan; leaving the context ends them and frees all that they used."""

    def run(self, progress: Progress | None = None, preparing: Progress | None = None) -> Sequence[Trial]:
        """Fill, run and verify as often as was asked for when the session was opened. Raises RunError with rank and step.

        `progress` is told the share of the trials that is done, `preparing` that of what comes before the first.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...
