"""A plan's predicted timeline: its steps as tasks, run by the event kernel."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.costs import PlanTasks, tasks_of
from shardroute.planner.plans import Plan
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.engine import SimulationResult, simulate
from shardroute.planner.timelines import Timeline
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

# With it plans of 16,384 GPUs come out in minutes; docs/engine.md has the errors.
TOLERANCE = 0.01

# Microseconds a step that making its tasks took, and simulating them, on one core of a Xeon (2026-11-30): 3 to 7 and 6 to 16,
# plans of DeepSeek-V3 by five strategies, of 0.2 to 1.9 million steps.
_MAKING_US, _SIMULATING_US = 4.0, 7.0
# And a COMPUTE in making tasks: what it takes is worked out for each (a ring of 64).
_COMPUTING_US = 30.0


@dataclass(frozen=True, slots=True)
class Resource:
    """A link (or the host's cores) in use: bytes through it, and the seconds that these take at its full rate."""

    name: str
    n_bytes: int
    busy_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """When a plan's steps are predicted to run, and what they use, busiest first (ties by link number).

    `tasks` and `result` are what was simulated: critical paths and traces read them.
    """

    timeline: Timeline
    resources: tuple[Resource, ...]
    tasks: PlanTasks
    result: SimulationResult

    @property
    def n_events(self) -> int:
        """Solves of the event kernel."""
        return self.result.n_events

    @property
    def predicted_s(self) -> float:
        """Seconds from start to the last arrival."""
        return self.timeline.total_s


def predict(
    plan: Plan,
    calibration: Calibration,
    topology: Topology | None = None,
    progress: Told | None = None,
    tolerance: float | None = None,
) -> Prediction:
    """Simulate the plan on its own topology, or on another one with at least as many GPUs (rank i on GPU i).

    Exactly, or with the tolerance given. With None an exact simulation that is foreseen to take minutes goes on with TOLERANCE;
    the timeline's source then says so, as does `result.tolerance`. progress is told the share that is done.

    Raises InputError when the topology is too small or the calibration doesn't fit its kind.
    """
    topology = plan.topology if topology is None else topology
    if topology.n_gpus < plan.problem.n_ranks:
        raise InputError(f"{topology.title} has {topology.n_gpus} GPUs, the plan uses {plan.problem.n_ranks} ranks")
    making, simulating = parts(progress, _weights(plan))
    tasks = tasks_of(plan, topology, calibration, making)
    exact, may_relax = (0.0, TOLERANCE) if tolerance is None else (tolerance, 0.0)
    result = simulate(tasks.graph, tolerance=exact, may_relax=may_relax, progress=simulating)
    n_steps = len(plan.steps)
    start_s, end_s = _spans(tasks, result) if n_steps else (np.zeros(0), np.zeros(0))
    source = f"{topology.title}, {calibration.library} ({calibration.measured})"
    if result.tolerance:
        source += f", with a tolerance of {result.tolerance:.2g}"
    used = np.flatnonzero(result.link_amount[: tasks.links.n_carrying] > 0)
    order = used[np.argsort(-result.link_busy_s[used], kind="stable")]
    n_bytes = np.array([tasks.n_bytes]) if topology.machine.kind is MachineKind.CPU else result.link_amount
    resources = tuple(Resource(tasks.links.name(i), round(n_bytes[i]), float(result.link_busy_s[i])) for i in order.tolist())
    return Prediction(Timeline("predicted", plan.digest, source, start_s, end_s), resources, tasks, result)


def predicting_us(plan: Plan) -> float:
    """About the microseconds that `predict` takes of the plan, for shares."""
    return sum(_weights(plan))


def _weights(plan: Plan) -> tuple[float, float]:
    """About the microseconds that making the tasks of a plan takes, and simulating them."""
    return _MAKING_US * len(plan.steps) + _COMPUTING_US * len(plan.computes), _SIMULATING_US * len(plan.steps)


def _spans(tasks: PlanTasks, result: SimulationResult) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When each step starts and ends. One in NCCL's groups starts when its sender's begins to pack, and ends unpacked."""
    n_steps = len(tasks.begins)
    own = np.flatnonzero(tasks.step >= 0)
    start_s, end_s = np.full(n_steps, np.inf), np.zeros(n_steps)
    np.minimum.at(start_s, tasks.step[own], result.ready_s[own])
    np.maximum.at(end_s, tasks.step[own], result.finish_s[own])
    began, landed = np.flatnonzero(tasks.begins >= 0), np.flatnonzero(tasks.unpacks >= 0)
    start_s[began] = result.ready_s[tasks.begins[began]]
    end_s[landed] = result.finish_s[tasks.unpacks[landed]]
    return start_s, end_s
