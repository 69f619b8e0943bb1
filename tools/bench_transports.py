"""How fast transports move bytes on this machine, beside a plain memcpy of the same bytes between as many processes.

    python tools/bench_transports.py [--transports processes,gloo,mpi] [--mib 256] [--repeats 5] [--json]

Each pair of ranks moves its share of the bytes at the same time. `plain` is what as many forked processes reach that each call
memcpy once for their share, from memory of their own into memory that another process maps; all pages have been touched before.
Rates are medians; a share is the rate of the plan over that of plain. Measure on an idle machine: `load` is the average before.
Rows of 4 KiB are cut out of rows twice as long: there is no single memcpy of those bytes, so their share says what cutting costs.
"""

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from shardroute.executors.launching.ranks import PROCESSES
from shardroute.executors.run import run_plan
from shardroute.executors.transports.libraries import load_library
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Shard
from shardroute.planner.plans import Plan
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

PAIRS = (1, 2, 4)
MESSAGE_BYTES = {"64 MiB": 64 * 2**20, "1 MiB": 2**20}
ROW_BYTES = 4096  # of a piece that is cut out of wider rows


@dataclass(frozen=True)
class Row:
    """One line of the table. `share` is rate_Bps over plain_Bps."""

    transport: str
    pairs: int
    pieces: str
    n_bytes: int
    rate_Bps: float
    plain_Bps: float
    share: float
    load: float


def plan_of(n_pairs: int, n_bytes: int, message_bytes: int, *, strided: bool) -> Plan:
    """Ranks 0 to n - 1 each send their rows to a rank of their own; strided: only columns of it, so that rows lie apart."""
    n_rows = n_bytes // ROW_BYTES
    shape = (n_rows, ROW_BYTES * (2 if strided else 1))
    senders, receivers = Mesh.of({"x": n_pairs}, range(n_pairs)), Mesh.of({"x": n_pairs}, range(n_pairs, 2 * n_pairs))
    source = place(shape, senders, [Shard(0)])
    if strided:  # twice as many receivers, each of half a row: each sender has two
        receivers = Mesh.of({"x": n_pairs, "y": 2}, range(n_pairs, 3 * n_pairs))
        target = place(shape, receivers, [Shard(0), Shard(1)])
    else:
        target = place(shape, receivers, [Shard(0)])
    problem = one_tensor(shape, "u8", source, target)
    topology = build_topology(load_machine("cpu-processes"), min_gpus=problem.n_ranks)
    return make_plan(problem, topology, "direct", message_bytes)


def plain_s(n_pairs: int, n_bytes: int, repeats: int) -> float:
    """Seconds that n processes take which each memcpy their share once, all at once: from the first start to the last end."""
    share = n_bytes // n_pairs
    shared = mmap.mmap(-1, n_bytes)
    target = np.frombuffer(shared, np.uint8)
    target[:] = 1
    times = np.frombuffer(mmap.mmap(-1, 8 * 2 * n_pairs * repeats), np.float64).reshape(repeats, 2, n_pairs)
    ready = np.frombuffer(mmap.mmap(-1, 8 * n_pairs), np.int64)
    pids = []
    for k in range(n_pairs):
        pid = os.fork()
        if pid == 0:
            source = np.full(share, k, np.uint8)
            for i in range(repeats):
                ready[k] = i + 1
                while ready.min() < i + 1:
                    time.sleep(0)
                times[i, 0, k] = time.monotonic()
                np.copyto(target[k * share : (k + 1) * share], source)
                times[i, 1, k] = time.monotonic()
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    seconds: list[float] = (times[:, 1].max(axis=1) - times[:, 0].min(axis=1)).tolist()
    return statistics.median(seconds)


def measure(transports: list[str], n_bytes: int, repeats: int) -> list[Row]:
    """All lines."""
    rows = []
    for n_pairs in PAIRS:
        for pieces, message_bytes in (*MESSAGE_BYTES.items(), ("rows of 4 KiB", 2**20)):
            strided = pieces.startswith("rows")
            plan = plan_of(n_pairs, n_bytes // (2 if strided else 1), message_bytes, strided=strided)
            moved = int(plan.step_bytes.sum())
            for transport in transports:
                load = os.getloadavg()[0]
                # Plain before and after, so that a machine that slows down meanwhile doesn't count for one side only.
                before = plain_s(n_pairs, moved, repeats)
                seconds = statistics.median(run_plan(plan, transport=transport, repeats=repeats).trials_s)
                plain = (before + plain_s(n_pairs, moved, repeats)) / 2
                rows.append(
                    Row(transport, n_pairs, pieces, moved, moved / seconds, moved / plain, plain / seconds, load)
                )
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="processes,gloo,mpi")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    transports = []
    for name in arguments.transports.split(","):
        try:
            if name != PROCESSES:
                load_library(name)
        except InputError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        transports.append(name)
    rows = measure(transports, arguments.mib * 2**20, arguments.repeats)
    if arguments.json:
        print(json.dumps([row.__dict__ for row in rows]))
        return 0
    table = Table("transport", "pairs", "pieces", "moved", "rate", "plain memcpy", "share", "load")
    for row in rows:
        table.add_row(
            row.transport, str(row.pairs), row.pieces, f"{row.n_bytes / 1e6:.0f} MB", f"{row.rate_Bps / 1e9:.2f} GB/s",
            f"{row.plain_Bps / 1e9:.2f} GB/s", f"{row.share:.0%}", f"{row.load:.1f}",
        )  # fmt: skip
    Console(width=110).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
