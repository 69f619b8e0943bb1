"""What the report says of one plan: which sections, in which order."""

from collections.abc import Sequence
from typing import Final

import msgspec

from shardroute.planner.critical_paths import critical_path, following_us
from shardroute.planner.plans import Plan
from shardroute.planner.reporting.contest_pictures import (
    WhatIf,
    measured_section,
    strategies_section,
    what_if_section,
)
from shardroute.planner.reporting.explanations import explain
from shardroute.planner.reporting.layout_pictures import layout_section
from shardroute.planner.reporting.machine_pictures import load_section, machine_section
from shardroute.planner.reporting.pages import Chapter
from shardroute.planner.reporting.rivals import Rival
from shardroute.planner.reporting.sections import Cell, Section, table
from shardroute.planner.reporting.time_pictures import gpu_section, link_section, path_section
from shardroute.planner.reports import PlanReport, calibration_warning, reporting_us
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import Prediction
from shardroute.planner.timelines import Timeline
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.units import format_bytes, format_seconds

# Microseconds a step that the data of all pictures took, on one core of a Xeon (2026-11-30); the share of those of a prediction.
_SECTION_US: Final = 1.5
_PICTURED: Final = 0.9
# What a reader calls the fields of a PlanReport.
WORDS: Final = {
    "strategy": "strategy", "machine": "machine", "calibration": "costs from", "n_tensors": "tensors",
    "n_tensor_bytes": "bytes of tensors", "n_steps": "steps", "n_bytes_moved": "moved between ranks",
    "n_bytes_cross_domain": "into other domains", "n_bytes_local": "copied within a rank",
    "least_bytes_cross_domain": "into other domains, least possible", "lower_bound_s": "lower bound", "bound": "bound by",
    "predicted_s": "predicted", "ratio_to_bound": "times the bound", "busiest": "busiest", "n_src_gpus": "source ranks",
    "n_dst_gpus": "destination ranks", "peak_staging_bytes": "staging, peak a rank",
    "peak_packing_bytes": "packing, peak a rank", "digest": "digest", "plan_s": "planned in",
}  # fmt: skip


def chapter(
    title: str,
    plan: Plan,
    report: PlanReport,
    prediction: Prediction,
    calibration: Calibration,
    *,
    rivals: Sequence[Rival] = (),
    what_ifs: Sequence[WhatIf] = (),
    measured: Timeline | None = None,
    tensor: str | None = None,
    progress: Told | None = None,
) -> Chapter:
    """All sections of a plan; progress is told the share that is done. Raises InputError for a tensor that it doesn't have and a
    measurement of another plan.
    """
    path_us, section_us = following_us(prediction), _SECTION_US * len(plan.steps)
    explaining, following, picturing = parts(progress, (reporting_us(plan) + path_us, path_us, section_us))
    explanation = explain(plan, prediction, calibration, rivals, explaining)
    chain = critical_path(plan, prediction, following)
    sections = [
        _numbers_section(plan, report, explanation.sentences),
        machine_section(plan),
        load_section(plan, prediction),
        path_section(plan, prediction, chain),
        gpu_section(plan, prediction.timeline),
        link_section(plan, prediction),
    ]
    picturing(_PICTURED)
    if rivals:
        sections.append(strategies_section(report, rivals))
    if measured is not None:
        sections += [measured_section(prediction.timeline, measured), gpu_section(plan, measured)]
    sections.append(layout_section(plan.problem, tensor))
    if what_ifs:
        sections.append(what_if_section(plan.strategy, what_ifs))
    picturing(1.0)
    return Chapter(title, calibration_warning(plan.topology.machine, calibration) or "", tuple(sections))


def _numbers_section(plan: Plan, report: PlanReport, sentences: Sequence[str]) -> Section:
    """The numbers of `show --json`, in the words of `show`, and the sentences of `explain`."""
    rows = [[Cell(name), Cell(text)] for name, text in plan.problem.about]
    for name, value in msgspec.to_builtins(report).items():
        match value:
            case None:
                continue
            case dict():
                cell = Cell(f"{value['resource']}, {format_seconds(value['seconds'])}")
            case str():
                cell = Cell(value, key=name)
            case _ if name.endswith("_s"):
                cell = Cell(format_seconds(value), value, name)
            case _ if "bytes" in name:
                cell = Cell(format_bytes(value), value, name)
            case _:
                cell = Cell(f"{value:.4g}" if isinstance(value, float) else f"{value:,}", value, name)
        rows.append([Cell(WORDS[name]), cell])
    return Section("numbers", "Why this plan", tuple(sentences), None, "", table(("", ""), rows))
