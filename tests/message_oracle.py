"""Ranks that exchange messages inside one process, one at a time, in any order in which a library could let them go on.

Each rank is a thread that stops at every call of its wire; between two calls only one thread runs. What happens next is chosen
among all that could: a message that has both ends is carried over, or a rank whose call may return goes on.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.arenas import Arena
from shardroute.executors.interpreting.drive import drive
from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.interpreting.packing import Pool
from shardroute.executors.messages.messages import Messages
from shardroute.executors.transports.exchanges import MessageTransport
from shardroute.executors.transports.seam import Deadline


@dataclass(eq=False)
class End:
    """One end of a message: a send or a receive that was begun."""

    data: NDArray[np.uint8]
    done: bool = False


@dataclass
class Exchange:
    """All ranks of a run. `eager`: a send is over as soon as it is begun, as with a library that keeps copies."""

    n_ranks: int
    choose: Callable[[int], int]
    eager: bool
    sends: dict[tuple[int, int, int], list[End]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[tuple[int, int, int], list[End]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.resume = [threading.Semaphore(0) for _ in range(self.n_ranks)]
        self.stopped = threading.Semaphore(0)
        self.waits_for: dict[int, End | None] = {}
        self.failure: list[BaseException] = []

    def stop(self, rank: int, wanted: End | None) -> None:
        """Called by a rank's thread: return when it is chosen to go on, and `wanted` is done."""
        self.waits_for[rank] = wanted
        self.stopped.release()
        self.resume[rank].acquire()
        if self.failure:
            raise SystemExit

    def run(self, threads: list[threading.Thread]) -> None:
        """Let the threads go on one by one until all have ended. Fails when nothing can happen before that."""
        for thread in threads:
            thread.start()
            self.stopped.acquire()
        while self.waits_for and not self.failure:
            pairs = [key for key, ends in self.sends.items() if ends and self.receives[key]]
            ranks = [rank for rank, wanted in self.waits_for.items() if wanted is None or wanted.done]
            if not pairs and not ranks:
                self.failure.append(AssertionError(f"deadlock: ranks {sorted(self.waits_for)} wait for each other"))
                break
            chosen = self.choose(len(pairs) + len(ranks))
            if chosen < len(pairs):
                self.carry(pairs[chosen])
            else:
                rank = ranks[chosen - len(pairs)]
                del self.waits_for[rank]
                self.resume[rank].release()
                self.stopped.acquire()
        for rank in list(self.waits_for):
            self.resume[rank].release()
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure[0]

    def carry(self, key: tuple[int, int, int]) -> None:
        """Copy the oldest message of a pair and tag into where it is received."""
        send, receive = self.sends[key].pop(0), self.receives[key].pop(0)
        assert len(send.data) == len(receive.data), f"message {key}: {len(send.data)} bytes sent, {len(receive.data)} expected"
        receive.data[...] = send.data
        send.done = receive.done = True


class ChosenWire:
    """A rank's wire over an Exchange."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank = exchange, rank

    def send(self, data: NDArray[np.uint8], to: int, tag: int) -> End:
        end = End(data.copy() if self.exchange.eager else data, self.exchange.eager)
        self.exchange.sends[self.rank, to, tag].append(end)
        self.exchange.stop(self.rank, None)
        return end

    def receive(self, data: NDArray[np.uint8], source: int, tag: int) -> End:
        end = End(data)
        self.exchange.receives[source, self.rank, tag].append(end)
        self.exchange.stop(self.rank, None)
        return end

    def wait(self, handle: End, deadline: Deadline) -> None:
        self.exchange.stop(self.rank, handle)


def run_messages(
    programs: Programs, messages: Messages, arenas: list[NDArray[np.uint8]], choose: Callable[[int], int], *, eager: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Run all ranks' programs over messages, in an order that `choose(n)` picks among n possible events at a time.

    When each cell began and ended.
    """
    exchange = Exchange(len(arenas), choose, eager)
    start_s, end_s = np.zeros(len(programs.cells.rank)), np.zeros(len(programs.cells.rank))

    def run_rank(rank: int) -> None:
        try:
            wire, arena = ChosenWire(exchange, rank), Arena.whole(arenas[rank])
            deadline, pools = Deadline.after(60), (Pool(), Pool())
            transport = MessageTransport(wire, lambda _: None, programs, messages, arena, rank, deadline, pools)
            transport.begin(0)
            exchange.stop(rank, None)
            drive(programs, rank, transport, start_s, end_s, np.zeros(1, np.int64))
        except SystemExit:
            pass
        except BaseException as error:
            exchange.failure.append(error)
        exchange.stopped.release()

    exchange.run([threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(len(arenas))])
    assert not any(exchange.sends.values()), "messages were sent that nobody received"
    assert not any(exchange.receives.values()), "messages are awaited that nobody sends"
    return start_s, end_s
