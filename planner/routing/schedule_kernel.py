"""The hot loop of ordering: when each step would run if every port carried one step at a time.

Everything here stays inside the subset of Python that Numba compiles; see `balance_kernel`.

A *port* is one direction of a rank's NICs or of its NVLink. A step uses an out port and an in port for its time. A sender that
is free takes, of the steps whose input has arrived, one whose receiver is free; of several, the one whose receiver has most left
to take in (nobody should be left with much at the end), times one more than its `tall`: how long a chain of steps waits for it.
If all receivers are busy, it takes the one that is free first. Steps of one sender to one receiver keep their order.
"""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def pick(first: int, last: int, head: Ints, pair_in: Ints, in_free: Floats, left: Floats, tall: Floats, now: float) -> int:
    """The pair from which a free sender takes its next step, -1 if none has one."""
    best, best_free, best_score = -1, 0.0, 0.0
    for p in range(first, last):
        row = head[p]
        if row < 0:
            continue
        port = pair_in[p]
        free = max(in_free[port], now)
        score = left[port] * (1.0 + tall[row])
        if best < 0 or free < best_free or (free == best_free and score > best_score):
            best, best_free, best_score = p, free, score
    return best


def schedule(
    roots: Ints, child_ptr: Ints, child: Ints, pair: Ints, out_port: Ints, seconds: Floats, tall: Floats, pair_ptr: Ints,
    pair_in: Ints, head: Ints, tail: Ints, after: Ints, in_free: Floats, busy: Ints, left: Floats, start: Floats,
) -> int:
    """Fill `start` with the time at which each row starts; rows without a pair (local copies) take no port. How many rows
    ran."""  # fmt: skip
    # An event is a time, a tie-breaker that counts up, and a row: one that has finished.
    events = [(0.0, 0, -1)]
    heappop(events)
    count = 0
    n_done = 0
    for row in roots:
        if pair[row] < 0:
            count += 1
            heappush(events, (0.0, count, row))
            continue
        p = pair[row]
        if head[p] < 0:
            head[p] = row
        else:
            after[tail[p]] = row
        tail[p] = row
    for port in range(len(pair_ptr) - 1):
        p = pick(pair_ptr[port], pair_ptr[port + 1], head, pair_in, in_free, left, tall, 0.0)
        if p >= 0:
            row = head[p]
            head[p] = after[row]
            start[row] = in_free[pair_in[p]]
            in_free[pair_in[p]] = start[row] + seconds[row]
            left[pair_in[p]] -= seconds[row]
            busy[port] = 1
            count += 1
            heappush(events, (start[row] + seconds[row], count, row))
    while len(events) > 0:
        now, _, done = heappop(events)
        n_done += 1
        first_woken = -1
        if pair[done] >= 0:
            first_woken = out_port[done]
            busy[first_woken] = 0
        for k in range(child_ptr[done], child_ptr[done + 1]):
            row = child[k]
            p = pair[row]
            if p < 0:
                start[row] = now
                count += 1
                heappush(events, (now, count, row))
                continue
            if head[p] < 0:
                head[p] = row
            else:
                after[tail[p]] = row
            tail[p] = row
        for k in range(child_ptr[done] - 1, child_ptr[done + 1]):
            port = first_woken
            if k >= child_ptr[done]:
                if pair[child[k]] < 0:
                    continue
                port = out_port[child[k]]
            if port < 0 or busy[port]:
                continue
            p = pick(pair_ptr[port], pair_ptr[port + 1], head, pair_in, in_free, left, tall, now)
            if p < 0:
                continue
            row = head[p]
            head[p] = after[row]
            start[row] = max(in_free[pair_in[p]], now)
            in_free[pair_in[p]] = start[row] + seconds[row]
            left[pair_in[p]] -= seconds[row]
            busy[port] = 1
            count += 1
            heappush(events, (start[row] + seconds[row], count, row))
    return n_done


FUNCTIONS = ("pick", "schedule")
