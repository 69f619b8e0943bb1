"""Everything published about ring attention beside its prediction, group by group: what `shardroute validate --ring` shows."""

from dataclasses import dataclass

from shardroute.planner.validation.attention_rows import attention_rows, kernel_rows, own_rows, skipped_calls
from shardroute.planner.validation.rows import Summary, ValidationRow, summarise
from shardroute.planner.validation.step_rows import Gain, gains, step_rows, te_rows
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class RingReport:
    """Rows and what they come to.

    rows          steps of training and calls of attention; judged are those of kinds "step" and "attention"
    unexplained   rows that are predicted and shown, but that nothing in the model can meet
    kernels       single kernels on one GPU, which the calls' rates come from
    skipped       published rows without a prediction: how many, and why
    """

    rows: tuple[ValidationRow, ...]
    unexplained: tuple[ValidationRow, ...]
    kernels: tuple[ValidationRow, ...]
    gains: tuple[Gain, ...]
    summaries: tuple[Summary, ...]
    skipped: tuple[tuple[int, str], ...]


def ring_report() -> RingReport:
    """Predict every published row. Takes a few seconds."""
    steps, attention, kernels = list(step_rows()), [*attention_rows(), *te_rows()], tuple(kernel_rows())
    told = [row for row in steps if row.kind == "step"]
    reasons: dict[str, int] = {}
    for _, reason in skipped_calls():
        reasons[reason] = reasons.get(reason, 0) + 1
    unseen = [row for row in attention if not row.fitted]
    summaries = [
        summarise("training steps, NVSHMEM", [row for row in told if row.fitted]),
        summarise("training steps, NCCL, tp 1", [row for row in told if not row.fitted]),
        summarise("attention over several GPUs, not fitted", unseen),
        *(summarise(f"  {title}", rows) for title, rows in _by_publication(unseen)),
        summarise("attention over several GPUs, fitted", [row for row in attention if row.fitted]),
        summarise("kernels on one GPU, from their charts", kernels),
    ]
    return RingReport(
        rows=(*told, *attention),
        unexplained=tuple(row for row in steps if row.kind == "unexplained"),
        kernels=kernels,
        gains=tuple(gains()),
        summaries=tuple(summaries),
        skipped=tuple((n, reason) for reason, n in sorted(reasons.items(), key=lambda item: -item[1])),
    )


def own_report(path: str) -> RingReport:
    """The report of calls in a table of one's own, with the columns of tables/ring_attention.csv; nothing is fitted to them."""
    rows = list(own_rows(path))
    if not rows:
        raise InputError(f"{path}: no rows to predict")
    summaries = [summarise("your rows", rows), *(summarise(f"  {title}", own) for title, own in _by_publication(rows))]
    return RingReport(tuple(rows), (), (), (), tuple(summaries), ())


def _by_publication(rows: list[ValidationRow]) -> list[tuple[str, list[ValidationRow]]]:
    found: dict[str, list[ValidationRow]] = {}
    for row in rows:
        found.setdefault(row.series.split(":")[0], []).append(row)
    return list(found.items())
