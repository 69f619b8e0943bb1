"""Resharding in a training loop: a plan is made once, and moves the caller's own tensors every step.

    resharder = Resharder(src, dst, topology, "gloo")           once, on all ranks
    transfer = resharder.run(tensors_in, tensors_out)           every step, on all ranks
    ...                                                         the next batch, say
    transfer.wait()

Rule: the destination tensors change once all of them have arrived, on all ranks, and else stay what they are. What that takes is
taken in the constructor: the plan's staging slots, a window to pack in, and spare memory for what arrives.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.memories import ALIGNMENT
from shardroute.executors.launching.launched import agree_on, own_memory
from shardroute.executors.resharding.buckets import Bucket
from shardroute.executors.resharding.changes import plan_after, present_after
from shardroute.executors.resharding.inventory_parts import cut_into_buckets
from shardroute.executors.resharding.numbered import numbered
from shardroute.executors.resharding.sides import Side, agree_on_sides
from shardroute.executors.resharding.transfers import RUNNING, Transfer, added
from shardroute.executors.resharding.versions import Given, Versions, check_version
from shardroute.executors.resharding.votes import agree_on_end, agree_on_ready, agree_on_version
from shardroute.executors.resharding.workers import Worker, worker_of
from shardroute.executors.resharding.worlds import open_world
from shardroute.executors.steps import describe_place
from shardroute.executors.transports.seam import Changing, Deadline, Enqueuing, GivingUp, LateError, OnDevice, World
from shardroute.planner.check import check
from shardroute.planner.exchange import problem_between
from shardroute.planner.plans import Plan
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.errors import InputError, RunError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import Topology, build_topology
from shardroute.topologies.units import format_bytes

# Of a transfer, where the caller sets none: a refit takes seconds, and a hung one should end while someone is watching.
DEFAULT_TIMEOUT_S: Final = 300.0


class Resharder:
    """Moves tensors from one layout to another, as often as asked, between the ranks of a transport.

    `src` and `dst` say how the tensors lie on either side: names with DTensors, with (Tensor, Sharding) pairs, or an Inventory. A
    rank may leave out (None, or a mapping without it) what it holds nothing of, as long as some rank says it. Ranks are those of
    the transport's group. `topology` is the machine to plan for; None plans for processes of one machine.

    `transport` is a library's name, or a World. "gloo" makes a group of its own among all ranks of torch.distributed, if that is
    initialised, and else joins the ranks that a launcher started; `group` uses one that is there.

    New weights arrive in spare memory on each rank, and take the old ones' place when all ranks have all of theirs. `spare_bytes`
    is the most that this may take on a rank: None for as much as all of its destination tensors; less, and the tensors change
    bucket by bucket, in as few as fit; 0, and they are written in place, so that a transfer that fails leaves parts of both.
    `version` counts what the destination tensors hold, see `reading`; after a transfer that failed it is what `versions` was.
    With `verify` checksums follow every piece.

    Every rank plans for itself, and all compare digests before anything is allocated: strategies that depend on time (`optimal`)
    need a plan made before, see `of_plan`. Raises InputError and InfeasibleError as planning does, RunError when ranks differ, or
    when one of them can't get ready.
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
        spare_bytes: int | None = None,
        verify: bool = False,
        version: Given = 0,
    ) -> None:
        deadline = Deadline.after(timeout_s)
        self._parts_s: dict[str, float] = {}
        with self._timed("meet"):
            world = open_world(transport, group, deadline)
        with _left_on_failure(world, transport):
            with self._timed("describe"):
                source, target = agree_on_sides(world, src, dst, deadline)
            plans = []
            with self._timed("plan"):
                for part in cut_into_buckets(target, spare_bytes or None):
                    problem = problem_between(source, part)
                    machine = topology or build_topology(load_machine("cpu-processes"), min_gpus=problem.n_ranks)
                    plans.append(make_plan(problem, machine, strategy, options=options))
            self._prepare(plans, world, timeout_s, deadline, spare_bytes, version, verify=verify)

    @classmethod
    def of_plan(
        cls, plan: Plan, transport: str | World = "gloo", *, group: object = None, timeout_s: float = DEFAULT_TIMEOUT_S,
        spare_bytes: int | None = None, verify: bool = False, version: Given = 0,
    ) -> "Resharder":  # fmt: skip
        """A resharder that runs a plan made before, the same on every rank; it is proved first, else PlanError is raised.

        A plan can't be cut into buckets: `spare_bytes` is None, 0, or at least what the fullest rank needs.
        """
        check(plan)
        deadline = Deadline.after(timeout_s)
        made = cls.__new__(cls)
        made._parts_s = {}
        with made._timed("meet"):
            world = open_world(transport, group, deadline)
        with _left_on_failure(world, transport):
            made._prepare([plan], world, timeout_s, deadline, spare_bytes, version, verify=verify)
        return made

    @classmethod
    def of_change(
        cls, plan: Plan, *, gone: Sequence[int] = (), new: Mapping[int, int] | None = None,
        nics: Mapping[int, float] | None = None, ranks: Sequence[int] | None = None, transport: str | World = "gloo",
        group: object = None, before: "Resharder | None" = None, options: Options | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S, spare_bytes: int | None = None, verify: bool = False, version: Given = 0,
    ) -> "Resharder":  # fmt: skip
        """A resharder for a plan whose ranks have changed: some are gone, others new (each with one that needs the same), or NICs
        are slower. Ranks keep their numbers in the plan: the rank of number i in the group is `ranks[i]`, by default all that are
        left and came, ascending.

        What a rank that is gone held is taken from another holder; `plan_after` says what is raised. `before` is the resharder
        that this rank had, which serves no more: over NCCL its communicator is shrunk and grown, where the library can do so and
        nothing was under way when a rank went. `parts_s` says what was done to get a communicator, and the time of it.
        """
        deadline = Deadline.after(timeout_s)
        made = cls.__new__(cls)
        made._parts_s = {}
        with made._timed("plan"):
            changed = plan_after(plan, gone=gone, new=new, nics=nics, options=options).plan
        if before is not None:
            before._give_back()
        with made._timed("meet"):
            world = open_world(transport, group, deadline, None if before is None else before._library_world)
        with _left_on_failure(world, transport):
            there = present_after(plan, gone, new) if ranks is None else list(ranks)
            by_number = numbered(world, there, plan.problem.n_ranks)
            made._prepare([changed], by_number, timeout_s, deadline, spare_bytes, version, verify=verify)
            made._library_world = world
            if isinstance(world, Changing):
                made._parts_s |= world.parts_s
        return made

    def _prepare(
        self, plans: list[Plan], world: World, timeout_s: float, deadline: Deadline, spare_bytes: int | None, version: Given,
        *, verify: bool,
    ) -> None:  # fmt: skip
        self.plans = tuple(plans)
        self._digest = "+".join([plan.digest for plan in plans])
        with self._timed("agree"):
            agree_on(world, self._digest, deadline)
        for plan in plans:
            if plan.problem.n_ranks > world.size:
                raise InputError(f"the plan is for {plan.problem.n_ranks} ranks, and the transport has {world.size}")
            if plan.attention is not None:
                raise InputError("a resharder moves tensors, and this plan computes attention; run it with `shardroute run`")
        self._world, self._timeout_s, self._broken, self._closed = world, timeout_s, False, False
        self._library_world = world
        self._worker: Worker | None = None
        self._in_place = spare_bytes == 0
        self._spare: NDArray[np.uint8] | None = None
        self._spare_pointer: int | None = None
        self._versions = Versions(version, [tensor.name for plan in plans for tensor in plan.problem.tensors])
        failure: Exception | None = None
        with self._timed("get ready"):
            try:
                self._buckets = [Bucket(plan, world, deadline, verify=verify) for plan in plans]
                self._take_spare(spare_bytes)
            except Exception as error:  # whatever it is, the others must not wait for this rank
                failure = error
            settings = f"verify={verify}" + (", in place" if self._in_place else "")
            words = "" if failure is None else str(failure) or type(failure).__name__
            try:
                agree_on_ready(world, settings, words, deadline)
            finally:
                if failure is not None:
                    raise failure

    def _take_spare(self, spare_bytes: int | None) -> None:
        """Memory in which weights arrive; on a GPU it is taken at the first transfer, which tells that they lie there."""
        need = max((bucket.spare_bytes for bucket in self._buckets), default=0)
        if not self._in_place and spare_bytes is not None and need > spare_bytes:
            raise InputError(
                f"spare_bytes={spare_bytes}: this rank's destination takes {need} ({format_bytes(need)}), and a plan made before "
                "can't be cut; give more, or 0 to write in place"
            )
        self._spare_bytes = 0 if self._in_place else need
        if self._buckets and not isinstance(self._buckets[0].transport, Enqueuing):
            self._spare = own_memory(self._spare_bytes)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self._parts_s[part] = time.monotonic() - began_s

    @property
    def plan(self) -> Plan:
        """The plan; of several buckets the first one's, and `plans` has all."""
        return self.plans[0]

    @property
    def parts_s(self) -> Mapping[str, float]:
        """Seconds that making this took: "meet", "describe", "plan", "agree", "get ready" (compile, allocate, connect)."""
        return dict(self._parts_s)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._world.rank

    @property
    def staging_bytes(self) -> int:
        """Memory of this rank's staging slots, as the plans declare it."""
        return sum(bucket.staging_bytes for bucket in self._buckets)

    @property
    def window_bytes(self) -> int:
        """Memory of this rank to pack what it sends and receives in pieces that lie apart."""
        return max((bucket.window_bytes for bucket in self._buckets), default=0)

    @property
    def spare_bytes(self) -> int:
        """Memory of this rank in which new weights arrive beside the old ones."""
        return self._spare_bytes

    @property
    def version(self) -> int | None:
        """What the destination tensors hold: the version of the last transfer that ended well; None for parts of two."""
        return self._versions.current

    @property
    def versions(self) -> Mapping[str, int | None]:
        """What each of them holds, by its name. After a failure between two buckets some have the new version and the others the
        old one, each whole; None is of one that was being written.

        A new resharder that is given these as its `version` moves only what is missing when it is run for the version of the
        transfer that failed: by that the caller says that the weights are the same.
        """
        return self._versions.of_tensors

    def reading(self) -> AbstractContextManager[int]:
        """A block in which the destination tensors hold one version, which it gives, from begin to end:

            with resharder.reading() as version: ...

        A transfer that is complete waits for it, and a block that begins while weights change waits for that. Raises RunError
        where the tensors hold parts of two versions.
        """
        return self._versions.reading()

    def run(
        self,
        tensors_in: Mapping[str, object] | None,
        tensors_out: Mapping[str, object] | None,
        *,
        timeout_s: float | None = None,
        version: int | None = None,
    ) -> Transfer:
        """Begin to move: from this rank's parts of the source tensors into its parts of the destination tensors, by name.

        All ranks call it, for the same `version`: by default one more than the last. Tensors that this rank holds no part of may
        be missing. Raises InputError for a part that is missing, of another size, not contiguous, or in memory that both sides
        share; RunError while an earlier transfer of this group goes on, and after one that failed.
        """
        if self._closed:
            raise RunError("this resharder was closed; make a new one")
        check_version(version)
        if self._broken:
            raise RunError("an earlier transfer failed, so the ranks no longer agree where they are; make a new resharder")
        for bucket in self._buckets:
            bucket.bind(tensors_in or {}, tensors_out or {})
        if not RUNNING.begin(self._world, self._digest):
            raise RunError(f"a transfer of plan {RUNNING.of(self._world)[:12]} goes on over these ranks; wait for it first")
        failure: list[BaseException] = []
        parts_s: dict[str, float] = {}
        deadline = Deadline.after(self._timeout_s if timeout_s is None else timeout_s)
        wanted = self._versions.next if version is None else version
        if self._worker is None:
            self._worker = worker_of(self._world.key)
        done = self._worker.do(partial(self._run, deadline, wanted, failure, parts_s))
        return Transfer(done, failure, parts_s)

    def use_graphs(self) -> None:
        """From the second run on replay a CUDA graph, captured anew when tensors have moved. All ranks call it.

        Raises InputError with the reason where the transport's runs can't be captured.
        """
        for bucket in self._buckets:
            transport = bucket.transport
            if transport is None:
                continue
            reason = "its runs aren't put on streams of a GPU"
            if isinstance(transport, Enqueuing):
                reason = transport.why_not_capturable(first=True) or ""
                transport.use_graphs = not reason
            if reason:
                raise InputError(f"this transport can't replay a CUDA graph: {reason}")

    def close(self) -> None:
        """Leave the group that the constructor made, if it did, and give spare memory back. All ranks call it."""
        self._closed = True
        self._give_back()
        self._world.close()

    def _give_back(self) -> None:
        self._worker = None
        transport = self._buckets[0].transport if self._buckets else None
        if self._spare_pointer is not None and isinstance(transport, OnDevice):
            transport.device.free(self._spare_pointer)
            self._spare_pointer = None
        self._spare = None

    def _run(self, deadline: Deadline, version: int, failure: list[BaseException], parts_s: dict[str, float]) -> None:
        """A transfer, in the worker's thread. After a failure the tensors hold what `_versions` says of them."""
        at_step = np.full(1, -1, dtype=np.int64)
        rank, bucket = self._world.rank, self._buckets[0]
        claimed, there = False, [False] * len(self._buckets)
        try:
            if not self._in_place:
                with added(parts_s, "agree"):
                    has = [self._versions.hold(each.tensors, version) for each in self._buckets]
                    there = agree_on_version(self._world, self._digest, version, has, deadline)
            for bucket in (each for each, is_there in zip(self._buckets, there, strict=True) if not is_there):
                at_step[0] = -1
                if self._in_place:
                    if not claimed:
                        self._versions.claim(deadline)
                        claimed = True
                    self._versions.mark(bucket.tensors, None)
                spare = self._spare_of(bucket)
                with added(parts_s, "move"):
                    bucket.move(spare, deadline, at_step)
                at_step[0] = len(bucket.plan.steps)
                if not claimed:  # before this rank says that it is ready: then nothing may hold up the change
                    self._versions.claim(deadline)
                    claimed = True
                if not self._in_place or bucket.rows is not None:
                    with added(parts_s, "vote"):
                        agree_on_end(self._world, bucket.plan, bucket.rows, bucket.sums, deadline)
                if spare is not None:
                    with added(parts_s, "take over"):
                        self._versions.mark(bucket.tensors, None)
                        bucket.take_over(spare, deadline)
                self._versions.mark(bucket.tensors, version)
        except LateError as error:
            peers = f", waiting for rank {', '.join(map(str, error.peers))}," if error.peers else ""
            late = f"when the {deadline.allowed_s:g} s that it may take were over"
            failure.append(RunError(f"rank {rank} {describe_place(bucket.plan, int(at_step[0]))}{peers} {late}"))
        except RunError as error:
            failure.append(RunError(f"rank {rank} {describe_place(bucket.plan, int(at_step[0]))}: {error}"))
        except BaseException as error:  # whatever it is, it belongs to whoever waits
            failure.append(error)
        finally:
            self._broken = bool(failure)
            if failure and isinstance(self._world, GivingUp):
                self._world.give_up(str(failure[0]))
            if claimed:
                self._versions.release()
            RUNNING.end(self._world)

    def _spare_of(self, bucket: Bucket) -> NDArray[np.uint8] | int | None:
        """Where a bucket's weights arrive; None to write in place."""
        if self._in_place:
            return None
        if not bucket.is_on_device:
            if self._spare is None:
                self._spare = own_memory(self._spare_bytes)
            return self._spare
        transport = bucket.transport
        assert isinstance(transport, OnDevice)
        if self._spare_pointer is None:
            transport.device.use()
            self._spare_pointer = transport.device.allocate(max(self._spare_bytes, ALIGNMENT))
        return self._spare_pointer


@contextmanager
def _left_on_failure(world: World, transport: str | World) -> Iterator[None]:
    """Leave a world that was opened here if the block raises; only those whose `close` waits for nobody."""
    try:
        yield
    except BaseException:
        if isinstance(transport, str) and isinstance(world, GivingUp):
            world.close()
        raise
