"""`shardroute bound`: what no plan of a problem can beat, cut by cut."""

import msgspec

from shardroute.planner.cli.options import bytes_of
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress
from shardroute.planner.cli.plan import (
    CalibrationOption,
    MachineOption,
    MaxStagingOption,
    NicOption,
    calibration_for,
    topology_for,
)
from shardroute.planner.cli.program import app
from shardroute.planner.cli.requests import Asked, with_request_options
from shardroute.planner.reports import needs_on
from shardroute.planner.routing.bounds import cuts
from shardroute.topologies.units import format_bytes, format_seconds


class BoundReport(msgspec.Struct, frozen=True):
    """All cuts, tightest first; the field names are those of `bound --json`, and stay."""

    machine: str
    n_src_gpus: int
    n_dst_gpus: int
    n_tensor_bytes: int
    least_bytes_cross_domain: int
    lower_bound_s: float
    cuts: list[dict[str, str | int | float]]


@app.command("bound", rich_help_panel="Plan and predict")
@with_request_options
def bound_command(
    machine: MachineOption,
    asked: Asked,
    calibration: CalibrationOption = None,
    max_staging: MaxStagingOption = None,
    nic: NicOption = None,
    json: JsonFlag = False,
) -> None:
    """Say how fast a move can be at best: each cut that its bytes must cross, tightest first. Takes a problem as `plan` does.

    shardroute bound --model qwen3-235b-a22b --from "TP4 x PP8 x EP16" --to "TP8 x DP16" --machine dgx-h100
    """
    request = asked.request()
    problem = request.problem
    topology = topology_for(machine, problem.n_ranks, nic)
    with progress("adding up what must cross") as done:
        needs = needs_on(problem, topology, done)
    staging = max_staging is None or bytes_of("--max-staging", max_staging) > 0
    found = cuts(needs, topology, calibration_for(topology.machine, calibration), staging=staging)
    report = BoundReport(
        machine=topology.title,
        n_src_gpus=len(problem.source.ranks),
        n_dst_gpus=len(problem.target.ranks),
        n_tensor_bytes=problem.n_bytes,
        least_bytes_cross_domain=needs.n_bytes_cross_domain,
        lower_bound_s=found[0].seconds if found else 0.0,
        cuts=[{"name": cut.name, "n_bytes": cut.n_bytes, "seconds": cut.seconds} for cut in found],
    )
    if json:
        print_json(report)
        return
    print_facts(
        request.title,
        [
            *request.facts,
            ("machine", f"{report.machine} ({report.n_src_gpus} source GPUs, {report.n_dst_gpus} destination GPUs)"),
            ("tensors", f"{len(problem.tensors):,} of {format_bytes(report.n_tensor_bytes)}"),
            ("into other domains, at least", format_bytes(report.least_bytes_cross_domain)),
            ("lower bound", format_seconds(report.lower_bound_s)),
        ],
    )
    print_table(
        ["cut", "bytes", "at least"],
        [[cut.name, format_bytes(cut.n_bytes), format_seconds(cut.seconds)] for cut in found],
        right=["bytes", "at least"],
        title="\nWhat no plan can beat",
    )
