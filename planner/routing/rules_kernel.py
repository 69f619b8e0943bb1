"""The hot loop of the fixed rules: the trees of `direct` and `domain-relay` for many patterns.

Everything here stays inside the subset of Python that Numba compiles; see `balance_kernel`, whose hops these are.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]
Flags = NDArray[np.bool_]
Kinds = NDArray[np.uint8]

INJECT, RELAY, HAND_OVER, LOCAL = 0, 1, 2, 3  # the numbers of plans.Lane


def at_home(
    k: int, turn: int, at: int, local_ptr: Ints, local: Ranks, group_ptr: Ints, home: Flags, holder_ptr: Ints, holders: Ranks,
    needer_ptr: Ints, needers: Ranks, src: Ranks, dst: Ranks, parent: Ranks, kind: Kinds,
) -> int:  # fmt: skip
    """Write the hops of pattern k that stay at home: local copies, and a holder of the domain for each needer; how many."""
    n = 0
    for i in range(local_ptr[k], local_ptr[k + 1]):
        src[at + n], dst[at + n], parent[at + n], kind[at + n] = local[i], local[i], -1, LOCAL
        n += 1
    for g in range(group_ptr[k], group_ptr[k + 1]):
        if not home[g]:
            break  # home groups come first
        near = holder_ptr[g + 1] - holder_ptr[g]
        for i in range(needer_ptr[g], needer_ptr[g + 1]):
            src[at + n] = holders[holder_ptr[g] + (i - needer_ptr[g] + turn) % near]
            dst[at + n], parent[at + n], kind[at + n] = needers[i], -1, HAND_OVER
            n += 1
    return n


def direct(
    pattern: Ints, turns: Ints, first: Ints, local_ptr: Ints, local: Ranks, group_ptr: Ints, home: Flags, holder_ptr: Ints,
    holders: Ranks, needer_ptr: Ints, needers: Ranks, src: Ranks, dst: Ranks, parent: Ranks, kind: Kinds,
) -> None:  # fmt: skip
    """Fill in the trees of `direct`: tree t is of pattern[t], shifted by turns[t], and its hops begin at first[t]."""
    for t in range(len(pattern)):
        k, turn, at = pattern[t], turns[t], first[t]
        n = at_home(
            k, turn, at, local_ptr, local, group_ptr, home, holder_ptr, holders, needer_ptr, needers, src, dst, parent, kind
        )
        g, last = group_ptr[k], group_ptr[k + 1]
        first_holder, n_holders = holder_ptr[g], holder_ptr[last] - holder_ptr[g]
        while g < last and home[g]:
            g += 1
        n_left = needer_ptr[last] - needer_ptr[g]
        for i in range(n_left):
            src[at + n] = holders[first_holder + (i * n_holders // n_left + turn) % n_holders]
            dst[at + n], parent[at + n], kind[at + n] = needers[needer_ptr[g] + i], -1, INJECT
            n += 1


def relay(
    pattern: Ints, turns: Ints, first: Ints, local_ptr: Ints, local: Ranks, group_ptr: Ints, home: Flags, holder_ptr: Ints,
    holders: Ranks, needer_ptr: Ints, needers: Ranks, src: Ranks, dst: Ranks, parent: Ranks, kind: Kinds,
) -> None:  # fmt: skip
    """The same for `domain-relay`."""
    for t in range(len(pattern)):
        k, turn, at = pattern[t], turns[t], first[t]
        n = at_home(
            k, turn, at, local_ptr, local, group_ptr, home, holder_ptr, holders, needer_ptr, needers, src, dst, parent, kind
        )
        g, last = group_ptr[k], group_ptr[k + 1]
        first_holder, n_holders = holder_ptr[g], holder_ptr[last] - holder_ptr[g]
        while g < last and home[g]:
            g += 1
        n_domains = last - g
        if n_domains == 0:
            continue
        n_chains = min(n_holders, n_domains)
        # Which domain comes first depends on the holder, so that the first legs of many pieces don't all enter one domain.
        shift = holders[first_holder] % n_domains
        for chain in range(n_chains):
            sender, by, lane = holders[first_holder + (chain + turn) % n_holders], -1, INJECT
            for place in range(chain * n_domains // n_chains, (chain + 1) * n_domains // n_chains):
                d = g + (place + shift) % n_domains
                a, b = needer_ptr[d], needer_ptr[d + 1]
                leader = needers[a + turn % (b - a)]
                src[at + n], dst[at + n], parent[at + n], kind[at + n] = sender, leader, by, lane
                sender, by, lane = leader, n, RELAY
                n += 1
                for i in range(a, b):
                    if needers[i] != leader:
                        src[at + n], dst[at + n], parent[at + n], kind[at + n] = leader, needers[i], by, HAND_OVER
                        n += 1


FUNCTIONS = ("at_home", "direct", "relay")
