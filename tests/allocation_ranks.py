"""Ranks that measure what they allocate while they run plans: forked for gloo, started by mpiexec for MPI.

`allocation_ranks.py FOLDER TRANSPORT`: rank r leaves in FOLDER/r.json, by case, what it took beside its weights and slots.
"""

import json
import resource
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from forked_ranks import fork_ranks
from hand_plans import HandPlan, column_shards, row_shards

from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.drive import drive
from shardroute.executors.launching.launched import own_memory
from shardroute.executors.launching.launches import find_place
from shardroute.executors.messages.separate import compile_separate
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Deadline, Place, World
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate
from shardroute.planner.plans import SOURCE, TARGET, Lane, Plan
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

N_RANKS: Final = 4
WINDOW_BYTES: Final = 2**20  # what the plans declare each way: far less than they move, or than one of their pieces has


def one_strided_piece() -> Plan:
    """Columns of 8 MiB each way between two ranks, one piece in one step."""
    hand = HandPlan()
    shape = (2048, 16384)
    t = hand.tensor(shape, column_shards(shape, [0, 1]), row_shards(shape, [0, 1]), "u8")
    for src in (0, 1):
        for dst in (0, 1):
            hand.copy(hand.bundle((t, [(1024 * dst, 1024 * dst + 1024), (8192 * src, 8192 * src + 8192)])), src, dst)
    return _small(hand.build(N_RANKS))


def one_shot_sum() -> Plan:
    """2 MiB of addends on each rank, whose sum all need, in one step: 6 MiB come to each."""
    axes = f"x={N_RANKS}"
    topology = build_topology(load_machine("cpu-processes"), min_gpus=N_RANKS)
    plan = make_plan(tensor_problem("512,1024", "f32", axes, "P", axes, "R"), topology, "one-shot")
    assert len(plan.steps) == 1
    return _small(plan)


def broadcast_of_rows() -> Plan:
    """Rows of 4 KiB that lie apart, 8 MiB in all, broadcast to three ranks in one step, there into a slot."""
    shape = (2048, 4096)
    hand = HandPlan(slots=[shape[0] * shape[1]])
    apart = Fragments(shape, [0], [[0, 0]], [shape], [0], [0], [[2 * shape[1], 1]], [2 * shape[0] * shape[1]])
    t = hand.tensor(shape, apart, place(shape, Mesh.of({"r": 3}, [1, 2, 3]), [Replicate()]), "u8")
    whole = hand.bundle((t, [(0, shape[0]), (0, shape[1])]))
    sent = hand.broadcast(whole, 0, [0, 1, 2, 3], SOURCE, 0)
    for rank in (1, 2, 3):
        hand.copy(whole, rank, rank, [sent], 0, TARGET, Lane.LOCAL)
    return _small(hand.build(N_RANKS))


CASES: Final[Mapping[str, Callable[[], Plan]]] = {
    "one strided piece": one_strided_piece,
    "one-shot sum": one_shot_sum,
    "broadcast of rows": broadcast_of_rows,
}


def _small(plan: Plan) -> Plan:
    return replace(plan, window_bytes=WINDOW_BYTES)


def measure(world: World) -> dict[str, dict[str, int]]:
    """Bytes that Python and NumPy held at once while this rank opened its transport and ran each plan twice, beside its arena;
    and by how many the process grew, libraries included.
    """
    found = {}
    for name, make in CASES.items():
        separate = compile_separate(make())
        programs = separate.programs
        memory = own_memory(int(programs.arena_bytes[world.rank]))
        memory[...] = 1
        deadline, times = Deadline.after(60), np.zeros((2, len(programs.cells.rank)))
        at_step = np.zeros(1, np.int64)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tracemalloc.start()
        transport = world.open(programs, separate.messages, Arena.whole(memory), deadline)
        for trial in range(2):
            transport.begin(trial)
            transport.barrier()
            drive(programs, world.rank, transport, times[0], times[1], at_step)
            transport.barrier()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown)
        found[name] = {"traced": peak, "grown": grown}
        world.pools = tuple(type(pool)() for pool in world.pools)  # so that the next case takes its own
    return found


def main() -> None:
    """Be a rank that mpiexec started, or fork all ranks."""
    folder, transport = Path(sys.argv[1]), sys.argv[2]
    library, place = load_library(transport), find_place() if transport == "mpi" else None

    def run(place: Place) -> object:
        world = library.connect(place, Deadline.after(60))
        found = measure(world)
        world.close()
        return found

    if place is not None:
        (folder / f"{place.rank}.json").write_text(json.dumps(run(place)))
        return
    library.preload()
    fork_ranks(N_RANKS, folder, lambda rank: run(Place(rank, N_RANKS, f"file://{folder}/rendezvous")))


if __name__ == "__main__":
    main()
