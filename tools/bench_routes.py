"""Lays our strategies and other planners side by side, and measures how planning grows with GPUs.

    python tools/bench_routes.py                             every layout on both machines, every contender
    python tools/bench_routes.py --wheel FILE                NCCL M2N's own planner too (tools/peers/m2n_wheel.py says which file)
    python tools/bench_routes.py --only greedy --only "EP32 -> DP16xTP16"
    python tools/bench_routes.py --scale                     seconds and memory of `greedy` from 64 to 8,192 GPUs

What is marked by a star is a published rule in our own words (tools/peers/rules.py). At the end stands every figure in which
`greedy` or `optimal` is worse than some other contender.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from peers.contenders import Row, arena, contender_names, contenders
from peers.layouts import MODELS, TENSORS
from peers.m2n_wheel import Absent, M2n
from shardroute.planner.arguments import tensor_problem
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.refits import refit_problem
from shardroute.planner.routing.bounds import cuts, demand
from shardroute.planner.routing.loads import busiest_s
from shardroute.planner.routing.strategies import make_plan, pieces_of
from shardroute.topologies.calibrations import nominal_calibration
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

MACHINES = ("dgx-h100", "gb200-nvl72")
BALANCED = ("greedy", "optimal")
# PP x EP of the source, DP (of TP32) of the destination. PP16 is the one split of DeepSeek-V3's 61 layers that is published.
SCALES = [(1, 32, 1), (1, 64, 2), (1, 128, 4), (1, 256, 8), (16, 32, 16), (16, 64, 32), (16, 128, 64), (16, 256, 128)]
# Less than this is rounding: shares of pieces, and bundles that end where they end.
SAME = 1.01


def rows(layouts: Sequence[str], machines: Sequence[str], only: Sequence[str], wheel: M2n | str) -> Iterator[Row]:
    """The rows of the contenders named in `only` (none: all), as they are worked out; progress on standard error."""
    began = time.perf_counter()
    for layout in layouts:
        for machine in machines:
            for name, run in contenders(arena(layout, machine), wheel):
                if only and name not in only:
                    continue
                print(f"{time.perf_counter() - began:7.1f} s  {layout}, {machine}: {name}", file=sys.stderr, flush=True)
                yield run()


class Worse(msgspec.Struct, frozen=True):
    """A figure in which one of ours is worse than another contender."""

    layout: str
    machine: str
    ours: str
    figure: str
    value: float
    contender: str
    best: float


def worse(found: Sequence[Row]) -> list[Worse]:
    """Every figure in which `greedy` or `optimal` is more than rounding worse than the best other contender there."""
    lost = []
    for row in found:
        if row.contender not in BALANCED:
            continue
        others = [o for o in found if (o.layout, o.machine) == (row.layout, row.machine) and o.contender not in BALANCED]
        for figure in ("senders", "crossed", "predicted_s"):
            mine = getattr(row, figure)
            theirs = [(getattr(o, figure), o.contender) for o in others if getattr(o, figure) is not None]
            if mine is not None and theirs and mine > SAME * min(theirs)[0]:
                lost.append(Worse(row.layout, row.machine, row.contender, figure, mine, min(theirs)[1], min(theirs)[0]))
    return lost


def scale_row(strategy: str, pp: int, ep: int, dp: int) -> dict[str, float]:
    """Plan DeepSeek-V3 and measure seconds and the process's peak memory."""
    problem = refit_problem(load_model("deepseek-v3"), parse_spec(f"PP{pp} x EP{ep}"), parse_spec(f"TP32 x DP{dp}"))[0]
    topology = build_topology(load_machine("dgx-h100"), None, problem.n_ranks)
    small = tensor_problem("256,256", "bf16", "ep=4", "S0", "tp=8", "S1")
    make_plan(small, build_topology(load_machine("dgx-h100"), None, small.n_ranks), strategy)  # compiling is not planning
    began, cpu_began = time.perf_counter(), time.process_time()
    plan = make_plan(problem, topology, strategy)
    plan_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB
    needs = demand(problem, pieces_of(problem), topology)
    bound_s = cuts(needs, topology, nominal_calibration(topology.machine))[0].seconds
    return {
        "gpus": problem.n_ranks, "plan_s": plan_s, "cpu_s": cpu_s, "bytes": peak, "steps": len(plan.steps),
        "ratio": busiest_s(plan) / bound_s,
    }  # fmt: skip


def scale(strategy: str, most_gpus: int, limit_s: float, as_json: bool) -> None:
    """Print a row a size, each measured in a process of its own, and the growth exponent."""
    if not as_json:
        print(f"DeepSeek-V3, `{strategy}` on dgx-h100: GPUs on both sides together\n")
        print(f"{'GPUs':>6} {'plan s':>8} {'CPU s':>8} {'peak GB':>8} {'steps':>10} {'busiest / bound':>16}")
    found = []
    for pp, ep, dp in SCALES:
        gpus = pp * ep + 32 * dp
        if gpus > most_gpus:
            break
        command = [sys.executable, __file__, "--strategy", strategy, "--one", f"{pp},{ep},{dp}"]
        print(f"planning for {gpus:,} GPUs", file=sys.stderr, flush=True)
        try:
            row = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=limit_s).stdout)
        except subprocess.TimeoutExpired:
            print(f"{gpus:>6} not done in {limit_s:g} s", file=sys.stderr, flush=True)
            break
        found.append(row)
        if not as_json:
            figures = f"{row['plan_s']:>8.2f} {row['cpu_s']:>8.2f} {row['bytes'] / 1e9:>8.2f} {row['steps']:>10}"
            print(f"{row['gpus']:>6} {figures} {row['ratio']:>16.4f}", flush=True)
    exponents = {}
    for what, last in (("all", len(found)), ("last three", 3)):
        if len(found) >= 3:
            # CPU seconds: others on the machine lengthen wall time.
            gpus_log, seconds_log = (np.log([row[key] for row in found[-last:]]) for key in ("gpus", "cpu_s"))
            exponents[what] = float(np.polyfit(gpus_log, seconds_log, 1)[0])
    if as_json:
        print(json.dumps({"strategy": strategy, "rows": found, "exponents": exponents}))
        return
    for what, exponent in exponents.items():
        print(f"\nCPU seconds grow with the power {exponent:.2f} of GPUs over {what} rows", end="")
    print()


def _text(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _line(row: Row) -> str:
    idle = "-" if row.idle is None else f"{row.idle}/{row.n_sources}"
    crossed = "-" if row.crossed is None else f"{row.crossed / 1e9:,.3f}"
    times = "-" if row.crossed is None or not row.least else f"{row.crossed / row.least:.2f}"
    moved = "-" if row.received_max is None else f"{row.received_max / 1e6:,.1f}"
    milliseconds = "-" if row.predicted_s is None else f"{row.predicted_s * 1e3:,.3f}"
    return (
        f"  {row.contender:<20} {_text(row.senders, 2):>8} {idle:>10} {moved:>10} {crossed:>12} {times:>6} "
        f"{'-' if row.depth is None else row.depth:>5} {_text(row.link):>8} {milliseconds:>11} {_text(row.ratio, 2):>8} "
        f"{_text(row.plan_s, 2):>7}  {row.note}"
    )


def print_rows(found: Iterator[Row]) -> list[Row]:
    """Print the rows as they come, a block a layout and machine."""
    print("senders: max / mean of what source ranks send; idle: sources that send nothing; into NIC: of the busiest rank;")
    print("least: bytes that cross over the least that must; link: busiest link / bound; * re-stated rule\n")
    heads = f"{'senders':>8} {'idle':>10} {'NIC in MB':>10} {'crossed GB':>12} {'/least':>6} {'depth':>5}"
    heads += f" {'link':>8} {'predicted ms':>11} {'/bound':>7} {'plan s':>7}"
    kept: list[Row] = []
    for row in found:
        if not kept or (kept[-1].layout, kept[-1].machine) != (row.layout, row.machine):
            print(f"{row.layout}, {row.machine}\n  {'':<20} {heads}")
        print(_line(row).rstrip(), flush=True)
        kept.append(row)
    return kept


def print_worse(lost: Sequence[Worse]) -> None:
    """Print where ours lose."""
    print(f"\n{len(lost)} figures in which {' or '.join(BALANCED)} is worse than another contender" + (":" if lost else ""))
    for one in lost:
        print(
            f"  {one.layout}, {one.machine}: {one.ours} {one.figure} {one.value:,.6g}, "
            f"{one.contender} {one.best:,.6g} ({one.value / one.best - 1:+.1%})"
        )


def main() -> None:
    """Parse arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a layout, machine or contender; repeatable")
    parser.add_argument("--wheel", help="the nccl-extensions 0.1.0 wheel, or a folder that it was unpacked in")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--scale", action="store_true", help="planning seconds and memory by GPUs instead")
    parser.add_argument("--strategy", default="greedy", help="with --scale")
    parser.add_argument("--most-gpus", type=int, default=8192, help="with --scale")
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="with --scale: for one size")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(scale_row(arguments.strategy, *map(int, arguments.one.split(",")))))
        return
    if arguments.scale:
        scale(arguments.strategy, arguments.most_gpus, arguments.limit, arguments.json)
        return
    every = [*TENSORS, *MODELS]
    layouts = [name for name in every if name in arguments.only] or every
    machines = [name for name in MACHINES if name in arguments.only] or list(MACHINES)
    only = [name for name in arguments.only if name not in (*every, *MACHINES)]
    if unknown := [name for name in only if name not in contender_names()]:
        known = "; ".join((*every, *MACHINES, *contender_names()))
        parser.error(f"--only {unknown[0]!r}: expected a layout, machine or contender: {known}")
    try:
        wheel: M2n | str = M2n(arguments.wheel)
    except Absent as absent:
        wheel = str(absent)
    found = rows(layouts, machines, only, wheel)
    if arguments.json:
        kept = list(found)
        print(msgspec.json.format(msgspec.json.encode({"rows": kept, "worse": worse(kept)}), indent=1).decode())
        return
    print_worse(worse(print_rows(found)))


if __name__ == "__main__":
    main()
