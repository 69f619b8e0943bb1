"""Predicted against measured on an emulated cluster, plan by plan: how far off times are, and whether their order is right.

Rule: the calibration is measured first, by ping-pong, and serves all plans; nothing is fitted to what is then compared.
"""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from shardroute.executors.emulation.cases import CASES, N_DOMAINS, N_RANKS, Case
from shardroute.executors.emulation.emulate import Links, emulate
from shardroute.executors.emulation.machines import NIC_BPS, NVLINK_BPS, emulated_machine
from shardroute.executors.emulation.ping_pong import calibrate_emulated
from shardroute.executors.foresee import foresee
from shardroute.executors.launching.ranks import EMULATED
from shardroute.executors.run import DEFAULT_TIMEOUT_S, check_limits
from shardroute.planner.plans import Plan
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import RunError
from shardroute.topologies.topologies import Topology, build_topology

# What predictions are to keep to: in the median, and at worst.
MEDIAN_GOAL, WORST_GOAL = 0.10, 0.20
# Predictions this near each other say that two strategies take the same time: half of what the median may be off.
TIE: Final = 0.05
BALANCED: Final = frozenset({"greedy", "optimal"})
RULES: Final = frozenset({"direct", "domain-relay"})
# Seconds of ping-pong, and of a plan of `CASES`: to make and predict it, to start and end its ranks, and for each run of it
# (2-core Xeon, 2026-12-01).
_PING_PONG_S, _PLANNING_S, _STARTING_S, _RUNNING_S = 7.0, 0.3, 0.8, 2.0


@dataclass(frozen=True, slots=True)
class EmulatedRow:
    """One plan. measured_s is the median of trials_s; error is predicted over measured, less 1."""

    case: str
    strategy: str
    n_steps: int
    n_bytes: int
    predicted_s: float
    measured_s: float
    trials_s: tuple[float, ...]

    @property
    def error(self) -> float:
        """How far the prediction is above the measurement, as a share."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Pair:
    """Two strategies for one case, the one that is predicted to be faster first, with the times of both."""

    case: str
    first: EmulatedRow
    second: EmulatedRow

    @property
    def is_tie(self) -> bool:
        """Whether predictions are too near each other to say which is faster."""
        return self.second.predicted_s <= self.first.predicted_s * (1 + TIE)

    @property
    def holds(self) -> bool:
        """Whether the first was measured to be faster, too."""
        return self.first.measured_s < self.second.measured_s


@dataclass(frozen=True, slots=True)
class Validation:
    """What was found. load is the machine's load average before and after, by whatever else ran on it too."""

    calibration: Calibration
    rows: tuple[EmulatedRow, ...]
    load: tuple[float, float]

    @property
    def median_error(self) -> float:
        """The median of the errors, without their signs."""
        return statistics.median(abs(row.error) for row in self.rows)

    @property
    def worst_error(self) -> float:
        """The largest of the errors, without its sign."""
        return max(abs(row.error) for row in self.rows)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All pairs of strategies of each case."""
        by_case: dict[str, list[EmulatedRow]] = {}
        for row in self.rows:
            by_case.setdefault(row.case, []).append(row)
        found = []
        for case, rows in by_case.items():
            ordered = sorted(rows, key=lambda row: row.predicted_s)
            found += [Pair(case, first, second) for first, second in combinations(ordered, 2)]
        return tuple(found)

    @property
    def ordered(self) -> tuple[Pair, ...]:
        """Pairs of which a prediction says which is faster."""
        return tuple(pair for pair in self.pairs if not pair.is_tie)

    @property
    def balanced_ahead(self) -> tuple[Pair, ...]:
        """Those of them in which greedy or optimal is predicted to beat direct or domain-relay."""
        return tuple(pair for pair in self.ordered if pair.first.strategy in BALANCED and pair.second.strategy in RULES)

    @property
    def is_within_goals(self) -> bool:
        """Whether errors are within the goals and no order is wrong."""
        close = self.median_error <= MEDIAN_GOAL and self.worst_error <= WORST_GOAL
        return close and all(pair.holds for pair in self.ordered)


def validate_emulated(
    topology: Topology | None = None, *, links: Links | None = None, cases: Sequence[Case] = CASES, repeats: int = 3,
    timeout_s: float = DEFAULT_TIMEOUT_S, progress: Told | None = None,
) -> Validation:  # fmt: skip
    """Calibrate by ping-pong, then predict and run every plan of the cases `repeats` times each; `progress` is told the share
    that is done. The topology is, unless given, that of `cluster`, and `links` are of it.

    Raises RunError when a run fails or brings wrong bytes.
    """
    check_limits(timeout_s, repeats)
    topology = cluster() if topology is None else topology
    calibrating, planning, running = parts(progress, _parts_s(cases, repeats))
    before = os.getloadavg()[0]
    calibration = calibrate_emulated(topology, links, timeout_s=timeout_s, progress=calibrating)
    planned = _planned(topology, calibration, cases, planning)
    told = parts(running, [foresee(p.plan, EMULATED, p.predicted_s).whole_s(repeats) for p in planned])
    rows = tuple(_run(p, links, repeats, timeout_s, done) for p, done in zip(planned, told, strict=True))
    return Validation(calibration, rows, (before, os.getloadavg()[0]))


def validating_us(cases: Sequence[Case], repeats: int) -> float:
    """About the microseconds that `validate_emulated` takes."""
    return 1e6 * sum(_parts_s(cases, repeats))


def _parts_s(cases: Sequence[Case], repeats: int) -> tuple[float, float, float]:
    """Seconds of ping-pong, of planning and predicting, of running."""
    n_plans = sum(len(case.strategies) for case in cases)
    return _PING_PONG_S, _PLANNING_S * n_plans, (_STARTING_S + repeats * _RUNNING_S) * n_plans


def cluster(nvlink_Bps: float = NVLINK_BPS, nic_Bps: float = NIC_BPS) -> Topology:
    """The cluster that the cases are for, at the rates of `machines` or others."""
    return build_topology(emulated_machine(N_RANKS // N_DOMAINS, nvlink_Bps, nic_Bps), N_DOMAINS)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan of a case, and the seconds that it is predicted to take."""

    case: str
    plan: Plan
    predicted_s: float


def _planned(topology: Topology, calibration: Calibration, cases: Sequence[Case], told: Told) -> list[_Planned]:
    return [
        _Planned(case.name, plan, predict(plan, calibration).predicted_s)
        for case, done in zip(cases, parts(told, [len(case.strategies) for case in cases]), strict=True)
        for plan in case.plans(topology, calibration, done)
    ]


def _run(planned: _Planned, links: Links | None, repeats: int, timeout_s: float, told: Told) -> EmulatedRow:
    plan, predicted_s = planned.plan, planned.predicted_s
    found = emulate(plan, links=links, timeout_s=timeout_s, repeats=repeats, progress=told, foreseen_s=predicted_s)
    if found.mismatches:
        raise RunError(f"{planned.case}, {plan.strategy}: the destination holds wrong bytes; {found.mismatches[0].text}")
    n_steps, n_bytes = len(plan.steps), plan.problem.n_bytes
    return EmulatedRow(planned.case, plan.strategy, n_steps, n_bytes, predicted_s, found.measured_s, found.trials_s)
