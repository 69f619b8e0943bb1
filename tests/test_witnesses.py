"""Witnesses: ranks hear of each other beside their library, and one that is held or stopped is spoken for."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gpu_doubles import need_asked
from hypothesis import given
from hypothesis import strategies as st

from shardroute.executors.launching.accounts import Accounts, Stage
from shardroute.executors.launching.launches import file_of_host
from shardroute.executors.launching.witnesses import GRACE_S, Witness
from shardroute.executors.transports.seam import Deadline, Place

N_RANKS = 4
WORDS = "rank 1 gave up: it is tired"
HERE = "here"  # where ranks meet that one launcher has started
PATIENCE_S = 10.0  # on a machine that others use too

Do = Callable[[Witness, int], object]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def play(folder: Path, do: Do, rendezvous: str, *, absent: int = -1, deadline_s: float = 30.0, tokens: str = "") -> list[int]:
    """Fork ranks that have witnesses and do something; how each ended, as exit codes. FOLDER/r.json has what it came to,
    FOLDER/r.err what was said. `tokens`: the token of each rank that has one, a letter each.
    """
    pids = []
    for rank in range(N_RANKS):
        pid = os.fork()
        if pid == 0:
            with open(folder / f"{rank}.err", "wb") as said:
                os.dup2(said.fileno(), 2)
            try:
                if rank == absent:
                    os._exit(0)
                if tokens:
                    os.environ["SHARDROUTE_TOKEN"] = tokens[rank] * 32
                place = Place(rank, N_RANKS, file_of_host() if rendezvous == HERE else rendezvous)
                (folder / f"{rank}.at").write_text(place.rendezvous.removeprefix("file://"))
                witness = Witness(place, Deadline.after(deadline_s), None, lambda process: None)
                (folder / f"{rank}.json").write_text(json.dumps(do(witness, rank)))
                witness.close()
            finally:
                os._exit(0)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def found(folder: Path, rank: int) -> object:
    return json.loads((folder / f"{rank}.json").read_text())


def until(ask: Callable[[], str]) -> str:
    """What is asked for, once it is something."""
    until_s = time.monotonic() + PATIENCE_S
    while not (answer := ask()) and time.monotonic() < until_s:
        time.sleep(0.01)
    return answer


def hear_of_first(folder: Path, witness: Witness, rank: int) -> None:
    """What MPI does for ranks that don't know where to meet: all are told where rank 0's witness is."""
    path = folder / "where"
    if rank == 0:
        path.with_suffix(".part").write_bytes(witness.where)
        path.with_suffix(".part").rename(path)
    else:
        witness.tell_where(until(lambda: path.read_text() if path.exists() else "").encode())


@pytest.mark.parametrize("meets", ["on this host", "at an address", "where they are told"])
def test_why_a_rank_fails_is_heard_by_all_others_and_none_is_waited_for_that_has_spoken(meets: str, tmp_path: Path) -> None:
    where = {"on this host": HERE, "at an address": f"tcp://127.0.0.1:{free_port()}"}.get(meets, "")

    def do(witness: Witness, rank: int) -> object:
        witness.started()
        if not where:
            hear_of_first(tmp_path, witness, rank)
        if rank == 1:
            witness.fail(WORDS)
            heard = WORDS
        else:
            heard = until(witness.failed)
            witness.fail(heard)
        silent = witness.silent()
        witness.leave()
        return heard, len(silent)

    began = time.monotonic()
    codes = play(tmp_path, do, where)

    assert codes == [0] * N_RANKS
    assert [found(tmp_path, rank) for rank in range(N_RANKS)] == [[WORDS, 0]] * N_RANKS
    assert time.monotonic() - began < PATIENCE_S
    assert all((tmp_path / f"{rank}.err").read_bytes() == b"" for rank in range(N_RANKS))
    if where == HERE:
        (at,) = {(tmp_path / f"{rank}.at").read_text() for rank in range(N_RANKS)}
        assert not Path(at).exists()


@pytest.mark.faults
def test_a_rank_that_is_stopped_is_told_of_with_its_step_and_ended_by_its_witness(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need_asked(request, in_gate=False)

    def do(witness: Witness, rank: int) -> object:
        witness.started()
        witness.at_step[rank] = 7 + rank
        time.sleep(0.5)  # for all to be heard of
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        witness.fail(f"rank {rank} gave up: it waited")
        silent = witness.silent()
        time.sleep(1.0)  # till the witness of the stopped one has seen that nobody resumes it
        return [[s.rank, s.step, s.is_stopped, s.is_gone] for s in silent]

    began = time.monotonic()
    codes = play(tmp_path, do, f"tcp://127.0.0.1:{free_port()}")

    assert codes == [0, 0, -signal.SIGKILL, 0]
    assert [found(tmp_path, rank) for rank in (0, 1, 3)] == [[[2, 9, True, False]]] * 3
    assert GRACE_S < time.monotonic() - began < GRACE_S + PATIENCE_S


def test_who_does_not_come_is_named_by_all_witnesses_and_their_ranks_end(tmp_path: Path) -> None:
    where = f"tcp://127.0.0.1:{free_port()}"

    codes = play(tmp_path, lambda witness, rank: time.sleep(60), where, absent=2, deadline_s=1.0)

    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0, -signal.SIGKILL]
    who = f"rank 2 didn't come to {where} within the 1 s that --timeout allows"
    for rank in (0, 1, 3):
        said = (tmp_path / f"{rank}.err").read_text()
        assert said == f"error: rank {rank} couldn't join the 4 ranks of the run: {who}\n"


@pytest.mark.faults
@pytest.mark.parametrize(
    ("rendezvous", "absent", "why"),
    [
        ("tcp://127.0.0.1:{port}", 0, r"rank 0's host can't be reached at tcp://127.0.0.1:\d+: Connection refused"),
        ("tcp://example.invalid:{port}", 0, r"others can reach example.invalid too: set a secret that all ranks know, .*"),
        ("", 3, "--rendezvous tcp://HOST:PORT, HOST being rank 0's, lets ranks of several hosts say who"),
    ],
    ids=["no rank 0", "no token", "nowhere to meet"],
)
def test_where_nobody_can_be_heard_witnesses_say_why_they_name_nobody(
    rendezvous: str, absent: int, why: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need_asked(request, in_gate=not rendezvous)
    codes = play(
        tmp_path, lambda witness, rank: time.sleep(60), rendezvous.format(port=free_port()), absent=absent, deadline_s=0.5
    )

    assert codes.count(-signal.SIGKILL) == N_RANKS - 1
    late = rf"not all of them came within the 0.5 s that --timeout allows \({why}\)\n"
    for rank in set(range(N_RANKS)) - {absent}:
        assert re.fullmatch(rf"error: rank {rank} couldn't .*: {late}", (tmp_path / f"{rank}.err").read_text())


def test_a_witness_with_another_token_is_not_heard(tmp_path: Path) -> None:
    def do(witness: Witness, rank: int) -> object:
        witness.started()
        if rank == 3:
            witness.fail("rank 3 gave up: it is a stranger")
        time.sleep(1.0)
        return witness.failed()

    play(tmp_path, do, f"tcp://127.0.0.1:{free_port()}", tokens="aaab")

    assert [found(tmp_path, rank) for rank in range(N_RANKS)] == [""] * N_RANKS


def test_a_witness_ends_with_its_rank_however_that_ends(tmp_path: Path) -> None:
    def do(witness: Witness, rank: int) -> object:
        witness.started()
        (tmp_path / f"{rank}.pid").write_text(str(witness._process))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            os._exit(3)
        return None

    codes = play(tmp_path, do, f"tcp://127.0.0.1:{free_port()}")

    assert codes == [0, -signal.SIGKILL, 3, 0]
    left = {int((tmp_path / f"{rank}.pid").read_text()) for rank in range(N_RANKS)}
    until_s = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < until_s:
        left = {pid for pid in left if runs(pid)}
        time.sleep(0.02)
    assert left == set()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@given(
    stage=st.sampled_from(Stage), step=st.integers(-1, 2**62), stopped=st.booleans(), text=st.text(max_size=400),
    rank=st.integers(0, 4),
)  # fmt: skip
def test_accounts_arrive_as_they_were_given_and_only_of_ranks_that_may_give_them(
    stage: Stage, step: int, stopped: bool, text: str, rank: int
) -> None:
    mine, theirs = Accounts.blank(5), Accounts.blank(5)
    mine.fail(rank, text)
    mine.stage[rank], mine.step[rank], mine.stopped[rank] = stage, step, stopped
    rows = b"".join(map(mine.row, range(5)))

    refused = theirs.take(rows, np.arange(5) > 5)
    taken = theirs.take(rows, np.arange(5) == rank)

    assert (refused, taken) == ([], [rank])
    assert (theirs.stage[rank], theirs.step[rank], theirs.stopped[rank]) == (stage, step, stopped)
    said = text.encode()[:1024].decode(errors="replace").rstrip("\0")
    assert theirs.text(rank) == (said if stage >= Stage.FAILED else "")
    assert (np.delete(theirs.stage, rank) == Stage.ABSENT).all()


@given(st.binary(max_size=80))
def test_what_is_no_account_is_refused(rows: bytes) -> None:
    accounts = Accounts.blank(2)

    try:
        taken = accounts.take(rows, np.array([False, True]))
    except ValueError:
        taken = []

    assert accounts.stage[0] == Stage.ABSENT
    assert (accounts.stage[1] == Stage.ABSENT) or taken
