"""Refits as something varies: each case planned anew by each strategy, predicted, and held against its own lower bound."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from shardroute.planner.layouts.holdings import totals
from shardroute.planner.problems import Problem
from shardroute.planner.reports import Busiest, PlanReport, report
from shardroute.planner.routing.auto import PLANNING_SHARE, choose
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import STRATEGIES, make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InfeasibleError, InputError
from shardroute.topologies.topologies import Topology

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Case:
    """One value of what varies: its name for people, its number, and what makes the problem and the machines for it.

    `make` may raise InputError or InfeasibleError: the case is then a row that says why.
    """

    name: str
    value: float
    make: Callable[[], tuple[Problem, Topology]]


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
    progress: Callable[[float], None] | None = None,
) -> list[RefitRow]:
    """A row a case and strategy, in that order. Raises InputError for an unknown strategy, and the first reason where no case has
    a plan.
    """
    for name in strategies:
        if name != AUTO and name not in STRATEGIES:
            raise InputError(f"strategy {name!r} is not known; expected one of {', '.join([*STRATEGIES, AUTO])}")
    rows: list[RefitRow] = []
    n = len(cases) * len(strategies)
    for case in cases:
        try:
            problem, topology = case.make()
        except (InputError, InfeasibleError) as error:
            rows += [RefitRow(name=case.name, value=case.value, strategy=name, why_not=str(error)) for name in strategies]
            continue
        held = [int(totals(problem.tensors, side).n_bytes.max(initial=0)) for side in (problem.source, problem.target)]
        for name in strategies:
            done = len(rows)
            inner = None if progress is None else lambda part, done=done: progress((done + part) / n)
            rows.append(_row(case, problem, topology, name, calibration, options, held, inner))
            if progress is not None:
                progress(len(rows) / n)
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
    progress: Callable[[float], None] | None,
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
    progress: Callable[[float], None] | None,
) -> PlanReport:
    if strategy == AUTO:
        choice = choose(problem, topology, calibration, options, progress)
        return report(choice.plan, choice.prediction, calibration)
    heard = replace(Options() if options is None else options, told=progress)
    plan = make_plan(problem, topology, strategy, options=heard.part(0.0, PLANNING_SHARE))
    return report(plan, predict(plan, calibration, progress=heard.part(PLANNING_SHARE, 1.0).told), calibration)
