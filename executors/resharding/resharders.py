"""Resharding in a training loop: a plan is made once, and moves the caller's own tensors every step.

    resharder = Resharder(src, dst, topology, "gloo")           once, on all ranks
    transfer = resharder.run(tensors_in, tensors_out)           every step, on all ranks
    ...                                                         the next batch, say
    transfer.wait()

Rule: nothing is allocated after the constructor: the plan's staging slots and a window to pack in are taken there, and all else
is the caller's memory.
"""

import threading
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import Arena, Lent
from shardroute.executors.interpreting.drive import drive
from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.interpreting.memories import Part
from shardroute.executors.launching.launched import agree_on
from shardroute.executors.messages.messages import lay_messages
from shardroute.executors.resharding.sides import Side, agree_on_sides
from shardroute.executors.resharding.tensors import HasLocalTensor, check_on_device, device_pointer, finish_writes, local_bytes
from shardroute.executors.resharding.worlds import open_world
from shardroute.executors.steps import describe_place
from shardroute.executors.transports.seam import Deadline, Enqueuing, LateError, World
from shardroute.planner.check import check
from shardroute.planner.exchange import problem_between
from shardroute.planner.plans import Plan
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.errors import InputError, RunError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import Topology, build_topology

# Of a transfer, where the caller sets none: a refit takes seconds, and a hung one should end while someone is watching.
DEFAULT_TIMEOUT_S: Final = 300.0


class Transfer:
    """One run of a resharder; its tensors belong to it until `wait` has returned."""

    def __init__(self, thread: threading.Thread, failure: list[BaseException]) -> None:
        self._thread, self._failure = thread, failure

    @property
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when all that this rank sends and receives has been moved. Raises RunError with rank, step and peer."""
        self._thread.join()
        if self._failure:
            raise self._failure[0]


class Resharder:
    """Moves tensors from one layout to another, as often as asked, between the ranks of a transport.

    `src` and `dst` say how the tensors lie on either side: names with DTensors, with (Tensor, Sharding) pairs, or an Inventory. A
    rank may leave out (None, or a mapping without it) what it holds nothing of, as long as some rank says it. Ranks are those of
    the transport's group. `topology` is the machine to plan for; None plans for processes of one machine.

    `transport` is a library's name, or a World. "gloo" makes a group of its own among all ranks of torch.distributed, if that is
    initialised, and else joins the ranks that a launcher started; `group` uses one that is there.

    Every rank plans for itself, and all compare digests before anything is allocated: strategies that depend on time (`optimal`)
    need a plan made before, see `of_plan`. Raises InputError and InfeasibleError as planning does, RunError when ranks differ.
    """

    def __init__(
        self,
        src: Side | None,
        dst: Side | None,
        topology: Topology | None = None,
        transport: str | World = "gloo",
        *,
        group: object = None,
        strategy: str = "greedy",
        options: Options | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        deadline = Deadline.after(timeout_s)
        world = open_world(transport, group, deadline)
        source, target = agree_on_sides(world, src, dst, deadline)
        problem = problem_between(source, target)
        machine = build_topology(load_machine("cpu-processes"), min_gpus=problem.n_ranks) if topology is None else topology
        self._prepare(make_plan(problem, machine, strategy, options=options), world, timeout_s, deadline)

    @classmethod
    def of_plan(
        cls, plan: Plan, transport: str | World = "gloo", *, group: object = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> "Resharder":
        """A resharder that runs a plan made before, the same on every rank; it is proved first, else PlanError is raised."""
        check(plan)
        deadline = Deadline.after(timeout_s)
        made = cls.__new__(cls)
        made._prepare(plan, open_world(transport, group, deadline), timeout_s, deadline)
        return made

    def _prepare(self, plan: Plan, world: World, timeout_s: float, deadline: Deadline) -> None:
        agree_on(world, plan.digest, deadline)
        if plan.problem.n_ranks > world.size:
            raise InputError(f"the plan is for {plan.problem.n_ranks} ranks, and the transport has {world.size}")
        if plan.attention is not None:
            raise InputError("a resharder moves tensors, and this plan computes attention; run it with `shardroute run`")
        programs, buffers = compile_plan(plan)
        rank = world.rank
        rows = np.flatnonzero((buffers.rank == rank) & (buffers.n_bytes > 0))
        self.plan = plan
        self._world, self._timeout_s, self._programs = world, timeout_s, programs
        self._starts: list[int] = buffers.offset[rows].tolist()
        self._sizes: list[int] = buffers.n_bytes[rows].tolist()
        self._parts: list[int] = buffers.part[rows].tolist()
        ids: list[int] = buffers.id[rows].tolist()
        self._names = ["" if part == Part.SLOT else buffers.names[i] for i, part in zip(ids, self._parts, strict=True)]
        slots = {k: np.empty(n, np.uint8) for k, n in enumerate(self._sizes) if self._parts[k] == Part.SLOT}
        self._slots = slots
        self._arena = Arena(self._starts, [slots.get(k, _NOTHING) for k in range(len(rows))])
        self._idle = rank >= plan.problem.n_ranks
        self._messages = lay_messages(plan, programs, buffers)
        self._transport = world.open(programs, self._messages, self._arena, deadline) if not self._idle else None
        if plan.problem.summed and isinstance(self._transport, Enqueuing):  # whose library adds up, after messages too
            raise InputError("a resharder over GPUs moves tensors, and this plan adds up; run it with `shardroute run`")
        self._times = np.zeros((2, len(programs.cells.rank)))
        self._n_runs = 0
        self._broken = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self._world.rank

    @property
    def staging_bytes(self) -> int:
        """Memory of this rank's staging slots, as the plan declares it."""
        return sum(len(slot) for slot in self._slots.values())

    @property
    def window_bytes(self) -> int:
        """Memory of this rank to pack what it sends and receives in pieces that lie apart."""
        return 0 if self._idle else int(self._messages.window_bytes[self._world.rank].sum())

    def run(
        self,
        tensors_in: Mapping[str, object] | None,
        tensors_out: Mapping[str, object] | None,
        *,
        timeout_s: float | None = None,
    ) -> Transfer:
        """Begin to move: from this rank's parts of the source tensors into its parts of the destination tensors, by name.

        All ranks call it. Tensors that this rank holds no part of may be missing. Raises InputError for a part that is missing,
        of another size, not contiguous, or in memory that both sides share; RunError while an earlier transfer of this group
        goes on, and after one that failed.
        """
        if self._broken:
            raise RunError("an earlier transfer failed, so the ranks no longer agree where they are; make a new resharder")
        given = tensors_in or {}, tensors_out or {}
        lent = self._borrow(*given)
        buffers = self._bind(*given) if lent is None else None
        if not _RUNNING.begin(self._world, self.plan.digest):
            raise RunError(f"a transfer of plan {_RUNNING.of(self._world)[:12]} goes on over these ranks; wait for it first")
        if buffers is not None:
            self._arena.bind(buffers)
        if isinstance(self._transport, Enqueuing):
            self._transport.adopt(lent)
            finish_writes([each.owner for each in lent or ()])
        failure: list[BaseException] = []
        deadline = Deadline.after(self._timeout_s if timeout_s is None else timeout_s)
        thread = threading.Thread(target=self._move, args=(deadline, failure), name="shardroute", daemon=True)
        thread.start()
        return Transfer(thread, failure)

    def use_graphs(self) -> None:
        """From the second run on replay a CUDA graph, captured anew when tensors have moved. All ranks call it.

        Raises InputError with the reason where the transport's runs can't be captured.
        """
        transport = self._transport
        if transport is None:
            return
        reason = "its runs aren't put on streams of a GPU"
        if isinstance(transport, Enqueuing):
            reason = transport.why_not_capturable(first=True) or ""
            transport.use_graphs = not reason
        if reason:
            raise InputError(f"this transport can't replay a CUDA graph: {reason}")

    def close(self) -> None:
        """Leave the group that the constructor made, if it did. All ranks call it."""
        self._world.close()

    def _borrow(self, tensors_in: Mapping[str, object], tensors_out: Mapping[str, object]) -> list[Lent] | None:
        """The buffers of tensors on a GPU, for a transport that works there; None where tensors lie on the CPU."""
        if not isinstance(self._transport, Enqueuing):
            return None
        found: list[Lent] = []
        n_host = 0
        for start, n_bytes, name, part in zip(self._starts, self._sizes, self._names, self._parts, strict=True):
            tensor = (tensors_in if part == Part.SOURCE else tensors_out).get(name)
            if part == Part.SLOT or tensor is None:
                continue
            pointer = device_pointer(tensor)
            if pointer is None:
                n_host += 1
                continue
            check_on_device(name, tensor, n_bytes)
            owner = tensor._local_tensor if isinstance(tensor, HasLocalTensor) else tensor
            found.append(Lent(start, n_bytes, pointer, owner, part == Part.TARGET))
        if found and n_host:
            raise InputError(
                f"rank {self._world.rank}: {n_host} tensors lie on the CPU and {len(found)} on a GPU; give all in one place"
            )
        n_needed = sum(part != Part.SLOT for part in self._parts)
        if found and len(found) < n_needed:
            raise InputError(f"rank {self._world.rank} holds parts of {n_needed} tensors, of which {len(found)} were given")
        sources = [(each.pointer, each.pointer + each.n_bytes) for each in found if not each.is_target]
        for each in found:
            if each.is_target and any(a < each.pointer + each.n_bytes and each.pointer < b for a, b in sources):
                raise InputError("a destination tensor lies in memory of a source tensor; give it its own")
        return found or None

    def _bind(self, tensors_in: Mapping[str, object], tensors_out: Mapping[str, object]) -> list[NDArray[np.uint8]]:
        found: list[NDArray[np.uint8]] = []
        for k, (name, part, n_bytes) in enumerate(zip(self._names, self._parts, self._sizes, strict=True)):
            if part == Part.SLOT:
                found.append(self._slots[k])
                continue
            given, side = (tensors_in, "source") if part == Part.SOURCE else (tensors_out, "destination")
            if name not in given:
                raise InputError(f"rank {self._world.rank} holds a part of {side} tensor {name}, which was not given")
            found.append(local_bytes(name, given[name], n_bytes))
        sources = [memory for memory, part in zip(found, self._parts, strict=True) if part == Part.SOURCE]
        for memory, part, name in zip(found, self._parts, self._names, strict=True):
            if part == Part.TARGET and any(np.may_share_memory(memory, source) for source in sources):
                raise InputError(f"tensor {name}: the destination lies in memory of a source tensor; give it its own")
        return found

    def _move(self, deadline: Deadline, failure: list[BaseException]) -> None:
        at_step = np.full(1, -1, dtype=np.int64)
        rank = self._world.rank
        try:
            if self._transport is None:
                return
            self._transport.deadline = deadline
            self._transport.begin(self._n_runs)
            drive(self._programs, rank, self._transport, self._times[0], self._times[1], at_step)
            self._n_runs += 1
        except LateError as error:
            peers = f", waiting for rank {', '.join(map(str, error.peers))}," if error.peers else ""
            late = f"when the {deadline.allowed_s:g} s that it may take were over"
            failure.append(RunError(f"rank {rank} {describe_place(self.plan, int(at_step[0]))}{peers} {late}"))
        except RunError as error:
            failure.append(RunError(f"rank {rank} {describe_place(self.plan, int(at_step[0]))}: {error}"))
        except BaseException as error:  # whatever it is, it belongs to whoever waits
            failure.append(error)
        finally:
            self._broken = bool(failure)
            _RUNNING.end(self._world)


class _Running:
    """Which plan each world is moving; a second one on it at once would match its messages with the first one's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[int, str] = {}

    def begin(self, world: World, digest: str) -> bool:
        """Note a plan, unless one is moving; says which."""
        with self._lock:
            if world.key in self._digests:
                return False
            self._digests[world.key] = digest
            return True

    def of(self, world: World) -> str:
        """The digest of what is moving."""
        with self._lock:
            return self._digests.get(world.key, "")

    def end(self, world: World) -> None:
        """Note that it has ended."""
        with self._lock:
            self._digests.pop(world.key, None)


_RUNNING: Final = _Running()
_NOTHING: Final[NDArray[np.uint8]] = np.zeros(0, dtype=np.uint8)
