"""Studies: the same question asked many times over, of machines, sizes, splits or lengths as they vary.

Rule: a row is one plan or one training step, predicted as `plan` and `ring` predict it; nothing here estimates a time of its own.
"""

from shardroute.planner.studies.loads import LoadEstimate, LoadStudy, estimate
from shardroute.planner.studies.refits import Case, RefitRow, RefitStudy, study_rows
from shardroute.planner.studies.rings import RingRow, RingStudy, ring_rows
from shardroute.planner.studies.sizes import STAND_INS, StudiedModel, count_text, studied_model, with_experts
from shardroute.planner.studies.splits import Split, SplitRow, SplitStudy, split_row, splits_of, widened

__all__ = [
    "STAND_INS",
    "Case",
    "LoadEstimate",
    "LoadStudy",
    "RefitRow",
    "RefitStudy",
    "RingRow",
    "RingStudy",
    "Split",
    "SplitRow",
    "SplitStudy",
    "StudiedModel",
    "count_text",
    "estimate",
    "ring_rows",
    "split_row",
    "splits_of",
    "studied_model",
    "study_rows",
    "widened",
    "with_experts",
]
