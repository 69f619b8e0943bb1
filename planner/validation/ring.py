"""Everything published about ring attention beside its prediction, group by group: what `shardroute validate --ring` shows."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardroute.planner.shares import Told, parts
from shardroute.planner.validation.attention_rows import attention_rows, kernel_rows, n_attention_rows, own_rows, skipped_calls
from shardroute.planner.validation.goals import RING_GAINS, RING_OTHERS, RING_STEPS, Limit
from shardroute.planner.validation.rows import Summary, ValidationRow, summarise, telling
from shardroute.planner.validation.step_rows import Gain, gains, published_steps, step_rows, te_rows
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class RingReport:
    """Rows and what they come to.

    rows          steps of training and calls of attention; judged are those of kinds "step" and "attention"
    unexplained   rows that are predicted and shown, but that nothing in the model can meet
    kernels       single kernels on one GPU, which the calls' rates come from
    skipped       published rows without a prediction: how many, and why
    goals         what predictions are held to that haven't seen their row
    """

    rows: tuple[ValidationRow, ...]
    unexplained: tuple[ValidationRow, ...]
    kernels: tuple[ValidationRow, ...]
    gains: tuple[Gain, ...]
    summaries: tuple[Summary, ...]
    skipped: tuple[tuple[int, str], ...]
    goals: tuple[Limit, ...]


# Seconds that training steps, attention and gains take on a 2-core Xeon.
_WEIGHTS: Final = (2.8, 1.3, 0.8)


def ring_report(progress: Told | None = None) -> RingReport:
    """Predict every published row. Takes a few seconds; progress is told the share that is done."""

    of_steps, of_attention, of_gains = parts(progress, _WEIGHTS)
    # Two columns of the table are predicted, and the first takes nearly all of the time: its rates are fitted anew for each row.
    steps = list(telling(step_rows(), len(published_steps()), of_steps))
    calls = telling(attention_rows(), n_attention_rows(), of_attention)
    attention, kernels = [*calls, *te_rows()], tuple(kernel_rows())
    explained = [row for row in steps if row.kind == "step"]
    reasons: dict[str, int] = {}
    for _, reason in skipped_calls():
        reasons[reason] = reasons.get(reason, 0) + 1
    unseen = [row for row in attention if not row.fitted]
    found_gains = tuple(gains())
    of_gains(1.0)
    summaries = [
        summarise("training steps, NVSHMEM", [row for row in explained if row.fitted]),
        summarise("training steps, NCCL, tp 1", [row for row in explained if not row.fitted]),
        summarise("attention over several GPUs, not fitted", unseen),
        *(summarise(f"  {title}", rows) for title, rows in _by_publication(unseen)),
        summarise("attention over several GPUs, fitted", [row for row in attention if row.fitted]),
        summarise("kernels on one GPU, from their charts", kernels),
    ]
    return RingReport(
        rows=(*explained, *attention),
        unexplained=tuple(row for row in steps if row.kind == "unexplained"),
        kernels=kernels,
        gains=found_gains,
        summaries=tuple(summaries),
        skipped=tuple((n, reason) for reason, n in sorted(reasons.items(), key=lambda item: -item[1])),
        goals=tuple(_goals(explained, unseen, found_gains)),
    )


def _goals(steps: Sequence[ValidationRow], attention: Sequence[ValidationRow], found: Sequence[Gain]) -> list[Limit]:
    left_out = [row.left_out_error for row in steps if row.left_out_error is not None]
    others = [abs(row.error) for row in (*(row for row in steps if not row.fitted), *attention)]
    explained = [abs(gain.predicted - gain.published) for gain in found if gain.explained]
    rms = math.sqrt(math.fsum(error**2 for error in left_out) / len(left_out))
    return [
        Limit("NVSHMEM steps, each left out", len(left_out), "root mean square", rms, RING_STEPS),
        Limit("gains at tp 1", len(explained), "worst", max(explained), RING_GAINS),
        Limit("other rows, not fitted", len(others), "median", statistics.median(others), RING_OTHERS[0]),
        Limit("other rows, not fitted", len(others), "worst", max(others), RING_OTHERS[1]),
    ]


def own_report(path: str) -> RingReport:
    """The report of calls in a table of one's own, with the columns of tables/ring_attention.csv; nothing is fitted to them."""
    rows = list(own_rows(path))
    if not rows:
        raise InputError(f"{path}: no rows to predict")
    summaries = [summarise("your rows", rows), *(summarise(f"  {title}", own) for title, own in _by_publication(rows))]
    return RingReport(tuple(rows), (), (), (), tuple(summaries), (), ())


def _by_publication(rows: list[ValidationRow]) -> list[tuple[str, list[ValidationRow]]]:
    found: dict[str, list[ValidationRow]] = {}
    for row in rows:
        found.setdefault(row.series.split(":")[0], []).append(row)
    return list(found.items())
