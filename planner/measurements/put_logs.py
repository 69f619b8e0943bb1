"""Reads what NVSHMEM's perftest prints: how long a put, or a barrier, took for how many bytes between which PEs.

The text tables of NVSHMEM 3 and the lines of NVSHMEM_MACHINE_READABLE_OUTPUT (`perftest/common/utils.cu`), as they stand in a
terminal or a job's log: with the tags that mpirun and srun put before lines, several runs in one file.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from shardroute.planner.measurements.log_lines import lines_of
from shardroute.planner.measurements.nccl_logs import LINE_TAG
from shardroute.planner.shares import Told, untold
from shardroute.topologies.errors import InputError


class PutTest(StrEnum):
    """The programs of perftest that a calibration can use, by their path under `perftest`."""

    BANDWIDTH = "host/pt-to-pt/bw"
    LATENCY = "host/pt-to-pt/latency"
    DEVICE_BANDWIDTH = "device/pt-to-pt/shmem_put_bw"
    SIGNAL = "device/pt-to-pt/shmem_put_signal_ping_pong_latency"
    BARRIER = "host/coll/barrier_all_on_stream"


@dataclass(frozen=True, slots=True)
class PutRun:
    """One table: the test, its PEs and hosts (0: not said), and seconds of one put, or of one barrier, by bytes, ascending."""

    test: PutTest
    n_pes: int
    n_hosts: int
    device: str
    n_bytes: tuple[int, ...]
    time_s: tuple[float, ...]
    file: str


@dataclass(frozen=True, slots=True)
class PutLog:
    """The runs of a log, and what else it holds that no calibration needs, in words."""

    runs: tuple[PutRun, ...]
    unused: tuple[str, ...]


@dataclass(slots=True)
class _Draft:
    """What has been read of a run so far; `rows` are (bytes, value) in the order of the file."""

    pes: dict[int, int] = field(default_factory=dict)  # PE to its number on its host
    device: str = ""
    options: dict[str, str] = field(default_factory=dict)
    program: str = ""
    job: str = ""
    head: str = ""
    rows: list[tuple[int, float]] = field(default_factory=list)


_OPTIONS: Final = re.compile(r"min_size: \d+, max_size: \d+, .*")
_OPTION: Final = re.compile(r"(\w[\w ]*?) ?: ?(\w+)")
_PE: Final = re.compile(r"mype: (\d{1,7}) mype_node: (\d{1,7}) device name: (.*?) bus id: \d+")
_PEER: Final = re.compile(r"PE (\d{1,7}): GPU (\d{1,7}), UUID: ")
_PROGRAM: Final = re.compile(r"shmem_put_signal_ping_pong_latency")
_JOB: Final = re.compile(r"#\s*([A-Za-z]\w*)")
_ROW: Final = re.compile(r"(\d{1,18})\s+[A-Za-z-]+\s+(\d+\.\d+)(?:\s.*)?")
_LINE: Final = re.compile(r"&&&& PERF (\w+?)___\w*?___size__(\d{1,18})___\w+ (\d+\.\d+) [+-](.*)")
# print_table_basic's names of the tables; the ping-pong with a signal shares its name with others, so its program must be said.
_JOBS: Final = {
    "Bandwidth": PutTest.BANDWIDTH, "Latency": PutTest.LATENCY, "barrier_all_on_stream": PutTest.BARRIER,
    "shmem_put_bw": PutTest.DEVICE_BANDWIDTH, "shmem_put_bw_uni": PutTest.DEVICE_BANDWIDTH,
}  # fmt: skip
_BANDWIDTHS: Final = (PutTest.BANDWIDTH, PutTest.DEVICE_BANDWIDTH)
_GB: Final = 1e9  # B_TO_GB of perftest/common/utils.h


def looks_like_put_log(text: str) -> bool:
    """Whether perftest printed the text."""
    return "warmup iterations: " in text or "&&&& PERF " in text or "size(B)     scope" in text


def read_put_log(text: str, file: str, progress: Told = untold) -> PutLog:
    """The runs in a log of perftest; progress is told the share of the lines that was read. Raises InputError, led by the file's
    name, when there is no row of results.
    """
    runs: list[PutRun] = []
    unused: list[str] = []
    for draft in _drafts(text, file, progress):
        found = _run(draft, file)
        if isinstance(found, str):
            unused.append(f"{file}: {found}")
        else:
            runs.append(found)
    if not runs and not unused:
        raise InputError(f"{file}: found no results of NVSHMEM's perftest; expected rows of size, scope and value, or &&&& PERF")
    return PutLog(tuple(runs), tuple(dict.fromkeys(unused)))


def _drafts(text: str, file: str, progress: Told) -> Iterator[_Draft]:
    """A draft for each table with rows."""
    named = _PROGRAM.search(file)
    draft = _Draft(program=named[0] if named else "")

    def after_table(*, begins: bool) -> Iterator[_Draft]:
        nonlocal draft
        if draft.rows:
            yield draft
            draft = _Draft(program=draft.program) if begins else _Draft(draft.pes, draft.device, draft.options, draft.program)

    for raw in lines_of(text, progress):
        line = LINE_TAG.sub("", raw).strip()
        if program := _PROGRAM.search(line):
            yield from after_table(begins=True)
            draft.program = program[0]
        elif _OPTIONS.fullmatch(line):
            yield from after_table(begins=True)
            draft.options = dict(_OPTION.findall(line))
        elif pe := _PE.match(line):
            yield from after_table(begins=True)
            draft.pes[int(pe[1])], draft.device = int(pe[2]), pe[3].strip()
        elif peer := _PEER.match(line):
            draft.pes.setdefault(int(peer[1]), int(peer[2]))
        elif job := _JOB.fullmatch(line):
            yield from after_table(begins=False)
            draft.job, draft.head = job[1], ""
        elif line.startswith("size(B)"):
            draft.head = line
        elif said := _LINE.fullmatch(line):
            if draft.job != said[1]:
                yield from after_table(begins=False)
                draft.job = said[1]
            draft.head = said[4]
            draft.rows.append((int(said[2]), float(said[3])))
        elif draft.head and (row := _ROW.fullmatch(line)):
            draft.rows.append((int(row[1]), float(row[2])))
    yield from after_table(begins=True)


def _run(draft: _Draft, file: str) -> PutRun | str:
    """The run of a table, or why it is of no use."""
    test = _JOBS.get(draft.job)
    if draft.program and draft.job.startswith("shmem_put") and "ping" in draft.job:
        test = PutTest.SIGNAL
    if test is None:
        return f"{draft.job or 'a table without a name'} says nothing that a prediction needs"
    if draft.options.get("dir", "write") != "write":
        return f"{test} reads (--dir read); plans put"
    if test in (PutTest.BANDWIDTH, PutTest.LATENCY) and draft.options.get("putget_issue", "on_stream") != "on_stream":
        return f"{test} was issued by the host (--issue host); plans put on a stream"
    if draft.options.get("bidirectional", "0") != "0":
        return f"{test} went both ways at once (--bidir); one way is needed"
    if test in _BANDWIDTHS and "latency" in draft.head:
        return f"{test} heads bandwidths as latencies, as NVSHMEM 2 does, whose GB isn't known to be 10^9 bytes; take NVSHMEM 3"
    means: dict[int, list[float]] = {}
    for size, value in draft.rows:
        if size > 0 and value > 0:
            means.setdefault(size, []).append(_seconds(test, size, value))
    if not means:
        return f"{test} has no row above 0"
    sizes = sorted(means)
    return PutRun(
        test, len(draft.pes), sum(number == 0 for number in draft.pes.values()), draft.device, tuple(sizes),
        tuple(sum(means[size]) / len(means[size]) for size in sizes), file,
    )  # fmt: skip


def _seconds(test: PutTest, size: int, value: float) -> float:
    if test in _BANDWIDTHS:
        return size / (value * _GB)
    return value / 1e6 / (2 if test is PutTest.SIGNAL else 1)  # the ping-pong's time is there and back
