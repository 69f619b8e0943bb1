"""Several ways to route one problem, compared by prediction: which a balanced strategy takes.

Rule: a way whose busiest link is far over the bound doesn't take part, so the strategies keep what they promise of links; of the
others the fastest by prediction wins. Small plans are simulated. Large ones are compared by when their last step would end if
every port carried one message at a time, which costs a fifth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.planner.backends.channels import Path
from shardroute.planner.plans import Backend, Boxes, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing.balance import Balanced, routes_of
from shardroute.planner.routing.chunked import Chunked
from shardroute.planner.routing.costs import Costs, calibration_for, costs_of
from shardroute.planner.routing.lowering import Arranged, arrange, finish
from shardroute.planner.routing.options import Options
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.topologies import Topology

# Steps that are simulated to choose, in all (some 3 s), and the most that one way may have. Above, the estimate serves: on
# 15 layouts of more steps it was within 12 % of the simulated time.
SIMULATED_STEPS = 400_000
ENTRANT_STEPS = 150_000
# Where bytes take this many starts of a message, simulating tells little more than the estimate.
LONG = 1000
# A way whose estimate is above the best one by more than this is not simulated, unless it has few steps: there the starts in a
# row are what counts, of which the estimate knows nothing.
CLOSE = 1.3
FEW_STEPS = 3_000
# Busiest links within this of each other are as good as equal.
SAME = 1.001


@dataclass(frozen=True, slots=True, eq=False)
class Entrant:
    """A way to route: how busy its busiest link is, when its last step would end, the number of its steps, and its plan."""

    busiest_s: float
    ends_s: float
    n_steps: int
    plan: Callable[[], Plan]


def entrant_of(
    strategy: str, problem: Problem, topology: Topology, backend: Backend, options: Options, chunked: Chunked, found: Balanced
) -> Entrant:
    """The entrant that moves each chunk by its tree."""
    routes = routes_of(chunked.entries, chunked.chunks, found)
    arranged = arrange(routes, topology, chunked.message_bytes, options, costs_of(topology, problem.n_ranks, options))
    return arranged_entrant(strategy, problem, topology, backend, options, chunked.boxes, arranged)


def arranged_entrant(
    strategy: str, problem: Problem, topology: Topology, backend: Backend, options: Options, boxes: tuple[Boxes, ...],
    arranged: Arranged,
) -> Entrant:  # fmt: skip
    """The entrant of arranged routes."""

    def plan() -> Plan:
        return finish(strategy, problem, boxes, topology, backend, arranged, options)

    return Entrant(arranged.busiest_s(topology, problem.n_ranks), arranged.ends_s, arranged.n_rows, plan)


def best_plan(
    entrants: Sequence[Entrant], topology: Topology, n_ranks: int, options: Options, bound_s: float, most_over: float
) -> Plan:
    """The plan of the entrant that is predicted to be fastest, of those whose busiest link is within `most_over` x `bound_s`.

    A link that is done sooner than a message starts is never too busy. Where all are too busy, the least busy take part.
    """
    calibration, costs = calibration_for(topology, options), costs_of(topology, n_ranks, options)
    left = list(entrants)
    if costs is not None:
        allowed = max(bound_s * most_over, costs.start_s(0.0, Path.NIC))
        least = min(e.busiest_s for e in entrants)
        left = [e for e in entrants if e.busiest_s <= max(allowed, least * SAME)]
    left.sort(key=lambda e: e.ends_s)
    if len(left) == 1 or calibration is None or is_long(bound_s, costs) or left[0].n_steps > ENTRANT_STEPS:
        return left[0].plan()
    close = left[0].ends_s * CLOSE
    return _fastest(
        [e for e in left if e.n_steps <= ENTRANT_STEPS and (e.ends_s <= close or e.n_steps <= FEW_STEPS)], calibration
    )


def is_long(bound_s: float, costs: Costs | None) -> bool:
    """Whether bytes take so long that the starts of messages hardly count."""
    return costs is not None and bound_s > LONG * costs.start_s(0.0, Path.NIC)


def _fastest(entrants: Sequence[Entrant], calibration: Calibration) -> Plan:
    """By simulation, those that look best first, as long as the steps allow."""
    best, best_s, n_steps = None, np.inf, 0
    for entrant in entrants:
        n_steps += entrant.n_steps
        if best is not None and n_steps > SIMULATED_STEPS:
            break
        plan = entrant.plan()
        seconds = predict(plan, calibration).predicted_s
        if best is None or seconds < best_s:
            best, best_s = plan, seconds
    assert best is not None
    return best
