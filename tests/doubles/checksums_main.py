"""Ranks along a chain over doubles, whose pieces are followed by checksums: `checksums_main.py FOLDER TRANSPORT N_RANKS`.

Over NCCL's and NVSHMEM's doubles it is these that corrupt a piece, see their heads; over the twin of `torch-nccl` TornPairs does.
"""

import os
import sys
from pathlib import Path

import numpy as np
from forked_ranks import fork_ranks
from hand_plans import relay_chain
from host_sums import take_sums_on_the_host
from resharder_main import OnDevice

from shardroute.executors.interpreting.interpret import compile_plan
from shardroute.executors.interpreting.piece_sums import NONE, describe_wrong, piece_rows
from shardroute.executors.launching.launched import run_launched
from shardroute.executors.messages.messages import lay_messages
from shardroute.executors.resharding.resharders import Resharder
from shardroute.executors.transports import libraries, torch_nccl
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.topologies.errors import RunError

N_CHUNK, N_CHUNKS = 16, 4
TWIN = "torch-cpu"
libraries.LIBRARIES = {**libraries.LIBRARIES, TWIN: "torch_twin"}


class TornPairs(torch_nccl.TorchPairs):
    """Groups in which a bit of a message turns on its way: which one, CORRUPT says as the doubles take it."""

    n_messages = 0

    def exchange(self, sends, receives, wire, stream):
        super().exchange(sends, receives, wire, stream)
        for pointer, n_bytes, _ in receives:
            TornPairs.n_messages += n_bytes > 1
            if n_bytes > 1 and f",{self._wires[wire].rank()}:{TornPairs.n_messages}," in os.environ["CORRUPT"]:
                self._device.view(pointer, n_bytes)[n_bytes // 2] ^= 0x10


def run(transport: str, place: Place) -> dict[str, object]:
    """Two trials of a run, the second one corrupted; then a resharder's two transfers, the second one corrupted."""
    world = load_library(transport).connect(place, Deadline.after(30.0))
    plan = relay_chain(place.size, N_CHUNK, N_CHUNKS)
    programs, buffers = compile_plan(plan)
    messages, rows = lay_messages(plan, programs, buffers, library_sums=True), piece_rows(plan)
    trials = run_launched(world, plan, programs, messages, n_trials=2, deadline=Deadline.after(30.0), pieces=rows)
    accused = [[describe_wrong(plan, rows, row) for row in trial.wrong_pieces if row != NONE] for trial in trials]

    resharder = Resharder.of_plan(plan, world, timeout_s=30.0, verify=True)
    weights = np.zeros(N_CHUNK * N_CHUNKS, np.uint16)
    held = (lambda array: array) if transport == TWIN else OnDevice
    errors = []
    for version in (1, 2):
        given = {"t0": held(np.full(N_CHUNK * N_CHUNKS, version, np.uint16))} if place.rank == 0 else {}
        try:
            resharder.run(given, {"t0": held(weights)} if place.rank else {}).wait()
            errors.append("")
        except RunError as error:
            errors.append(str(error))
    world.exchange(b"", Deadline.after(30.0))
    return {"accused": accused, "errors": errors, "holds": sorted(set(weights.tolist())), "version": resharder.version}


def main() -> None:
    """Fork all ranks and wait for them."""
    folder, transport, n_ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch_nccl.TorchPairs = TornPairs
    load_library(transport).preload()
    take_sums_on_the_host()
    fork_ranks(n_ranks, folder, lambda rank: run(transport, Place(rank, n_ranks, f"file://{folder}/rendezvous")))


if __name__ == "__main__":
    main()
