"""What the studies' commands share: options, machines for each row, and how a study is printed, written as JSON and as a page."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import typer

from shardroute.planner.cli.cautions import say_costs
from shardroute.planner.cli.options import check_known, check_output, machine_of
from shardroute.planner.cli.output import print_facts, print_json, print_table, progress, say
from shardroute.planner.cli.plan import calibration_for, costs_file
from shardroute.planner.cli.study_files import SUFFIXES, Study, is_page, save_table
from shardroute.planner.reporting.charts import check_charts
from shardroute.planner.reporting.pages import page
from shardroute.planner.reporting.sections import Section
from shardroute.planner.reports import calibration_warning, costs_place
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import STRATEGIES
from shardroute.planner.studies import Case, RefitRow, study_rows
from shardroute.planner.studies.refits import AUTO
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import write_file
from shardroute.topologies.machines import Machine, MachineKind
from shardroute.topologies.topologies import Topology, build_topology

# Ours and the usual baseline; both are planned in seconds where `optimal` and `m2n-pack` can take minutes.
_STRATEGIES: Final = ("greedy", "gather-broadcast")

# Cells that say what goes without saying: nothing, it fits, no GPU is idle.
_EXPECTED: Final = ("", "-", "yes", "0")

# Tables of a calibration that refits by NCCL rest on.
_REFIT_COSTS: Final = ("nvlink", "nic", "step", "p2p", "memory")

PageOption = Annotated[
    str | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="Write a page with plots and tables to FILE.html, or rows to FILE.csv, FILE.json."
    ),
]
StrategiesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy",
        "-s",
        help=f"Plan by this one; repeat it for several. Default: {' and '.join(_STRATEGIES)}.",
        autocompletion=lambda: [*STRATEGIES, AUTO],
    ),
]

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Setting:
    """What all rows of a study have in common; `most_gpus` is how many GPUs there are, None for as many as it takes, and
    `costs_file` where the costs were read from if they don't ship.
    """

    machine: Machine
    most_gpus: int | None
    costs: Calibration
    options: Options
    strategies: tuple[str, ...]
    costs_file: str = ""

    def topology(self, n_ranks: int, machine: Machine | None = None) -> Topology:
        """As much of the machine, or of a changed one, as the ranks need. Raises InputError beyond what there is."""
        if self.most_gpus is not None and n_ranks > self.most_gpus:
            raise InputError(f"the layouts use {n_ranks:,} GPUs, and --machine has {self.most_gpus:,}; leave its count out")
        return build_topology(self.machine if machine is None else machine, None, n_ranks)

    @property
    def caution(self) -> str | None:
        """What must be said aloud of the costs."""
        return calibration_warning(self.machine, self.costs)

    @property
    def calibration(self) -> str:
        """Where the costs come from."""
        return f"{self.costs.library} on {self.costs.machine}"

    @property
    def assumed(self) -> list[str]:
        """Notes that hold for every predicted refit."""
        return [
            *self.costs_notes(_REFIT_COSTS),
            "GPUs are numbered through, training first, so an NVLink domain may hold both sides. The bound is at nominal rates. "
            "Time of the host, quantising and loading of weights are left out.",
        ]

    def costs_notes(self, tables: Sequence[str]) -> list[str]:
        """Where the costs come from, and which in these tables of the calibration nobody has measured."""
        if self.caution is not None:
            return [self.caution]
        keys = [f.key for f in self.costs.figures if f.key.partition(".")[0] in tables and f.source.startswith("assumption")]
        assumed = f" Assumed of them, not measured: {', '.join(keys)}." if keys else ""
        return [f"Costs are those of {self.calibration}{costs_place(self.costs, self.costs_file)}.{assumed}"]


def setting(text: str, calibration: str | None, strategies: Sequence[str] | None = None) -> Setting:
    """The setting of `--machine`, `--calibration` and `--strategy`. Raises InputError for machines without GPUs."""
    if " + " in text:
        raise InputError(f"--machine {text!r}: a study varies one kind of machine; name one, such as dgx-h100")
    machine, n_units = machine_of(text)
    if machine.kind is not MachineKind.GPU:
        raise InputError(f"--machine {machine.name} has no GPUs; studies are of GPU machines, such as dgx-h100")
    costs = calibration_for(machine, calibration)
    options = Options(calibration=None if calibration is None else costs)
    most = None if n_units is None else n_units * machine.gpus_per_unit
    for name in strategies or ():
        check_known("--strategy", name, [*STRATEGIES, AUTO])
    names = _STRATEGIES if strategies is None else tuple(dict.fromkeys(strategies))
    return Setting(machine, most, costs, options, names, costs_file(calibration))


def rows_of(found: Setting, cases: Sequence[Case]) -> list[RefitRow]:
    """The cases planned by each strategy and predicted, showing progress on a terminal."""
    with progress("planning and predicting") as done:
        return study_rows(cases, found.strategies, found.costs, found.options, done)


def listed(option: str, text: str, parse: Callable[[str], _Item], example: str) -> list[_Item]:
    """The items of a list with commas, each once, in order. Raises InputError for none, and for one that `parse` refuses."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise InputError(f"{option} {text!r}: expected a list such as {option} {example}")
    found: dict[_Item, None] = {}
    for item in items:
        try:
            found[parse(item)] = None
        except ValueError as error:
            why = f": {error}" if isinstance(error, InputError) else ""
            raise InputError(f"{option} {text!r}: {item!r} isn't an item of it, such as {option} {example}{why}") from None
    return list(found)


# More GPUs than anybody has joined.
MAX_COUNT: Final = 2**20


def counts(option: str, text: str, example: str, most: int = MAX_COUNT) -> list[int]:
    """Whole numbers from 1 to `most`."""

    def parse(item: str) -> int:
        if not 1 <= int(item) <= most:
            raise InputError(f"expected 1 to {most:,}")
        return int(item)

    return listed(option, text, parse, example)


def check_page(output: str | None) -> None:
    """Raise InputError, before anything takes time, where the page, or the table, couldn't be made or written."""
    check_output(output, "a study", suffixes=SUFFIXES)
    if output is not None and is_page(output):
        check_charts()


def show(
    study: Study,
    sections: Sequence[Section],
    facts: Sequence[tuple[str, str]],
    shown: Sequence[str],
    reasons: Sequence[tuple[str, str]],
    *,
    found: Setting | None,
    json: bool,
    output: str | None,
    n_printed: int = 1,
) -> None:
    """Print a study as JSON, or as the tables of its first sections with the columns `shown`, and write its file.

    `facts` are what it is of; `reasons` says for each row without a time why it has none.
    """
    if found is not None:
        say_costs(found.machine, found.costs)
    if output is not None and not is_page(output):
        save_table(study, output)
    elif output is not None:
        n_drawn = 0
        with progress("drawing") as done:

            def drawn() -> None:
                nonlocal n_drawn
                n_drawn += 1
                done(n_drawn / len(sections))

            text = page(f"shardroute study {study.study}", sections, [], drawn)
        write_file(output, text.encode(), "the page")
    if json:
        print_json(study)
    else:
        print_facts(sections[0].title, facts)
        for section in sections[:n_printed]:
            _print_section(section, shown, first=section is sections[0])
        if reasons:
            print_facts("\nWithout a time", _grouped(reasons))
        print_facts("", [("-", note) for note in study.notes])
    if output is not None:
        say(f"page written to {output}; open it in a browser" if is_page(output) else f"study written to {output}")


def _grouped(reasons: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The reasons, each once, with the first row that it is of and how many more."""
    rows: dict[str, list[str]] = {}
    for name, why in reasons:
        rows.setdefault(why, []).append(name)
    return [(names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""), why) for why, names in rows.items()]


def _print_section(section: Section, shown: Sequence[str], *, first: bool) -> None:
    """The section's table without columns in which each row says the expected."""
    assert section.table is not None
    columns, rows = section.table.columns, section.table.rows
    at = [i for i, name in enumerate(columns) if i == 0 or name in shown]
    at = [i for i in at if i == 0 or any(row[i].text not in _EXPECTED for row in rows)]
    print_table(
        [columns[i] for i in at],
        [[row[i].text for i in at] for row in rows],
        right=[columns[i] for i in at if i and any(row[i].value is not None for row in rows)],
        title="" if first else f"\n{section.title}",
    )
