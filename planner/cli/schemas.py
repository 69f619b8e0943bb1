"""`shardroute schema`: the JSON Schema of what each command prints with --json.

Rule: a document is the type that its command prints. What is put together of several, and what commands that run plans print, is
written down here once more; a test holds it all against what is printed. Fields stay; new ones may come, so a reader should leave
those that it doesn't know.
"""

from collections.abc import Mapping
from typing import Annotated, Final, get_type_hints

import msgspec
import typer

from shardroute.planner.cli.bound import BoundReport
from shardroute.planner.cli.catalogues import ModelEntry, ShownModel
from shardroute.planner.cli.choose import ChoiceRow, ChosenModule
from shardroute.planner.cli.import_layouts import ImportedLayouts
from shardroute.planner.cli.inspect import CheckedLayouts, CheckedPlan, LaneTotal, ShownPart
from shardroute.planner.cli.layout import RankLayout, RankTotal
from shardroute.planner.cli.output import print_facts, print_json, print_table
from shardroute.planner.cli.predict import Simulated
from shardroute.planner.cli.program import app
from shardroute.planner.cli.refits import Strategies, StrategyEntry
from shardroute.planner.cli.replan import ReplanReport
from shardroute.planner.cli.ring import StepRow
from shardroute.planner.cli.ring_report import ValidatedRing
from shardroute.planner.cli.validation_report import Validated
from shardroute.planner.compare import Comparison
from shardroute.planner.exchange.layout_files import LayoutDocument
from shardroute.planner.reporting.differences import PlanDifference, TimelineDifference
from shardroute.planner.reporting.explanations import Explanation
from shardroute.planner.reports import PlanReport
from shardroute.planner.ring.overlaps import Overlap
from shardroute.planner.ring.reports import RingReport
from shardroute.planner.routing.bounds import Cut
from shardroute.planner.studies import LoadStudy, RefitStudy, RingStudy, SplitStudy
from shardroute.planner.timelines import Verified
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.importers import Rail
from shardroute.topologies.machines import Machine


def _with(name: str, base: type, **more: object) -> type[msgspec.Struct]:
    """A document that has the fields of `base` and these."""
    fields: dict[str, object] = {field: kind for field, kind in get_type_hints(base).items() if field[0] != "_"}
    return msgspec.defstruct(name, [(field, kind) for field, kind in (fields | more).items()], kw_only=True)


class ImportedMachines(msgspec.Struct):
    """Machines of a cluster; `machine` is the text for --machine."""

    machine: str
    machines: list[_with("ImportedMachine", Machine, n_units=int, hosts=list[str])]  # type: ignore[valid-type]
    rails: list[Rail]
    notes: list[str]


class ChosenSteps(msgspec.Struct):
    """What carries each kind of a plan's collectives; `count` is how many are of the kind."""

    digest: str
    n_ranks: int
    calibration: str
    steps: list[_with("CountedChoice", ChoiceRow, count=int)]  # type: ignore[valid-type]


class Ran(msgspec.Struct):
    """A run of a plan; `overlap` is there for plans that compute attention, `corrupted` with --verify."""

    measured_s: float
    verified: Verified
    trials_s: list[float]
    n_bytes_copied: int
    peak_staging_bytes: int
    memory_bytes: int
    packing_bytes: int
    digest: str
    source: str
    mismatches: list[str]
    corrupted: list[str] | msgspec.UnsetType = msgspec.UNSET
    overlap: Overlap | msgspec.UnsetType = msgspec.UNSET


class Demonstrated(msgspec.Struct):
    """What `demo` planned, and what it ran."""

    model: str
    n_parameters: int
    plans: list[PlanReport]
    n_deliveries: int
    scale: int
    n_steps: int
    measured_s: float
    verified: Verified
    comparison: Comparison


class EmulatedRow(msgspec.Struct):
    """A plan that ran on the emulated cluster; the error is a share."""

    case: str
    strategy: str
    steps: int
    bytes: int
    predicted_s: float
    measured_s: float
    trials_s: list[float]
    error: float


class ValidatedHere(msgspec.Struct):
    """Predictions beside runs on an emulated cluster, and how many pairs of plans they put in order."""

    rows: list[EmulatedRow]
    median_error: float
    worst_error: float
    pairs: int
    pairs_in_order: int
    wrong_order: list[str]
    ties: int
    balanced_ahead: int
    balanced_ahead_measured: int
    within_goals: bool
    load_average: list[float]
    calibration: Calibration


_LAYOUTS: Final[Mapping[str, object]] = {"layouts": dict[str, str]}
DOCUMENTS: Final[Mapping[str, tuple[str, object]]] = {
    "bound": ("bound --json", BoundReport),
    "calibrate": ("calibrate --json", Calibration),
    "check": ("check PLAN --json", CheckedPlan),
    "check-layouts": ("check --from-json A --to-json B --json", CheckedLayouts),
    "choose": ("choose --json, of one collective", _with("Chosen", ChoiceRow, calibration=str)),
    "choose-module": ("choose --json, of an HLO module", ChosenModule),
    "choose-steps": ("choose --json, of a plan", ChosenSteps),
    "compare": ("compare --json", Comparison),
    "demo": ("demo --json", Demonstrated),
    "diff": ("diff PLAN PLAN --json", PlanDifference),
    "diff-timelines": ("diff TIMELINE TIMELINE --json", TimelineDifference),
    "emulate": ("emulate PLAN --json", _with("Emulated", Comparison, trials_s=list[float])),
    "explain": ("explain --json", Explanation),
    "import": ("import --json", ImportedLayouts),
    "layout": ("layout --json", list[RankTotal]),
    "layout-file": ("a layout file, which --from-json takes", LayoutDocument),
    "layout-rank": ("layout --rank N --json", RankLayout),
    "machines": ("machines --json", list[Machine]),
    "machines-import": ("machines import --json", ImportedMachines),
    "machines-show": ("machines show --json", _with("ShownMachine", Machine, calibration=Calibration | None)),
    "models": ("models --json", list[ModelEntry]),
    "models-show": ("models show --json", ShownModel),
    "plan": ("plan --json", _with("Planned", PlanReport, **_LAYOUTS, notes=dict[str, str])),
    "plan-ring": ("plan-ring --json", _with("PlannedRing", RingReport, calibration=str)),
    "replan": ("replan --json", _with("Replanned", PlanReport, **get_type_hints(ReplanReport))),
    "ring": (
        "ring --json",
        _with(
            "Ring", StepRow, model=str, machine=str, n_gpus=int, seq=int, batch_per_gpu=float, recompute=str, overlapped=bool,
            why=str, rates=str, calibration=str, layouts=list[StepRow],
        ),
    ),
    "run": ("run --json", Ran),
    "show": ("show PLAN --json", _with("Shown", PlanReport, **_LAYOUTS, bounds=list[Cut], lanes=list[LaneTotal])),
    "show-part": ("show PLAN --rank N --json", ShownPart),
    "show-ring": ("show PLAN --json, of attention", _with("ShownRing", RingReport, lanes=list[LaneTotal])),
    "simulate": ("simulate --json", Simulated),
    "strategies": ("strategies --json", Strategies),
    "strategies-list": ("strategies --json, with nothing to move", list[StrategyEntry]),
    "study-load": ("study gather-vs-reshard --json", LoadStudy),
    "study-refit": ("study refit-vs-nic --json, and the other refit-vs- studies", RefitStudy),
    "study-ring": ("study ring-vs-seq --json", RingStudy),
    "study-split": ("study split --json", SplitStudy),
    "validate": ("validate --json", Validated),
    "validate-emulated": ("validate --emulated --json", ValidatedHere),
    "validate-ring": ("validate --ring --json", ValidatedRing),
}  # fmt: skip


def schema_of(name: str) -> dict[str, object]:
    """The JSON Schema (draft 2020-12) of a document. Raises InputError, with the names that there are, for another."""
    if name not in DOCUMENTS:
        raise InputError(f"unknown document {name!r}; known are {', '.join(DOCUMENTS)}")
    found: dict[str, object] = msgspec.json.schema(DOCUMENTS[name][1])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": DOCUMENTS[name][0], **found}


@app.command("schema", rich_help_panel="Catalogues")
def schema_command(
    name: Annotated[
        str | None, typer.Argument(help="A document's name; without one, all are listed.", autocompletion=lambda: list(DOCUMENTS))
    ] = None,
) -> None:
    """Print the JSON Schema of what a command prints with --json; without a name, list the documents."""
    if name is not None:
        print_json(schema_of(name))
        return
    print_table(["document", "printed by"], [[key, what] for key, (what, _) in DOCUMENTS.items()])
    print_facts("\n`shardroute schema NAME` prints one", [])
