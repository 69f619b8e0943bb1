"""Several ways to route one problem, compared by prediction: which a balanced strategy takes.

Rule: a way whose busiest link is far over the bound doesn't take part, so the strategies keep what they promise of links; of the
others the fastest by prediction wins, or one that is hardly slower and loads the sources more evenly, so that none of them is
a straggler. Small plans are simulated. Large ones are compared by when their last step would end if every port carried one
message at a time, which costs a fifth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardroute.planner.backends.channels import Path
from shardroute.planner.plans import Backend, Boxes, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing.balance import Balanced, routes_of, unevenness
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
# Where bytes take this many starts of a message, simulating more than FEW_STEPS tells little more than the estimate.
LONG = 1000
# A way whose estimate is above the best one by more than this is not simulated, unless it has few steps: there starts in a row
# and links that wait for each other are what counts, of which the estimate knows nothing.
CLOSE = 1.3
FEW_STEPS = 3_000
# Busiest links within this of each other are as good as equal.
SAME = 1.001
# Senders are even when the busiest source is this near to their mean, and this much longer a plan may take for it.
EVEN = 1.01
WORTH = 1.05


@dataclass(frozen=True, slots=True, eq=False)
class Entrant:
    """A way to route.

    busiest_s   seconds of its busiest link at nominal rates
    ends_s      when its last step would end
    unevenness  the busiest source rank over their mean, by what they send over NICs
    rule        whether it is the very routes of a fixed rule: a plan that is slower than these doesn't win
    """

    busiest_s: float
    ends_s: float
    unevenness: float
    n_steps: int
    rule: bool
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
    arranged: Arranged, *, rule: bool = False,
) -> Entrant:  # fmt: skip
    """The entrant of arranged routes."""
    sent = arranged.sent(problem.n_ranks)[problem.source.ranks]

    def plan() -> Plan:
        return finish(strategy, problem, boxes, topology, backend, arranged, options)

    busiest_s = arranged.busiest_s(topology, problem.n_ranks)
    return Entrant(busiest_s, arranged.ends_s, unevenness(sent), arranged.n_rows, rule, plan)


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
    most_steps = FEW_STEPS if is_long(bound_s, costs) else ENTRANT_STEPS
    if len(left) == 1 or calibration is None or left[0].n_steps > most_steps:
        return left[_winner([e.ends_s for e in left], left)].plan()
    close = left[0].ends_s * CLOSE
    return _fastest(
        [e for e in left if e.n_steps <= most_steps and (e.ends_s <= close or e.n_steps <= FEW_STEPS)], calibration
    )


def _winner(seconds: Sequence[float], entrants: Sequence[Entrant]) -> int:
    """The fastest, by the seconds given, of those that load the sources most evenly and are not too slow for it."""
    allowed = min(WORTH * min(seconds), *(s for s, e in zip(seconds, entrants, strict=True) if e.rule), np.inf)
    near = [i for i, s in enumerate(seconds) if s <= allowed]
    even = max(EVEN, SAME * min(entrants[i].unevenness for i in near))
    return min((i for i in near if entrants[i].unevenness <= even), key=lambda i: seconds[i])


def is_long(bound_s: float, costs: Costs | None) -> bool:
    """Whether bytes take so long that the starts of messages hardly count."""
    return costs is not None and bound_s > LONG * costs.start_s(0.0, Path.NIC)


def _fastest(entrants: Sequence[Entrant], calibration: Calibration) -> Plan:
    """By simulation, those that look best first, as long as the steps allow."""
    n_steps = np.cumsum([entrant.n_steps for entrant in entrants])
    tried = entrants[: max(1, int(np.searchsorted(n_steps, SIMULATED_STEPS, side="right")))]
    plans = [entrant.plan() for entrant in tried]
    return plans[_winner([predict(plan, calibration).predicted_s for plan in plans], tried)]
