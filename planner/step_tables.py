"""A plan's steps as a table for spreadsheets and data frames: CSV, one row a step, with its time where a timeline is given.

Rule: rows are made some thousand at a time, so that a plan of millions of steps needs no more memory than its columns.
"""

import csv
import io
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final

import numpy as np

from shardroute.planner.plans import SOURCE, TARGET, Backend, Lane, Op, Plan, lane_of, queue_of
from shardroute.planner.shares import Told, heard
from shardroute.planner.timelines import Timeline
from shardroute.topologies.errors import InputError

COLUMNS: Final = (
    "step", "op", "lane", "queue", "backend", "src", "dst", "group", "src_at", "dst_at", "bundle", "n_bytes", "after",
)  # fmt: skip
TIME_COLUMNS: Final = ("start_s", "end_s")
_ROWS: Final = 2**14
_PLACES: Final[Mapping[int, str]] = {SOURCE: "source", TARGET: "target"}


def write_steps(
    plan: Plan, timeline: Timeline | None, file: BinaryIO, progress: Told | None = None
) -> None:
    """Write the steps as CSV (RFC 4180, UTF-8) with a line of column names.

    op, lane and backend are words; src and dst are ranks, empty where the step has none; group and after list ranks and earlier
    steps with spaces between; src_at and dst_at are source, target or the number of a staging slot; n_bytes is what the step
    carries. progress is told the share that is written. Raises InputError for a timeline of another plan.
    """
    check_timeline(plan, timeline)
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text)
    writer.writerow([*COLUMNS, *(TIME_COLUMNS if timeline is not None else ())])
    done = heard(progress)
    for first in range(0, len(plan.steps), _ROWS):
        done(first / len(plan.steps))
        writer.writerows(_rows(plan, timeline, first, min(first + _ROWS, len(plan.steps))))
    done(1.0)
    text.detach()


def check_timeline(plan: Plan, timeline: Timeline | None) -> None:
    """Raise InputError for a timeline of another plan."""
    if timeline is not None and (timeline.digest != plan.digest or len(timeline.end_s) != len(plan.steps)):
        raise InputError(
            f"the timeline is of plan {timeline.digest[:16]}, the plan is {plan.digest[:16]}; simulate or run this plan"
        )


def place_name(place: int) -> str:
    """Where a step reads or writes: `source`, `target`, or the number of a staging slot."""
    return _PLACES.get(place, str(place))


def _rows(plan: Plan, timeline: Timeline | None, first: int, end: int) -> Iterator[list[object]]:
    steps, cut = plan.steps, slice(first, end)
    lanes, queues = lane_of(steps.lane[cut]).tolist(), queue_of(steps.lane[cut]).tolist()
    ends = [steps.src[cut].tolist(), steps.dst[cut].tolist()]
    groups, n_bytes = steps.group[cut].tolist(), plan.step_bytes[cut].tolist()
    ops, backends, bundles = steps.op[cut].tolist(), steps.backend[cut].tolist(), steps.bundle[cut].tolist()
    at = [steps.src_at[cut].tolist(), steps.dst_at[cut].tolist()]
    times = [] if timeline is None else [timeline.start_s[cut].tolist(), timeline.end_s[cut].tolist()]
    for i in range(end - first):
        after = steps.after[steps.after_ptr[first + i] : steps.after_ptr[first + i + 1]]
        yield [
            first + i, Op(ops[i]).name.lower(), Lane(lanes[i]).name.lower(), queues[i], Backend(backends[i]).label,
            *("" if ranks[i] < 0 else ranks[i] for ranks in ends),
            "" if groups[i] < 0 else _listed(plan.group(groups[i])),
            *(place_name(places[i]) for places in at),
            bundles[i], n_bytes[i], _listed(after), *(column[i] for column in times),
        ]  # fmt: skip


def _listed(numbers: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> str:
    return " ".join(map(str, numbers.tolist()))
