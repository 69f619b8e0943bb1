"""Planners that order transfers into rounds in which a port does one thing at a time, re-stated: Megatron's and Alpa's."""

from collections.abc import Sequence

import numpy as np

from peers.ways import Domains, Pattern, Way, by_trees, chain


def megatron_rounds(pairs: Sequence[tuple[int, int]]) -> int:
    """Rounds that Megatron-Core's NVSHMEM scheduler takes for messages (from, to) of one size.

    A rank is in one message a round, whether it sends or receives. Messages go into the first round in which both ends are free,
    those with the busiest ends first.
    """
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    degree = np.bincount(ends.ravel())
    order = np.argsort(-degree[ends].sum(axis=1), kind="stable")
    busy: dict[int, int] = {}  # a bit a round
    last = 0
    for a, b in ends[order].tolist():
        taken = busy.get(a, 0) | busy.get(b, 0)
        free = ~taken & (taken + 1)  # the lowest round in which both are free
        busy[a] = busy.get(a, 0) | free
        busy[b] = busy.get(b, 0) | free
        last = max(last, free.bit_length())
    return last


def alpa_rounds(patterns: Sequence[Pattern], *, greedy: bool = True) -> tuple[list[int], int]:
    """The sender of each pattern's broadcast, and the rounds that all take, as Alpa's cross-mesh solvers order them.

    A broadcast takes a round of its sender and of all its receivers. `greedy` fills a round with broadcasts that don't meet,
    busiest ports first; otherwise each goes, in the order given, as early as its ports allow, from the holder with least to send.
    """
    if not greedy:
        free_at: dict[tuple[str, int], int] = {}
        load: dict[int, int] = {}
        senders, end = [], 0
        for who, to in patterns:
            sender = min(who.tolist(), key=lambda rank: (load.get(rank, 0), rank))
            load[sender] = load.get(sender, 0) + 1
            ports = [("out", sender), *(("in", rank) for rank in to.tolist())]
            start = max(free_at.get(port, 0) for port in ports)
            free_at.update(dict.fromkeys(ports, start + 1))
            senders.append(sender)
            end = max(end, start + 1)
        return senders, end
    left = {rank: 0 for who, _ in patterns for rank in who.tolist()}
    waiting = np.zeros(1 + max((int(to.max()) for _, to in patterns), default=0), dtype=np.int64)
    for who, to in patterns:
        waiting[to] += 1
        for rank in who.tolist():
            left[rank] += 1
    todo, chosen, round_ = list(range(len(patterns))), [-1] * len(patterns), 0
    load = dict.fromkeys(left, 0)
    while todo:
        out_busy: set[int] = set()
        in_busy = np.zeros(len(waiting), dtype=bool)
        later = []
        todo.sort(key=lambda i: (-int(waiting[patterns[i][1]].max()), -min(left[r] for r in patterns[i][0].tolist()), i))
        for i in todo:
            who, to = patterns[i]
            free = [rank for rank in who.tolist() if rank not in out_busy]
            if not free or in_busy[to].any():
                later.append(i)
                continue
            chosen[i] = min(free, key=lambda rank: (load[rank], left[rank], rank))
            out_busy.add(chosen[i])
            in_busy[to] = True
        for i in set(todo) - set(later):
            load[chosen[i]] += 1
            waiting[patterns[i][1]] -= 1
            for rank in patterns[i][0].tolist():
                left[rank] -= 1
        todo, round_ = later, round_ + 1
    return chosen, round_


def alpa(patterns: Sequence[Pattern], domain: Domains) -> list[Way]:
    """Alpa's greedy: each piece is broadcast once, from the holder that its rounds chose, along the receivers in rank order."""
    senders, _ = alpa_rounds(patterns)
    return [by_trees([chain(sender, to.tolist(), domain)]) for sender, (_, to) in zip(senders, patterns, strict=True)]
