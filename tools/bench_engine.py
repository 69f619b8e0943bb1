"""Times the event kernel on seeded cases, and prints rate solves, seconds and memory for each.

    python tools/bench_engine.py [--case NAME]... [--tasks N] [--tolerance X] [--seed N]

Cases: `all-to-all`, unequal flows between all pairs of GPUs; `burst`, flows between random pairs, all at once; `windowed`, the
same with four at a time for each sender; `relay`, store-and-forward chains of chunks from domain to domain, every GPU
sending in order. GPUs have one port out and one in, of 50 GB/s (one 400 Gb/s NIC), and the routes are of those two links.
Each case runs in a process of its own, once for the time of a fresh process (Numba's cache included) and once warm.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.simulator import TaskGraph, in_order, merge_dependencies, simulate
from shardroute.planner.simulator.tasks import Csr

Ints = NDArray[np.integer]
Floats = NDArray[np.float64]

PORT_BPS = 50e9  # one 400 Gb/s NIC
LATENCY_S = 2e-6
FLOW_BYTES = 1e6
WINDOW = 4
N_DOMAINS = 16


def pair_graph(src: Ints, dst: Ints, n_gpus: int, n_bytes: Floats, deps: Csr) -> TaskGraph:
    """Flows from port out of src to port in of dst."""
    n = len(src)
    return TaskGraph(
        start_s=np.zeros(n),
        delay_s=np.full(n, LATENCY_S),
        amount=n_bytes,
        cap=np.full(n, np.inf),
        weight=np.ones(n),
        route_ptr=np.arange(0, 2 * n + 1, 2),
        route_links=np.stack([src, n_gpus + dst], 1).reshape(-1),
        dep_ptr=deps[0],
        dep_tasks=deps[1],
        capacity=np.full(2 * n_gpus, PORT_BPS),
    )


def unequal(rng: np.random.Generator, n: int) -> Floats:
    """Sizes around FLOW_BYTES, log-normal: every flow ends at its own time."""
    return np.ceil(FLOW_BYTES * rng.lognormal(0, 1, n))


def no_dependencies(n: int) -> Csr:
    """The empty set of dependencies of n tasks."""
    return np.zeros(n + 1, np.int64), np.zeros(0, np.int32)


def all_to_all(rng: np.random.Generator, n_tasks: int) -> TaskGraph:
    """Unequal flows between all pairs of as many GPUs as make about n_tasks."""
    n_gpus = max(2, round((1 + (1 + 4 * n_tasks) ** 0.5) / 2))
    src = np.repeat(np.arange(n_gpus), n_gpus - 1)
    dst = (src + np.tile(np.arange(1, n_gpus), n_gpus)) % n_gpus
    return pair_graph(src, dst, n_gpus, unequal(rng, len(src)), no_dependencies(len(src)))


def random_pairs(rng: np.random.Generator, n_tasks: int) -> tuple[Ints, Ints, int]:
    """Senders, receivers and number of GPUs: 128 of either kind, drawn at random."""
    half = 128
    return rng.integers(0, half, n_tasks), half + rng.integers(0, half, n_tasks), 2 * half


def burst(rng: np.random.Generator, n_tasks: int) -> TaskGraph:
    """Flows between random pairs, all at once."""
    src, dst, n_gpus = random_pairs(rng, n_tasks)
    return pair_graph(src, dst, n_gpus, unequal(rng, n_tasks), no_dependencies(n_tasks))


def windowed(rng: np.random.Generator, n_tasks: int) -> TaskGraph:
    """Flows between random pairs, each sender with WINDOW at a time."""
    src, dst, n_gpus = random_pairs(rng, n_tasks)
    order = np.argsort(src, kind="stable")
    rank = np.empty(n_tasks, np.int64)
    starts = np.searchsorted(src[order], np.arange(n_gpus))
    rank[order] = np.arange(n_tasks) - starts[src[order]]
    deps = in_order(src * WINDOW + rank % WINDOW)
    return pair_graph(src, dst, n_gpus, unequal(rng, n_tasks), deps)


def relay(rng: np.random.Generator, n_tasks: int) -> TaskGraph:
    """Pieces that enter at one domain and pass through all, each GPU sending in order."""
    n_gpus = 16 * N_DOMAINS
    n_pieces = max(1, n_tasks // N_DOMAINS)
    n_bytes = np.repeat(unequal(rng, n_pieces), N_DOMAINS)
    entry = np.repeat(rng.integers(0, 16, n_pieces), N_DOMAINS)
    first = np.repeat(rng.integers(0, N_DOMAINS, n_pieces), N_DOMAINS)
    hop = np.tile(np.arange(N_DOMAINS), n_pieces)
    dst = entry + 16 * ((first + hop) % N_DOMAINS)
    src = np.where(hop == 0, n_gpus + entry, np.roll(dst, 1))
    chained = hop > 0
    previous = np.flatnonzero(chained) - 1
    chain = np.concatenate([[0], np.cumsum(chained)]), previous.astype(np.int32)
    return pair_graph(src, dst, n_gpus + 16, n_bytes, merge_dependencies(chain, in_order(src)))


CASES: dict[str, Callable[[np.random.Generator, int], TaskGraph]] = {
    "all-to-all": all_to_all,
    "burst": burst,
    "windowed": windowed,
    "relay": relay,
}


def measure(case: str, n_tasks: int, tolerance: float, seed: int) -> dict[str, float]:
    """Makes a case and simulates it twice: the first run pays for Numba and its cache."""
    start = time.perf_counter()
    graph = CASES[case](np.random.default_rng(seed), n_tasks)
    made = time.perf_counter()
    simulate(graph, tolerance=tolerance)
    first = time.perf_counter()
    result = simulate(graph, tolerance=tolerance)
    second = time.perf_counter()
    return {
        "n_tasks": graph.n_tasks,
        "n_events": result.n_events,
        "make_s": made - start,
        "first_s": first - made,
        "warm_s": second - first,
        "peak_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "makespan_s": result.makespan_s,
    }


def main() -> int:
    """Runs the cases asked for, each in its own process, and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="all by default; may be given more than once")
    parser.add_argument("--tasks", type=int, default=16_256, help="about how many tasks (default: %(default)s)")
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--measure", choices=list(CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.tasks, arguments.tolerance, arguments.seed)))
        return 0
    print(f"{'case':12}{'tasks':>9}{'solves':>9}{'make s':>9}{'first s':>9}{'warm s':>9}{'peak MB':>9}  makespan s")
    for case in arguments.case or list(CASES):
        command = [
            sys.executable, __file__, "--measure", case, "--tasks", str(arguments.tasks),
            "--tolerance", str(arguments.tolerance), "--seed", str(arguments.seed),
        ]  # fmt: skip
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(
            f"{case:12}{found['n_tasks']:9.0f}{found['n_events']:9.0f}{found['make_s']:9.2f}{found['first_s']:9.2f}"
            f"{found['warm_s']:9.2f}{found['peak_MB']:9.0f}  {found['makespan_s']:.6g}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
