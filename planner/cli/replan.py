"""`shardroute replan`: a plan after GPUs have gone, come or slowed down, with what was kept of it."""

import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer
from msgspec import to_builtins

from shardroute.planner.arguments import parse_nics, parse_ranks, ranges_text
from shardroute.planner.changes import carried_over, changed_topology, silent_nics, with_new_ranks, without_ranks
from shardroute.planner.cli.cautions import say_tolerance
from shardroute.planner.cli.files import read_plan, write_plan
from shardroute.planner.cli.inspect import PlanArgument
from shardroute.planner.cli.options import about, check_output
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress, say
from shardroute.planner.cli.plan import CalibrationOption, MaxStagingOption, NicOption, calibration_for, costs_file, within
from shardroute.planner.cli.program import app
from shardroute.planner.cli.texts import devices_text, report_facts
from shardroute.planner.problems import Problem
from shardroute.planner.reports import report, reporting_us
from shardroute.planner.routing.auto import PLANNING_SHARE
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.replans import replan
from shardroute.planner.shares import part, parts
from shardroute.planner.simulator.refit import predict, predicting_us
from shardroute.topologies.errors import InputError
from shardroute.topologies.topologies import Topology
from shardroute.topologies.units import format_bandwidth, format_bytes


class NicChange(msgspec.Struct, frozen=True):
    """What the NICs of a GPU carry before and after."""

    gpu: int
    before_Bps: float
    after_Bps: float


class ReplanReport(msgspec.Struct, frozen=True):
    """What changed and what was kept; the field names are those of `replan --json`, and stay.

    n_bytes_kept, n_bytes_anew   bytes of pieces, each counted once, that go the way they went and that were routed anew
    """

    gone: list[int]
    new: list[int]
    nics: list[NicChange]
    n_bytes_kept: int
    n_bytes_anew: int
    digest_before: str


@app.command("replan", rich_help_panel="Plan and predict")
def replan_command(
    plan: PlanArgument,
    gone: Annotated[str | None, typer.Option("--gone", metavar="RANKS", help="Ranks that are gone, 24-31,40.")] = None,
    new: Annotated[
        list[str] | None,
        typer.Option("--new", metavar="RANKS=RANKS", help="New ranks, each with what another needs: 64-71=24-31. Repeatable."),
    ] = None,
    nic: NicOption = None,
    nic_down: Annotated[str | None, typer.Option("--nic-down", metavar="GPUS", help="GPUs whose NICs are down, 17.")] = None,
    slow_domain: Annotated[
        list[str] | None,
        typer.Option("--slow-domain", metavar="DOMAIN=SHARE", help="A domain whose NICs give a share, 2=0.5. Repeatable."),
    ] = None,
    calibration: CalibrationOption = None,
    max_staging: MaxStagingOption = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the new plan to this file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Plan again after a change, keeping the way of every piece that the change leaves alone.

    \b
    Host 3 (GPUs 24 to 31) is gone, a new host takes its place, one NIC is down:
      shardroute replan q.plan --gone 24-31 --new 64-71=24-31 --nic-down 17 -o r.plan
    """
    before = read_plan(plan)
    costs = calibration_for(before.topology.machine, calibration)
    check_output(output, "the plan")
    lost = [] if gone is None else parse_ranks("--gone", gone)
    problem, came, like = _problem(before.problem, lost, new or [])
    topology = changed_topology(before.topology, {}, problem.n_ranks)
    start = carried_over(before, topology, gone=lost, new=came, like=like)
    nics = _nics(topology, lost, nic or [], nic_down, slow_domain or [])
    if not (lost or came or nics):
        raise InputError("nothing has changed: name what has, with --gone, --new, --nic, --nic-down or --slow-domain")
    changed = changed_topology(topology, nics, problem.n_ranks)
    with progress("planning again") as done:
        began = time.perf_counter()
        asked = within(Options(told=part(done, 0.0, PLANNING_SHARE)), max_staging)
        found = replan(start, problem, changed, asked)
        plan_s = time.perf_counter() - began
        done(PLANNING_SHARE)
        weights = predicting_us(found.plan), reporting_us(found.plan)
        predicted, reported = parts(part(done, PLANNING_SHARE, 1.0), weights)
        prediction = say_tolerance(predict(found.plan, costs, progress=predicted))
        figures = report(found.plan, prediction, costs, plan_s, costs_file(calibration), reported)
    if output is not None:
        write_plan(found.plan, output)
    changes = [
        NicChange(gpu, float(topology.nic_Bps[gpu]), float(changed.nic_Bps[gpu]))
        for gpu in sorted(nics)
        if topology.nic_Bps[gpu] != changed.nic_Bps[gpu]
    ]
    said = ReplanReport(sorted(lost), sorted(came), changes, found.n_bytes_kept, found.n_bytes_anew, before.digest)
    if json:
        print_json(to_builtins(figures) | to_builtins(said))
        return
    print_facts(plan, [*_facts(said), *report_facts(figures, devices_text(found.plan))])
    if said.nics:
        print_table(["GPUs", "NIC before", "NIC now"], _nic_rows(said.nics), right=["NIC before", "NIC now"], title="\nNICs")
    if output is not None:
        say(f"plan written to {output}")


def _problem(problem: Problem, gone: Sequence[int], new: Sequence[str]) -> tuple[Problem, list[int], list[int]]:
    """The problem after the change, its new ranks, and whom each of them is like."""
    came: list[int] = []
    models: list[int] = []
    for text in new:
        ranks, equals, like = text.partition("=")
        if not equals:
            raise InputError(f"--new {text!r}: expected new ranks and whom they are like, such as 64-71=24-31")
        these, old = parse_ranks("--new", ranks), parse_ranks("--new", like)
        with about("--new"):
            problem = with_new_ranks(problem, these, old)  # before any go: what these are like may be gone
        came += these
        models += old
    both = sorted(set(came) & set(gone))
    if both:
        raise InputError(f"rank {both[0]} is both in --new and in --gone")
    if not gone:
        return problem, came, models
    with about("--gone"):
        return without_ranks(problem, gone), came, models


def _nics(
    topology: Topology, gone: Sequence[int], texts: Sequence[str], down: str | None, slow: Sequence[str]
) -> dict[int, float]:
    """What the NICs carry of every GPU that the change names. A GPU that is gone carries nothing for others."""
    nics: dict[int, float] = {}
    for text in slow:
        domain, equals, share = text.partition("=")
        try:
            number, part = int(domain), float(share)
        except ValueError:
            raise InputError(f"--slow-domain {text!r}: expected a domain and a share of its rate, such as 2=0.5") from None
        if not equals or not 0 <= part <= 1 or not 0 <= number < topology.n_domains:
            raise InputError(f"--slow-domain {text!r}: expected a domain of 0 to {topology.n_domains - 1} and a share of 0 to 1")
        gpus = (topology.domain == number).nonzero()[0].tolist()
        nics.update({gpu: float(topology.nic_Bps[gpu]) * part for gpu in gpus})
    with about("--nic"):
        nics.update(parse_nics("--nic", texts))
    nics.update(dict.fromkeys([] if down is None else parse_ranks("--nic-down", down), 0.0))
    return nics | silent_nics(topology, gone)


def _facts(said: ReplanReport) -> list[tuple[str, str]]:
    whole = said.n_bytes_kept + said.n_bytes_anew
    share = f" ({said.n_bytes_kept / whole:.1%})" if whole else ""
    facts = [("ranks gone", ranges_text(said.gone))] if said.gone else []
    facts += [("ranks new", ranges_text(said.new))] if said.new else []
    return [
        *facts,
        ("kept", format_bytes(said.n_bytes_kept) + share),
        ("routed anew", format_bytes(said.n_bytes_anew)),
    ]


def _nic_rows(changes: Sequence[NicChange]) -> list[list[str]]:
    alike: dict[tuple[float, float], list[int]] = {}
    for change in changes:
        alike.setdefault((change.before_Bps, change.after_Bps), []).append(change.gpu)
    return [
        [ranges_text(gpus), format_bandwidth(before), format_bandwidth(after) if after else "down"]
        for (before, after), gpus in alike.items()
    ]
