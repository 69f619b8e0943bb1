import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.executors.gpus.local_devices import local_device
from shardroute.executors.launching.hubs import Hub, listen, meet
from shardroute.executors.transports.seam import Deadline, LateError, Place
from shardroute.topologies.errors import InputError, RunError


def meet_all(rendezvous: str, size: int, timeout_s: float = 10.0) -> list[Hub]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: meet(Place(rank, size, rendezvous), Deadline.after(timeout_s)), range(size)))


def exchange_all(hubs: list[Hub], payloads: list[bytes]) -> list[list[bytes]]:
    with ThreadPoolExecutor(len(hubs)) as pool:
        return list(pool.map(lambda pair: pair[0].exchange(pair[1], Deadline.after(10.0)), zip(hubs, payloads, strict=True)))


def close_all(hubs: list[Hub]) -> None:
    for hub in hubs:
        hub.close()


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
@settings(max_examples=15, deadline=None)
def test_every_rank_gets_what_all_gave_by_rank(payloads: list[bytes]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    hubs = meet_all(f"tcp://127.0.0.1:{port}", len(payloads))

    found = exchange_all(hubs, payloads)

    assert found == [payloads] * len(payloads)
    close_all(hubs)


def test_ranks_meet_at_a_file_though_an_old_one_lies_there(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("elsewhere 1")

    hubs = meet_all(f"file://{tmp_path}/r", 3)

    assert exchange_all(hubs, [b"a", b"", b"c"]) == [[b"a", b"", b"c"]] * 3
    close_all(hubs)


def test_a_socket_that_was_opened_before_ranks_were_forked_is_where_they_meet() -> None:
    rendezvous, server = listen()

    hubs = meet_all(rendezvous, 2)

    assert exchange_all(hubs, [b"x", b"y"])[1] == [b"x", b"y"]
    close_all(hubs)
    server.detach()  # rank 0 has closed it


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rank 0 couldn't join the 2 ranks of the run: it waited for rank 1 until the deadline"):
        meet(Place(0, 2, f"file://{tmp_path}/r"), Deadline.after(0.3))


def test_a_rank_that_says_nothing_is_late_and_one_that_is_gone_is_lost(tmp_path: Path) -> None:
    hubs = meet_all(f"file://{tmp_path}/r", 2)

    with pytest.raises(LateError) as late:
        hubs[0].exchange(b"", Deadline.after(0.2))
    hubs[1].close()
    with pytest.raises(RunError, match="rank 1 is lost: it closed its connection"):
        hubs[0].exchange(b"", Deadline.after(10.0))

    assert late.value.peers == (1,)
    hubs[0].close()


def test_ranks_go_by_the_names_that_they_were_given(tmp_path: Path) -> None:
    hubs = meet_all(f"file://{tmp_path}/r", 2)
    for hub in hubs:
        hub.rename([3, 7])

    with pytest.raises(LateError) as late:
        hubs[0].exchange(b"", Deadline.after(0.2))
    hubs[0].close()
    with pytest.raises(RunError, match="rank 3 is lost: it closed its connection"):
        hubs[1].exchange(b"", Deadline.after(10.0))

    assert late.value.peers == (7,)
    hubs[1].close()


@pytest.mark.parametrize("where", ["tcp://nowhere", "ring://a:1", "tcp://:x"])
def test_a_rendezvous_that_is_none_is_refused(where: str) -> None:
    with pytest.raises(InputError, match="expected tcp://HOST:PORT or file:///PATH"):
        meet(Place(1, 2, where), Deadline.after(1.0))


def find_devices(seen: list[list[str]], tmp_path: Path) -> list[object]:
    hubs, found = meet_all(f"file://{tmp_path}/r", len(seen)), list[object](seen)

    def find(rank: int) -> None:
        try:
            found[rank] = local_device(hubs[rank], seen[rank], Deadline.after(10.0))  # type: ignore[arg-type]  # exchange is all it calls
        except InputError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=find, args=(rank,)) for rank in range(len(seen))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close_all(hubs)
    return found


@pytest.mark.parametrize(
    ("seen", "taken"),
    [
        ([["a", "b", "c"]] * 3, [0, 1, 2]),
        ([["c"], ["a"], ["b"]], [0, 0, 0]),  # a launcher shows each rank its own
        ([["a", "b"], ["b", "a"]], [0, 0]),
        ([["a", "b", "c"], ["c"], ["a"]], [1, 0, 0]),  # who sees one keeps it, whoever comes before
    ],
)
def test_ranks_of_a_host_take_one_gpu_each(seen: list[list[str]], taken: list[int], tmp_path: Path) -> None:
    assert find_devices(seen, tmp_path) == taken


def test_more_ranks_than_gpus_are_refused_on_all_ranks(tmp_path: Path) -> None:
    found = find_devices([["a"], ["a"]], tmp_path)

    assert all("has 2 ranks and 1 GPUs that rank 1 can use" in str(text) for text in found)
