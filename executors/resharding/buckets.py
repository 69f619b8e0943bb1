"""A bucket: tensors that one plan moves, and that change on this rank at once.

Rule: what a transfer needs is taken when the bucket is made; while it moves nothing is allocated.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import Arena, Lent
from shardroute.executors.interpreting.drive import drive
from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.interpreting.memories import Part
from shardroute.executors.interpreting.piece_sums import PieceRows, PieceSums, Sums, piece_rows
from shardroute.executors.launching.launched import own_memory
from shardroute.executors.messages.messages import lay_messages
from shardroute.executors.resharding.spares import Spares
from shardroute.executors.resharding.tensors import HasLocalTensor, check_on_device, device_pointer, finish_writes, local_bytes
from shardroute.executors.transports.following import FollowedTransport, sums_on
from shardroute.executors.transports.seam import Deadline, Enqueuing, OnDevice, Transport, World
from shardroute.planner.plans import Plan
from shardroute.topologies.errors import InputError

Tensors = Mapping[str, object]


class Bucket:
    """One plan, ready to move on this rank. A rank that the plan doesn't know has nothing to do.

    rows, sums   what checksums follow, and this rank's; None without
    tensors      the names of all that it moves, this rank's or not
    """

    def __init__(self, plan: Plan, world: World, deadline: Deadline, *, verify: bool) -> None:
        programs, buffers = compile_plan(plan)
        self.plan, self._rank, self._programs = plan, world.rank, programs
        self.tensors = tuple(tensor.name for tensor in plan.problem.tensors)
        rows = np.flatnonzero((buffers.rank == world.rank) & (buffers.n_bytes > 0))
        self._starts: list[int] = buffers.offset[rows].tolist()
        self._sizes: list[int] = buffers.n_bytes[rows].tolist()
        self._parts: list[int] = buffers.part[rows].tolist()
        ids: list[int] = buffers.id[rows].tolist()
        self._names = ["" if part == Part.SLOT else buffers.names[i] for i, part in zip(ids, self._parts, strict=True)]
        self._slots = {k: own_memory(n) for k, n in enumerate(self._sizes) if self._parts[k] == Part.SLOT}
        self._arena = Arena(self._starts, [self._slots.get(k, _NOTHING) for k in range(len(rows))])
        targets = [part == Part.TARGET for part in self._parts]
        self._spares = Spares(programs, world.rank, self._starts, self._sizes, targets)
        self._bound: list[NDArray[np.uint8]] = []
        self._lent: list[Lent | None] | None = None
        self._idle = world.rank >= plan.problem.n_ranks
        self._messages = lay_messages(plan, programs, buffers)
        self.transport: Transport | Enqueuing | None = None
        self.rows: PieceRows | None = piece_rows(plan) if verify else None
        self.sums: Sums | None = None
        if not self._idle:
            self.transport = self._open(world, deadline)
        if plan.problem.summed and isinstance(self.transport, Enqueuing):  # whose library adds up, after messages too
            raise InputError("a resharder over GPUs moves tensors, and this plan adds up; run it with `shardroute run`")
        self._times = np.zeros((2, len(programs.cells.rank)))
        self._n_runs = 0

    @property
    def staging_bytes(self) -> int:
        """Memory of this rank's staging slots, as the plan declares it."""
        return sum(len(slot) for slot in self._slots.values())

    @property
    def window_bytes(self) -> int:
        """Memory of this rank to pack what it sends and receives in pieces that lie apart."""
        return 0 if self._idle else int(self._messages.window_bytes[self._rank].sum())

    @property
    def spare_bytes(self) -> int:
        """Memory in which all of this rank's part can arrive beside the old one."""
        return self._spares.n_bytes

    def bind(self, tensors_in: Tensors, tensors_out: Tensors) -> None:
        """Take the caller's tensors for the next transfer. Raises InputError for one that can't be this rank's part."""
        self._lent = self._borrow(tensors_in, tensors_out)
        self._bound = self._find(tensors_in, tensors_out) if self._lent is None else []

    @property
    def is_on_device(self) -> bool:
        """Whether the tensors that were bound last lie on a GPU."""
        return self._lent is not None

    def move(self, spare: NDArray[np.uint8] | int | None, deadline: Deadline, at_step: NDArray[np.int64]) -> None:
        """Move this rank's part: into spare memory (a pointer where tensors lie on a GPU), with None into the caller's tensors.
        Raises LateError and RunError.
        """
        transport = self.transport
        if transport is None:
            return
        if self._lent is None:
            self._arena.bind(self._spares.views(spare, self._bound) if isinstance(spare, np.ndarray) else self._bound)
        if isinstance(transport, Enqueuing):
            lent = None if self._lent is None else [each for each in self._lent if each is not None]
            if self._lent is not None and isinstance(spare, int):
                lent = self._spares.lent(spare, self._lent)
            transport.adopt(lent)
            finish_writes([each.owner for each in lent or ()])
        transport.deadline = deadline
        transport.begin(self._n_runs)
        drive(self._programs, self._rank, transport, self._times[0], self._times[1], at_step)
        if isinstance(self.sums, PieceSums):  # others are taken on a device, by its transport
            self.sums.take_kept()
        self._n_runs += 1

    def take_over(self, spare: NDArray[np.uint8] | int, deadline: Deadline) -> None:
        """Put what has arrived in the place of the old weights. Raises LateError where a GPU doesn't get it done."""
        if isinstance(spare, np.ndarray):
            self._spares.take_over(spare, self._bound)
        elif self._lent is not None and isinstance(self.transport, OnDevice):
            self._spares.take_over_on(self.transport.device, spare, self._lent, deadline)

    def _open(self, world: World, deadline: Deadline) -> Transport | Enqueuing:
        transport = world.open(self._programs, self._messages, self._arena, deadline)
        if self.rows is None:
            return transport
        if isinstance(transport, Enqueuing):
            self.sums = sums_on(transport, self._programs, self.rows, self._rank)
            return transport
        sent, kept = (np.zeros(len(self.rows.step), dtype=np.uint64) for _ in range(2))
        sums = PieceSums(self.rows, self._programs.forms, self._arena, self._rank, sent, kept)
        self.sums = sums
        return FollowedTransport(transport, self._programs, self.rows, sums, self._rank, _never_shared)

    def _borrow(self, tensors_in: Tensors, tensors_out: Tensors) -> list[Lent | None] | None:
        """The buffers of tensors on a GPU, with None for slots, for a transport that works there; None for tensors on the CPU."""
        if not isinstance(self.transport, Enqueuing):
            return None
        found: list[Lent | None] = []
        n_host = 0
        for start, n_bytes, name, part in zip(self._starts, self._sizes, self._names, self._parts, strict=True):
            tensor = (tensors_in if part == Part.SOURCE else tensors_out).get(name)
            pointer = None if part == Part.SLOT or tensor is None else device_pointer(tensor)
            n_host += part != Part.SLOT and tensor is not None and pointer is None
            if pointer is None:
                found.append(None)
                continue
            check_on_device(name, tensor, n_bytes)
            owner = tensor._local_tensor if isinstance(tensor, HasLocalTensor) else tensor
            found.append(Lent(start, n_bytes, pointer, owner, part == Part.TARGET))
        lent = [each for each in found if each is not None]
        if lent and n_host:
            raise InputError(
                f"rank {self._rank}: {n_host} tensors lie on the CPU and {len(lent)} on a GPU; give all in one place"
            )
        n_needed = sum(part != Part.SLOT for part in self._parts)
        if lent and len(lent) < n_needed:
            raise InputError(f"rank {self._rank} holds parts of {n_needed} tensors, of which {len(lent)} were given")
        sources = [(each.pointer, each.pointer + each.n_bytes) for each in lent if not each.is_target]
        for each in lent:
            if each.is_target and any(a < each.pointer + each.n_bytes and each.pointer < b for a, b in sources):
                raise InputError("a destination tensor lies in memory of a source tensor; give it its own")
        return found if lent else None

    def _find(self, tensors_in: Tensors, tensors_out: Tensors) -> list[NDArray[np.uint8]]:
        found: list[NDArray[np.uint8]] = []
        for k, (name, part, n_bytes) in enumerate(zip(self._names, self._parts, self._sizes, strict=True)):
            if part == Part.SLOT:
                found.append(self._slots[k])
                continue
            given, side = (tensors_in, "source") if part == Part.SOURCE else (tensors_out, "destination")
            if name not in given:
                raise InputError(f"rank {self._rank} holds a part of {side} tensor {name}, which was not given")
            found.append(local_bytes(name, given[name], n_bytes))
        sources = [memory for memory, part in zip(found, self._parts, strict=True) if part == Part.SOURCE]
        for memory, part, name in zip(found, self._parts, self._names, strict=True):
            if part == Part.TARGET and any(np.may_share_memory(memory, source) for source in sources):
                raise InputError(f"tensor {name}: the destination lies in memory of a source tensor; give it its own")
        return found


def _never_shared() -> None:
    """Nothing: a resharder's checksums travel with its votes."""


_NOTHING: NDArray[np.uint8] = np.zeros(0, dtype=np.uint8)
