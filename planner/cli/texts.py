"""Numbers of a plan in words and units, for tables."""

from shardroute.planner.plans import Plan
from shardroute.planner.reports import PlanReport
from shardroute.planner.stagings import staging_facts
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.units import format_bytes, format_seconds


def ratio_text(ratio: float | None) -> str:
    """`1.22 x bound`, or nothing where there is no bound."""
    return "" if ratio is None else f"{ratio:.2f} x bound"


def devices_text(plan: Plan) -> str:
    """What the plan's ranks sit on, `GPUs` or `processes`."""
    return "processes" if plan.topology.machine.kind is MachineKind.CPU else "GPUs"


def report_facts(report: PlanReport, devices: str) -> list[tuple[str, str]]:
    """The lines that describe a plan to a person; `devices` is what its ranks sit on."""
    least = report.least_bytes_cross_domain
    across = format_bytes(report.n_bytes_cross_domain)
    if least:
        across += f" ({report.n_bytes_cross_domain / least:.4g} x the least possible)"
    facts = [
        ("strategy", report.strategy),
        ("machine", f"{report.machine} ({report.n_src_gpus} source {devices}, {report.n_dst_gpus} destination {devices})"),
        ("tensors", f"{report.n_tensors:,} of {format_bytes(report.n_tensor_bytes)}"),
        ("steps", f"{report.n_steps:,}"),
        (f"moved between {devices}", format_bytes(report.n_bytes_moved)),
        ("into other domains", across),
        *([("copied within its rank", format_bytes(report.n_bytes_local))] if report.n_bytes_local else []),
        *staging_facts(report.peak_staging_bytes, report.peak_packing_bytes),
        ("lower bound", f"{format_seconds(report.lower_bound_s)} ({report.bound})"),
    ]
    if report.predicted_s is None:
        facts.append(("predicted", "needs measured costs: --calibration FILE, or --calibration nominal"))
    else:
        ratio = f" ({ratio_text(report.ratio_to_bound)})" if report.ratio_to_bound is not None else ""
        facts.append(("predicted", f"{format_seconds(report.predicted_s)}{ratio}"))
        facts.append(("costs from", report.calibration))
    if report.busiest is not None:
        busy = report.busiest
        facts.append(("busiest", f"{busy.resource}: {format_bytes(busy.n_bytes)} in {format_seconds(busy.seconds)}"))
    if report.plan_s is not None:
        facts.append(("planned in", format_seconds(report.plan_s)))
    facts.append(("digest", report.digest[:16]))
    return facts
