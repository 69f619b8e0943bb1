"""`shardroute choose`: what should carry a collective, or each one of an XLA program or a plan, and which rule or margin says
so."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from shardroute.planner.choice import (
    RULE_SETS,
    Assigned,
    Choice,
    HloModule,
    Operation,
    Setting,
    Verdict,
    Version,
    read_hlo,
    rule_set,
)
from shardroute.planner.choice.plan_steps import PlanSteps, plan_steps
from shardroute.planner.cli.choosing import asked_for, choices_for, libraries_of
from shardroute.planner.cli.files import read_plan
from shardroute.planner.cli.options import about, machine_of
from shardroute.planner.cli.output import JsonFlag, print_facts, print_json, print_table, progress, stdout
from shardroute.planner.cli.plan import CalibrationOption, OneMachineOption, calibration_for
from shardroute.planner.cli.program import app
from shardroute.planner.file_kinds import HLO, reading
from shardroute.planner.plans import Plan
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import build_topology
from shardroute.topologies.units import format_bytes, format_seconds

_MOST_NAMES = 3  # of collectives behind flags; --json has all


class OptionRow(msgspec.Struct, frozen=True):
    """One way; the field names are those of `choose --json`, and stay. predicted_s and sms are null where it isn't possible,
    and sms where nobody knows how many NCCL takes.
    """

    backend: str
    possible: bool
    predicted_s: float | None
    sms: int | None
    reason: str


class RuleRow(msgspec.Struct, frozen=True):
    """What one release of XLA takes. flags: XLA_FLAGS that make it run `flags_for`, null where none do: what was chosen, or a way
    that is predicted to be as fast.
    """

    rules: str
    backend: str
    reason: str
    hazards: list[str]
    flags: list[str] | None
    flags_for: str | None


class ChoiceRow(msgspec.Struct, frozen=True):
    """The choice for one collective."""

    name: str
    op: str
    dtype: str
    n_bytes: int
    group_size: int
    n_groups: int
    backend: str
    predicted_s: float
    decided_by: str
    margin: float | None
    options: list[OptionRow]
    rules: list[RuleRow]


class ChosenModule(msgspec.Struct, frozen=True):
    """What carries each collective of an HLO module."""

    module: str
    n_devices: int
    calibration: str
    collectives: list[ChoiceRow]


def choice_row(choice: Choice) -> ChoiceRow:
    """A choice as a row for programs."""
    asked = choice.operation
    assert choice.chosen.seconds is not None
    return ChoiceRow(
        name=asked.name, op=asked.op, dtype=asked.dtype, n_bytes=asked.n_bytes, group_size=len(asked.largest),
        n_groups=len(asked.groups), backend=choice.chosen.way, predicted_s=choice.chosen.seconds, decided_by=choice.decided_by,
        margin=choice.margin,
        options=[OptionRow(o.way, o.possible, o.seconds, o.n_sms if o.possible else None, o.reason) for o in choice.options],
        rules=[_rule_row(verdict) for verdict in choice.verdicts],
    )  # fmt: skip


@app.command("choose", rich_help_panel="Plan and predict")
def choose_command(
    machine: OneMachineOption,
    op: Annotated[Collective | None, typer.Option("--op", help="The collective.")] = None,
    n_bytes: Annotated[
        str | None,
        typer.Option("--bytes", help="32MiB: the whole tensor of one rank, as nccl-tests counts; what a permute sends."),
    ] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks of the group.", min=2)] = None,
    pairs: Annotated[
        str | None,
        typer.Option("--pairs", help="Sources and targets of a permute, 0>1,1>0; one pair is a copy. Default: a ring."),
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", help="Devices of the whole program. Default: the ranks of the group.", min=2)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bf16, f32, s8, f8e4m3fn, ... as XLA writes it. Default: bf16.")
    ] = None,
    hlo: Annotated[
        str | None, typer.Option("--hlo", help="An XLA text dump (--xla_dump_to): chooses for every collective in it.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help="A plan file: chooses for every kind of step that moves bytes in it.")
    ] = None,
    devices_per_process: Annotated[int, typer.Option("--devices-per-process", help="GPUs that one process drives.", min=1)] = 1,
    rules: Annotated[
        str | None,
        typer.Option("--rules", help="XLA calls, by the rules of this JAX release: xla-0.8.1. Default: no rules but NCCL's."),
    ] = None,
    library_version: Annotated[
        list[str] | None, typer.Option("--library-version", help="nccl=2.29.7 or nvshmem=3.5.1; may be given twice.")
    ] = None,
    calibration: CalibrationOption = None,
    json: JsonFlag = False,
) -> None:
    """Choose what carries a collective: rules of what is possible and correct first, then predicted time.

    shardroute choose --op collective-permute --bytes 32MiB --ranks 16 --machine gb200-nvl72 --rules xla-0.8.1
    """
    found, count = machine_of(machine)
    if found.kind is not MachineKind.GPU:
        raise InputError(f"--machine {found.name} has no GPUs; there is nothing to choose between")
    with about("--rules"):
        named = None if rules is None else rule_set(rules)
    setting = Setting(
        machine=found, calibration=calibration_for(found, calibration), libraries=libraries_of(library_version or []), rules=named
    )
    sets = RULE_SETS if named is None else (named,)
    asked_too = {"--op": op, "--bytes": n_bytes, "--ranks": ranks, "--pairs": pairs, "--devices": devices, "--dtype": dtype}
    for name, file in (("--hlo", hlo), ("--plan", plan)):
        if file is not None and (given := [other for other, value in asked_too.items() if value is not None]):
            raise InputError(f"{name} and {given[0]} don't go together: the file says which collectives there are")
    if hlo is not None and plan is not None:
        raise InputError("--hlo and --plan don't go together: each says which collectives there are")
    if plan is not None:
        with about("--plan"):
            loaded = read_plan(plan)
            steps = plan_steps(loaded, devices_per_process)
        with about("--machine"):
            build_topology(found, count, loaded.problem.n_ranks)
        choices = choices_for(steps.operations, setting, sets, calibration)
        _print_steps(plan, loaded, steps, choices, setting, json)
        return
    if hlo is not None:
        with about("--hlo"), reading(hlo, HLO), progress(f"reading {hlo}") as done:
            module = read_hlo(hlo, devices_per_process, done)
        with about("--machine"):
            build_topology(found, count, max((o.n_devices for o in module.operations), default=1))
        choices = choices_for(module.operations, setting, sets, calibration)
        _print_module(module, choices, setting, json)
        return
    asked = asked_for(op, n_bytes, ranks, pairs, "bf16" if dtype is None else dtype, devices, devices_per_process)
    with about("--machine"):
        build_topology(found, count, asked.n_devices)  # refuses a count of the machine that has too few
    (choice,) = choices_for([asked], setting, sets, calibration)
    if json:
        print_json({**msgspec.to_builtins(choice_row(choice)), "calibration": _costs(setting)})
        return
    _print_choice(choice, setting)


def _rule_row(verdict: Verdict) -> RuleRow:
    flags = None if verdict.wanted_flags is None else list(verdict.wanted_flags)
    return RuleRow(verdict.rules.name, verdict.assigned, verdict.reason, list(verdict.hazards), flags, verdict.wanted_way)


def _print_choice(choice: Choice, setting: Setting) -> None:
    asked, row = choice.operation, choice_row(choice)
    print_facts(
        f"{asked.op} of {format_bytes(asked.n_bytes)} ({asked.dtype}) over {len(asked.largest)} GPUs of {setting.machine.name}",
        [
            ("choice", f"{row.backend}: {format_seconds(row.predicted_s)}"),
            ("decided by", choice.decided_by),
            ("costs from", _costs(setting)),
        ],
    )
    print_table(
        ["way", "predicted", "SMs", "how, or why not"],
        [
            [o.backend, "-" if o.predicted_s is None else format_seconds(o.predicted_s), _sms_text(o), o.reason]
            for o in row.options
        ],
        right=["predicted", "SMs"],
    )
    print_table(
        ["XLA's rules", "take", "because"],
        [[r.rules, r.backend, _rule_text(r)] for r in row.rules],
        title="\nWhat XLA takes if NVSHMEM is enabled, which it isn't by default",
    )
    _print_flags([choice])
    _print_hazards([choice])


def _sms_text(option: OptionRow) -> str:
    if not option.possible:
        return "-"
    return "unknown" if option.sms is None else str(option.sms)


def _costs(setting: Setting) -> str:
    return f"{setting.calibration.library} on {setting.calibration.machine}"


def _rule_text(row: RuleRow) -> str:
    return row.reason.removeprefix(f"{row.rules}: ")


def _flags_text(row: RuleRow, chosen: str) -> str:
    """The flags; for a way that is only as fast as the chosen one, with its name."""
    if row.flags is None:
        return "none known"
    text = " ".join(row.flags) or "none needed"
    return text if row.flags_for == chosen else f"{text} (for {row.flags_for}, as fast)"


def _print_flags(choices: list[Choice]) -> None:
    """A line for each release, or for each of its flags where collectives want different ones; never folded, to be copied."""
    rows = [choice_row(choice) for choice in choices]
    lines: list[str] = []
    differ = False
    for i in range(len(rows[0].rules)):
        wanted: dict[str, dict[str, None]] = {}
        for row in rows:
            wanted.setdefault(_flags_text(row.rules[i], row.backend), {})[row.name or row.op] = None
        differ |= len(wanted) > 1
        for text, names in wanted.items():
            whose = f" for {_listed(list(names))}" if len(wanted) > 1 else ""
            lines.append(f"{rows[0].rules[i].rules}{whose}: {text}")
    title = "XLA_FLAGS for the choice" + ("" if len(rows) == 1 else "s")
    title += "; flags hold for a whole program, so of several lines of a release take one" if differ else ""
    stdout().print(f"\n{title}", style="bold")
    for line in lines:
        stdout().print(line, markup=False, highlight=False, soft_wrap="--xla" in line)


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _print_module(module: HloModule, choices: list[Choice], setting: Setting, json: bool) -> None:
    rows = [choice_row(choice) for choice in choices]
    if json:
        print_json(ChosenModule(module.name, module.n_devices, _costs(setting), rows))
        return
    print_facts(
        module.name,
        [
            ("devices", str(module.n_devices)),
            ("collectives", str(len(rows))),
            ("costs from", _costs(setting)),
        ],
    )
    if not rows:
        return
    print_table(
        ["collective", "bytes", "groups", "choice", "predicted", "XLA takes NVSHMEM"],
        [
            [
                row.name or row.op, format_bytes(row.n_bytes), f"{row.n_groups} x {row.group_size}", row.backend,
                format_seconds(row.predicted_s), _releases(row.rules),
            ]
            for row in rows
        ],
        right=["bytes", "groups", "choice", "predicted"],
        title="\nCollectives in order; last, the releases of JAX whose rules take NVSHMEM when it is enabled",
    )  # fmt: skip
    print_table(
        ["collective", "op", "decided by"],
        list(dict.fromkeys((_named(choice.operation), str(choice.operation.op), choice.decided_by) for choice in choices)),
        title="\nWhy",
    )
    _print_flags(choices)
    _print_hazards(choices)


def _print_steps(path: str, plan: Plan, steps: PlanSteps, choices: list[Choice], setting: Setting, json: bool) -> None:
    rows = [choice_row(choice) for choice in choices]
    if json:
        kinds = [{"count": count, **msgspec.to_builtins(row)} for count, row in zip(steps.counts, rows, strict=True)]
        print_json({"digest": plan.digest, "n_ranks": plan.problem.n_ranks, "calibration": _costs(setting), "steps": kinds})
        return
    print_facts(path, [("ranks", str(plan.problem.n_ranks)), ("strategy", plan.strategy), ("costs from", _costs(setting))])
    if not rows:
        return
    print_table(
        ["times", "op", "bytes", "ranks", "choice", "predicted", "XLA takes NVSHMEM"],
        _alike(steps.counts, rows),
        right=["times", "op", "bytes", "ranks", "choice", "predicted"],
        title="\nSteps that move bytes, copies that go together as permutes, in one row where only their ranks differ; last, "
        "releases of JAX whose rules take NVSHMEM",
    )
    print_table(
        ["step", "decided by"],
        list(dict.fromkeys((_named(choice.operation), choice.decided_by) for choice in choices)),
        title="\nWhy",
    )
    _print_flags(choices)
    _print_hazards(choices)


def _alike(counts: Sequence[int], rows: list[ChoiceRow]) -> list[list[str]]:
    """The steps as rows of a table, in the order in which each kind first comes. Those that move as much between groups of one
    size, by the same way in the same time, are one kind, whichever ranks and however many groups they have.
    """
    kinds: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for count, row in zip(counts, rows, strict=True):
        size, seconds = str(row.group_size), format_seconds(row.predicted_s)
        kind = (row.op, row.dtype, format_bytes(row.n_bytes), size, row.backend, seconds, _releases(row.rules))
        kinds.setdefault(kind, []).append((count, row.n_groups))
    found = []
    for (op, _, n_bytes, size, backend, seconds, releases), them in kinds.items():
        fewest, most = min(n for _, n in them), max(n for _, n in them)
        groups = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        found.append([f"{sum(count for count, _ in them):,}", op, n_bytes, f"{groups} x {size}", backend, seconds, releases])
    return found


def _releases(rows: list[RuleRow]) -> str:
    return ", ".join(row.rules.removeprefix("xla-") for row in rows if row.backend == Assigned.NVSHMEM) or "never"


def _named(asked: Operation) -> str:
    return asked.name or asked.op


def _print_hazards(choices: list[Choice]) -> None:
    found: dict[tuple[str, str], set[Version]] = {}
    for choice in choices:
        for verdict in choice.verdicts:
            for hazard in verdict.hazards:
                found.setdefault((_named(choice.operation), hazard), set()).add(verdict.rules.release)
    if found:
        rows = [[name, ", ".join(map(str, sorted(releases))), hazard] for (name, hazard), releases in found.items()]
        print_table(["collective", "JAX", "hazard on NVSHMEM"], rows, title="\nWarnings")
