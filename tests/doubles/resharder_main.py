"""Ranks of a Resharder whose tensors lie on a GPU, over doubles: `resharder_main.py FOLDER TRANSPORT N_RANKS`.

Device memory of the double is host memory, so an array that describes itself by the CUDA array interface is a tensor on a GPU.
"""

import sys
import time
from pathlib import Path

import numpy as np
from forked_ranks import fork_ranks
from hand_plans import column_shards, row_shards

from shardroute.executors.resharding.resharders import Resharder
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.errors import InputError, RunError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

SHAPE = (24, 40)
LATE_S = 2.0


class OnDevice:
    """An array that says that it lies on a GPU."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__array_interface__ | {"version": 3}


def run(transport: str, place: Place) -> dict[str, object]:
    """Six transfers from rows to columns; then what is said of tensors in two places, and of a rank that doesn't come."""
    n = place.size
    problem = one_tensor(SHAPE, "f32", row_shards(SHAPE, range(n)), column_shards(SHAPE, range(n)), n_ranks=n)
    world = load_library(transport).connect(place, Deadline.after(30.0))
    plan = make_plan(problem, build_topology(load_machine("cpu-processes"), min_gpus=n), "greedy", 128)
    resharder = Resharder.of_plan(plan, world, timeout_s=30.0)
    whole = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)
    rows, columns = np.array_split(np.arange(SHAPE[0]), n)[place.rank], np.array_split(np.arange(SHAPE[1]), n)[place.rank]
    right = []
    graphs = ""
    for turn in range(6):
        if turn == 3:
            try:
                resharder.use_graphs()
            except InputError as error:
                graphs = str(error)
        if turn < 5:  # the last two lie in one place, so a graph is captured twice and replayed three times
            into = np.zeros((SHAPE[0], len(columns)), np.float32)
            given = np.ascontiguousarray(whole[rows])
        into[...], given[...] = 0, whole[rows] + turn
        resharder.run({"tensor": OnDevice(given)}, {"tensor": OnDevice(into)}).wait()
        right.append(bool((into == whole[:, columns] + turn).all()))
    refused = ""
    try:
        resharder.run({"tensor": OnDevice(given)}, {"tensor": into})
    except InputError as error:
        refused = str(error)
    late = ""
    if place.rank > 0:  # rank 0 stays away
        try:
            resharder.run({"tensor": OnDevice(given)}, {"tensor": OnDevice(into)}, timeout_s=LATE_S).wait()
        except RunError as error:
            late = str(error)
    time.sleep(LATE_S)
    return {"right": right, "refused": refused, "late": late, "graphs": graphs}


def main() -> None:
    """Fork all ranks and wait for them."""
    folder, transport, n_ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    load_library(transport).preload()
    fork_ranks(n_ranks, folder, lambda rank: run(transport, Place(rank, n_ranks, f"file://{folder}/rendezvous")))


if __name__ == "__main__":
    main()
