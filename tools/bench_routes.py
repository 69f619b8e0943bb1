"""Prints how near each strategy comes to the bound, side by side with the published rules, and how planning grows with GPUs.

    python tools/bench_routes.py                    layouts that the published planners were run on, and whole models
    python tools/bench_routes.py --growth seconds and memory of `greedy` from 64 to 8,192 GPUs, each in a process of its own


The published rules are re-stated in our own words from what they were seen to do: which holder sends each piece, and how often.
They are compared by their senders' loads and by bytes that enter another domain; how their bytes go on inside a domain is not
modelled.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.arguments import tensor_problem
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.plans import Lane, Op, Plan, lane_of
from shardroute.planner.problems import Problem
from shardroute.planner.refits import refit_problem
from shardroute.planner.reports import traffic
from shardroute.planner.routing.bounds import cuts, demand
from shardroute.planner.routing.loads import busiest_s
from shardroute.planner.routing.patterns import entries_of
from shardroute.planner.routing.strategies import make_plan, pieces_of
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import default_calibration, nominal_calibration
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import Topology, build_topology

EXPERTS = "256,2048,7168"  # one layer's gate or up projections of DeepSeek-V3, bf16: 7.516 GB
SQUARE = "8192,8192"
TENSORS: dict[str, tuple[str, str, str, str, str]] = {
    "TP4 -> TP2xDP2": (SQUARE, "tp=4", "S0", "dp=2,tp=2", "R,S0"),
    "EP16 -> DP8xTP32": (EXPERTS, "ep=16", "S0", "dp=8,tp=32", "R,S1"),
    "EP16 -> DP16xTP8": (EXPERTS, "ep=16", "S0", "dp=16,tp=8", "R,S1"),
    "DP8xEP8 -> DP2xEP32": (EXPERTS, "dp=8,ep=8", "R,S0", "dp=2,ep=32", "R,S0"),
    "DP8 -> TP4xDP4": (SQUARE, "dp=8", "R", "dp=4,tp=4", "R,S0"),
    "DP8xTP8 -> TP8": (SQUARE, "dp=8,tp=8", "R,S0", "tp=8", "S0"),
    "DP2xTP8 -> DP2xTP16": ("128,1536,4096", "dp=2,tp=8", "R,S1", "dp=2,tp=16", "R,S1"),
    "EP32 -> DP16xTP16": (EXPERTS, "ep=32", "S0", "dp=16,tp=16", "R,S1"),
    "EP64 -> DP8xTP8": (EXPERTS, "ep=64", "S0", "dp=8,tp=8", "R,S1"),
    "DP256xTP8 -> same": (SQUARE, "dp=256,tp=8", "R,S0", "dp=256,tp=8", "R,S0"),
    "EP16 -> DP128xTP32": (EXPERTS, "ep=16", "S0", "dp=128,tp=32", "R,S1"),
}
MODELS: dict[str, tuple[str, str, str]] = {
    "DeepSeek-V3": ("deepseek-v3", "PP16 x EP16", "TP32 x DP8"),
    "Qwen3-235B": ("qwen3-235b-a22b", "TP4 x PP8 x EP16", "TP8 x DP16"),
}
MACHINES = ("dgx-h100", "gb200-nvl72")
# Steps above which a plan isn't simulated here: some minutes on 2 cores.
MOST_SIMULATED = 700_000
# PP x EP of the source, DP (of TP32) of the destination. PP16 is the one split of DeepSeek-V3's 61 layers that is published.
GROWTH = [(1, 32, 1), (1, 64, 2), (1, 128, 4), (1, 256, 8), (16, 32, 16), (16, 64, 32), (16, 128, 64), (16, 256, 128)]


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one layout; None where a figure is not defined for it."""

    name: str
    link: float | None
    simulated: float | None
    senders: float
    crossed: int
    plan_s: float | None


def problem_of(layout: str) -> Problem:
    """The problem of a layout of the tables."""
    if layout in TENSORS:
        shape, *meshes = TENSORS[layout]
        return tensor_problem(shape, "bf16", *meshes)
    model, source, target = MODELS[layout]
    return refit_problem(load_model(model), parse_spec(source), parse_spec(target))[0]


def rows_of(layout: str, machine: str) -> Iterator[Row]:
    """All contenders on a layout."""
    problem = problem_of(layout)
    topology = build_topology(load_machine(machine), None, problem.n_ranks)
    whole = pieces_of(problem)
    bound_s = cuts(demand(problem, whole, topology), topology, nominal_calibration(topology.machine))[0].seconds
    calibration = default_calibration(machine)
    for strategy in ("direct", "domain-relay", "gather-broadcast", "greedy", "optimal"):
        began = time.perf_counter()
        plan = make_plan(problem, topology, strategy)
        plan_s = time.perf_counter() - began
        copies = bool((plan.steps.op == Op.COPY).all())
        simulated = predict(plan, calibration).predicted_s / bound_s if len(plan.steps) <= MOST_SIMULATED else None
        yield Row(
            strategy, busiest_s(plan) / bound_s if copies else None, simulated, _spread(_injected(plan), problem),
            traffic(plan).n_bytes_cross_domain, plan_s,
        )  # fmt: skip
    for name, rule in RULES.items():
        sent, crossed = _rule_loads(problem, topology, rule)
        yield Row(name, None, None, _spread(sent, problem), crossed, None)


def _injected(plan: Plan) -> NDArray[np.float64]:
    """Bytes that each rank sends from its source weights to other ranks."""
    steps = plan.steps
    first = (lane_of(steps.lane) <= Lane.HAND_OVER) & (steps.src_at < -1) & (steps.src != steps.dst) & (steps.src >= 0)
    sent = np.bincount(steps.src[first], weights=plan.step_bytes[first], minlength=plan.problem.n_ranks)
    return sent.astype(np.float64)


def _spread(sent: NDArray[np.float64], problem: Problem) -> float:
    of_sources = sent[problem.source.ranks]
    return float(of_sources.max() / of_sources.mean()) if of_sources.any() else math.nan


# A rule says, for a piece's holders and needers, which holder sends to the domains or ranks of which needers: (holder, needer)
# pairs.
Rule = Callable[[list[int], list[int], NDArray[np.int32]], list[tuple[int, float, list[int]]]]


def _m2n_uniform(holders: list[int], needers: list[int], domain: NDArray[np.int32]) -> list[tuple[int, float, list[int]]]:
    """NCCL M2N, uniform: needing replicas are split over holding ones; of several holders for one needer, the first sends."""
    if len(holders) >= len(needers):
        return [(holders[j * len(holders) // len(needers)], 1.0, [needer]) for j, needer in enumerate(needers)]
    cut = [i * len(needers) // len(holders) for i in range(len(holders) + 1)]
    return [(holder, 1.0, needers[a:b]) for holder, a, b in zip(holders, cut, cut[1:], strict=False)]


def _m2n_nodes(holders: list[int], needers: list[int], domain: NDArray[np.int32]) -> list[tuple[int, float, list[int]]]:
    """NCCL M2N, node-aware: holder i serves domain i, the rest idle; with fewer holders, a range of domains each."""
    nodes = sorted({int(domain[n]) for n in needers})
    n_senders = min(len(holders), len(nodes))
    cut = [i * len(nodes) // n_senders for i in range(n_senders + 1)]
    return [
        (holders[i], 1.0, [n for n in needers if int(domain[n]) in set(nodes[cut[i] : cut[i + 1]])]) for i in range(n_senders)
    ]


def _nemo_first(holders: list[int], needers: list[int], domain: NDArray[np.int32]) -> list[tuple[int, float, list[int]]]:
    """NeMo's Python planner, v1: the first holder sends once."""
    return [(holders[0], 1.0, needers)]


def _nemo_striped(holders: list[int], needers: list[int], domain: NDArray[np.int32]) -> list[tuple[int, float, list[int]]]:
    """NeMo's Python planner, striped: the piece is cut over the needing replicas, holders take turns; needers all-gather."""
    return [(holder, 1.0 / len(holders), needers) for holder in holders]


RULES: dict[str, Rule] = {
    "M2N uniform*": _m2n_uniform, "M2N node-aware*": _m2n_nodes, "NeMo v1*": _nemo_first, "NeMo striped*": _nemo_striped,
}  # fmt: skip


def _rule_loads(problem: Problem, topology: Topology, rule: Rule) -> tuple[NDArray[np.float64], int]:
    """Bytes that each rank sends first by a rule, and bytes that enter another domain if each range is served domain by domain.
    """
    entries, holders, needers = entries_of(problem, pieces_of(problem))
    n_bytes = np.bincount(entries.pattern, weights=entries.n_bytes, minlength=len(holders))
    sent, crossed = np.zeros(problem.n_ranks), 0.0
    for who, to, count in zip(holders, needers, n_bytes.tolist(), strict=True):
        for holder, share, served in rule(who.tolist(), to.tolist(), topology.domain):
            sent[holder] += count * share
            crossed += count * share * len({int(topology.domain[n]) for n in served} - {int(topology.domain[holder])})
    return sent, round(crossed)


def growth(pp: int, ep: int, dp: int) -> dict[str, float]:
    """Plan DeepSeek-V3 by `greedy` and measure."""
    problem = refit_problem(load_model("deepseek-v3"), parse_spec(f"PP{pp} x EP{ep}"), parse_spec(f"TP32 x DP{dp}"))[0]
    topology = build_topology(load_machine("dgx-h100"), None, problem.n_ranks)
    began = time.perf_counter()
    plan = make_plan(problem, topology, "greedy")
    plan_s = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    needs = demand(problem, pieces_of(problem), topology)
    bound_s = cuts(needs, topology, nominal_calibration(topology.machine))[0].seconds
    return {
        "gpus": problem.n_ranks, "plan_s": plan_s, "bytes": peak, "steps": len(plan.steps), "ratio": busiest_s(plan) / bound_s,
    }  # fmt: skip


def _print_growth(limit: int) -> None:
    print("DeepSeek-V3, `greedy` on dgx-h100: GPUs on both sides together\n")
    print(f"{'GPUs':>6} {'plan s':>8} {'peak GB':>8} {'steps':>10} {'busiest / bound':>16}")
    found = []
    for pp, ep, dp in GROWTH:
        if 2 * pp * ep > limit:
            break
        command = [sys.executable, __file__, "--one", f"{pp},{ep},{dp}"]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found.append(row)
        figures = f"{row['plan_s']:>8.2f} {row['bytes'] / 1e9:>8.2f} {row['steps']:>10} {row['ratio']:>16.4f}"
        print(f"{row['gpus']:>6} {figures}", flush=True)
    if len(found) >= 3:
        gpus, seconds = (np.log([row[key] for row in found[-3:]]) for key in ("gpus", "plan_s"))
        print(f"\nplanning grows with the power {np.polyfit(gpus, seconds, 1)[0]:.2f} of GPUs over the last three rows")


def _text(value: float | None, digits: int = 3) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def main() -> None:
    """Parse arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--most-gpus", type=int, default=8192)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--layout", action="append", choices=[*TENSORS, *MODELS])
    parser.add_argument("--machine", action="append", choices=MACHINES)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(growth(*map(int, arguments.one.split(",")))))
        return
    if arguments.growth:
        _print_growth(arguments.most_gpus)
        return
    print("* re-stated published rules. link: busiest link / bound, nominal rates; senders: max / mean over source ranks\n")
    heads = f"{'link':>7} {'simulated':>9} {'senders':>8} {'crossed GB':>11} {'plan s':>7}"
    print(f"{'layout':<20} {'machine':<12} {'contender':<17} {heads}")
    for layout in arguments.layout or [*TENSORS, *MODELS]:
        for machine in arguments.machine or MACHINES:
            for row in rows_of(layout, machine):
                figures = f"{_text(row.link):>7} {_text(row.simulated):>9} {_text(row.senders, 2):>8}"
                totals = f"{row.crossed / 1e9:>11.3f} {_text(row.plan_s, 2):>7}"
                print(f"{layout:<20} {machine:<12} {row.name:<17} {figures} {totals}", flush=True)


if __name__ == "__main__":
    main()
