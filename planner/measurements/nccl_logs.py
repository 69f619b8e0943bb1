"""Reads what nccl-tests prints: which ranks on which hosts took how long for how many bytes.

The text output of all versions since 2.0, as it stands in a terminal, a job's log or an issue: with the tags that mpirun and srun
put before lines, with or without the columns redop and root, several runs in one file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from shardroute.planner.measurements.log_lines import lines_of
from shardroute.planner.shares import Told, untold
from shardroute.topologies.errors import InputError


class Test(StrEnum):
    """The programs of nccl-tests that a calibration can use."""

    __test__ = False  # not a test of ours

    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "alltoall"
    BROADCAST = "broadcast"
    REDUCE_SCATTER = "reduce_scatter"
    SEND_RECV = "sendrecv"


@dataclass(frozen=True, slots=True)
class NcclRun:
    """One run: the test, its ranks and hosts, and microseconds out of place by bytes, ascending and without repeats."""

    test: Test
    n_ranks: int
    n_hosts: int
    device: str
    version: str
    n_bytes: tuple[int, ...]
    time_us: tuple[float, ...]
    file: str


@dataclass(slots=True)
class _Draft:
    """What has been read of a run so far."""

    test: Test | None = None
    hosts: dict[int, str] = field(default_factory=dict)
    device: str = ""
    version: str = ""
    rows: list[tuple[int, float, float]] = field(default_factory=list)  # bytes, microseconds, busbw / algbw


# What launchers put before lines: `1: ` of srun -l, `[1,0]<stdout>: ` of mpirun --tag-output, a date of a container's log.
LINE_TAG: Final = re.compile(r"^\s*(?:\[\d+,\d+\]\s*<std(?:out|err)>:|\d+:(?=\s)|\d{4}-\d\d-\d\d[T ][\d:.,]+Z?)\s?")
_PROGRAM: Final = re.compile(r"(?<![a-z])(" + "|".join(Test) + r")_perf")
_BEGIN: Final = re.compile(r"#\s*(?:nThreads?|Collective test starting)\b")
_RANK: Final = re.compile(
    r"#\s*Rank\s+(?P<rank>\d{1,9})\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(?P<host>\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(?P<device>.*)"
)
_VERSION: Final = re.compile(r"nccl-library=(?P<code>\d+)|NCCL version (?P<text>\d+\.\d+\.\d+)")
_ROW: Final = re.compile(
    r"^\s*(?P<size>\d{1,18})\s+\d+\s+[a-z]\w*\s+(?:[a-z]+\s+)?(?:-?\d+\s+)?"
    r"(?P<time>\d+\.?\d*)\s+(?P<alg>\d+\.?\d*)\s+(?P<bus>\d+\.?\d*)\s+(?:\S+)"
    r"(?:\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+\S+|(?:\s+N/A)+)?\s*$"
)


def read_nccl_log(text: str, file: str, progress: Told = untold) -> tuple[NcclRun, ...]:
    """The runs in a log of nccl-tests, of the programs that Test names; progress is told the share of the lines that was read.

    Raises InputError, led by the file's name, when there is no row of results, or a run doesn't say its program or ranks.
    """
    runs = [_run(draft, file) for draft in _drafts(text, file, progress) if draft.rows]
    if not runs:
        raise InputError(f"{file}: found no results of nccl-tests; expected rows of size, count, type, ..., time, algbw, busbw")
    return tuple(runs)


def looks_like_nccl_log(text: str) -> bool:
    """Whether the text has the header of results that nccl-tests prints."""
    return "algbw" in text and "busbw" in text


def _drafts(text: str, file: str, progress: Told) -> Iterator[_Draft]:
    named = _PROGRAM.search(file)
    program = Test(named[1]) if named else None
    draft = _Draft(test=program)
    for raw in lines_of(text, progress):
        line = LINE_TAG.sub("", raw)
        if found := _PROGRAM.search(line):
            program = Test(found[1])
        if _BEGIN.match(line.strip()) and draft.rows:
            yield draft
            draft = _Draft(version=draft.version)
        if draft.test is None or not draft.rows:
            draft.test = program
        if rank := _RANK.match(line.strip()):
            draft.hosts[int(rank["rank"])] = rank["host"]
            draft.device = rank["device"].strip()
        elif version := _VERSION.search(line):
            draft.version = version["text"] or _dotted(int(version["code"]))
        elif (row := _ROW.match(line)) and int(row["size"]) > 0:
            alg, bus = float(row["alg"]), float(row["bus"])
            draft.rows.append((int(row["size"]), float(row["time"]), bus / alg if alg >= 1 else 0.0))
    yield draft


def _run(draft: _Draft, file: str) -> NcclRun:
    if draft.test is None:
        raise InputError(
            f"{file}: results that don't say of which test; put the command (all_reduce_perf, ...) into the log, or into its name"
        )
    n_ranks = max(draft.hosts, default=-1) + 1 or _ranks_by_busbw(draft)
    if n_ranks < 2:
        raise InputError(f"{file}: {draft.test}_perf without lines of '#  Rank  0 ...'; how many ranks ran can't be told")
    times: dict[int, list[float]] = {}
    for size, time_us, _ in draft.rows:
        if time_us > 0:
            times.setdefault(size, []).append(time_us)
    sizes = sorted(times)
    return NcclRun(
        draft.test,
        n_ranks,
        max(len(set(draft.hosts.values())), 1),
        draft.device,
        draft.version,
        tuple(sizes),
        tuple(sum(times[size]) / len(times[size]) for size in sizes),
        file,
    )


def _ranks_by_busbw(draft: _Draft) -> int:
    """Ranks by busbw / algbw: 2 (n - 1) / n of an all-reduce, (n - 1) / n of gathers; 0 if that can't tell."""
    shares = [share for *_, share in draft.rows if share > 0]
    if not shares or draft.test in (Test.SEND_RECV, Test.BROADCAST):
        return 0
    share = shares[-1] / (2 if draft.test is Test.ALL_REDUCE else 1)
    return round(1 / (1 - share)) if share < 1 else 0


def _dotted(code: int) -> str:
    """23007 as 2.30.7."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def merged(runs: tuple[NcclRun, ...]) -> NcclRun:
    """Runs of one test over one group as one: the mean time of each size."""
    times: dict[int, list[float]] = {}
    for run in runs:
        for size, time_us in zip(run.n_bytes, run.time_us, strict=True):
            times.setdefault(size, []).append(time_us)
    sizes = sorted(times)
    means = tuple(sum(times[size]) / len(times[size]) for size in sizes)
    files = ", ".join(dict.fromkeys(run.file for run in runs))
    return replace(runs[0], n_bytes=tuple(sizes), time_us=means, file=files)
