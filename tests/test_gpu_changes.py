"""Ranks that go and come on GPU transports, over doubles of their libraries; and what is done to get a communicator, by NCCL."""

import json
import re
from pathlib import Path

import pytest
from gpu_doubles import need, need_asked, run_over_doubles
from hypothesis import given
from hypothesis import strategies as st

from shardroute.executors.transports.communicators import Had, Way, ways_to

MAIN = Path(__file__).parent / "doubles" / "changes_main.py"
N_RANKS, DIES, LEAVES = 7, 1, 5
NEW, SHRUNK, GROWN = (f"{how} communicator" for how in ("new", "shrunk", "grown"))
CASES = {  # what must be done to get a communicator of those that are left, and then with the one who comes
    "nccl": (("cuda", "nccl"), [SHRUNK], [GROWN]),
    "nccl-new": (("cuda", "nccl"), [NEW], [NEW]),
    "nccl-late": (("cuda", "nccl"), [NEW], [GROWN]),
    "nccl-put": (("cuda", "nccl"), [SHRUNK], [GROWN]),
    "torch-cpu": (("torch",), [], []),
}


@pytest.mark.faults
@pytest.mark.parametrize("transport", CASES)
def test_after_a_death_and_a_join_every_rank_has_its_weights_and_errors_name_ranks_of_the_plan(
    transport: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    need_asked(request, transport == "nccl")
    modules, shrunk, grown = CASES[transport]
    need(*modules)

    done = run_over_doubles(str(MAIN), str(tmp_path), transport, FAKECUDA_JITTER_US="200", GLOO_SOCKET_IFNAME="lo")

    told = read(tmp_path, {*range(N_RANKS)} - {DIES})
    assert all(isinstance(found, dict) for found in told.values()), (told, done.stderr[-2000:])
    assert f"rank {DIES}" in told[0]["lost"]
    assert re.search(f"rank {LEAVES} is lost|waiting for rank {LEAVES},", told[0]["left"])
    for rank, found in told.items():
        assert found["grown"] == grown
        assert rank == N_RANKS - 1 or found["shrunk"] == shrunk
        assert f"rank {rank} " in found.get("left", f"rank {rank} ")


@pytest.mark.faults
def test_nvshmem_is_started_once_a_process_and_goes_on_in_new_ones(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    need_asked(request, False)
    need("cuda", "nvshmem")

    done = run_over_doubles(str(MAIN), str(tmp_path), "nvshmem", FAKECUDA_JITTER_US="200", FAKENVSHMEM_DOMAIN="2")

    there = {*range(N_RANKS)} - {DIES}
    told, again = read(tmp_path, there), read(tmp_path / "again", there)
    assert all(isinstance(found, dict) for found in (*told.values(), *again.values())), (told, again, done.stderr[-2000:])
    for rank in there - {N_RANKS - 1}:
        assert "has used NVSHMEM before in its process" in told[rank]["refused"]
    assert re.search(f"rank {LEAVES} is lost|waiting for rank {LEAVES},", again[0]["left"])


def read(folder: Path, ranks: set[int]) -> dict[int, dict[str, object]]:
    """What each of these ranks left."""
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in sorted(ranks)}


def had(rank: int, size: int = 4, name: str = "a", shrinks: bool = True, grows: bool = True) -> Had:
    return Had(name, rank, size, shrinks, grows)


def came(grows: bool = True) -> Had:
    return Had("", 0, 0, True, grows)


@pytest.mark.parametrize(
    ("told", "ways"),
    [
        ([came(), came()], [Way.NEW]),
        ([had(0), had(2), had(3)], [Way.SHRINK]),
        ([had(0), had(1), had(2), had(3), came()], [Way.GROW]),
        ([had(1), had(3), came()], [Way.SHRINK, Way.GROW]),
        ([had(0), had(1), had(2), had(3)], []),
        ([had(0), had(2, shrinks=False), had(3)], [Way.NEW]),
        ([had(0), had(1), had(2), had(3), came(grows=False)], [Way.NEW]),
        ([came(), had(0), had(1), had(2), had(3)], [Way.NEW]),  # NCCL puts those who come behind the others
        ([had(2), had(0), had(3)], [Way.NEW]),
        ([had(0), had(1), had(2, name="b"), had(3)], [Way.NEW]),
        ([had(0), had(1), came(), had(3)], [Way.NEW]),  # one whose communicator has been aborted
    ],
)
def test_a_communicator_serves_again_where_its_ranks_are_the_first_in_their_order(told: list[Had], ways: list[Way]) -> None:
    assert list(ways_to(told)) == ways


@given(st.permutations(range(5)), st.integers(0, 5), st.integers(0, 3), st.booleans(), st.booleans())
def test_what_is_kept_of_a_communicator_numbers_its_ranks_as_they_are_numbered_now(order, n, n_came, shrinks, grows) -> None:
    stay = order[:n]

    ways = ways_to([*(had(rank, 5, "a", shrinks, grows) for rank in stay), *(came(grows) for _ in range(n_came))])

    if list(ways) == [Way.NEW]:
        return
    assert sorted(stay) == list(stay)
    assert (Way.SHRINK in ways, Way.GROW in ways) == (n < 5, n_came > 0)
    assert shrinks or n == 5
    assert grows or not n_came
