"""Roll calls among threads over a wire of queues: what is told arrives, and whoever is missing is named on every rank."""

import queue
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.executors.transports.roll_calls import RollCall
from shardroute.executors.transports.seam import Deadline, LateError
from shardroute.topologies.errors import RunError

TAG = 7


class Queues:
    """A Wire whose messages are copies in queues, one a pair and tag."""

    def __init__(self, rank: int, boxes: dict[tuple[int, int], "queue.Queue[bytes]"]) -> None:
        self._rank, self._boxes = rank, boxes

    def send(self, data, to, tag):
        self._boxes[self._rank, to].put(data.tobytes())
        return None

    def receive(self, data, source, tag):
        return data, source

    def wait(self, handle, deadline):
        if handle is None:
            return
        data, source = handle
        try:
            found = self._boxes[source, self._rank].get(timeout=deadline.limit_s)
        except queue.Empty:
            raise LateError() from None
        data[...] = np.frombuffer(found, np.uint8)


def call(ranks: list[int], do: Callable[[int, RollCall], object]) -> dict[int, object]:
    """What each rank's part gives or raises."""
    boxes = {(a, b): queue.Queue() for a in ranks for b in ranks}
    found: dict[int, object] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = do(rank, RollCall(Queues(rank, boxes), rank, ranks, TAG))
        except (LateError, RunError) as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=9), min_size=1, max_size=5), st.integers(0, 3))
def test_every_rank_hears_what_each_has_told_in_their_order(payloads: list[bytes], gap: int) -> None:
    ranks = [k * (gap + 1) for k in range(len(payloads))]

    def tell(rank: int, calls: RollCall) -> list[bytes]:
        mine, deadline = payloads[ranks.index(rank)], Deadline.after(10.0)
        return calls.gather(mine, calls.lengths(len(mine), deadline), deadline)

    assert call(ranks, tell) == dict.fromkeys(ranks, payloads)


@pytest.mark.parametrize("missing", [1, 3])
def test_a_rank_that_does_not_answer_is_named_on_all_others(missing: int) -> None:
    found = call([0, 1, 3], lambda rank, calls: None if rank == missing else calls.lengths(0, Deadline.after(0.4)))

    for rank in {0, 1, 3} - {missing}:
        assert isinstance(found[rank], LateError)
        assert found[rank].peers == (missing,)


def test_the_first_rank_is_missed_by_its_name() -> None:
    found = call([2, 4], lambda rank, calls: None if rank == 2 else calls.lengths(0, Deadline.after(0.2)))

    assert found[4].peers == (2,)


@pytest.mark.parametrize("quitter", [0, 2])
def test_who_gives_up_is_heard_with_its_words_by_whoever_calls(quitter: int) -> None:
    def answer(rank: int, calls: RollCall) -> object:
        return calls.give_up("no more paper") if rank == quitter else calls.lengths(0, Deadline.after(5.0))

    found = call([0, 1, 2], answer)

    for rank in {0, 1, 2} - {quitter}:
        assert isinstance(found[rank], RunError)
        assert str(found[rank]) == f"rank {quitter} gave up: no more paper"


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_gives_up_behind_a_count_isnt_taken_for_one_that_told_something(missing: int) -> None:
    ranks = [0, 1, 2]

    def part(rank: int, roll: RollCall) -> object:
        deadline = Deadline.after(20)
        sizes = roll.lengths(8, deadline)
        if rank == missing:
            roll.give_up("it has had enough")
            return "gave up"
        return roll.gather(bytes([rank] * 8), sizes, deadline)

    found = call(ranks, part)

    for rank in ranks:
        if rank != missing:
            assert str(found[rank]) == f"rank {missing} gave up: it has had enough"
