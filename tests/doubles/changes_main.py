"""Ranks that go and come over doubles: `changes_main.py FOLDER TRANSPORT`; each leaves what it saw in FOLDER/RANK.json.

Ranks 0 to 3 train, as two replicas of two; 4 and 5 serve. Rank 1 is killed, then rank 6 comes, which needs what rank 4 does. Over
NVSHMEM, which a process can't start twice, all that are there at the end are processes of their own. "nccl-new" is "nccl" by a
library that can neither shrink nor grow; in "nccl-late" rank 1 dies when all are about to move, and others wait on their GPUs.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

import numpy as np
from forked_ranks import fork_ranks
from resharder_main import OnDevice

from shardroute.executors.resharding import resharders
from shardroute.executors.resharding.resharders import Resharder
from shardroute.executors.transports import communicators, libraries
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.planner.exchange import Sharding, inventory_of, problem_between
from shardroute.planner.layouts.meshes import Mesh
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.layouts.tensors import Tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies import build_topology, load_machine
from shardroute.topologies.errors import InputError, RunError

N_RANKS = 7
SHAPE = (16, 24)
DIES, JOINS, LIKE, LEAVES = 1, 6, 4, 5
STAGES = ([0, 1, 2, 3, 4, 5], [0, 2, 3, 4, 5], [0, 2, 3, 4, 5, 6])
TWIN, NVSHMEM, NEW, LATE = "torch-cpu", "nvshmem", "nccl-new", "nccl-late"
SOON_S = 1.0
libraries.LIBRARIES = {**libraries.LIBRARIES, TWIN: "torch_twin"}


def first_plan():
    tensor = Tensor("w", SHAPE, "f32")
    training = Sharding(Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3)), (Replicate(), Shard(0)))
    serving = Sharding(Mesh(("tp",), (2,), (4, 5)), (Shard(1),))
    problem = problem_between(inventory_of([(tensor, training)]), inventory_of([(tensor, serving)]))
    return make_plan(problem, build_topology(load_machine("cpu-processes"), min_gpus=problem.n_ranks), "greedy")


def whole(version: int) -> np.ndarray:
    return np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE) + version


def part_of(rank: int, of: np.ndarray) -> np.ndarray:
    if rank < 4:
        return np.ascontiguousarray(of[8 * (rank % 2) : 8 * (rank % 2 + 1)])
    side = rank in (LIKE, JOINS)
    return np.ascontiguousarray(of[:, :12] if side else of[:, 12:])


class Life:
    """One rank's."""

    def __init__(self, folder: Path, transport: str, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.transport, self.dies_late = "nccl" if transport in (NEW, LATE) else transport, transport == LATE
        self.held = (lambda array: array) if transport == TWIN else OnDevice
        self.weights = np.zeros_like(part_of(rank, whole(0)))
        self.seen: dict[str, object] = {}

    def meet(self, stage: int):
        """What a resharder takes: over the twin a world, else the library's name, and where to meet in the environment."""
        there = STAGES[stage]
        place = Place(there.index(self.rank), len(there), f"file://{self.folder}/rendezvous-{stage}")
        if self.transport == TWIN:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
            return load_library(TWIN).connect(place, Deadline.after(30.0))
        port = 20000 + (os.getppid() * 8 + stage) % 12000
        os.environ |= {"RANK": str(place.rank), "WORLD_SIZE": str(place.size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return self.transport

    def transfer(self, resharder: Resharder, version: int, timeout_s: float = 30.0) -> None:
        given = {"w": self.held(part_of(self.rank, whole(version)))} if self.rank < 4 else {}
        into = {"w": self.held(self.weights)} if self.rank >= 4 else {}
        resharder.run(given, into, version=version, timeout_s=timeout_s).wait()
        assert self.rank < 4 or (self.weights == part_of(self.rank, whole(version))).all(), version

    def parts(self, name: str, resharder: Resharder) -> None:
        self.seen[name] = sorted(part for part in resharder.parts_s if part.endswith("communicator"))

    def begin(self) -> Resharder:
        """Six ranks reshard, one dies, and the others hear of it before anything is under way."""
        resharder = Resharder.of_plan(first_plan(), self.meet(0), timeout_s=30.0)
        self.transfer(resharder, 1)
        if self.rank == DIES:
            if self.dies_late:
                resharders.Bucket.move = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                self.transfer(resharder, 2)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            self.transfer(resharder, 2, SOON_S)
        except RunError as error:
            self.seen["lost"] = str(error)
        assert resharder.version == 1
        return resharder

    def shrink(self, before: Resharder) -> Resharder:
        world = self.meet(1)
        resharder = Resharder.of_change(first_plan(), gone=[DIES], transport=world, before=before, version=1, timeout_s=30.0)
        self.transfer(resharder, 2)
        self.parts("shrunk", resharder)
        return resharder

    def grow(self, before: Resharder | None) -> None:
        new, world, version = {JOINS: LIKE}, self.meet(2), 2 if before is None else before.version
        options = {"verify": self.transport == TWIN, "timeout_s": 30.0}
        resharder = Resharder.of_change(
            first_plan(), gone=[DIES], new=new, transport=world, before=before, version=version, **options
        )
        self.transfer(resharder, 3)
        self.parts("grown", resharder)
        if self.rank == LEAVES:
            return
        try:
            self.transfer(resharder, 4, SOON_S)
        except RunError as error:
            self.seen["left"] = str(error)


def run(folder: Path, transport: str, rank: int) -> dict[str, object]:
    life = Life(folder, transport, rank)
    before = life.shrink(life.begin()) if rank != JOINS else None
    life.grow(before)
    return life.seen


def run_and_be_refused(folder: Path, rank: int) -> dict[str, object]:
    """Over NVSHMEM, in processes that have started it."""
    life = Life(folder, NVSHMEM, rank)
    if rank == JOINS:
        return {}
    before = life.begin()
    try:
        life.shrink(before)
    except InputError as error:
        life.seen["refused"] = str(error)
    return life.seen


def run_anew(folder: Path, rank: int) -> dict[str, object]:
    """Over NVSHMEM, in processes of their own."""
    life = Life(folder, NVSHMEM, rank)
    if rank != DIES:
        life.grow(None)
    return life.seen


def main() -> None:
    """Fork all ranks and wait for them."""
    folder, transport = Path(sys.argv[1]), sys.argv[2]
    if transport == NEW:
        communicators.nccl_has = lambda *names: False
    load_library("nccl" if transport in (NEW, LATE) else transport).preload()
    if transport != NVSHMEM:
        fork_ranks(N_RANKS, folder, lambda rank: run(folder, transport, rank))
        return
    with contextlib.suppress(FileExistsError):
        (folder / "again").mkdir()
    fork_ranks(N_RANKS, folder, lambda rank: run_and_be_refused(folder, rank))
    fork_ranks(N_RANKS, folder / "again", lambda rank: run_anew(folder / "again", rank))


if __name__ == "__main__":
    main()
