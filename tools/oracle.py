"""Runs oracle files of max-min flow sharing and prints the largest relative difference of a finish time for each.

    python tools/oracle.py FILE...

A file is JSON: `links` (capacity_Bps, latency_s), `flows` (start_s, size_B, route, deps), `finish_s`; its `semantics` says
when a flow is ready and how it shares. Exit 0: all within 1e-6; 1: some aren't; 2: a file can't be used.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.simulator import TaskGraph, simulate
from shardroute.topologies.errors import InputError, ShardrouteError

# What the project asks of its engine (issue 5).
LIMIT = 1e-6


def read_case(path: Path) -> tuple[TaskGraph, NDArray[np.float64]]:
    """The task graph of an oracle file and the finish times it states; InputError names what is wrong in the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read: {error}") from error
    try:
        case = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: isn't JSON: {error}") from error
    try:
        links, flows = case["links"], case["flows"]
        finish_s = np.array(case["finish_s"], np.float64)
        if [link.get("id", i) for i, link in enumerate(links)] != list(range(len(links))):
            raise InputError("links: ids are not 0, 1, 2, ... in order")
        if [flow.get("id", i) for i, flow in enumerate(flows)] != list(range(len(flows))):
            raise InputError("flows: ids are not 0, 1, 2, ... in order")
        n = len(flows)
        if finish_s.shape != (n,):
            raise InputError(f"finish_s: found shape {finish_s.shape}, expected one time for each of {n} flows")
        routes = [flow["route"] for flow in flows]
        deps = [flow["deps"] for flow in flows]
        graph = TaskGraph(
            start_s=np.array([flow["start_s"] for flow in flows], np.float64),
            delay_s=np.array([sum(links[link]["latency_s"] for link in route) for route in routes], np.float64),
            amount=np.array([flow["size_B"] for flow in flows], np.float64),
            cap=np.full(n, np.inf),
            weight=np.ones(n),
            route_ptr=np.cumsum([0, *map(len, routes)]),
            route_links=np.array([link for route in routes for link in route], np.int64),
            dep_ptr=np.cumsum([0, *map(len, deps)]),
            dep_tasks=np.array([task for waits in deps for task in waits], np.int64),
            capacity=np.array([link["capacity_Bps"] for link in links], np.float64),
        )
    except ShardrouteError as error:
        raise InputError(f"{path}: {error}") from error
    except KeyError as error:
        raise InputError(f"{path}: has no key {error}; an oracle file has links, flows and finish_s") from error
    except (TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise InputError(f"{path}: isn't an oracle file: {error}") from error
    return graph, finish_s


def largest_difference(path: Path) -> float:
    """Largest |simulated - stated| / stated over the finish times of one oracle file."""
    graph, stated_s = read_case(path)
    found_s = simulate(graph).finish_s
    scale_s = np.where(stated_s == 0, 1.0, np.abs(stated_s))
    return float((np.abs(found_s - stated_s) / scale_s).max(initial=0.0))


def main(arguments: Sequence[str]) -> int:
    """Runs the files named and prints a line for each; the exit code."""
    if not arguments or any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    status = 0
    for argument in arguments:
        try:
            difference = largest_difference(Path(argument))
        except ShardrouteError as error:
            print(f"oracle: {error}", file=sys.stderr)
            return 2
        verdict = "ok" if difference <= LIMIT else f"over {LIMIT:g}"
        print(f"{argument}  {difference:.2e}  {verdict}")
        if not difference <= LIMIT:
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
