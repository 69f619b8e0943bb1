"""The signals of a plan over libraries that put and signal, in one order that all ranks compute from the same programs.

Rule: a *signal* tells one rank of one thing of another's: that it is ready for a collective, that a message has come, that a
place in its window is free. All signals have a position in one order, and what a signal waits for has lower positions; so ranks
that put their work on streams in this order never wait in a circle. A *channel* is a pair of ranks and a queue, on which signals
arrive in order and are counted.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.interpreting.interpret import Programs
from shardroute.executors.messages.messages import NO_ROWS, Messages
from shardroute.executors.messages.rounds import Ring
from shardroute.executors.messages.windows import count_within
from shardroute.planner.layouts.fragments import Ints

CREDIT_QUEUE = 256  # of signals that tell of free places; queues of lanes are below


class Tells(IntEnum):
    """What a signal says."""

    READY = 0  # the sender has come to a collective
    DATA = 1  # a message is there
    FREE = 2  # what lay where a message goes has been unpacked


@dataclass(frozen=True, slots=True, eq=False)
class Signals:
    """Signals in their order.

    tells       uint8[n]
    step        int64[n]    of the plan
    message     int64[n]    DATA: the message; FREE: the message that may come now; else -1
    src, dst    int64[n]
    channel     int64[n]    and `number` counts on it from 1; channel_src, channel_dst and channel_queue say whose it is
    out_at, in_at   int64[n_messages]   place in the window of the sender and of the receiver, NO_ROWS where it isn't packed there
    after_out, after_in   for each message those that must have left its place, at the sender and at the receiver
    """

    tells: NDArray[np.uint8]
    step: Ints
    message: Ints
    src: Ints
    dst: Ints
    channel: Ints
    number: Ints
    channel_src: Ints
    channel_dst: Ints
    channel_queue: Ints
    out_at: Ints
    in_at: Ints
    after_out: dict[int, list[int]]
    after_in: dict[int, list[int]]


def lay_signals(programs: Programs, messages: Messages, reaches: NDArray[np.bool_], *, by_queue: bool) -> Signals:
    """The signals of all ranks. reaches[a, b] (bool[n_ranks, n_ranks]): rank a writes rank b's memory as its own, so what it
    sends to b needs no packing. by_queue: a pair has a channel a queue; else one for all.
    """
    n = len(messages.step)
    order = np.lexsort((np.arange(n), messages.answers, messages.step))
    packs = ~reaches[messages.src, messages.dst] & (messages.n_bytes > 0)
    out_at, after_out = _place(messages, order, packs & (messages.src_at == NO_ROWS), messages.src, 0)
    in_at, after_in = _place(messages, order, packs & (messages.dst_at == NO_ROWS), messages.dst, 1)
    position = np.empty(n, dtype=np.int64)
    position[order] = np.arange(n)

    queue = _queues(programs, messages)
    ready = _ready(programs)
    rows: list[tuple[int, int, int, int, int, int, int, int]] = []  # step, answers, position, tells, message, src, dst, queue
    rows += [(step, -1, 0, Tells.READY, -1, src, dst, q) for step, src, dst, q in ready]
    columns = (messages.step, messages.answers, position, messages.src, messages.dst, queue)
    for message, (step, answers, at, src, dst, q) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        rows.append((step, int(answers), at, Tells.DATA, message, src, dst, q))
    for message, left in after_in.items():
        last = max(left, key=lambda who: int(position[who]))
        step, answers, at = int(messages.step[last]), int(messages.answers[last]), int(position[last])
        rows.append((step, answers, at, Tells.FREE, message, int(messages.dst[message]), int(messages.src[message]),
        CREDIT_QUEUE))
    rows.sort()
    table = np.array(rows, dtype=np.int64).reshape(-1, 8)
    src_of, dst_of = table[:, 5], table[:, 6]
    queue_of = table[:, 7] if by_queue else np.zeros_like(src_of)
    n_ranks = programs.n_ranks
    key, channel = np.unique((src_of * n_ranks + dst_of) * (CREDIT_QUEUE + 1) + queue_of, return_inverse=True)
    channel = channel.ravel()
    pair = key // (CREDIT_QUEUE + 1)
    return Signals(
        table[:, 3].astype(np.uint8), table[:, 0], table[:, 4], src_of, dst_of, channel, 1 + count_within(channel),
        pair // n_ranks, pair % n_ranks, key % (CREDIT_QUEUE + 1), out_at, in_at, after_out, after_in,
    )  # fmt: skip


def _place(
    messages: Messages, order: Ints, packed: NDArray[np.bool_], rank: Ints, side: int
) -> tuple[Ints, dict[int, list[int]]]:
    rings = [Ring(int(size)) for size in messages.window_bytes[:, side]]
    at = np.full(len(order), NO_ROWS, dtype=np.int64)
    after: dict[int, list[int]] = {}
    for message in order[packed[order]].tolist():
        at[message], leave = rings[int(rank[message])].take(int(messages.n_bytes[message]), message)
        if leave:
            after[message] = leave
    return at, after


def _queues(programs: Programs, messages: Messages) -> Ints:
    """The queue of the action that sends each message."""
    actions, n_steps = programs.actions, max(len(programs.cells.ptr) - 1, 1)
    rank = np.repeat(np.arange(programs.n_drivers), np.diff(actions.ptr))
    at = np.searchsorted(rank * n_steps + actions.step, messages.src * n_steps + messages.step)
    return actions.queue[at].astype(np.int64) if len(at) else np.zeros(0, dtype=np.int64)


def _ready(programs: Programs) -> list[tuple[int, int, int, int]]:
    """Step, sender, receiver and the sender's queue: each rank of a collective tells those that copy in it."""
    actions, cells = programs.actions, programs.cells
    action_of = np.argsort(actions.cell, kind="stable")
    found = []
    for step in np.flatnonzero(np.diff(cells.ptr) > 1).tolist():
        of_step = action_of[cells.ptr[step] : cells.ptr[step + 1]].tolist()
        ranks = cells.rank[cells.ptr[step] : cells.ptr[step + 1]].tolist()
        for action, src in zip(of_step, ranks, strict=True):
            for other, dst in zip(of_step, ranks, strict=True):
                if dst != src and actions.meets[other]:
                    found.append((step, src, dst, int(actions.queue[action])))
    return found
