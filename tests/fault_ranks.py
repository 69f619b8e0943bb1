"""Ranks that are hurt on purpose while they reshard: `fault_ranks.py FOLDER TRANSPORT CASE...`, for test_faults.

Four ranks move a tensor along a chain, 0 -> 1 -> 2 -> 3, whose every element is the version that it belongs to. The first
transfer goes well. In the second one rank is hurt, by its own Wire or World or by a signal. Each rank leaves in
FOLDER/CASE/RANK.json what it then saw: its error, what its tensors held, what a reader saw meanwhile. At last those that are left
reshard once more.
"""

import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from fault_cases import CASES, N_RANKS, Case
from hand_plans import HandPlan, relay_chain, row_shards

from shardroute.executors.resharding.resharders import Resharder
from shardroute.executors.transports.exchanges import MessageTransport
from shardroute.executors.transports.libraries import MPI
from shardroute.executors.transports.seam import Deadline, World
from shardroute.topologies.errors import ShardrouteError

N_CHUNK, N_CHUNKS = 16, 4  # elements of a piece, pieces
N_ELEMENTS = N_CHUNK * N_CHUNKS
LATE_S = 0.3
AT_ONCE = 5  # cases that run beside each other: most of their time is waiting
WATCHDOG_S = 60.0  # of a case: far past every deadline, on a machine that others use too


@dataclass
class Seen:
    """What a rank saw. `holds` is old, new or torn; `again` what came of the transfer after the fault."""

    error: str = ""
    took_s: float = 0.0
    holds: str = ""
    version: int | None = None
    n_read: int = 0
    misread: list[str] = field(default_factory=list)
    again: str = ""
    files: int = 0
    threads: int = 0


class HurtWire:
    """A Wire that does to this rank's messages, once it is armed, what the case says."""

    def __init__(self, wire: object, call_tag: int, case: Case) -> None:
        self._wire, self._call_tag, self._case = wire, call_tag, case
        self.armed = False
        self._n_sent = self._n_arrived = 0
        self._arrives: dict[int, np.ndarray] = {}

    def send(self, data, to, tag):
        if not self.armed or tag == self._call_tag:
            return self._wire.send(data, to, tag)
        self._n_sent += 1
        if self._n_sent != 2:  # the first one goes, so that the transfer is under way
            return self._wire.send(data, to, tag)
        match self._case.does:
            case "drop":
                return None
            case "corrupt":
                data = data.copy()
                data[5] ^= 0x10
            case does:
                act(does)
        return self._wire.send(data, to, tag)

    def receive(self, data, source, tag):
        handle = self._wire.receive(data, source, tag)
        if self.armed and tag != self._call_tag and self._case.does == "corrupt what arrived":
            self._arrives[id(handle)] = data
        return handle

    def wait(self, handle, deadline):
        if handle is None:
            return
        self._wire.wait(handle, deadline)
        if id(handle) in self._arrives:
            self._n_arrived += 1
            if self._n_arrived == 2:
                self._arrives[id(handle)][7] ^= 1


class HurtWorld:
    """A World over a HurtWire; it counts what all ranks tell each other, and hurts its rank before the one of the case."""

    def __init__(self, world: World, case: Case | None) -> None:
        self._world, self._case = world, case
        self.rank, self.size, self.key = world.rank, world.size, world.key
        self.pools, self.call_tag = world.pools, world.call_tag
        self.wire = world.wire if case is None else HurtWire(world.wire, world.call_tag, case)
        self.n_told = 0

    def arm(self) -> None:
        if self._case is not None:
            self.wire.armed = True

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        if self._case is not None and self._case.at == self.n_told:
            act(self._case.does)
        self.n_told += 1
        return self._world.exchange(payload, deadline)

    def open(self, programs, messages, arena, deadline):
        line_up = self._world._line_up
        return MessageTransport(self.wire, line_up, programs, messages, arena, self.rank, deadline, self.pools)

    def close(self) -> None:
        self._world.close()

    def abandon(self) -> None:
        self._world.abandon()

    def give_up(self, words: str) -> None:
        self._world.give_up(words)


def act(does: str) -> None:
    """Hurt this process."""
    match does:
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop" | "stop for a while":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "late":
            time.sleep(LATE_S)
        case "stall":
            time.sleep(4.0)
        case "cut":
            cut_connections()
        case "raise":
            raise RuntimeError("the rank's own code failed")


def cut_connections() -> None:
    """Shut down every TCP connection of this process, as a link does that goes down for good."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    found.getpeername()  # raises OSError for one that only listens
                    found.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def filled(version: int) -> np.ndarray:
    return np.full(N_ELEMENTS, version, dtype=np.uint16)


class Reader(threading.Thread):
    """Reads the weights again and again, as a server does."""

    def __init__(self, resharder: Resharder, weights: np.ndarray, seen: Seen) -> None:
        super().__init__(daemon=True)
        self._resharder, self._weights, self._seen, self._ended = resharder, weights, seen, threading.Event()

    def run(self) -> None:
        while not self._ended.is_set():
            with self._resharder.reading() as version:
                first = self._weights.copy()
                time.sleep(0.001)
                if not (first == version).all() or not (self._weights == version).all():
                    self._seen.misread.append(f"{version}: {sorted(set(self._weights.tolist()))}")
            self._seen.n_read += 1
            time.sleep(0.001)

    def end(self) -> None:
        self._ended.set()
        self.join()


def big_slot_plan():
    """A chain over a slot that is declared far larger than what it carries."""
    hand = HandPlan(slots=[2**30])
    t = hand.tensor((N_ELEMENTS,), row_shards((N_ELEMENTS,), [0]), row_shards((N_ELEMENTS,), [3]), "u16")
    bundle = hand.bundle((t, [(0, N_ELEMENTS)]))
    first = hand.copy(bundle, 0, 1, dst_at=0)
    hand.copy(bundle, 1, 3, [first], src_at=0)
    return hand.build(N_RANKS)


def holds(weights: np.ndarray | None, old: int, new: int) -> str:
    if weights is None:
        return ""
    return "old" if (weights == old).all() else "new" if (weights == new).all() else "torn"


def make(case: Case, world: World, rank: int, **more: object) -> Resharder:
    plan = relay_chain(N_RANKS, N_CHUNK, N_CHUNKS)
    hurt = rank == case.rank
    match case.does:
        case "have another plan" if hurt:
            plan = relay_chain(N_RANKS, N_ELEMENTS // 2, 2)
        case "lack memory":
            plan = big_slot_plan()
            if hurt:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
                resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, resource.RLIM_INFINITY))
        case "verify alone":
            more |= {"verify": hurt}
    options = {"verify": case.verify, "timeout_s": case.timeout_s, "spare_bytes": case.spare_bytes} | more
    return Resharder.of_plan(plan, world, **options)


def play(case: Case, rank: int, connect) -> Seen:
    """A rank's whole story."""
    seen = Seen()
    world = HurtWorld(connect(None), case if rank == case.rank else None)
    weights = filled(0) if rank > 0 else None
    given, into = ({"t0": filled(1)} if rank == 0 else {}), ({"t0": weights} if rank > 0 else {})
    began = time.monotonic()
    resharder = None
    try:
        resharder = make(case, world, rank)
        resharder.run(given, into).wait()
        if rank == 0:
            given["t0"][:] = 2
        world.arm()
        reader = Reader(resharder, weights, seen) if rank > 0 and case.spare_bytes != 0 else None
        if reader is not None and not (case.does == "read on" and rank == case.rank):
            reader.start()
        began = time.monotonic()
        try:
            second(case, resharder, given, into, rank)
        finally:
            seen.took_s = time.monotonic() - began
            if reader is not None and reader.is_alive():
                reader.end()
        if case.does == "die afterwards" and rank == case.rank:
            act("die")
    except ShardrouteError as error:
        seen.error = f"{type(error).__name__}: {error}"
        seen.took_s = seen.took_s or time.monotonic() - began
    except RuntimeError as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.holds = holds(weights, 1, 2)
    seen.version = None if resharder is None else resharder.version
    (world if resharder is None else resharder).close()
    return seen


def second(case: Case, resharder: Resharder, given, into, rank: int) -> None:
    hurt = rank == case.rank
    match case.does:
        case "say another version" if hurt:
            resharder.run(given, into, version=7).wait()
        case "give no tensors" if hurt:
            resharder.run({}, {}).wait()
        case "read on" if hurt:
            with resharder.reading():
                resharder.run(given, into).wait()
        case "stay away" if hurt:
            time.sleep(case.timeout_s + 0.5)
        case _:
            resharder.run(given, into).wait()


def play_again(case: Case, rank: int, connect) -> str:
    """Reshard once more, those that are left; what became of it."""
    gone = [case.rank] if case.dies else []
    weights = filled(0) if rank > 0 else None
    given, into = ({"t0": filled(3)} if rank == 0 else {}), ({"t0": weights} if rank > 0 else {})
    try:
        world = connect([r for r in range(N_RANKS) if r not in gone])
        plan = relay_chain(N_RANKS, N_CHUNK, N_CHUNKS)
        if gone:
            resharder = Resharder.of_change(plan, gone=gone, transport=world, timeout_s=20.0, version=2)
        else:
            resharder = Resharder.of_plan(plan, world, timeout_s=20.0, version=2, verify=True)
        resharder.run(given, into).wait()
        resharder.close()
    except ShardrouteError as error:
        return f"{type(error).__name__}: {error}"
    if weights is not None and not (weights == 3).all():
        return f"wrong weights: {weights.tolist()}"
    return f"version {resharder.version}"


def over_gloo(case: Case, rank: int, folder: Path) -> Seen:
    import torch.distributed as dist

    from shardroute.executors.transports.gloo import GlooWorld

    files = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=N_RANKS)

    def connect(ranks: Sequence[int] | None) -> World:
        return GlooWorld(dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None), owned=True)

    seen = play(case, rank, connect)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    seen.again = play_again(case, rank, connect)
    dist.destroy_process_group()
    gc.collect()  # errors hold the frames that they came from, and those hold connections
    seen.files = len(os.listdir("/proc/self/fd")) - files
    seen.threads = threading.active_count() - threads
    return seen


def over_mpi(case: Case, rank: int) -> Seen:
    from mpi4py import MPI as library

    from shardroute.executors.transports.mpi import MpiWorld

    seen = play(case, rank, lambda _: MpiWorld(library.COMM_WORLD))
    seen.again = play_again(case, rank, lambda _: MpiWorld(library.COMM_WORLD))
    return seen


def tell(folder: Path, rank: int, run) -> None:
    """Leave what a rank saw, whole or not at all."""
    try:
        found: object = asdict(run())
    except BaseException:
        found = traceback.format_exc()
    (folder / f"{rank}.part").write_text(json.dumps(found))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")


def be_rank_of_mpi(folder: Path, names: Sequence[str]) -> None:
    from shardroute.executors.transports.mpi import shared_segments

    rank = int(os.environ["PMI_RANK"])
    for name in names:
        tell(folder / name, rank, lambda name=name: over_mpi(CASES[name], rank))
    if rank == 0:
        (folder / "segments").write_text("\n".join(shared_segments()))
    while not all((folder / names[-1] / f"{r}.json").exists() for r in range(N_RANKS)) or not (folder / "segments").exists():
        time.sleep(0.02)
    for segment in shared_segments():  # MPI can't end itself: what was dropped is still being received
        Path(segment).unlink(missing_ok=True)
    os._exit(0)


def fork_case(case: Case, folder: Path) -> dict[int, int]:
    """Start the ranks of a case; rank by process id."""
    pids = {}
    for rank in range(N_RANKS):
        pid = os.fork()
        if pid == 0:
            tell(folder, rank, lambda rank=rank: over_gloo(case, rank, folder))
            os._exit(0)
        pids[pid] = rank
    return pids


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def main() -> None:
    """Be a rank that mpiexec started, or fork the ranks of all cases, some cases at a time, and watch them end."""
    folder, transport, *names = Path(sys.argv[1]), *sys.argv[2:]
    if transport == MPI:
        be_rank_of_mpi(folder, names)
    import torch.distributed  # once, before ranks are forked

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    waiting, running = list(names), {}
    stopped_at: dict[int, float] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            name = waiting.pop(0)
            running[name] = (fork_case(CASES[name], folder / name), time.monotonic())
        for name, (pids, began) in list(running.items()):
            case = CASES[name]
            for pid, rank in list(pids.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del pids[pid]
                elif state_of(pid) == "T":
                    since = stopped_at.setdefault(pid, time.monotonic())
                    others_ended = len(pids) == 1
                    if case.does == "stop for a while" and time.monotonic() > since + LATE_S:
                        os.kill(pid, signal.SIGCONT)
                    elif others_ended:  # which is what this is about; nobody else would end it
                        os.kill(pid, signal.SIGKILL)
                elif time.monotonic() > began + WATCHDOG_S:
                    (folder / name / f"{rank}.json").write_text(json.dumps("hung"))
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                del running[name]
        time.sleep(0.01)


if __name__ == "__main__":
    main()
