"""Numbers of a plan in words and units, for tables."""

from shardroute.planner.reports import PlanReport
from shardroute.topologies.units import format_bytes, format_seconds


def ratio_text(ratio: float | None) -> str:
    """`1.22 x bound`, or a dash where there is no bound."""
    return "-" if ratio is None else f"{ratio:.3g} x bound"


def report_facts(report: PlanReport) -> list[tuple[str, str]]:
    """The lines that describe a plan to a person."""
    least = report.least_bytes_cross_domain
    across = format_bytes(report.n_bytes_cross_domain)
    if least:
        across += f" ({report.n_bytes_cross_domain / least:.4g} x the least possible)"
    facts = [
        ("strategy", report.strategy),
        ("machine", f"{report.machine} ({report.n_src_gpus} source GPUs, {report.n_dst_gpus} destination GPUs)"),
        ("tensors", f"{report.n_tensors:,} of {format_bytes(report.n_tensor_bytes)}"),
        ("steps", f"{report.n_steps:,}"),
        ("moved between GPUs", format_bytes(report.n_bytes_moved)),
        ("into other domains", across),
        ("staging, peak per GPU", format_bytes(report.peak_staging_bytes)),
        ("lower bound", f"{format_seconds(report.lower_bound_s)} ({report.bound})"),
        ("predicted", f"{format_seconds(report.predicted_s)} ({ratio_text(report.ratio_to_bound)})"),
    ]
    if report.busiest is not None:
        busy = report.busiest
        facts.append(("busiest", f"{busy.resource}: {format_bytes(busy.n_bytes)} in {format_seconds(busy.seconds)}"))
    facts.append(("costs from", report.calibration))
    if report.plan_s is not None:
        facts.append(("planned in", format_seconds(report.plan_s)))
    facts.append(("digest", report.digest[:16]))
    return facts
