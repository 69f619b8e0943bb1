"""Two timelines of one plan side by side: how well the prediction meets the measurement."""

import msgspec
import numpy as np

from shardroute.planner.timelines import Timeline, Verified
from shardroute.topologies.errors import InputError


class Row(msgspec.Struct, frozen=True):
    """One quantity on both sides; error is first / second - 1, None where the second is 0."""

    name: str
    first_s: float
    second_s: float
    error: float | None


class Comparison(msgspec.Struct, frozen=True):
    """What `compare` found. `error` is that of the total time: how far the first (the prediction) is from the second."""

    digest: str
    n_steps: int
    first_kind: str
    first_source: str
    second_kind: str
    second_source: str
    error: float | None
    rows: list[Row]
    verified: Verified | None


def compare(first: Timeline, second: Timeline) -> Comparison:
    """Join two timelines on the plan's steps. Raises InputError when they aren't of one plan.

    Rows: total time, and the time by which a quarter, half and three quarters of the steps have ended. Single steps are not
    compared: where ranks outnumber cores, when a step runs is the operating system's choice, but the sum of work is not.
    """
    if first.digest != second.digest:
        raise InputError(
            f"the timelines are of different plans: digests {first.digest[:16]} and {second.digest[:16]}; "
            "simulate and run the same file"
        )
    if len(first.end_s) != len(second.end_s):
        raise InputError(f"the timelines have {len(first.end_s)} and {len(second.end_s)} steps, though they name the same plan")
    rows = [_row("total", first.total_s, second.total_s)]
    if len(first.end_s):
        for share, name in ((0.25, "a quarter of the steps done"), (0.5, "half of them"), (0.75, "three quarters")):
            rows.append(_row(name, float(np.quantile(first.end_s, share)), float(np.quantile(second.end_s, share))))
    return Comparison(
        first.digest, len(first.end_s), first.kind, first.source, second.kind, second.source, rows[0].error, rows,
        second.verified if second.verified is not None else first.verified,
    )  # fmt: skip


def _row(name: str, first_s: float, second_s: float) -> Row:
    return Row(name, first_s, second_s, first_s / second_s - 1 if second_s > 0 else None)
