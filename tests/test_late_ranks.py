"""Ranks that are late, or die, while others wait for what they bring to a sum, and ranks that never come."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_doubles import need_asked
from late_ranks import ALLOWED_S, HURT, N_RANKS

from shardroute.executors.launching.launches import file_of_host
from shardroute.executors.launching.mpiexec import find_mpiexec
from shardroute.executors.launching.presences import come, missing_ranks
from shardroute.executors.transports.libraries import load_library
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.executors.transports.stores import LastWords, open_store
from shardroute.topologies.errors import InputError, RunError

HERE = Path(__file__).parent
GONE = "gone"
LATE_S = 0.5  # by which a rank goes on after the deadline
AT = r"at step 0 \(all-reduce of 1 piece, 16.4 kB, the 4 ranks of group 0\)"
OVER = f"when the {ALLOWED_S[signal.SIGSTOP]:g} s that --timeout allows were over"


def need_library(transport: str) -> None:
    """Skip the test where its library is missing."""
    try:
        load_library(transport)
    except InputError as error:
        pytest.skip(str(error))


def errors_of(
    transport: str, folder: Path, number: signal.Signals, *, resumes: bool = True, hosts: str = ""
) -> dict[int, str]:
    """What ranks say of which one gets a signal in the middle of the sum; if that stops it, it goes on after the deadline, unless
    it never does. `hosts` are names that mpiexec takes for hosts, all of which are this one.
    """
    need_library(transport)
    launcher = mpiexec(hosts) if transport == "mpi" else []
    command = [*launcher, sys.executable, str(HERE / "late_ranks.py"), str(folder), transport, number.name]
    environment = os.environ | {"PYTHONPATH": str(HERE), "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    if number == signal.SIGSTOP and resumes:
        hurt = pid_of(folder, HURT)
        while state_of(hurt) not in ("T", GONE):
            time.sleep(0.05)
        time.sleep(ALLOWED_S[number] + LATE_S)
        with suppress(ProcessLookupError):
            os.kill(hurt, signal.SIGCONT)
    process.wait(60)
    files = {rank: folder / f"{rank}.json" for rank in range(N_RANKS)}
    return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}


def mpiexec(hosts: str) -> list[str]:
    """The launcher of four ranks, on one host or two by each name of several."""
    return [find_mpiexec(), *(["-launcher", "fork", "-hosts", hosts, "-ppn", "2"] if hosts else []), "-n", str(N_RANKS)]


def pid_of(folder: Path, rank: int) -> int:
    path = folder / f"{rank}.pid"
    while not path.exists() or not path.read_text():
        time.sleep(0.05)
    return int(path.read_text())


def state_of(pid: int) -> str:
    """The letter by which Linux says what a process does."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return GONE


def test_a_rank_that_is_late_in_a_sum_over_gloo_is_named_and_says_itself_where_it_was(tmp_path: Path) -> None:
    errors = errors_of("gloo", tmp_path, signal.SIGSTOP)

    assert sorted(errors) == list(range(N_RANKS))
    waiting = {rank: re.fullmatch(rf"rank {rank} {AT}, waiting for rank (\d), {OVER}", errors[rank]) for rank in (0, 2, 3)}
    assert any(found and int(found[1]) == HURT for found in waiting.values()), errors
    for rank, found in waiting.items():  # or it heard of the rank from one that had given up
        assert found or re.match(rf"rank {rank} {AT}: rank \d gave up: .*, waiting for rank {HURT}, {OVER}", errors[rank]), errors
    assert re.match(rf"rank {HURT} {AT}(: rank \d gave up: rank \d {AT})?, waiting for rank \d, {OVER}", errors[HURT]), errors


@pytest.mark.faults
def test_a_rank_that_is_late_in_a_sum_over_mpi_says_itself_where_it_was_before_the_run_ends(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need_asked(request, in_gate=False)
    errors = errors_of("mpi", tmp_path, signal.SIGSTOP)

    assert sorted(errors) == list(range(N_RANKS))
    for rank, error in errors.items():
        assert re.fullmatch(rf"rank {rank} {AT}, waiting for rank \d, {OVER}", error), error
    assert any(f"waiting for rank {HURT}, " in error for error in errors.values())


@pytest.mark.faults
@pytest.mark.parametrize("hosts", ["", "one,other"], ids=["one host", "two hosts"])
def test_a_rank_that_stays_stopped_over_mpi_is_named_by_all_others_with_its_step_and_the_run_ends(
    hosts: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need_asked(request, in_gate=False)
    errors = errors_of("mpi", tmp_path, signal.SIGSTOP, resumes=False, hosts=hosts)

    assert sorted(errors) == [rank for rank in range(N_RANKS) if rank != HURT]
    for rank, error in errors.items():
        seen = rf"rank {HURT} is stopped by a signal {AT}"
        assert re.fullmatch(rf"rank {rank} {AT}, waiting for rank \d, {OVER}; {seen}", error), error
    assert state_of(pid_of(tmp_path, HURT)) == GONE


@pytest.mark.faults
def test_a_rank_that_never_comes_to_mpi_is_named_though_it_is_on_another_host(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need_asked(request, in_gate=False)
    need_library("mpi")
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    segments = set(Path("/dev/shm").glob("mpich_*"))
    program = (
        "import sys; from shardroute.executors.launching.launches import find_place; "
        "from shardroute.executors.transports.mpi import connect; from shardroute.executors.transports.seam import Deadline; "
        f"import time; place = find_place(rendezvous={where!r}); "
        "time.sleep(8) if place.rank == 2 else connect(place, Deadline.after(4))"
    )

    command = [*mpiexec("one,other"), sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stderr

    late = rf"rank 2 didn't come to {where} within the 4 s that --timeout allows"
    for rank in (0, 1, 3):
        assert f"error: rank {rank} couldn't join the 4 ranks of the run: {late}\n" in said
    assert set(Path("/dev/shm").glob("mpich_*")) <= segments


def test_all_that_lose_a_rank_over_gloo_name_it_and_not_a_neighbour_that_gave_up(tmp_path: Path) -> None:
    errors = errors_of("gloo", tmp_path, signal.SIGKILL)

    assert sorted(errors) == [rank for rank in range(N_RANKS) if rank != HURT]
    lost = rf"rank {HURT} is lost: its connection (closed|failed) \(torch says: [^()]*\)"
    for rank, error in errors.items():
        assert re.fullmatch(rf"rank {rank} {AT}: (rank \d gave up: rank \d {AT}: )?{lost}", error), error


def test_last_words_are_found_by_name_and_nothing_is_waited_for() -> None:
    class Kept(dict):
        def set(self, key: str, value: str) -> None:
            self[key] = value.encode()

        def check(self, keys: list[str]) -> bool:
            return all(key in self for key in keys)

    store = Kept()
    LastWords(store, "one").leave(3, "rank 3 gave up: it is tired")

    assert LastWords(store, "one").of(3) == "rank 3 gave up: it is tired"
    assert LastWords(store, "one").of(2) == LastWords(store, "two").of(3) == LastWords(None, "").of(3) == ""


def test_a_store_that_does_not_answer_holds_up_nobody() -> None:
    goes_on = threading.Event()

    class Stopped:
        def check(self, keys: list[str]) -> bool:
            goes_on.wait(60)
            return False

    began = time.monotonic()

    assert LastWords(Stopped(), "one").of(1) == ""
    assert time.monotonic() - began < 10
    goes_on.set()


def test_where_the_store_is_gone_its_keeper_is_named() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer")

    words = LastWords(Gone(), "run", keeper=0)

    assert words.of(2).startswith("rank 0 is lost, and rank 2: ")
    assert words.of(0) == LastWords(Gone(), "run").of(2) == ""


def test_ranks_of_one_launcher_see_who_has_not_come() -> None:
    place = Place(1, 4, file_of_host())

    with come(place) as here:
        assert here is not None
        assert missing_ranks(place) == [0, 2, 3]

    assert missing_ranks(place) == [0, 1, 2, 3]
    assert come(replace(place, rendezvous="tcp://elsewhere:1")) is None


def test_a_rank_that_nobody_listens_to_gives_up_at_its_deadline() -> None:
    pytest.importorskip("torch", reason="torch is not installed (pip install 'shardroute[torch]')")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()

    with pytest.raises(RunError, match=rf"rank 1 couldn't join .* tcp://127.0.0.1:{port} within the 1.5 s that --timeout"):
        open_store(Place(1, 2, f"tcp://127.0.0.1:{port}"), Deadline.after(1.5))

    assert 1.4 < time.monotonic() - began < 4
