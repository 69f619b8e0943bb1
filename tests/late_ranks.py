"""Ranks that add up partial tensors, of which one is stopped or killed in the middle: forked for gloo, under mpiexec for MPI.

`late_ranks.py FOLDER TRANSPORT SIGNAL`: rank r leaves its process id in FOLDER/r.pid and its error, or "", in FOLDER/r.json.
"""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from forked_ranks import fork_ranks

from shardroute.executors.launching.launched import run_launched
from shardroute.executors.launching.launches import find_place
from shardroute.executors.messages.separate import compile_separate
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Deadline, Place, World
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.plans import Plan
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.errors import ShardrouteError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

N_RANKS: Final = 4
HURT: Final = 1
ALLOWED_S: Final = {signal.SIGSTOP: 2.0, signal.SIGKILL: 30.0}  # who dies is missed long before
_SENDS = 2  # of the hurt rank, the last of which it does not begin


def adding() -> Plan:
    """One ALL_REDUCE of four ranks, in rounds."""
    axes = f"x={N_RANKS}"
    topology = build_topology(load_machine("cpu-processes"), min_gpus=N_RANKS)
    plan = make_plan(tensor_problem("64,64", "f32", axes, "P", axes, "R"), topology, "one-shot")
    return replace(plan, window_bytes=2**15)


class HurtWire:
    """A rank's wire, by which it sends so often and no more."""

    def __init__(self, wire: object, number: int) -> None:
        self._wire, self._number, self._left = wire, number, _SENDS

    def __getattr__(self, name: str) -> object:
        return getattr(self._wire, name)

    def send(self, data, to, tag):
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), self._number)
        return self._wire.send(data, to, tag)


def run(world: World, number: signal.Signals) -> str:
    """The rank's error, "" for none."""
    separate = compile_separate(adding())
    if world.rank == HURT:
        world.wire = HurtWire(world.wire, number)
    try:
        run_launched(
            world, separate.plan, separate.programs, separate.messages, n_trials=1, deadline=Deadline.after(ALLOWED_S[number])
        )  # fmt: skip
    except ShardrouteError as error:
        world.abandon()
        return str(error)
    world.close()
    return ""


def be_rank(folder: Path, transport: str, number: signal.Signals, place: Place) -> str:
    """Join the others, run, and leave what became of it."""
    (folder / f"{place.rank}.pid").write_text(str(os.getpid()))
    found = run(load_library(transport).connect(place, Deadline.after(60)), number)
    (folder / f"{place.rank}.json").write_text(json.dumps(found))
    return found


def main() -> None:
    """Be a rank that mpiexec started, or fork all ranks."""
    folder, transport, number = Path(sys.argv[1]), sys.argv[2], signal.Signals[sys.argv[3]]
    place = find_place() if transport == "mpi" else None
    if place is not None:
        be_rank(folder, transport, number, place)
        return
    load_library(transport).preload()
    fork_ranks(
        N_RANKS, folder, lambda rank: be_rank(folder, transport, number, Place(rank, N_RANKS, f"file://{folder}/rendezvous"))
    )


if __name__ == "__main__":
    main()
