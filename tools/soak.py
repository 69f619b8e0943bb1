"""Move the same weights over and over, and see that nothing grows: memory, descriptors, processes, time.

    python tools/soak.py --refits 1000 [--ring 200] [--ranks 16] [--kib 256] [--transport gloo] [--json]

Refits of `gloo` go through two Resharders at once on each rank (rows to columns, and rows to replicas), of torch tensors
whose contents change every time and are compared every time. Those of `processes` are trials of one run, which fills, moves and
compares every byte; `--ring` does the same with ring attention, forward and backward.

After a fifth, when everything has been touched once, memory may grow by 1 % and 1 MiB a rank, and no descriptor, process or
file of shared memory be left over. Of such files those count that a process of the soak had mapped, or that are called after
shardroute, since other programs leave theirs in the same folder.

Of time, the last fifth of runs may take 1.5 times what the second took: of processor time, which other work on the machine
hardly moves, and of time on the clock, where the tenth fastest of each hundred runs counts. The clock isn't judged if others used
more than a tenth of the cores in one of these fifths, and the soak says so. Exit code 1 if anything grew.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from shardroute.executors import Resharder
from shardroute.executors.run import run_plan
from shardroute.planner.exchange import Sharding
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.layouts.tensors import Tensor
from shardroute.planner.plans import Plan
from shardroute.planner.problems import one_tensor
from shardroute.planner.ring.strategies import ring_plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import Topology, build_topology
from shardroute.topologies.units import format_bytes, format_seconds

_ROW: Final = 1024  # elements of float32
# A Python process that does the same over and over takes some pages more or less; a leak of one element a refit shows at once.
_GROWTH_SHARE, _GROWTH_BYTES = 0.01, 2**20
_SLOWER: Final = 1.5
_OTHERS_SHARE: Final = 0.1  # of the cores; with nine tenths of them left, runs take a ninth longer, far from 1.5
_SAMPLES: Final = 50  # of memory and descriptors over a soak
_OWN: Final = ("Anonymous:", "Pss_Shmem:")  # lines of smaps_rollup, see proc(5)
_LEAST_SAMPLES: Final = 5
_RUN_TIME: Final = 2  # the clock of Linux' clock_getcpuclockid(3): time that all threads of a process ran, in nanoseconds
_SHARED_MEMORY: Final = Path("/dev/shm")
_OURS: Final = "shardroute"
_SECOND, _LAST = (0.2, 0.4), (0.8, 1.0)  # fifths of the runs, as shares
_RANK_TIMEOUT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a soak took when a share of its runs was done: memory and descriptors of its processes together.

    memory_bytes   resident, without files: pages of its own in each process, even where it has them from the one that it was
                   forked from; shared memory once
    at_s           on the clock
    busy_s         of the cores that the soak may use, until then: what anyone took, and what a hypervisor gave to others
    cpu_s          of its processes, until then
    watch_s        of the process that watches them from outside, until then
    mapped         files of shared memory that its processes have mapped
    """

    share: float
    memory_bytes: int
    n_files: int
    n_processes: int = 1
    at_s: float = 0.0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    watch_s: float = 0.0
    mapped: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Row:
    """One soak. early: after a fifth; late: at its end. Of times, the second and the last fifth of runs.

    early_s, late_s          on the clock, the tenth percentile of runs
    early_cpu_s, late_cpu_s  processor time of all ranks a run, with filling and comparing
    others_cores             how many of n_cores others used, in the fifth in which it was more
    """

    what: str
    n_ranks: int
    n_runs: int
    n_bytes: int
    wall_s: float
    early_memory_bytes: int
    late_memory_bytes: int
    early_files: int
    late_files: int
    early_s: float
    late_s: float
    early_cpu_s: float
    late_cpu_s: float
    others_cores: float
    n_cores: int
    left_over: tuple[str, ...]

    @property
    def troubles(self) -> list[str]:
        """What grew more than it may."""
        found = [*self.left_over]
        if self.late_memory_bytes > self.early_memory_bytes * (1 + _GROWTH_SHARE) + _GROWTH_BYTES * self.n_ranks:
            found.append(f"memory grew from {format_bytes(self.early_memory_bytes)} to {format_bytes(self.late_memory_bytes)}")
        if self.late_files > self.early_files:
            found.append(f"descriptors grew from {self.early_files} to {self.late_files}")
        if self.late_s > _SLOWER * self.early_s and self._clock_counts:
            found.append(f"a run took {format_seconds(self.early_s)} and later {format_seconds(self.late_s)}")
        if self.late_cpu_s > _SLOWER * self.early_cpu_s:
            found.append(
                f"a run took {format_seconds(self.early_cpu_s)} of processor time and later {format_seconds(self.late_cpu_s)}"
            )
        return found

    @property
    def not_judged(self) -> list[str]:
        """What the machine was too busy to judge."""
        if self._clock_counts:
            return []
        return [
            f"not judged: the time of a run on the clock, since others used {self.others_cores:.1f} of {self.n_cores} cores; "
            "its processor time is judged"
        ]

    @property
    def _clock_counts(self) -> bool:
        return self.others_cores <= _OTHERS_SHARE * self.n_cores


def sample(share: float, pids: Sequence[int], watch_s: float = 0.0, folder: Path = _SHARED_MEMORY) -> Sample:
    """What these processes have and have used now, when a share of the runs is done."""
    cpu_s = 0.0
    for pid in pids:  # while the share is new
        with suppress(OSError):  # it has ended just now
            cpu_s += time.clock_gettime((~pid << 3) | _RUN_TIME)
    at_s, busy_s = time.monotonic(), _busy_s()
    memory = files = n_live = 0
    mapped: set[str] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            resident = 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_OWN))
            n_open = len(os.listdir(f"/proc/{pid}/fd"))
            mapped |= {path.name for path in _mapped(pid) if path.parent == folder}
        except OSError:
            continue
        if resident:  # else it has ended, and nobody has asked how
            memory, files, n_live = memory + resident, files + n_open, n_live + 1
    return Sample(share, memory, files, n_live, at_s, busy_s, cpu_s, watch_s, frozenset(mapped))


def _mapped(pid: int) -> set[Path]:
    fields = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {Path(each[5]) for each in fields if len(each) == 6}


def _busy_s() -> float:
    """Of the cores that this process may use, since some moment that is always the same: time in which they were not idle."""
    cores, per_s = os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK")
    idle = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            idle += int(ticks[3]) + int(ticks[4])  # idle and iowait, see proc(5)
    return len(cores) * time.monotonic() - idle / per_s


def stretch(samples: Sequence[Sample], fifth: tuple[float, float]) -> Sequence[Sample]:
    """The samples that hold a fifth of the runs between them, or come nearest to it; two at least, where there are two."""
    first = next((k for k in reversed(range(len(samples))) if samples[k].share <= fifth[0]), 0)
    last = next((k for k in range(len(samples)) if samples[k].share >= fifth[1]), len(samples) - 1)
    first = max(0, min(first, len(samples) - 2))
    return samples[first : max(last, first + 1) + 1]


def others_cores(first: Sample, last: Sample) -> float:
    """How many cores others used from one sample to the next, on average."""
    ours_s = last.cpu_s - first.cpu_s + last.watch_s - first.watch_s
    return max(0.0, last.busy_s - first.busy_s - ours_s) / (last.at_s - first.at_s)


def _cpu_s(samples: Sequence[Sample], n_runs: int) -> float:
    """Processor time of a run: the median from one sample to the next, for a share may be late where the machine is busy."""
    return float(
        np.median([(b.cpu_s - a.cpu_s) / (n_runs * (b.share - a.share)) for a, b in pairwise(samples) if b.share > a.share])
    )


def row_of(
    what: str, n_ranks: int, n_bytes: int, wall_s: float, samples: Sequence[Sample], seconds: Sequence[float],
    left_over: Sequence[str],
) -> Row:  # fmt: skip
    """What samples and times of a soak come to."""
    early = next((s for s in samples if s.share >= 0.2), samples[-1])
    late, n = samples[-1], len(seconds)
    second, last = seconds[n // 5 : 2 * n // 5] or seconds, seconds[4 * n // 5 :] or seconds
    fifths = [stretch(samples, fifth) for fifth in (_SECOND, _LAST)]
    if any(each[0].share == each[-1].share for each in fifths):
        raise SystemExit(f"{what}: too few runs to compare ({n}); ask for more")
    early_cpu_s, late_cpu_s = (_cpu_s(each, n) for each in fifths)
    return Row(
        what, n_ranks, n, n_bytes, wall_s, early.memory_bytes, late.memory_bytes, early.n_files, late.n_files,
        float(np.percentile(second, 10)), float(np.percentile(last, 10)),
        early_cpu_s, late_cpu_s, max(others_cores(each[0], each[-1]) for each in fifths),
        len(os.sched_getaffinity(0)), tuple(left_over),
    )  # fmt: skip


def soak_gloo(n_ranks: int, n_refits: int, kib: int) -> Row:
    """Refits through two Resharders at once on every rank, over gloo."""
    from shardroute.executors.transports import gloo

    gloo.preload()  # before ranks are forked, which then share it
    shape = (max(2 * n_ranks, kib * 1024 // (4 * _ROW)), _ROW)
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        _fork(n_ranks, Path(folder), lambda rank: _rank_of_gloo(rank, n_ranks, n_refits, shape, Path(folder)))
        wall_s = time.monotonic() - began
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(n_ranks)]
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(told) if isinstance(text, str)]
    if failed:
        raise RuntimeError("\n".join(failed))
    n_samples = min(len(each["samples"]) for each in told)
    samples = [_together([each["samples"][k] for each in told]) for k in range(n_samples)]
    return row_of("gloo, two resharders", n_ranks, 2 * 4 * shape[0] * shape[1], wall_s, samples, told[0]["seconds"], ())


def _together(ranks: Sequence[Mapping[str, float]]) -> Sample:
    first = ranks[0]
    memory, files, cpu_s = (sum(each[name] for each in ranks) for name in ("memory_bytes", "n_files", "cpu_s"))
    return Sample(first["share"], int(memory), int(files), len(ranks), first["at_s"], first["busy_s"], cpu_s)


def _rank_of_gloo(rank: int, n_ranks: int, n_refits: int, shape: tuple[int, int], folder: Path) -> object:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=n_ranks)
    half, tensor = n_ranks // 2, Tensor("w", shape, "f32")
    sources, targets = Mesh.of({"x": half}, range(half)), Mesh.of({"x": half}, range(half, n_ranks))
    rows = {"w": (tensor, Sharding(sources, (Shard(0),)))}
    sides = [{"w": (tensor, Sharding(targets, (placement,)))} for placement in (Shard(1), Replicate())]
    resharders = [Resharder(rows, side) for side in sides]
    mine = place(shape, sources, [Shard(0)]) if rank < half else None
    given = {} if mine is None else {"w": torch.empty(int(mine.hi[rank, 0] - mine.lo[rank, 0]), shape[1])}
    got = [_room(shape, targets, placement, rank) for placement in (Shard(1), Replicate())]
    samples, seconds = [], []
    every = max(1, n_refits // _SAMPLES)
    for step in range(n_refits):
        if mine is not None:
            given["w"].fill_(float(step * n_ranks + rank))
        began = time.monotonic()
        transfers = [resharder.run(given, room) for resharder, room in zip(resharders, got, strict=True)]
        for transfer in transfers:
            transfer.wait()
        seconds.append(time.monotonic() - began)
        for room in got:
            _compare(room, shape, step * n_ranks, half)
        if step % every == every - 1:
            samples.append({k: v for k, v in asdict(sample((step + 1) / n_refits, [os.getpid()])).items() if k != "mapped"})
    for resharder in resharders:
        resharder.close()
    return {"samples": samples, "seconds": seconds}


def _room(shape: tuple[int, int], mesh: Mesh, placement: Shard | Replicate, rank: int) -> dict[str, object]:
    import torch

    fragments = place(shape, mesh, [placement])
    row = np.flatnonzero(fragments.rank == rank)
    return {"w": torch.empty(*(fragments.hi[row[0]] - fragments.lo[row[0]]).tolist())} if len(row) else {}


def _compare(room: dict[str, object], shape: tuple[int, int], first: int, half: int) -> None:
    """Raise unless rows of the destination hold what their source ranks filled in."""
    for got in room.values():
        found: NDArray[np.float32] = got.numpy()  # type: ignore[attr-defined]
        wanted = first + np.arange(shape[0]) // -(-shape[0] // half)
        if not (found == wanted[:, None]).all():
            raise AssertionError(f"wrong bytes after a refit: {found[:, 0]}")


def _fork(n_ranks: int, folder: Path, run: Callable[[int], object]) -> None:
    pids = []
    for rank in range(n_ranks):
        pid = os.fork()
        if pid == 0:
            try:
                found = run(rank)
            except BaseException:
                found = traceback.format_exc()
            (folder / f"{rank}.json").write_text(json.dumps(found))
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def refit_plan(n_ranks: int, kib: int) -> Plan:
    """Rows on half of the ranks, columns on the others."""
    shape, half = (max(2 * n_ranks, kib * 1024 // (4 * _ROW)), _ROW), n_ranks // 2
    held = place(shape, Mesh.of({"x": half}, range(half)), [Shard(0)])
    needed = place(shape, Mesh.of({"x": half}, range(half, n_ranks)), [Shard(1)])
    return make_plan(one_tensor(shape, "f32", held, needed), _machine(n_ranks), "greedy")


def attention_plan(n_ranks: int) -> Plan:
    """A small ring, forward and backward."""
    call = Attention((16 * n_ranks,), n_ranks, 4, 2, 8, dtype="f32")
    return ring_plan(call, _machine(n_ranks), "ring", Pass.RECOMPUTE)


def _machine(n_ranks: int) -> Topology:
    return build_topology(load_machine("cpu-processes"), None, n_ranks)


def soak_processes(what: str, plan: Plan, n_runs: int, folder: Path = _SHARED_MEMORY) -> Row:
    """The plan so often on transport `processes`, in one run, watched from here. folder: that of the system's shared memory."""
    before = _names(folder), sample(0.0, [os.getpid()]).n_files
    samples: list[Sample] = []
    pids: list[int] = []

    def take(share: float) -> None:
        samples.append(sample(share, pids, time.process_time(), folder))
        pids[:] = _descendants(os.getpid())  # takes a while, so for the next time

    began = time.monotonic()
    result = run_plan(plan, repeats=n_runs, timeout_s=_RANK_TIMEOUT_S, trials=take)
    wall_s = time.monotonic() - began
    seen = frozenset[str]().union(*(s.mapped for s in samples), sample(1.0, [os.getpid()], folder=folder).mapped)
    left = {name for name in _names(folder) - before[0] if name in seen or name.startswith(_OURS)}
    left_over = [f"shared memory left: {name}" for name in sorted(left)]
    left_over += [f"process left: {pid}" for pid in _descendants(os.getpid())]
    left_over += [f"{result.verified.mismatches} wrong bytes"] if result.verified.mismatches else []
    if (n_files := sample(1.0, [os.getpid()]).n_files) > before[1]:
        left_over.append(f"the caller had {before[1]} descriptors and has {n_files}")
    most = max((s.n_processes for s in samples), default=0)
    running = [s for s in samples if s.n_processes == most and 0 < s.share < 1]  # neither while ranks start nor while they end
    if len(running) < _LEAST_SAMPLES:
        raise SystemExit(f"{what}: {n_runs} runs were over after {wall_s:.1f} s, too soon to see what they take; ask for more")
    return row_of(what, plan.problem.n_ranks, result.n_bytes_copied, wall_s, running, result.trials_s, left_over)


def _descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def _names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.is_dir() else set()


def main() -> int:
    """Soak and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refits", type=int, default=0, help="through Resharders over gloo, and on transport processes")
    parser.add_argument("--ring", type=int, default=0, help="runs of ring attention on transport processes")
    parser.add_argument("--ranks", type=int, default=16, help="processes; even; default: 16")
    parser.add_argument("--kib", type=int, default=256, help="of each tensor; default: 256")
    parser.add_argument("--transport", choices=["gloo", "processes"], help="of --refits; default: both")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.refits < 1 and arguments.ring < 1:
        parser.error("nothing to soak: give --refits N or --ring N, or both")
    if arguments.ranks < 2 or arguments.ranks % 2 or arguments.kib < 1:
        parser.error(f"--ranks {arguments.ranks} --kib {arguments.kib}: expected an even number of ranks, and 1 KiB or more")
    rows = []
    if importlib.util.find_spec("torch") is None:
        if arguments.transport == "gloo":
            parser.error("--transport gloo: torch is not installed (pip install 'shardroute[torch]')")
        if arguments.refits > 0 and arguments.transport is None:
            print("soak: not over gloo, as torch is not installed (pip install 'shardroute[torch]')", file=sys.stderr)
        arguments.transport = "processes"
    if arguments.refits > 0 and arguments.transport != "processes":
        rows.append(soak_gloo(arguments.ranks, arguments.refits, arguments.kib))
    if arguments.refits > 0 and arguments.transport != "gloo":
        rows.append(soak_processes("processes", refit_plan(arguments.ranks, arguments.kib), arguments.refits))
    if arguments.ring > 0:
        rows.append(soak_processes("ring attention, processes", attention_plan(arguments.ranks), arguments.ring))
    if arguments.json:
        print(json.dumps([asdict(row) | {"troubles": row.troubles, "not_judged": row.not_judged} for row in rows]))
    else:
        _print(rows)
    return 1 if any(row.troubles for row in rows) else 0


def _print(rows: Sequence[Row]) -> None:
    table = Table(
        "soak", "ranks", "runs", "bytes a run", "wall", "memory, 1/5 and end", "files, 1/5 and end", "a run, 1/5 and end",
        "its processor time",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.what, str(row.n_ranks), f"{row.n_runs:,}", format_bytes(row.n_bytes), format_seconds(row.wall_s),
            f"{format_bytes(row.early_memory_bytes)}, {format_bytes(row.late_memory_bytes)}",
            f"{row.early_files}, {row.late_files}", f"{format_seconds(row.early_s)}, {format_seconds(row.late_s)}",
            f"{format_seconds(row.early_cpu_s)}, {format_seconds(row.late_cpu_s)}",
        )  # fmt: skip
    console = Console(width=130)
    console.print(table)
    for row in rows:
        for line in [*row.troubles, *row.not_judged]:
            console.print(f"{row.what}: {line}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    sys.exit(main())
