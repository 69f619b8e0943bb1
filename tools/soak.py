"""Move the same weights over and over, and see that nothing grows: memory, descriptors, processes, time.

    python tools/soak.py --refits 1000 [--ring 200] [--ranks 16] [--kib 256] [--transport gloo] [--json]

Refits of `gloo` go through two Resharders at once on each rank (rows to columns, and rows to replicas), of torch tensors
whose contents change every time and are compared every time. Those of `processes` are trials of one run, which fills, moves and
compares every byte; `--ring` does the same with ring attention, forward and backward.

After a fifth, when everything has been touched once, memory may grow by 1 % and 1 MiB a rank, and no descriptor, process or
file of shared memory be left over. Of a run's time the tenth fastest of each hundred counts, since the others tell how busy the
machine was: that of the last fifth may be 1.5 times that of the second. Exit code 1 if one of these grew.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
_SAMPLES: Final = 50  # of memory and descriptors over a soak
_OWN: Final = ("Anonymous:", "Pss_Shmem:")  # lines of smaps_rollup, see proc(5)
_LEAST_SAMPLES: Final = 5
_WATCH_S: Final = 0.05
_RANK_TIMEOUT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a soak took when a share of its runs was done: memory and descriptors of its processes together.

    memory_bytes   resident, without files: pages of its own in each process, even where it has them from the one that it was
                   forked from; shared memory once
    """

    share: float
    memory_bytes: int
    n_files: int
    n_processes: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """One soak. early: after a fifth; late: at its end. Times are tenth percentiles of the second and the last fifth of runs."""

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
    left_over: tuple[str, ...]

    @property
    def troubles(self) -> list[str]:
        """What grew more than it may."""
        found = [*self.left_over]
        if self.late_memory_bytes > self.early_memory_bytes * (1 + _GROWTH_SHARE) + _GROWTH_BYTES * self.n_ranks:
            found.append(f"memory grew from {format_bytes(self.early_memory_bytes)} to {format_bytes(self.late_memory_bytes)}")
        if self.late_files > self.early_files:
            found.append(f"descriptors grew from {self.early_files} to {self.late_files}")
        if self.late_s > _SLOWER * self.early_s:
            found.append(f"a run took {format_seconds(self.early_s)} and later {format_seconds(self.late_s)}")
        return found


def _sample(share: float, pids: Sequence[int]) -> Sample:
    memory = files = n_live = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            resident = 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_OWN))
            n_open = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:  # it has ended just now
            continue
        if resident:  # else it has ended, and nobody has asked how
            memory, files, n_live = memory + resident, files + n_open, n_live + 1
    return Sample(share, memory, files, n_live)


def _row(
    what: str, n_ranks: int, n_bytes: int, wall_s: float, samples: Sequence[Sample], seconds: Sequence[float],
    left_over: Sequence[str],
) -> Row:  # fmt: skip
    early = next((s for s in samples if s.share >= 0.2), samples[-1])
    late, n = samples[-1], len(seconds)
    second, last = seconds[n // 5 : 2 * n // 5] or seconds, seconds[4 * n // 5 :] or seconds
    return Row(
        what, n_ranks, n, n_bytes, wall_s, early.memory_bytes, late.memory_bytes, early.n_files, late.n_files,
        float(np.percentile(second, 10)), float(np.percentile(last, 10)), tuple(left_over),
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
    samples = [
        Sample(told[0]["samples"][k][0], *(sum(each["samples"][k][field] for each in told) for field in (1, 2)))
        for k in range(n_samples)
    ]
    return _row("gloo, two resharders", n_ranks, 2 * 4 * shape[0] * shape[1], wall_s, samples, told[0]["seconds"], ())


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
            sample = _sample((step + 1) / n_refits, [os.getpid()])
            samples.append((sample.share, sample.memory_bytes, sample.n_files))
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


def soak_processes(what: str, plan: Plan, n_runs: int) -> Row:
    """The plan so often on transport `processes`, in one run, watched from here."""
    before = _shared_memory(), _sample(0.0, [os.getpid()]).n_files
    samples: list[Sample] = []
    ended = threading.Event()
    shares: list[float] = [0.0]
    watch = threading.Thread(target=_watch, args=(samples, shares, ended))
    began = time.monotonic()
    watch.start()
    try:
        result = run_plan(plan, repeats=n_runs, timeout_s=_RANK_TIMEOUT_S, progress=shares.append)
    finally:
        ended.set()
        watch.join()
    wall_s = time.monotonic() - began
    left_over = [f"shared memory left: {name}" for name in sorted(_shared_memory() - before[0])]
    left_over += [f"process left: {pid}" for pid in _descendants(os.getpid())]
    left_over += [f"{result.verified.mismatches} wrong bytes"] if result.verified.mismatches else []
    if (n_files := _sample(1.0, [os.getpid()]).n_files) > before[1]:
        left_over.append(f"the caller had {before[1]} descriptors and has {n_files}")
    most = max((s.n_processes for s in samples), default=0)
    running = [s for s in samples if s.n_processes == most and 0 < s.share < 1]  # neither while ranks start nor while they end
    if len(running) < _LEAST_SAMPLES:
        raise SystemExit(f"{what}: {n_runs} runs were over after {wall_s:.1f} s, too soon to see what they take; ask for more")
    return _row(what, plan.problem.n_ranks, result.n_bytes_copied, wall_s, running, result.trials_s, left_over)


def _watch(samples: list[Sample], shares: Sequence[float], ended: threading.Event) -> None:
    while not ended.wait(_WATCH_S):
        share, pids = shares[-1], _descendants(os.getpid())
        if pids:
            samples.append(_sample(share, pids))


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


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


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
    if arguments.refits > 0 and arguments.transport != "processes":
        rows.append(soak_gloo(arguments.ranks, arguments.refits, arguments.kib))
    if arguments.refits > 0 and arguments.transport != "gloo":
        rows.append(soak_processes("processes", refit_plan(arguments.ranks, arguments.kib), arguments.refits))
    if arguments.ring > 0:
        rows.append(soak_processes("ring attention, processes", attention_plan(arguments.ranks), arguments.ring))
    if arguments.json:
        print(json.dumps([asdict(row) | {"troubles": row.troubles} for row in rows]))
    else:
        _print(rows)
    return 1 if any(row.troubles for row in rows) else 0


def _print(rows: Sequence[Row]) -> None:
    table = Table(
        "soak", "ranks", "runs", "bytes a run", "wall", "memory, 1/5 and end", "files, 1/5 and end", "a run, 1/5 and end"
    )
    for row in rows:
        table.add_row(
            row.what, str(row.n_ranks), f"{row.n_runs:,}", format_bytes(row.n_bytes), format_seconds(row.wall_s),
            f"{format_bytes(row.early_memory_bytes)}, {format_bytes(row.late_memory_bytes)}",
            f"{row.early_files}, {row.late_files}", f"{format_seconds(row.early_s)}, {format_seconds(row.late_s)}",
        )  # fmt: skip
    console = Console(width=130)
    console.print(table)
    for row in rows:
        for trouble in row.troubles:
            console.print(f"{row.what}: {trouble}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    sys.exit(main())
