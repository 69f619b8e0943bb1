"""Predicted against measured on an emulated cluster, plan by plan: how far off times are, and whether their order is right.

Rule: the calibration is measured first, by ping-pong, and serves all plans; nothing is fitted to what is then compared.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from shardroute.executors.emulation.cases import CASES, N_DOMAINS, N_RANKS, Case
from shardroute.executors.emulation.emulate import Links, emulate
from shardroute.executors.emulation.machines import NIC_BPS, NVLINK_BPS, emulated_machine
from shardroute.executors.emulation.ping_pong import calibrate_emulated
from shardroute.executors.run import DEFAULT_TIMEOUT_S, check_limits
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
    timeout_s: float = DEFAULT_TIMEOUT_S, progress: Callable[[float, str], None] | None = None,
) -> Validation:  # fmt: skip
    """Calibrate by ping-pong, then predict and run every plan of the cases `repeats` times each; `progress` is told the share
    done and what comes next. The topology is, unless given, that of `cluster`, and `links` are of it.

    Raises RunError when a run fails or brings wrong bytes.
    """
    check_limits(timeout_s, repeats)
    topology = cluster() if topology is None else topology
    tell = progress if progress is not None else lambda _share, _what: None
    n_plans = sum(len(case.strategies) for case in cases)
    before = os.getloadavg()[0]
    tell(0.0, "ping-pong")
    calibration = calibrate_emulated(topology, links, timeout_s=timeout_s)
    rows = []
    for row in _rows(topology, calibration, links, cases, repeats, timeout_s):
        rows.append(row)
        tell((len(rows) + 1) / (n_plans + 1), f"after {row.case}, {row.strategy}")
    return Validation(calibration, tuple(rows), (before, os.getloadavg()[0]))


def cluster(nvlink_Bps: float = NVLINK_BPS, nic_Bps: float = NIC_BPS) -> Topology:
    """The cluster that the cases are for, at the rates of `machines` or others."""
    return build_topology(emulated_machine(N_RANKS // N_DOMAINS, nvlink_Bps, nic_Bps), N_DOMAINS)


def _rows(
    topology: Topology, calibration: Calibration, links: Links | None, cases: Sequence[Case], repeats: int, timeout_s: float
) -> Iterator[EmulatedRow]:  # fmt: skip
    for case in cases:
        for plan in case.plans(topology, calibration):
            predicted_s = predict(plan, calibration).predicted_s
            found = emulate(plan, links=links, timeout_s=timeout_s, repeats=repeats)
            if found.mismatches:
                raise RunError(f"{case.name}, {plan.strategy}: the destination holds wrong bytes; {found.mismatches[0].text}")
            n_bytes = plan.problem.n_bytes
            yield EmulatedRow(case.name, plan.strategy, len(plan.steps), n_bytes, predicted_s, found.measured_s, found.trials_s)
