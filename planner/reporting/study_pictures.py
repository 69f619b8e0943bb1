"""Studies as sections of a page: the line or the bars of what varies, and the table that the command prints as well."""

from collections.abc import Callable, Sequence
from typing import Final

from shardroute.planner.reporting.charts import BYTES, Chart, Value, bars, lines
from shardroute.planner.reporting.sections import Cell, Section, Table, count, ratio, seconds, size, table
from shardroute.planner.studies import LoadStudy, RefitRow, RefitStudy, RingRow, RingStudy, SplitRow, SplitStudy, count_text
from shardroute.topologies.units import format_bytes

BOUND: Final = "lower bound"
# What varies in a study of sizes; there the axis has numbers of parameters.
MODELS: Final = "model"
_REFIT: Final = (
    "strategy", "predicted", "bound", "x bound", "across", "moved", "source GPU", "inference GPU", "fits", "staging",
    "busiest, of the time",
)  # fmt: skip


def refit_section(study: RefitStudy) -> Section:
    """Predicted seconds by strategy over what varies, with the lower bound."""
    rows, varies = study.rows, study.varies
    values: list[dict[str, Value]] = [
        {"x": row.value, "s": row.predicted_s, "series": row.strategy} for row in rows if row.predicted_s
    ]
    bounds = sorted({(row.value, row.lower_bound_s) for row in rows if row.lower_bound_s})
    values += [{"x": value, "s": bound_s, "series": BOUND} for value, bound_s in bounds]
    by_size = varies == MODELS
    ticks = sorted({(row.value, count_text(row.value) if by_size else row.name) for row in rows})
    about = f"predicted seconds of each strategy and the lower bound, over {varies}"
    chart = lines(values, ticks, "parameters" if by_size else varies, dashed=BOUND) if values else None
    return Section(study.study, study.title, (study.moved, *study.notes), chart, about, refit_table(varies, rows))


def load_sections(study: LoadStudy) -> list[Section]:
    """The two-phase estimate, and what plans move where there are any."""
    values: list[dict[str, Value]] = []
    rows = []
    for found in study.estimates:
        for what, n_bytes in (("gather and broadcast", found.two_phase_bytes), ("reshard", found.reshard_bytes)):
            name = f"{found.name}: {what}"
            values.append({"name": name, "s": n_bytes, "text": format_bytes(n_bytes), "what": what})
        rows.append([
            Cell(found.name), size(found.gather_bytes), size(found.broadcast_bytes), size(found.two_phase_bytes),
            size(found.reshard_bytes),
        ])  # fmt: skip
    columns = ("size", "gathered", "broadcast", "two phases", "resharded")
    about = "bytes that gathering and broadcasting move, beside those of resharding, by size of the model"
    chart = bars(values, colour="what", units=BYTES)
    sections = [Section("estimate", "Two-phase estimate", tuple(study.notes), chart, about, table(columns, rows))]
    if not study.rows:
        return sections
    planned = [(r.name, r.strategy, r.n_bytes_cross_domain) for r in study.rows if r.n_bytes_cross_domain is not None]
    moved: list[dict[str, Value]] = [
        {"name": f"{name}: {strategy}", "s": n_bytes, "text": format_bytes(n_bytes), "what": strategy}
        for name, strategy, n_bytes in planned
    ]
    words = ("Bytes that enter another NVLink domain, by the plan of each strategy.",)
    about = "bytes into other NVLink domains, by size and strategy"
    chart = bars(moved, colour="what", units=BYTES)
    return [*sections, Section("planned", "What plans move", words, chart, about, refit_table("size", study.rows))]


def ring_sections(study: RingStudy) -> list[Section]:
    """Seconds of a step over the length of sequences, a line a carrier; and those that a GPU waits for others' data."""
    columns = ("tokens", "carrier", "step", "gain", "TFLOP/s", "exposed", "hop", "SMs", "memory", "fits", "why not")
    rows = [
        [
            Cell(f"{row.seq:,}", row.seq), Cell(row.carrier), seconds(row.step_s),
            Cell("-") if row.gain is None else Cell(f"{row.gain:+.1%}", row.gain),
            Cell("-") if row.tflops_per_gpu is None else Cell(f"{row.tflops_per_gpu:.1f}", row.tflops_per_gpu),
            seconds(row.exposed_comm_s), seconds(row.hop_s), count(row.hop_sms),
            size(None if row.memory_bytes is None else round(row.memory_bytes)), _fits(row.fits), Cell(row.why_not),
        ]
        for row in study.rows
    ]  # fmt: skip
    ticks = [(float(seq), _tokens(seq)) for seq in sorted({row.seq for row in study.rows})]

    def chart(of_row: Callable[[RingRow], float | None]) -> Chart | None:
        found = [(row, s) for row in study.rows if (s := of_row(row))]
        values: list[dict[str, Value]] = [{"x": float(row.seq), "s": s, "series": row.carrier} for row, s in found]
        return lines(values, ticks, "tokens of a sequence") if values else None

    words = (study.trained, *study.notes)
    about = "seconds of a training step over the length of its sequences, by what carries the ring's hops"
    waits = "seconds of a step in which a GPU waits for others' data, over the length of sequences, by carrier"
    exposed = table(("tokens", "carrier", "exposed", "hop", "SMs"), [[row[i] for i in (0, 1, 5, 6, 7)] for row in rows])
    return [
        Section(study.study, study.title, words, chart(lambda row: row.step_s), about, table(columns, rows)),
        Section("exposed", "Communication that a step waits for", (), chart(lambda row: row.exposed_comm_s), waits, exposed),
    ]


def split_sections(study: SplitStudy) -> list[Section]:
    """Seconds of refit over the GPUs that train; and of a whole step, by the fastest refit, where the user gave the rest."""
    columns = (
        "GPUs", "strategy", "refit", "x bound", "train", "rollout", "in turn", "overlap", "replicas", "idle", "source GPU",
        "inference GPU", "fits", "training layout", "why not",
    )  # fmt: skip
    rows = [
        [
            Cell(row.refit.name), Cell(row.refit.strategy), seconds(row.refit.predicted_s), ratio(row.refit.ratio_to_bound),
            seconds(row.train_s), seconds(row.rollout_s), seconds(row.in_turn_s), seconds(row.overlapped_s), count(row.replicas),
            count(row.n_idle_gpus), size(row.refit.src_bytes_per_gpu), size(row.refit.dst_bytes_per_gpu), _fits(row.refit.fits),
            Cell(row.from_spec), Cell(row.refit.why_not),
        ]
        for row in study.rows
    ]  # fmt: skip
    title = "GPUs that train + GPUs that serve"
    ticks = sorted({(row.refit.value, row.refit.name) for row in study.rows})
    refits: list[dict[str, Value]] = [
        {"x": row.refit.value, "s": row.refit.predicted_s, "series": row.refit.strategy}
        for row in study.rows
        if row.refit.predicted_s
    ]
    about = "predicted seconds of refit by how many of the GPUs train and how many serve"
    chart = lines(refits, ticks, title, log_x=False) if refits else None
    sections = [Section(study.study, study.title, (study.moved, *study.notes), chart, about, table(columns, rows))]
    best: dict[float, SplitRow] = {}
    for row in study.rows:
        known = best.get(row.refit.value)
        if row.in_turn_s is not None and (known is None or known.in_turn_s is None or row.in_turn_s < known.in_turn_s):
            best[row.refit.value] = row
    if not best:
        return sections
    steps: list[dict[str, Value]] = []
    for value, row in sorted(best.items()):
        for series, s in (("in turn", row.in_turn_s), ("overlap", row.overlapped_s)):
            steps.append({"x": value, "s": s, "series": series})
    of_steps = [
        [Cell(r.refit.name), Cell(r.refit.strategy), *map(seconds, (r.train_s, r.rollout_s, r.in_turn_s, r.overlapped_s))]
        for _, r in sorted(best.items())
    ]
    about = "seconds of a step of learning by how many of the GPUs train and how many serve"
    shown = table(("GPUs", "refit by", "train", "rollout", "in turn", "overlap"), of_steps)
    words = ("Training, rollouts and the fastest of the refits.",)
    chart = lines(steps, ticks, title, log_x=False)
    return [*sections, Section("steps", "A step of learning", words, chart, about, shown)]


def refit_table(first: str, rows: Sequence[RefitRow]) -> Table:
    """A row a case and strategy."""
    return table(
        (first, *_REFIT),
        [
            [
                Cell(row.name, row.value), Cell(row.strategy), seconds(row.predicted_s), seconds(row.lower_bound_s),
                ratio(row.ratio_to_bound), size(row.n_bytes_cross_domain), size(row.n_bytes_moved), size(row.src_bytes_per_gpu),
                size(row.dst_bytes_per_gpu), _fits(row.fits), size(row.peak_staging_bytes), Cell(row.why_not or _busiest(row)),
            ]
            for row in rows
        ],
    )  # fmt: skip


def _busiest(row: RefitRow) -> str:
    if row.busiest is None or not row.predicted_s:
        return ""
    chosen = "" if row.planned_by == row.strategy else f"by {row.planned_by}: "
    return f"{chosen}{row.busiest.resource}, {row.busiest.seconds / row.predicted_s:.0%}"


def _fits(fits: bool | None) -> Cell:
    return Cell("-" if fits is None else "yes" if fits else "no")


def _tokens(seq: int) -> str:
    """`128K` for 131,072, else the number."""
    return f"{seq // 1024}K" if seq % 1024 == 0 else f"{seq:,}"
