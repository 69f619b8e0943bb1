"""A refit loop whose ranks change: a trainer dies, a server joins, and the weights keep flowing.

    python examples/refit_changes.py

Ranks 0 to 3 train, as two replicas of two tensor-parallel ranks; 4 and 5 serve. Rank 1 is killed: its shard then comes from
rank 3, which holds the same. Later rank 6 joins as a third server, which needs what rank 4 does. After each change the ranks that
are there make a new group, plan again from the plan that they had, and go on; what each part of that took is printed.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from shardroute.executors import Resharder
from shardroute.planner.exchange import Sharding, inventory_of, problem_between
from shardroute.planner.layouts.meshes import Mesh
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.layouts.tensors import Tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies import build_topology, load_machine
from shardroute.topologies.errors import RunError

N_RANKS = 7
SHAPE = (512, 256)
TENSOR = Tensor("w", SHAPE, "f32")
TRAINING = Sharding(Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3)), (Replicate(), Shard(0)))
SERVING = Sharding(Mesh(("tp",), (2,), (4, 5)), (Shard(1),))
DIES, JOINS, LIKE = 1, 6, 4


def first_plan():
    """The plan of the six ranks that the loop begins with; on a cluster, a file that one of them saved."""
    problem = problem_between(inventory_of([(TENSOR, TRAINING)]), inventory_of([(TENSOR, SERVING)]))
    return make_plan(problem, build_topology(load_machine("cpu-processes"), min_gpus=problem.n_ranks), "greedy")


def version_of(step):
    """The whole tensor after a step."""
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + step


def part_of(rank, whole):
    """What a rank has of it."""
    if rank < 4:
        return whole[256 * (rank % 2) : 256 * (rank % 2 + 1)].contiguous()
    side = 0 if rank in (LIKE, JOINS) else 1
    return whole[:, 128 * side : 128 * (side + 1)].contiguous()


def transfer(resharder, rank, step, weights):
    """One step of the loop: from the trainers to the servers, which then look at what they have."""
    given, into = ({"w": part_of(rank, version_of(step))}, {}) if rank < 4 else ({}, {"w": weights})
    moving = resharder.run(given, into, version=step, timeout_s=20.0)
    moving.wait()
    if rank >= 4:
        with resharder.reading() as version:
            assert version == step
            assert torch.equal(weights, part_of(rank, version_of(step)))
    return moving.parts_s


def meet(folder, rank, there):
    """Join those that are there, who meet anew after each change, as a launcher has them do."""
    began = time.monotonic()
    if dist.is_initialized():
        dist.destroy_process_group()
    name = "-".join(map(str, there))
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=there.index(rank), world_size=len(there))
    return time.monotonic() - began


def tell(rank, what, met, resharder, moved):
    """What a change took, as rank 0 saw it."""
    if rank == 0:
        parts = {**resharder.parts_s, "meet": met + resharder.parts_s["meet"], **moved}
        print(f"{what}: " + ", ".join(f"{part} {1000 * s:.1f} ms" for part, s in parts.items()), flush=True)


def run(rank, folder):
    """What every rank does."""
    weights = torch.zeros_like(part_of(rank, version_of(0))) if rank >= 4 else None
    plan, there = first_plan(), [0, 1, 2, 3, 4, 5]
    if rank != JOINS:
        met = meet(folder, rank, there)
        resharder = Resharder.of_plan(plan)
        tell(rank, "6 ranks", met, resharder, transfer(resharder, rank, 1, weights))

        if rank == DIES:
            os.kill(os.getpid(), signal.SIGKILL)
        with contextlib.suppress(RunError):  # which names the rank that is lost; here all know
            transfer(resharder, rank, 2, weights)
        assert resharder.version == 1
        assert weights is None or torch.equal(weights, part_of(rank, version_of(1)))  # the old weights, whole

        there = [0, 2, 3, 4, 5]
        resharder.close()
        met = meet(folder, rank, there)
        resharder = Resharder.of_change(plan, gone=[DIES], version=1)
        tell(rank, f"rank {DIES} has died", met, resharder, transfer(resharder, rank, 2, weights))
        resharder.close()

    there = [0, 2, 3, 4, 5, JOINS]
    met = meet(folder, rank, there)
    resharder = Resharder.of_change(plan, gone=[DIES], new={JOINS: LIKE}, version=2)
    tell(rank, f"rank {JOINS} has come", met, resharder, transfer(resharder, rank, 3, weights))
    resharder.close()
    dist.destroy_process_group()


def main():
    """Fork all ranks, and wait for them."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        children = [fork_rank(rank, folder) for rank in range(N_RANKS)]
        ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return int(any(code != (-signal.SIGKILL if rank == DIES else 0) for rank, code in enumerate(ended)))


def fork_rank(rank, folder):
    """Start a rank in a copy of this process; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        run(rank, folder)
        os._exit(0)
    finally:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
