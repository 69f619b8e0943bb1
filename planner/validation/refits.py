"""Refits: published latencies against the simulated plans of the strategy that the system runs.

A plan of a whole model has millions of steps. What each layer adds is the same once a refit is under way, so plans of a few
and of twice as many layers are simulated, and the time is continued along bytes; 235 billion parameters come out within 1 % of
the whole. Where a training framework ran the refit, its host's time for each weight that a rank exports is added: one constant,
`control.tensor`, which is the median over the rows that are marked as fitted, so each of these is also predicted with the median
over the others. Rows of M2N's own benchmark are simulated as it times them (`model_benches`).
"""

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.layouts.models.catalogue import load_model
from shardroute.planner.layouts.models.parameters import Model
from shardroute.planner.layouts.notation import Axis, parse_spec
from shardroute.planner.layouts.tensors import Layout
from shardroute.planner.plans import Plan
from shardroute.planner.problems import Problem
from shardroute.planner.refits import refit_problem
from shardroute.planner.routing import gather_broadcast
from shardroute.planner.routing.auto import PLANNING_SHARE
from shardroute.planner.routing.hybrid import in_bulk
from shardroute.planner.routing.m2n_window import Way
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import backend_for, make_plan, pieces_of
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import predict
from shardroute.planner.studies.sizes import STAND_INS, studied_model
from shardroute.planner.validation.model_benches import bench, pattern_times
from shardroute.planner.validation.published import AssumedRefit, PublishedRefit, RefitCase, assumed_refits, published_refits
from shardroute.planner.validation.rows import Forecast, ValidationRow
from shardroute.topologies.calibrations import Calibration, default_calibration
from shardroute.topologies.machines import Machine, load_machine
from shardroute.topologies.topologies import Topology, build_topology

# Layers of the two plans; models with no more than twice as many are simulated whole.
_LAYERS: Final = 4
# `gather-broadcast` as miles does it: the first rank of each pipeline stage broadcasts what its stage has, one after the other.
ROOT_ALONE: Final = "gather-broadcast, root alone"
# M2N's own benchmark, by its two algorithms.
BENCH_WAYS: Final = {f"m2n-window, {way}": way for way in Way}
# Experts of a stand-in come in multiples of this, so that EP16 splits them.
_EXPERTS_STEP: Final = 16
_LAYER: Final = re.compile(r"\.(\d+)\.")
_NO_LAYER: Final = -1


@dataclass(frozen=True, slots=True)
class RefitTime:
    """Predicted seconds of a refit, and from how many of its layers."""

    time_s: float
    n_layers: int
    n_simulated: int


@dataclass(frozen=True, slots=True)
class _Moved:
    """What moving a refit's bytes is predicted to take, from what that was found, and the weights that a training rank exports
    where a framework runs it.
    """

    time_s: float
    how: str
    n_weights: int

    def host_text(self) -> str:
        """What is to be said of the host's time."""
        return f", and the host's time for {self.n_weights:,} weights" if self.n_weights else ""


@dataclass(frozen=True, slots=True)
class _Simulated:
    """A published refit, and what moving its bytes is predicted to take."""

    published: PublishedRefit
    moved: _Moved

    @property
    def tensor_s(self) -> float:
        """Host time a weight that would make the prediction right; 0 where moving alone takes as long as was measured."""
        return max(self.published.time_s - self.moved.time_s, 0.0) / self.moved.n_weights

    def with_control(self, tensor_s: float) -> float:
        """Seconds with the host's time; a refit that no framework ran has none."""
        return self.moved.time_s + self.moved.n_weights * tensor_s


def refit_rows(
    refits: Sequence[PublishedRefit] | None = None, progress: Told | None = None
) -> Iterator[ValidationRow]:
    """Published refits with their predictions; by default all of them, which takes half a minute.

    progress is told the share that is done.
    """
    refits = published_refits() if refits is None else refits
    told = parts(progress, [*map(n_gpus, refits)])
    yield from _rows([_Simulated(published, _moved(published, done)) for published, done in zip(refits, told, strict=True)])


def n_gpus(case: RefitCase) -> int:
    """GPUs of both sides: about how long the case takes beside others, 3 to 10 ms each on one core of a Xeon (2026-11-30)."""
    total = 0
    for spec in map(parse_spec, (case.source_spec, case.target_spec)):
        dense = math.prod(size for axis, size in spec.axes if axis not in (Axis.PP, Axis.EP, Axis.ETP, Axis.VPP))
        total += spec.size(Axis.PP) * max(dense, spec.size(Axis.EP) * spec.size(Axis.ETP))
    return total


def forecasts(
    refits: Sequence[AssumedRefit] | None = None, progress: Told | None = None
) -> Iterator[Forecast]:
    """Refits that are spoken of without a number, or without what it was measured on, with predictions under what is assumed.

    progress is told the share that is done.
    """
    refits = assumed_refits() if refits is None else refits
    for case, done in zip(refits, parts(progress, [*map(n_gpus, refits)]), strict=True):
        # Of DeepSeek-V3 on GB200 4 layers run at two thirds of the rate of 8 and of all 61: 8 alone make 3.96 s, all 4.03 s.
        moved = _moved(case, done, few=0 if case.strategy == "gather-broadcast" else _LAYERS)
        yield Forecast(
            case.group,
            _name(case),
            case.time_s,
            moved.time_s + moved.n_weights * _control_s(case),
            f"{case.strategy}, {moved.how}{moved.host_text()}",
            f"{case.said}; {case.note}",
        )


def _rows(simulated: list[_Simulated]) -> Iterator[ValidationRow]:
    for one in simulated:
        published, moved = one.published, one.moved
        rest = [other.tensor_s for other in simulated if other is not one and other.published.fitted]
        judged = published.fitted and bool(rest)
        yield ValidationRow(
            "early refit" if published.group.startswith("early") else "refit",
            f"{published.group} ({published.origin.title})",
            _name(published),
            published.time_s,
            one.with_control(_control_s(published)),
            published.fitted,
            one.with_control(statistics.median(rest)) if judged else None,
            "row" if judged else "",
            f"{published.strategy}, {moved.how}{moved.host_text()}",
            published.origin.url,
            published.note,
        )


def _name(case: RefitCase) -> str:
    return f"{case.model} {case.source_spec} to {case.target_spec} on {case.machine}"


def _control_s(case: RefitCase) -> float:
    control = default_calibration(case.machine).control
    return 0.0 if control is None else control.tensor_s


def _moved(case: RefitCase, progress: Told, few: int = _LAYERS) -> _Moved:
    model, source, target = _model(case), parse_spec(case.source_spec), parse_spec(case.target_spec)
    machine, calibration = load_machine(case.machine), default_calibration(case.machine)
    if case.strategy in BENCH_WAYS:
        run = bench(model, source, target)
        times = pattern_times(run, machine, case.domain_gpus, calibration, BENCH_WAYS[case.strategy], progress)
        total_s = math.fsum(one.time_s for one in times)
        how = f"{total_s:.2f} s for {len(times)} patterns of {len(run.tensors):,} tensors, one after the other"
        return _Moved(total_s, how, 0)
    problem, _ = refit_problem(model, source, target)
    topology = build_topology(with_domains(machine, case.domain_gpus), None, problem.n_ranks)
    found = refit_time(problem, topology, case.strategy, calibration, few, progress)
    n_weights = exported_weights(problem, case.strategy) if case.framework else 0
    return _Moved(found.time_s, f"{found.time_s:.2f} s simulated with {found.n_simulated} of {found.n_layers} layers", n_weights)


def _model(case: RefitCase) -> Model:
    if case.model in STAND_INS:
        return studied_model(case.model, None, load_model, _EXPERTS_STEP).model
    return load_model(case.model, mtp=case.mtp, precision=case.precision)


def exported_weights(problem: Problem, strategy: str) -> int:
    """The weights that the busiest training rank exports, each expert's counted by itself: those that it holds a part of.

    To gather whole tensors on every training rank (NeMo RL's broadcast) all take part in all of them, whichever stage has them.
    """
    names = [tensor.name for tensor in problem.tensors]
    own = in_bulk(names) if strategy == "hybrid" else np.arange(0 if strategy == "gather-broadcast" else len(names))
    held = np.zeros(problem.n_ranks, dtype=np.int64)
    gathered = 0
    for i, name in enumerate(names):
        fragments = problem.source.fragments[i]
        # Experts are one tensor a projection; its dim 0 counts them.
        n = fragments.hi[:, 0] - fragments.lo[:, 0] if "*" in name else np.ones(len(fragments), np.int64)
        if i in own:
            np.add.at(held, fragments.rank, n)
        else:
            gathered += int(n.max(initial=0))
    return int(held.max(initial=0)) + gathered


def refit_time(
    problem: Problem,
    topology: Topology,
    strategy: str,
    calibration: Calibration,
    few: int = _LAYERS,
    progress: Told | None = None,
) -> RefitTime:
    """Predicted time of the problem by the strategy: of the whole, or continued along bytes from `few` and 8 layers, from 8 alone
    where `few` is 0. progress is told the share that is done.
    """
    of_layer = _layers(problem)
    layers = np.unique(of_layer[of_layer != _NO_LAYER])

    def simulated(part: Problem, done: Told) -> tuple[float, int]:
        planned, predicted = parts(done, (PLANNING_SHARE, 1.0 - PLANNING_SHARE))
        plan = _plan(part, topology, strategy, Options(told=planned))
        planned(1.0)
        return predict(plan, calibration, progress=predicted).predicted_s, part.n_bytes

    fewer, more = parts(progress, (few, 2 * _LAYERS))
    if len(layers) <= 2 * _LAYERS:
        return RefitTime(simulated(problem, more)[0], len(layers), len(layers))
    few_s, few_bytes = simulated(_with_layers(problem, of_layer, layers, few), fewer) if few else (0.0, 0)
    more_s, more_bytes = simulated(_with_layers(problem, of_layer, layers, 2 * _LAYERS), more)
    per_byte_s = (more_s - few_s) / (more_bytes - few_bytes)
    return RefitTime(few_s + (problem.n_bytes - few_bytes) * per_byte_s, len(layers), 2 * _LAYERS)


def _plan(problem: Problem, topology: Topology, strategy: str, options: Options) -> Plan:
    if strategy != ROOT_ALONE:
        return make_plan(problem, topology, strategy, options=options)
    backend = backend_for(problem, topology)
    return gather_broadcast.plan(problem, pieces_of(problem), topology, backend, root_alone=True, told=options.told)


def _layers(problem: Problem) -> Ints:
    """The layer of each tensor, -1 for those of none."""
    found = (_LAYER.search(tensor.name) for tensor in problem.tensors)
    return np.array([_NO_LAYER if match is None else int(match[1]) for match in found], dtype=np.int64)


def _with_layers(
    problem: Problem,
    of_layer: Ints,
    layers: Ints,
    n: int,
) -> Problem:
    """The problem with n of its layers, evenly spaced, and all that is in none."""
    kept = layers[np.linspace(0, len(layers) - 1, n).round().astype(np.int64)]
    return _with_tensors(problem, np.flatnonzero(np.isin(of_layer, kept) | (of_layer == _NO_LAYER)))


def _with_tensors(problem: Problem, kept: Ints) -> Problem:
    """The problem with these of its tensors."""
    rows = kept.tolist()

    def side(layout: Layout) -> Layout:
        return Layout(tuple(layout.fragments[i] for i in rows), tuple(layout.buffers[i] for i in rows))

    return Problem(tuple(problem.tensors[i] for i in rows), side(problem.source), side(problem.target), problem.n_ranks)


def with_domains(machine: Machine, domain_gpus: int) -> Machine:
    """The machine with NVLink domains of that many GPUs; 0 leaves them as they are."""
    if not domain_gpus:
        return machine
    return replace(machine, hosts_per_domain=domain_gpus // machine.gpus_per_host, figures=())
