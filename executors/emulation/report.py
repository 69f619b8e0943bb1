"""How `shardroute validate --emulated` shows what was predicted beside what was measured."""

from collections.abc import Sequence
from contextlib import nullcontext

import msgspec
import typer

from shardroute.executors.emulation.cases import Case, cases_named
from shardroute.executors.emulation.namespaces import Namespaces
from shardroute.executors.emulation.validate import (
    MEDIAN_GOAL,
    TIE,
    WORST_GOAL,
    Pair,
    Validation,
    cluster,
    validate_emulated,
    validating_us,
)
from shardroute.executors.run import DEFAULT_TIMEOUT_S, check_limits
from shardroute.planner.cli.options import about
from shardroute.planner.cli.output import print_facts, print_json, print_table, progress, stderr
from shardroute.topologies.calibrations import calibration_to_dict
from shardroute.topologies.units import format_seconds


class RowOfRuns(msgspec.Struct, frozen=True):
    """One plan; the field names are those of `validate --emulated --json`, and stay. Errors are shares: 0.1 is 10 % too long."""

    case: str
    strategy: str
    steps: int
    bytes: int
    predicted_s: float
    measured_s: float
    trials_s: tuple[float, ...]
    error: float


def print_emulated(*, cases: Sequence[str], namespaces: bool, repeats: int, json: bool) -> None:
    """Run the plans of the cases of these names (none for all) on an emulated cluster, and print them as a table or as JSON; exit
    1 where goals are missed. Raises InputError for a name that no case has, and for repeats that make no sense.
    """
    with about("--repeats"):
        check_limits(DEFAULT_TIMEOUT_S, repeats)
    chosen, topology = cases_named(cases), cluster()
    foreseen_us = validating_us(chosen, repeats)
    with progress("emulating", foreseen_us) as done, Namespaces(topology) if namespaces else nullcontext() as links:
        found = validate_emulated(topology, links=links, cases=chosen, repeats=repeats, progress=done)
    if json:
        print_json(_as_json(found))
    else:
        _print(found, topology.title, chosen)
    if not found.is_within_goals:
        stderr().print("out of tolerance: see the goals above" if not json else "out of tolerance", markup=False)
        raise typer.Exit(1)


def _print(found: Validation, title: str, cases: Sequence[Case]) -> None:
    print_table(
        ["case", "strategy", "predicted", "measured", "trials", "error"],
        [
            [
                row.case, row.strategy, format_seconds(row.predicted_s), format_seconds(row.measured_s),
                f"{format_seconds(min(row.trials_s))} to {format_seconds(max(row.trials_s))}", f"{row.error:+.1%}",
            ]
            for row in found.rows
        ],
        right=["predicted", "measured", "error"],
        title=f"{title}: predicted and measured",
    )  # fmt: skip
    print_facts("\nCases", [(case.name, case.what) for case in cases])
    ordered, ahead = found.ordered, found.balanced_ahead
    ties = [pair for pair in found.pairs if pair.is_tie]
    facts = [
        (
            "errors",
            f"median {found.median_error:.1%} ({MEDIAN_GOAL:.0%} allowed), worst {found.worst_error:.1%} ({WORST_GOAL:.0%})",
        ),
        ("order", f"{_n_holding(ordered)} of {len(ordered)} pairs of strategies are measured in the order predicted"),
        *(("wrong order", _text(pair)) for pair in ordered if not pair.holds),
        ("ties", f"{len(ties)} more pairs are predicted within {TIE:.0%} of each other and not counted"),
        ("balanced", f"greedy or optimal beats direct or domain-relay in {_n_holding(ahead)} of {len(ahead)} pairs predicted so"),
        ("costs from", found.calibration.figures[-1].source),
        ("load average", f"{found.load[0]:.1f} before, {found.load[1]:.1f} after"),
    ]
    print_facts("\nTogether", facts)


def _n_holding(pairs: Sequence[Pair]) -> int:
    return sum(pair.holds for pair in pairs)


def _text(pair: Pair) -> str:
    first, second = pair.first, pair.second
    return (
        f"{pair.case}: {first.strategy} before {second.strategy} predicted ({format_seconds(first.predicted_s)}, "
        f"{format_seconds(second.predicted_s)}), measured {format_seconds(first.measured_s)}, {format_seconds(second.measured_s)}"
    )


def _as_json(found: Validation) -> dict[str, object]:
    return {
        "rows": [
            RowOfRuns(r.case, r.strategy, r.n_steps, r.n_bytes, r.predicted_s, r.measured_s, r.trials_s, r.error)
            for r in found.rows
        ],
        "median_error": found.median_error,
        "worst_error": found.worst_error,
        "pairs": len(found.ordered),
        "pairs_in_order": _n_holding(found.ordered),
        "wrong_order": [_text(pair) for pair in found.ordered if not pair.holds],
        "ties": len(found.pairs) - len(found.ordered),
        "balanced_ahead": len(found.balanced_ahead),
        "balanced_ahead_measured": _n_holding(found.balanced_ahead),
        "within_goals": found.is_within_goals,
        "load_average": list(found.load),
        "calibration": calibration_to_dict(found.calibration),
    }
