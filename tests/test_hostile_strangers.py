"""Who isn't a rank of the run: strangers who knock at the hub, who talk in between, who answer in its place."""

import socket
import stat
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shardroute.executors.launching.hubs import Hub, listen, meet
from shardroute.executors.launching.introductions import introduced
from shardroute.executors.launching.launched import agree_on
from shardroute.executors.launching.tokens import VARIABLE, token_of
from shardroute.executors.transports.seam import Deadline, Place
from shardroute.topologies.errors import InputError, RunError

TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def start(run) -> tuple[threading.Thread, list[object]]:
    """What `run` gives or raises, by and by."""
    found: list[object] = []

    def keep() -> None:
        try:
            found.append(run())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=keep)
    thread.start()
    return thread, found


def knock(port: int) -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5.0)
        except OSError:
            time.sleep(0.02)
    raise AssertionError("nobody listens")


def test_a_stranger_who_knocks_first_neither_joins_nor_delays_the_ranks(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    port = free_port()
    place = f"tcp://127.0.0.1:{port}"
    thread, found = start(lambda: meet(Place(0, 2, place), Deadline.after(20.0)))
    silent, gone, rude = knock(port), knock(port), knock(port)
    gone.close()
    rude.recv(32)
    rude.sendall(struct.pack("<8sI", b"shardhb2", 1) + bytes(64))  # as rank 1, with a proof of nothing

    began = time.monotonic()
    rank = meet(Place(1, 2, place), Deadline.after(20.0))
    thread.join()

    assert time.monotonic() - began < 8.0
    assert isinstance(found[0], Hub)
    assert rude.recv(1) == b""  # shown out
    for each in (rank, found[0]):
        each.close()
    silent.close()
    rude.close()


def test_a_rank_with_another_token_is_told_so_and_so_is_rank_0(monkeypatch) -> None:
    port = free_port()
    monkeypatch.setenv(VARIABLE, TOKEN)
    thread, found = start(lambda: meet(Place(0, 2, f"tcp://127.0.0.1:{port}"), Deadline.after(3.0)))
    knock(port).close()  # it listens, so it has read its token
    monkeypatch.setenv(VARIABLE, OTHER)

    with pytest.raises(RunError, match=rf"who answers there has another token \({VARIABLE} must be the same on all ranks\)"):
        meet(Place(1, 2, f"tcp://127.0.0.1:{port}"), Deadline.after(20.0))
    thread.join()

    assert "waited for rank 1" in str(found[0])
    assert "that didn't have its token" in str(found[0])


def test_who_answers_in_the_hubs_place_learns_no_token_and_is_not_believed() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    mine = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    theirs.sendall(bytes(32))
    thread, heard = start(lambda: (theirs.recv(4096), theirs.sendall(bytes(32)))[0])

    with pytest.raises(OSError, match="another token"):
        introduced(mine, 1, TOKEN.encode())
    thread.join()

    assert TOKEN.encode() not in heard[0]
    for each in (server, mine, theirs):
        each.close()


def two_ranks() -> tuple[Hub, Hub]:
    rendezvous, server = listen()
    with ThreadPoolExecutor(2) as pool:
        hubs = list(pool.map(lambda rank: meet(Place(rank, 2, rendezvous), Deadline.after(10.0)), range(2)))
    server.detach()
    return hubs[0], hubs[1]


def exchange_both(hubs: tuple[Hub, Hub]) -> list[object]:
    threads = [start(lambda hub=hub: hub.exchange(b"x", Deadline.after(1.0))) for hub in hubs]
    for thread, _ in threads:
        thread.join()
    return [found[0] for _, found in threads]


@pytest.mark.parametrize("put_in", [b"\x00" * 8 + b"\x00" * 32, b"\x01" + b"\x00" * 39 + b"y"])
def test_a_message_that_is_put_in_is_noticed(put_in: bytes) -> None:
    hubs = two_ranks()
    assert exchange_both(hubs) == [[b"x", b"x"]] * 2
    hubs[1]._peers[0][0].sendall(put_in)  # as one who had broken into the connection

    found = exchange_both(hubs)

    assert "a message of the control plane was changed or put in on its way" in str(found[0])
    for hub in hubs:
        hub.close()


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:29500", "tcp://[2001:db8::1]:29500", "tcp://node07:29500"])
@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_token_ranks_meet_nowhere_that_others_can_reach(monkeypatch, address: str, rank: int) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)

    with pytest.raises(InputError, match=rf"others can reach .* too: set a secret .* `export {VARIABLE}="):
        meet(Place(rank, 2, address), Deadline.after(5.0))


def test_rank_0_listens_at_the_named_address_alone(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    port = free_port()
    thread, found = start(lambda: meet(Place(0, 2, f"tcp://127.0.0.1:{port}"), Deadline.after(0.7)))
    knock(port).close()

    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=1.0)
    thread.join()

    assert isinstance(found[0], RunError)
    with pytest.raises(RunError, match=r"rank 0 can't listen at 192\.0\.2\.1:29500, which must be an address of its own host"):
        meet(Place(0, 2, "tcp://192.0.2.1:29500"), Deadline.after(2.0))


def test_the_file_where_ranks_meet_is_their_owners_alone(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        meet(Place(0, 2, f"file://{tmp_path}/r"), Deadline.after(0.2))

    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o600


def test_a_token_that_could_be_guessed_is_refused() -> None:
    assert token_of({}) == b""
    assert token_of({VARIABLE: TOKEN}) == TOKEN.encode()
    with pytest.raises(InputError, match=f"{VARIABLE} has 4 characters; expected 16 or more"):
        token_of({VARIABLE: "1234"})


class World:
    """Ranks in threads whose library lets anyone in; `tokens` is what each has."""

    key = 0

    def __init__(self, rank: int, size: int, board: dict[int, bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def exchange(self, payload: bytes, deadline: Deadline) -> list[bytes]:
        self._board[self.rank] = payload
        self._barrier.wait(5.0)
        found = [self._board[rank] for rank in range(self.size)]
        self._barrier.wait(5.0)
        return found


def agree(monkeypatch, tokens: list[bytes]) -> list[object]:
    barrier, board = threading.Barrier(len(tokens)), dict[int, bytes]()
    by_thread = threading.local()
    monkeypatch.setattr("shardroute.executors.launching.launched.token_of", lambda: by_thread.token)

    def run(rank: int) -> object:
        by_thread.token = tokens[rank]
        return agree_on(World(rank, len(tokens), board, barrier), "d" * 64, Deadline.after(5.0))  # type: ignore[arg-type]

    threads = [start(lambda rank=rank: run(rank)) for rank in range(len(tokens))]
    for thread, _ in threads:
        thread.join()
    return [found[0] for _, found in threads]


@pytest.mark.parametrize("theirs", [b"", OTHER.encode()])
def test_a_rank_that_a_library_let_in_without_the_token_is_named_before_a_byte_moves(monkeypatch, theirs: bytes) -> None:
    found = agree(monkeypatch, [TOKEN.encode(), TOKEN.encode(), theirs])

    assert [isinstance(each, RunError) for each in found] == [True] * 3
    assert f"rank 2 couldn't prove to have the others' {VARIABLE}" in str(found[0])
    assert "no byte was moved" in str(found[2])


@pytest.mark.parametrize("token", [b"", TOKEN.encode()])
def test_ranks_of_one_token_or_of_none_agree(monkeypatch, token: bytes) -> None:
    assert agree(monkeypatch, [token] * 3) == [None] * 3
