"""The report's comparisons: plans with each other and with their bounds, other strategies, a measurement, other machines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shardroute.planner.compare import compare
from shardroute.planner.machine_changes import with_domains, with_nics
from shardroute.planner.plans import Plan
from shardroute.planner.reporting.charts import Value, bars
from shardroute.planner.reporting.rivals import Rival, predict_anew
from shardroute.planner.reporting.sections import Cell, Section, count, ratio, seconds, size, table
from shardroute.planner.reports import PlanReport, bounds_of
from shardroute.planner.timelines import Timeline
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InfeasibleError, InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology, build_topology
from shardroute.topologies.units import format_bandwidth, format_seconds

# What-ifs: rates of the NICs over the machine's, and GPUs of an NVLink domain (DGX and HGX hosts, NVL36, NVL72).
_NIC_FACTORS: Final = (0.5, 1.0, 2.0, 4.0)
_DOMAIN_SIZES: Final = (8, 36, 72)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change of the machine, and what the plan's strategy then takes; `why_not` says why there is no plan."""

    change: str
    machine: str
    predicted_s: float | None
    bound_s: float | None
    why_not: str = ""


def plans_section(names: Sequence[str], reports: Sequence[PlanReport]) -> Section:
    """All plans of the page beside each other, predicted time and bound."""
    values: list[dict[str, Value]] = []
    rows = []
    for name, report in zip(names, reports, strict=True):
        if report.predicted_s is not None:
            values.append(_bar(name, report.predicted_s, "predicted"))
        if report.lower_bound_s:
            values.append(_bar(f"{name}, bound", report.lower_bound_s, "lower bound"))
        rows.append([
            Cell(name), Cell(report.strategy), Cell(report.machine), seconds(report.predicted_s), seconds(report.lower_bound_s),
            ratio(report.ratio_to_bound), count(report.n_steps), size(report.n_bytes_cross_domain),
            size(report.peak_staging_bytes),
        ])  # fmt: skip
    columns = ("plan", "strategy", "machine", "predicted", "bound", "times it", "steps", "into other domains", "staging")
    about = "predicted time and lower bound of each plan"
    chart = bars(values, colour="what") if values else None
    return Section("plans", "The plans", (), chart, about, table(columns, rows))


def strategies_section(report: PlanReport, rivals: Sequence[Rival]) -> Section:
    """The plan beside other strategies, against the bound."""
    ours = Rival(
        f"{report.strategy} (this plan)", report.predicted_s, 1.0, report.n_steps, report.n_bytes_cross_domain,
        report.peak_staging_bytes, report.busiest,
    )  # fmt: skip
    ranked = sorted([ours, *rivals], key=lambda r: (r.predicted_s is None, r.predicted_s or 0.0, r.strategy))
    values = [_bar(r.strategy, r.predicted_s) for r in ranked if r.predicted_s is not None]
    rows = [
        [
            Cell(r.strategy), seconds(r.predicted_s), ratio(r.ratio),
            ratio(r.predicted_s / report.lower_bound_s if r.predicted_s is not None and report.lower_bound_s else None),
            count(r.n_steps), size(r.n_bytes_cross_domain), size(r.peak_staging_bytes),
            Cell(r.why_not or ("" if r.busiest is None else r.busiest.resource)),
        ]
        for r in ranked
    ]  # fmt: skip
    bound_s = report.lower_bound_s
    words = ["Others are planned with the options that a plan gets when none are given."]
    if bound_s:
        words.append(f"The line is the lower bound, {format_seconds(bound_s)}: {report.bound}.")
    columns = (
        "strategy", "predicted", "to this plan", "to the bound", "steps", "into other domains", "staging", "busiest, or why not",
    )  # fmt: skip
    chart = bars(values, rule_s=bound_s or None) if values else None
    about = "predicted time of each strategy, with the lower bound as a line"
    return Section("strategies", "Strategies against the bound", tuple(words), chart, about, table(columns, rows))


def measured_section(predicted: Timeline, measured: Timeline) -> Section:
    """A prediction beside a measurement of the same plan. Raises InputError when they are of different plans."""
    found = compare(predicted, measured)
    values: list[dict[str, Value]] = []
    for row in found.rows:
        for kind, s in ((found.first_kind, row.first_s), (found.second_kind, row.second_s)):
            values.append(_bar(f"{row.name}, {kind}", s, kind))
    rows = [
        [
            Cell(row.name), seconds(row.first_s), seconds(row.second_s),
            Cell("-" if row.error is None else f"{row.error:+.1%}", row.error),
        ]
        for row in found.rows
    ]  # fmt: skip
    words = [f"Predicted for {found.first_source}; measured by {found.second_source}."]
    if found.verified is not None:
        words.append(f"Verified {found.verified.bytes:,} bytes, {found.verified.mismatches:,} of them wrong.")
    about = "predicted and measured seconds until a share of the steps was done"
    columns = ("", found.first_kind, found.second_kind, "off by")
    chart = bars(values, colour="what")
    return Section("measured", "Predicted against measured", tuple(words), chart, about, table(columns, rows))


def what_ifs(plan: Plan, calibration: Calibration, progress: Callable[[float], None] | None = None) -> list[WhatIf]:
    """The plan's strategy on machines with other NICs, and with NVLink domains of other sizes, at the same measured costs;
    progress is told the share that is done.

    Empty for CPU machines, for machines joined of several kinds, and where some NICs are not the machine's.
    """
    topology = plan.topology
    machine = topology.machine
    if machine.kind is MachineKind.CPU or topology.more or topology.own_nic_Bps:
        return []
    found: list[WhatIf] = []

    def add(change: str, other: Topology) -> None:
        n_done = len(found)

        def done(share: float) -> None:
            if progress is not None:
                progress((n_done + share) / (len(_NIC_FACTORS) + len(_DOMAIN_SIZES)))

        found.append(_what_if(plan, calibration, change, other, done))
        done(1.0)

    for factor in _NIC_FACTORS:
        other = with_nics(machine, machine.gpu_nic_Bps * factor)
        change = f"NICs {factor:g} x, {format_bandwidth(other.gpu_nic_Bps)} a GPU"
        add(change, Topology(other, topology.n_gpus))
    for n_gpus in _DOMAIN_SIZES:
        other = with_domains(machine, n_gpus)
        change = f"NVLink domains of {n_gpus} GPUs"
        add(change, build_topology(other, min_gpus=plan.problem.n_ranks))
    return found


def what_if_section(strategy: str, found: Sequence[WhatIf]) -> Section:
    """What-ifs as a section."""
    values = [_bar(row.change, row.predicted_s) for row in found if row.predicted_s is not None]
    rows = [
        [
            Cell(row.change), seconds(row.predicted_s), seconds(row.bound_s),
            ratio(row.predicted_s / row.bound_s if row.predicted_s is not None and row.bound_s else None), Cell(row.why_not),
        ]
        for row in found
    ]  # fmt: skip
    words = [
        f"The same problem, planned anew by {strategy} for each machine, at the same measured costs: latencies and the share of "
        "nominal rates that is reached. Nobody has measured these machines."
    ]
    columns = ("machine", "predicted", "bound", "times it", "")
    about = "predicted time with other NIC speeds and other sizes of NVLink domains"
    chart = bars(values) if values else None
    return Section("what-if", "What if", tuple(words), chart, about, table(columns, rows))


def _bar(name: str, s: float, what: str = "") -> dict[str, Value]:
    return {"name": name, "s": s, "text": format_seconds(s), "what": what}


def _what_if(
    plan: Plan, calibration: Calibration, change: str, topology: Topology, progress: Callable[[float], None]
) -> WhatIf:
    try:
        other, prediction = predict_anew(plan, plan.strategy, calibration, topology, progress)
        bounds = bounds_of(other, calibration)
    except (InputError, InfeasibleError) as error:
        return WhatIf(change, topology.title, None, None, str(error))
    return WhatIf(change, topology.title, prediction.predicted_s, bounds[0].seconds if bounds else None)
