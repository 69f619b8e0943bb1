"""Times the event kernel beside SimGrid on the same flows in one run: seconds, memory, growth, error of finish times.

    python tools/bench_engine.py [CASE]... [--tolerance X] [--seed N] [--no-simgrid] [--no-exact] [--json FILE]

A CASE is a family and a size: `a2a_128` and `a2av_128` (equal and unequal all-to-all of 128 GPUs, all at once), `ring_64` (each
of 64 GPUs passes on what it got, 63 times), `refit_10000` (as many flows of random sizes from 128 GPUs to 128 others, all at
once), `refitw_10000` (the same with WINDOW at a time for each sender), `wide_1024` (half of 1,024 GPUs send WIDE_FLOWS each to
random ones of the others, WIDE_WINDOW at a time), `poisson_10000` (random pairs of 256 GPUs at random times). GPUs have NVLink
within domains of 8 and one NIC each on a leaf-spine fabric, one leaf for each rail and 8 domains.

Each run is a process of its own. Seconds are CPU seconds of the simulation alone, since other programs may share the machine;
compiled code is loaded before. Errors are relative, over the finish times of all flows: exact against SimGrid, and with the
tolerance against exact. Growth is the exponent of seconds over flows from the smallest to the largest case of a family.

SimGrid (LGPL, used here only) is built from tools/sg_flows where g++ and its headers are found (Debian: libsimgrid-dev).
"""

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from shardroute.planner.simulator import TaskGraph, in_order, merge_dependencies, simulate

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

DEFAULT_CASES = (
    *("a2a_64", "a2a_128", "a2av_32", "a2av_64", "a2av_128", "ring_64", "ring_128", "refit_1000", "refit_3000", "refit_10000"),
    *("refitw_10000", "refitw_30000", "refitw_100000", "poisson_1000", "poisson_10000"),
)
# Rates of DGX H100: NVLink 4, 450 GB/s one way; ConnectX-7, 400 Gb/s. Latencies only spread the flows' starts: round numbers.
NVLINK_BPS, NIC_BPS = 450e9, 50e9
NVLINK_S, FABRIC_S = 0.5e-6, 1e-6
DOMAIN, LEAF_DOMAINS = 8, 8
N_GPUS = 256  # of the families that are sized by flows
FLOW_BYTES, LEAST_BYTES = 1e6, 4096
WINDOW = 4
WIDE_FLOWS, WIDE_WINDOW = 64, 8  # of each sender; a plan of a large model has so many messages and queues a GPU
FAMILIES = ("a2a", "a2av", "ring", "refit", "refitw", "wide", "poisson")
DRIVER = Path(__file__).parent / "sg_flows" / "sg_flows.cpp"


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of one case: CPU seconds, peak memory of its process, and finish times."""

    cpu_s: float
    peak_MB: float
    finish_s: Floats
    n_solves: int = 0
    reached: float = 0.0


def routes(n_gpus: int, src: Ints, dst: Ints) -> tuple[Floats, Ints, Ints, Floats]:
    """Capacities of the links, the routes of flows from src to dst (CSR), and the latency of each route."""
    n_domains = -(-n_gpus // DOMAIN)
    n_groups = -(-n_domains // LEAF_DOMAINS)
    domains_of = np.minimum(LEAF_DOMAINS, n_domains - LEAF_DOMAINS * np.arange(n_groups))
    ports = np.tile([NVLINK_BPS, NVLINK_BPS, NIC_BPS, NIC_BPS], n_gpus)  # out and in of NVLink, out and in of the NIC
    spine = np.repeat(domains_of * NIC_BPS, 2 * DOMAIN)  # up and down for each leaf
    leaf = [gpu // DOMAIN // LEAF_DOMAINS * DOMAIN + gpu % DOMAIN for gpu in (src, dst)]
    near, one_leaf = src // DOMAIN == dst // DOMAIN, leaf[0] == leaf[1]
    hops = np.stack(
        [4 * src + np.where(near, 0, 2), 4 * n_gpus + 2 * leaf[0], 4 * n_gpus + 2 * leaf[1] + 1, 4 * dst + np.where(near, 1, 3)],
        axis=1,
    )
    used = np.ones(hops.shape, bool)
    used[:, 1:3] = ~(near | one_leaf)[:, None]
    lengths = used.sum(1)
    latency_s = lengths * np.where(near, NVLINK_S, FABRIC_S)
    return np.concatenate([ports, spine]), np.concatenate([[0], np.cumsum(lengths)]), hops[used], latency_s


def make(case: str, seed: int) -> TaskGraph:
    """The flows of a case."""
    family, _, number = case.partition("_")
    size, rng = int(number), np.random.default_rng(seed)
    start_s, deps = None, (np.zeros(1, np.int64), np.zeros(0, np.int32))
    n_gpus = size if family in ("a2a", "a2av", "ring", "wide") else N_GPUS
    match family:
        case "a2a" | "a2av":
            src = np.repeat(np.arange(n_gpus), n_gpus - 1)
            dst = (src + np.tile(np.arange(1, n_gpus), n_gpus)) % n_gpus
            scale = rng.lognormal(0, 1, len(src)) if family == "a2av" else np.ones(len(src))
        case "ring":
            src = np.tile(np.arange(n_gpus), n_gpus - 1)
            dst = (src + 1) % n_gpus
            scale = np.ones(len(src))
            later = np.arange(n_gpus, len(src))
            received = np.arange(len(later)) // n_gpus * n_gpus + (src[later] - 1) % n_gpus
            waits = np.concatenate([np.zeros(n_gpus, np.int64), np.ones(len(later), np.int64)])
            deps = merge_dependencies(in_order(src), (np.concatenate([[0], np.cumsum(waits)]), received.astype(np.int32)))
        case "refit" | "refitw":
            src, dst = rng.integers(0, n_gpus // 2, size), rng.integers(n_gpus // 2, n_gpus, size)
            scale = rng.lognormal(0, 1.2, size)
            if family == "refitw":
                order = np.argsort(src, kind="stable")
                rank = np.empty(size, np.int64)
                rank[order] = np.arange(size) - np.searchsorted(src[order], src[order])
                deps = in_order(src * WINDOW + rank % WINDOW)
        case "wide":
            half = size // 2
            src, nth = np.arange(WIDE_FLOWS * half) % half, np.arange(WIDE_FLOWS * half) // half
            dst = rng.integers(half, size, len(src))
            scale = rng.lognormal(0, 1.2, len(src))
            deps = in_order(src * WIDE_WINDOW + nth % WIDE_WINDOW)
        case "poisson":
            start_s = np.cumsum(rng.exponential(FLOW_BYTES / (NIC_BPS * n_gpus / 2), size))
            src = rng.integers(0, n_gpus, size)
            dst = (src + rng.integers(1, n_gpus, size)) % n_gpus
            scale = rng.lognormal(0, 1, size)
        case _:
            raise AssertionError(f"{family} isn't one of {FAMILIES}")
    n = len(src)
    capacity, route_ptr, route_links, latency_s = routes(n_gpus, src, dst)
    return TaskGraph(
        start_s=np.zeros(n) if start_s is None else start_s, delay_s=latency_s,
        amount=np.floor(np.maximum(LEAST_BYTES, FLOW_BYTES * scale)), cap=np.full(n, np.inf), weight=np.ones(n),
        route_ptr=route_ptr, route_links=route_links.astype(np.int32), dep_tasks=deps[1], capacity=capacity,
        dep_ptr=deps[0] if len(deps[0]) > 1 else np.zeros(n + 1, np.int64),
    )  # fmt: skip


def build_driver(folder: Path) -> Path | str:
    """Builds the SimGrid driver in a folder: its path, or why it can't be built."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "no g++"
    program = folder / "sg_flows"
    built = subprocess.run(
        [compiler, "-O2", "-std=c++17", str(DRIVER), "-lsimgrid", "-o", str(program)], capture_output=True, text=True, check=False
    )
    if built.returncode:
        missing = "simgrid/" in built.stderr or "-lsimgrid" in built.stderr
        return "SimGrid isn't installed (Debian: libsimgrid-dev)" if missing else f"g++ failed: {built.stderr.strip()[-300:]}"
    return program


def run_simgrid(program: Path, graph: TaskGraph, folder: Path) -> Run:
    """Simulates a graph by SimGrid; weights must be 1 and amounts whole numbers, which is all that the driver takes."""
    assert (graph.weight == 1).all()
    assert (graph.amount == np.floor(graph.amount)).all()
    flows, finish = folder / "flows.txt", folder / "finish.txt"
    columns = [graph.start_s, graph.delay_s, graph.amount, np.where(np.isinf(graph.cap), 0, graph.cap)]
    heads = zip(*(column.tolist() for column in columns), strict=True)
    lists = [
        [values[a:b] for a, b in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True)]
        for ptr, values in ((graph.route_ptr, graph.route_links.tolist()), (graph.dep_ptr, graph.dep_tasks.tolist()))
    ]
    with flows.open("w") as file:
        print(graph.n_links, graph.n_tasks, file=file)
        print(*(f"{capacity:.17g}" for capacity in graph.capacity), sep="\n", file=file)
        for head, route, deps in zip(heads, *lists, strict=True):
            print(*(f"{value:.17g}" for value in head), len(route), *route, len(deps), *deps, file=file)
    ran = subprocess.run([str(program), str(flows), str(finish)], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"bench_engine: the SimGrid driver failed with {ran.returncode}: {ran.stderr.strip()[-300:]}")
    cpu_s, peak_kB = map(float, ran.stdout.split())
    return Run(cpu_s, peak_kB / 1e3, np.loadtxt(finish, ndmin=1))


def run_ours(case: str, seed: int, tolerance: float, finish: Path) -> None:
    """Simulates a case here, after a small one that loads the compiled code; prints what it cost and saves the finish times."""
    graph = make(case, seed)
    simulate(make("refit_100", seed), tolerance=tolerance, compiled=True)
    start_s = time.process_time()
    result = simulate(graph, tolerance=tolerance, compiled=True)
    cpu_s = time.process_time() - start_s
    np.save(finish, result.finish_s)
    peak_MB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps([cpu_s, peak_MB, result.n_events, result.reached_tolerance]))


def in_process(arguments: list[str], finish: Path) -> Run:
    """What a run in a fresh process of this script cost and gave."""
    said = subprocess.run([sys.executable, __file__, *arguments, str(finish)], check=True, capture_output=True, text=True).stdout
    cpu_s, peak_MB, n_solves, reached = json.loads(said)
    return Run(cpu_s, peak_MB, np.load(finish), n_solves, reached)


def errors(found: Run, true: Run) -> dict[str, float]:
    """Relative errors of finish times: median, largest, mean with its sign, and that of the last."""
    off = (found.finish_s - true.finish_s) / true.finish_s
    return {
        "median": float(np.median(np.abs(off))),
        "largest": float(np.abs(off).max()),
        "bias": float(off.mean()),
        "makespan": float(found.finish_s.max() / true.finish_s.max() - 1),
    }


def measure(case: str, seed: int, tolerance: float, with_exact: bool, program: Path | None, folder: Path) -> dict[str, object]:
    """Runs a case with the tolerance, exactly unless that isn't wanted, and by SimGrid where there is a driver."""
    finish = folder / "finish.npy"
    runs = {}
    for name, share in (("exact", 0.0), ("tolerance", tolerance)):
        if name == "tolerance" or with_exact:
            runs[name] = in_process(["--measure", case, "--seed", str(seed), "--tolerance", str(share)], finish)
    last = runs["tolerance"].finish_s
    row: dict[str, object] = {"case": case, "n_flows": len(last), "makespan_s": float(last.max())}
    for name, run in runs.items():
        row[name] = {"cpu_s": run.cpu_s, "peak_MB": run.peak_MB, "n_solves": run.n_solves, "reached": run.reached}
    if with_exact:
        row["tolerance_error"] = errors(runs["tolerance"], runs["exact"])
    if program is not None:
        reference = run_simgrid(program, make(case, seed), folder)
        row["simgrid"] = {"cpu_s": reference.cpu_s, "peak_MB": reference.peak_MB}
        if with_exact:
            row["exact_error"] = errors(runs["exact"], reference)
    return row


def number(row: dict[str, object], run: str, what: str) -> float:
    """A figure of one of a row's runs, nan where that wasn't made."""
    found = row.get(run)
    return float(found[what]) if isinstance(found, dict) else math.nan


def show(rows: list[dict[str, object]], tolerance: float, why_none: str) -> None:
    """Prints the rows for people, then growth."""
    console = Console(width=170, highlight=False)
    table = Table(box=None, header_style="bold")
    names = ["case", "flows", "SimGrid s", "MB", "exact s", "ratio", "MB", "solves", "largest error"]
    names += [f"{tolerance:g} s", "ratio", "MB", "solves", "median error", "largest", "bias", "makespan", "reached"]
    for name in names:
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in rows:
        cells = [str(row["case"]), str(row["n_flows"])]
        reference_s = number(row, "simgrid", "cpu_s")
        cells += [f"{reference_s:.3g}", f"{number(row, 'simgrid', 'peak_MB'):.0f}"]
        for name, error in (("exact", "exact_error"), ("tolerance", "tolerance_error")):
            cpu_s = number(row, name, "cpu_s")
            cells += [f"{cpu_s:.3g}", f"{reference_s / cpu_s:.1f}", f"{number(row, name, 'peak_MB'):.0f}"]
            cells += [f"{number(row, name, 'n_solves'):.0f}"]
            if name == "exact":
                cells.append(f"{number(row, error, 'largest'):.0e}")
        cells += [f"{100 * number(row, 'tolerance_error', each):.3f} %" for each in ("median", "largest", "bias", "makespan")]
        cells.append(f"{100 * number(row, 'tolerance', 'reached'):.2f} %")
        table.add_row(*("-" if "nan" in cell else cell for cell in cells))
    console.print(table)
    if why_none:
        console.print(f"No SimGrid column: {why_none}.")
    families = [str(row["case"]).partition("_")[0] for row in rows]
    for family in dict.fromkeys(families):
        sizes = sorted((int(str(row["n_flows"])), at) for at, row in enumerate(rows) if families[at] == family)
        (few, first), (many, last) = sizes[0], sizes[-1]
        if few == many:
            continue
        words = []
        for name in ("simgrid", "exact", "tolerance"):
            grown = number(rows[last], name, "cpu_s") / number(rows[first], name, "cpu_s")
            if not math.isnan(grown):
                words.append(f"{name} {math.log(grown) / math.log(many / few):.2f}")
        console.print(f"growth of {family}: {', '.join(words)}")


def main() -> int:
    """Runs the cases asked for and prints a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: {' '.join(DEFAULT_CASES)}")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-simgrid", action="store_true", help="without SimGrid, which takes most of the time")
    parser.add_argument("--no-exact", action="store_true", help="with the tolerance only, for cases that take too long exactly")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured here, too")
    parser.add_argument("--measure", metavar="CASE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        run_ours(arguments.measure, arguments.seed, arguments.tolerance, Path(arguments.cases[0]))
        return 0
    for case in arguments.cases:
        family, _, size = case.partition("_")
        if family not in FAMILIES or not size.isdecimal() or int(size) < 2:
            print(
                f"bench_engine: {case}: found no such case; expected one of {', '.join(FAMILIES)}, _ and a size of 2 or more",
                file=sys.stderr,
            )
            return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        driver = "not asked for" if arguments.no_simgrid else build_driver(folder)
        program, why_none = (None, driver) if isinstance(driver, str) else (driver, "")
        rows = []
        for case in arguments.cases or DEFAULT_CASES:
            print(f"bench_engine: {case}", file=sys.stderr, flush=True)
            rows.append(measure(case, arguments.seed, arguments.tolerance, not arguments.no_exact, program, folder))
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))
    show(rows, arguments.tolerance, why_none)
    return 0


if __name__ == "__main__":
    sys.exit(main())
