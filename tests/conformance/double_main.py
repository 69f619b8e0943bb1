"""Forks the ranks of a GPU transport over test doubles, or of `torch-nccl` over its CPU twin, and runs all cases in each.

`double_main.py FOLDER TRANSPORT N_RANKS`: rank r leaves what it saw in FOLDER/r.json. The doubles are preloaded by whoever starts
this.
"""

import sys
from pathlib import Path

import conformance_plans
from forked_ranks import fork_ranks
from gpu_doubles import LARGE_MIB, N_TRIALS, TAKES_SUMS
from rank_main import run_cases

from shardroute.executors.messages import messages
from shardroute.executors.transports import libraries
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Place

TWIN = "torch-cpu"
# Small windows and messages, so that places in windows are given again and rounds are cut into groups.
conformance_plans.MOST_WINDOW_BYTES, messages.PACKED_BYTES = 2**19, 2**18
conformance_plans.LARGE_MIB = LARGE_MIB
libraries.LIBRARIES = {**libraries.LIBRARIES, TWIN: "torch_twin"}


def main() -> None:
    """Fork all ranks and wait for them."""
    folder, transport, n_ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    load_library(transport).preload()
    if TAKES_SUMS:
        import host_sums

        host_sums.take_sums_on_the_host()

    def run(rank: int) -> dict[str, object]:
        return run_cases(
            transport, Place(rank, n_ranks, f"file://{folder}/rendezvous"), 60.0, N_TRIALS, verify=TAKES_SUMS
        )

    fork_ranks(n_ranks, folder, run)


if __name__ == "__main__":
    main()
