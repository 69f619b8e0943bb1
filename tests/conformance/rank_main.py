"""A launched rank, or a process that forks all ranks of a transport (for MPI, mpiexec starts this once a rank).

`rank_main.py FOLDER`: FOLDER/request.json says what to do, rank r leaves what it saw in FOLDER/r.json.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np
from conformance_plans import CASES, N_RANKS, all_to_all

from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.interpreting.piece_sums import NONE, piece_rows
from shardroute.executors.launching.launched import run_launched
from shardroute.executors.launching.launches import find_place
from shardroute.executors.messages.messages import lay_messages
from shardroute.executors.resharding.resharders import Resharder
from shardroute.executors.run import run_as_rank
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Deadline, Place, World
from shardroute.planner.plan_files import load_plan
from shardroute.topologies.errors import RunError

LEAVES_S = 0.5  # a rank that never comes is there so long, then leaves
HOLDS_UP_S = 1.0
# What is run once more, followed by checksums: all ways that pieces lie and go, in cases that take little time.
FOLLOWED = (
    "strided rows to columns", "order along relays", "collectives through reused slots", "relays through staging",
    "strided 4-D boxes", "gather-broadcast",
)


def run_cases(
    transport: str, place: Place, timeout_s: float, n_trials: int = 3, *, verify: bool = False
) -> dict[str, object]:
    """All cases over one world, each run several times, and what they came to on rank 0; then two plans at once on every rank.
    With `verify` some of them once more, followed by checksums.
    """
    world = load_library(transport).connect(place, Deadline.after(timeout_s))
    found: dict[str, object] = {}
    for name, make in CASES.items():
        plan, deadline = make(), Deadline.after(timeout_s)
        programs, buffers = compile_plan(plan)
        messages = lay_messages(plan, programs, buffers, library_sums=transport not in ("gloo", "mpi"))
        trials = run_launched(world, plan, programs, messages, n_trials=n_trials, deadline=deadline)
        if trials:
            found[name] = {
                "n_trials": len(trials),
                "n_bytes": sum(f.n_bytes for f in trials[0].findings),
                "n_wrong": sum(f.n_wrong + f.n_stray for trial in trials for f in trial.findings),
                "start_s": (trials[0].start_s - trials[0].began_s).tolist(),
                "end_s": (trials[0].end_s - trials[0].began_s).tolist(),
            }
        if verify and name in FOLLOWED:
            rows = piece_rows(plan)
            trials = run_launched(world, plan, programs, messages, n_trials=1, deadline=deadline, pieces=rows)
            if trials:
                found[name]["n_accused"] = sum(row != NONE for row in trials[0].wrong_pieces)
                found[name]["n_wrong"] += sum(f.n_wrong + f.n_stray for f in trials[0].findings)
    found["two plans at once"] = two_at_once(world)
    world.close()
    return found


def two_at_once(world: World) -> dict[str, object]:
    """What a rank is told that begins a second plan over a world while a first one, which rank 0 holds up, goes on."""
    first, second = (Resharder.of_plan(plan, world) for plan in (all_to_all(), CASES["many peers"]()))
    given = {"t0": np.zeros((4, N_RANKS * 48), np.uint16)}, {"t0": np.zeros((N_RANKS * 4, 48), np.uint16)}
    if world.rank == 0:
        time.sleep(HOLDS_UP_S)
        first.run(*given).wait()
        refused = ""
    else:
        transfer = first.run(*given)
        try:
            second.run(*given)
            refused = ""
        except RunError as error:
            refused = str(error)
        transfer.wait()
    second.run(*given).wait()
    return {"refused": refused}


def run_one(folder: Path, transport: str, place: Place, timeout_s: float, stall: int) -> str:
    """The rank's own plan file, as a launched rank runs it; its error, or nothing."""
    if place.rank == stall:
        time.sleep(LEAVES_S + timeout_s)
        return ""
    try:
        run_as_rank(load_plan(folder / f"{place.rank}.plan"), place, transport=transport, timeout_s=timeout_s)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run(folder: Path, place: Place) -> None:
    """Do what was asked for, as a rank."""
    request = json.loads((folder / "request.json").read_text())
    transport, timeout_s = request["transport"], request["timeout_s"]
    try:
        if request["cases"]:
            found: object = run_cases(transport, place, timeout_s)
        else:
            found = run_one(folder, transport, place, timeout_s, request["stall"])
    except Exception:
        found = traceback.format_exc()
    (folder / f"{place.rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Be a rank that a launcher started, or fork all ranks and wait for them."""
    folder = Path(sys.argv[1])
    place = find_place()
    if place is not None:
        run(folder, place)
        return
    request = json.loads((folder / "request.json").read_text())
    load_library(request["transport"]).preload()
    pids = []
    for rank in range(request["n_ranks"]):
        pid = os.fork()
        if pid == 0:
            run(folder, Place(rank, request["n_ranks"], f"file://{folder}/rendezvous"))
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
