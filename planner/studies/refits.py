"""Refits as something varies: each case planned anew by each strategy, predicted, and held against its own lower bound."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from shardroute.planner.layouts.holdings import totals
from shardroute.planner.problems import Problem
from shardroute.planner.reports import Busiest, PlanReport, report, reporting_us
from shardroute.planner.routing.auto import PLANNING_SHARE, choose
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import STRATEGIES, effort, make_plan
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import predict, predicting_us
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InfeasibleError, InputError
from shardroute.topologies.topologies import Topology

AUTO = "auto"
# What making the problem of a case takes beside planning by its strategies: 0.3 s beside 7.4 s with 32 replicas.
_MADE = 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """One value of what varies: its name for people, its number, and what makes the problem and the machines for it.

    `make` tells the share of it that is done, and may raise InputError or InfeasibleError: the case is then a row that says why.
    `weight` says about how long the case takes beside others, by what is known of it before: GPUs.
    """

    name: str
    value: float
    make: Callable[[Told], tuple[Problem, Topology]]
    weight: float = 1.0


class RefitRow(msgspec.Struct, frozen=True, kw_only=True):
    """A case by one strategy; the field names are those of `study --json`, and stay. `why_not` says why there is no plan.

    value   of what varies, in the unit that the study names
    src_bytes_per_gpu, dst_bytes_per_gpu   weights on the fullest GPU of a side
    planned_by   the strategy that `auto` chose, else the strategy itself
    fits    whether these alone are within the memory of a GPU
    """

    name: str
    value: float
    strategy: str
    planned_by: str = ""
    machine: str = ""
    n_src_gpus: int | None = None
    n_dst_gpus: int | None = None
    n_tensor_bytes: int | None = None
    predicted_s: float | None = None
    lower_bound_s: float | None = None
    ratio_to_bound: float | None = None
    bound: str = ""
    n_bytes_moved: int | None = None
    n_bytes_cross_domain: int | None = None
    busiest: Busiest | None = None
    peak_staging_bytes: int | None = None
    src_bytes_per_gpu: int | None = None
    dst_bytes_per_gpu: int | None = None
    fits: bool | None = None
    why_not: str = ""


class RefitStudy(msgspec.Struct, frozen=True, kw_only=True):
    """Refits as something varies.

    moved    what is refitted between which layouts
    varies   what the rows' names and values are of
    """

    study: str
    title: str
    moved: str
    varies: str
    calibration: str
    calibrated: bool
    notes: list[str]
    rows: list[RefitRow]


def study_rows(
    cases: Sequence[Case],
    strategies: Sequence[str],
    calibration: Calibration,
    options: Options | None = None,
    progress: Told | None = None,
) -> list[RefitRow]:
    """A row a case and strategy, in that order; progress is told the share that is done.

    Raises InputError for an unknown strategy, and the first reason where no case has a plan.
    """
    for name in strategies:
        if name != AUTO and name not in STRATEGIES:
            raise InputError(f"strategy {name!r} is not known; expected one of {', '.join([*STRATEGIES, AUTO])}")
    rows: list[RefitRow] = []
    for case, done in zip(cases, parts(progress, [case.weight for case in cases]), strict=True):
        weights = [effort(name) for name in strategies]
        made, *told = parts(done, (_MADE * sum(weights), *weights))
        try:
            problem, topology = case.make(made)
        except (InputError, InfeasibleError) as error:
            rows += [RefitRow(name=case.name, value=case.value, strategy=name, why_not=str(error)) for name in strategies]
            done(1.0)
            continue
        made(1.0)
        held = [int(totals(problem.tensors, side).n_bytes.max(initial=0)) for side in (problem.source, problem.target)]
        for name, done_by in zip(strategies, told, strict=True):
            rows.append(_row(case, problem, topology, name, calibration, options, held, done_by))
            done_by(1.0)
    if all(row.predicted_s is None for row in rows):
        raise InputError(rows[0].why_not)
    return rows


def _row(
    case: Case,
    problem: Problem,
    topology: Topology,
    strategy: str,
    calibration: Calibration,
    options: Options | None,
    held: Sequence[int],
    progress: Told,
) -> RefitRow:
    try:
        found = _report(problem, topology, strategy, calibration, options, progress)
    except (InputError, InfeasibleError) as error:
        return RefitRow(name=case.name, value=case.value, strategy=strategy, machine=topology.title, why_not=str(error))
    return RefitRow(
        name=case.name, value=case.value, strategy=strategy, planned_by=found.strategy, machine=found.machine,
        n_src_gpus=found.n_src_gpus, n_dst_gpus=found.n_dst_gpus, n_tensor_bytes=found.n_tensor_bytes,
        predicted_s=found.predicted_s, lower_bound_s=found.lower_bound_s, ratio_to_bound=found.ratio_to_bound, bound=found.bound,
        n_bytes_moved=found.n_bytes_moved, n_bytes_cross_domain=found.n_bytes_cross_domain, busiest=found.busiest,
        peak_staging_bytes=found.peak_staging_bytes, src_bytes_per_gpu=held[0], dst_bytes_per_gpu=held[1],
        fits=max(held) <= topology.machine.memory_bytes,
    )  # fmt: skip


def _report(
    problem: Problem,
    topology: Topology,
    strategy: str,
    calibration: Calibration,
    options: Options | None,
    progress: Told,
) -> PlanReport:
    if strategy == AUTO:
        choice = choose(problem, topology, calibration, options, progress)
        return report(choice.plan, choice.prediction, calibration)
    planned, rest = parts(progress, (PLANNING_SHARE, 1.0 - PLANNING_SHARE))
    plan = make_plan(problem, topology, strategy, options=replace(Options() if options is None else options, told=planned))
    predicted, reported = parts(rest, (predicting_us(plan), reporting_us(plan)))
    return report(plan, predict(plan, calibration, progress=predicted), calibration, progress=reported)
