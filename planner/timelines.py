"""When each step of a plan began and ended, predicted or measured; and its file.

Rule: row i is step i of the plan whose digest the timeline carries, whoever made it, so comparing is a join on the row.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardroute.planner.file_kinds import mistaken
from shardroute.planner.shares import Told, parts
from shardroute.topologies.documents import check_keys
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import read_file, write_file

FORMAT = "shardroute-timeline"
SCHEMA = 1
# Two numbers of some 20 characters a step: ten million steps.
MAX_BYTES: Final = 2**29

_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Verified(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a run checked after it had moved everything: destination bytes compared, and how many were wrong.

    against   what numbers that were computed were compared with, and how near they came
    """

    bytes: _Bytes
    mismatches: _Bytes
    against: str = ""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    schema: int
    kind: Literal["predicted", "measured"]
    digest: str
    source: str
    start_s: list[float]
    end_s: list[float]
    verified: Verified | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Spans of a plan's steps, seconds from the start of the run.

    kind      "predicted" or "measured"
    digest    of the plan
    source    what made it: machine and calibration, or transport and machine
    start_s, end_s   float64[n_steps]: when the driving rank began the step, when all of it had arrived
    verified  for measured ones: the check of the destination bytes

    Raises InputError when the columns differ in length, aren't finite, or a step ends before it starts.
    """

    kind: Literal["predicted", "measured"]
    digest: str
    source: str
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    verified: Verified | None = None

    def __post_init__(self) -> None:
        for name in ("start_s", "end_s"):
            column = np.ascontiguousarray(getattr(self, name), dtype=np.float64)
            column.setflags(write=False)
            object.__setattr__(self, name, column)
        if self.start_s.shape != self.end_s.shape or self.start_s.ndim != 1:
            raise InputError(f"timeline: {len(self.start_s)} starts and {len(self.end_s)} ends; expected one of each a step")
        if not np.isfinite(self.end_s).all() or not (self.start_s >= 0).all() or (self.start_s > self.end_s).any():
            raise InputError("timeline: a step starts before 0, ends before it starts, or has no finite time")

    @property
    def total_s(self) -> float:
        """Seconds until the last step ended; 0 for a plan without steps."""
        return float(self.end_s.max(initial=0.0))


def save_timeline(timeline: Timeline, path: str | Path, progress: Told | None = None) -> None:
    """Write the timeline as JSON; progress is told the share that is done."""
    listed, encoded, written = parts(progress, (1, 3, 1))
    file = _File(
        FORMAT, SCHEMA, timeline.kind, timeline.digest, timeline.source,
        timeline.start_s.tolist(), timeline.end_s.tolist(), timeline.verified,
    )  # fmt: skip
    listed(1.0)
    data = msgspec.json.encode(file) + b"\n"
    encoded(1.0)
    write_file(path, data, "the timeline")
    written(1.0)


def load_timeline(path: str | Path, progress: Told | None = None) -> Timeline:
    """Read a timeline that `simulate -o` or `run -o` wrote; progress is told the share that is done.

    Raises InputError for anything else.
    """
    read, decoded, checked, made = parts(progress, (1, 4, 4, 2))
    if not os.path.isfile(path):  # False, too, for names that no file can have
        none = f"no timeline file {path}; `shardroute simulate PLAN -o {path}` or `run PLAN -o {path}` writes one"
        raise InputError(mistaken(path, "a timeline") or none)
    data = read_file(path, MAX_BYTES)
    read(1.0)
    try:
        file = msgspec.json.decode(data, type=_File)
        decoded(1.0)
        check_keys(data, file)
        checked(1.0)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InputError) as error:
        damaged = f"{path}: not a shardroute timeline, or cut short ({error})"
        raise InputError(mistaken(path, "a timeline") or damaged) from error
    if file.format != FORMAT or file.schema != SCHEMA:
        raise InputError(f"{path}: says {file.format!r} schema {file.schema}; expected {FORMAT!r} schema {SCHEMA}")
    found = Timeline(file.kind, file.digest, file.source, np.array(file.start_s), np.array(file.end_s), file.verified)
    made(1.0)
    return found
