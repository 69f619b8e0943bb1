"""A plan's steps as Parquet, for data frames of millions of rows: the columns of the CSV, typed.

Rule: columns are made by NumPy, a row group at a time; pyarrow (the extra `parquet`) is imported when a file is written.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.plans import Backend, Lane, Op, Plan, lane_of, queue_of
from shardroute.planner.shares import Told, heard
from shardroute.planner.step_tables import check_timeline, place_name
from shardroute.planner.timelines import Timeline
from shardroute.topologies.errors import InputError

# Steps of a row group. Readers take a row group at a time; Parquet's own advice is 2^17 to 2^20 rows.
_ROWS: Final = 2**17

Ints = NDArray[np.integer]


def check_parquet() -> None:
    """Raise InputError where the package that writes Parquet is not installed."""
    if find_spec("pyarrow") is None:
        raise InputError(
            "Parquet is written by the package pyarrow, which isn't installed: pip install 'shardroute[parquet]', or name a .csv"
        )


def write_parquet(
    plan: Plan, timeline: Timeline | None, file: BinaryIO, progress: Told | None = None
) -> None:
    """Write the steps as Parquet (zstd) with the columns of `write_steps`.

    src and dst are null where the step has none; group and after are lists; words (op, lane, backend, src_at, dst_at) are
    dictionaries. Raises InputError for a timeline of another plan, and where pyarrow is not installed.
    """
    check_parquet()
    check_timeline(plan, timeline)
    import pyarrow as pa
    from pyarrow import parquet

    word = pa.dictionary(pa.int32(), pa.string())
    kinds = {
        "step": pa.int64(), "op": word, "lane": word, "queue": pa.int32(), "backend": word, "src": pa.int32(), "dst": pa.int32(),
        "group": pa.list_(pa.int32()), "src_at": word, "dst_at": word, "bundle": pa.int32(), "n_bytes": pa.int64(),
        "after": pa.list_(pa.int32()),
    }  # fmt: skip
    if timeline is not None:
        kinds |= {"start_s": pa.float64(), "end_s": pa.float64()}

    def words(codes: Ints, names: Sequence[str]) -> object:
        return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(names, pa.string()))

    def places(at: Ints) -> object:
        found, codes = np.unique(at, return_inverse=True)
        return words(codes, [place_name(place) for place in found.tolist()])

    def ranks(column: Ints) -> object:
        return pa.array(column.astype(np.int32), mask=column < 0)

    def lists(lengths: Ints, values: Ints) -> object:
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(ends), pa.array(values.astype(np.int32)))

    steps = plan.steps
    schema = pa.schema(list(kinds.items()), metadata={"plan": plan.digest})
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for first in range(0, len(steps), _ROWS):
            heard(progress)(first / len(steps))
            cut = slice(first, min(first + _ROWS, len(steps)))
            after = steps.after[steps.after_ptr[cut.start] : steps.after_ptr[cut.stop]]
            columns = [
                pa.array(np.arange(cut.start, cut.stop, dtype=np.int64)),
                words(steps.op[cut], [op.name.lower() for op in Op]),
                words(lane_of(steps.lane[cut]), [lane.name.lower() for lane in Lane]),
                pa.array(queue_of(steps.lane[cut]).astype(np.int32)),
                words(steps.backend[cut], [backend.label for backend in Backend]),
                ranks(steps.src[cut]),
                ranks(steps.dst[cut]),
                lists(*_groups(plan, steps.group[cut])),
                places(steps.src_at[cut]),
                places(steps.dst_at[cut]),
                pa.array(steps.bundle[cut].astype(np.int32)),
                pa.array(plan.step_bytes[cut].astype(np.int64)),
                lists(np.diff(steps.after_ptr[cut.start : cut.stop + 1]), after),
            ]
            if timeline is not None:
                columns += [pa.array(timeline.start_s[cut]), pa.array(timeline.end_s[cut])]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    heard(progress)(1.0)


def _groups(plan: Plan, group: NDArray[np.int32]) -> tuple[Ints, Ints]:
    """How many ranks the group of each step has (0: none), and the ranks of all of them, one step's after the other's."""
    some = np.flatnonzero(group >= 0)
    length, begin = np.zeros(len(group), dtype=np.int64), np.zeros(len(group), dtype=np.int64)
    length[some], begin[some] = np.diff(plan.group_ptr)[group[some]], plan.group_ptr[:-1][group[some]]
    inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    return length, plan.group_ranks[np.repeat(begin, length) + inside]
