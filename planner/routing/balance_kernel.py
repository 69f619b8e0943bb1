"""The hot loop of balancing: routes one chunk after the other by the cheapest links at that moment, and routes chunks anew.

Everything here stays inside the subset of Python that Numba compiles, so that the same lines run compiled and plain with the
same bits, and stands in one file because Numba's cache looks for changes only in the file of the function that it compiles.

Terms
  load     float64[4, n_gpus]: seconds that a link is busy so far, as a share of a reference time; rows NIC out, NIC in, NVLink
           out, NVLink in. `inv` is the share that one byte adds. `up` and `inv_up` are the same for a domain's uplink into the
           fabric (0 where it can't bind).
  price    what a chunk pays for a link: its share of it times the 16th power of the load that results. The sum of prices is the
           growth of a high power mean of the loads, so the cheapest route is the one that keeps the busiest link low, and links
           far below the busiest cost next to nothing.
  has      ranks that have (or will have) the chunk, group by group: rank, the hop that brings it (-1: held), hops inside the
           domain.
  hop      source, destination, the hop before it in this chunk (-1: from a holder), kind = lane + 8 where it lands in staging
           memory.

Domains are served one after the other, each from the one before it unless that link is busy, and at most `most_depth` domains
deep. Inside a domain a tree is at most two hops deep: mixes of stars and two-hop trees are enough for the best rate of a
broadcast over peers.
"""

import numpy as np
from numpy.typing import NDArray

INJECT, RELAY, HAND_OVER, LOCAL = 0, 1, 2, 3  # the numbers of plans.Lane
STAGED = 8
MOST_HAND_OVERS = 2
# What a rank that must stage pays more than its links cost: with the 16th power, staging begins where it saves 4 % of a link's
# load.
STAGING_FACTOR = 2.0
# What a deeper feeder inside a domain pays more, each level: it decides between links that are within 0.3 % of each other.
DEPTH_FACTOR = 0.05
# What any other sender pays more than the domain that was served last. So domains form chains, in which each rank takes in from
# few and sends to few: links that are shared by few flows stay full, where many flows that meet at random leave them idle 10 to
# 20 % of the time (simulated, DeepSeek-V3 from 256 to 256 H100: 1.24 x bound by chains, 1.33 by stars).
BRANCH_FACTOR = 1.0
# What passing on pays more than a home domain that hasn't sent the chunk yet: so replicas all send, and that waits for nobody.
RELAY_FACTOR = 0.1
# What an entry pays more whose place in its domain isn't its sender's: the same, for the choice of GPUs.
CROSS_FACTOR = 0.25
# The price of an idle link, as a share of a full one's: below some 90 % of the bound, the preferences above decide.
IDLE_PRICE = 0.2

HUGE = 1e300  # above any price

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Ranks = NDArray[np.int32]
Flags = NDArray[np.bool_]
Kinds = NDArray[np.uint8]


def price(load: float, share: float) -> float:
    """The price of adding `share` to a link."""
    x = load + share
    x *= x
    x *= x
    x *= x
    x *= x
    return share * (IDLE_PRICE + x)


def feeder(load: Floats, inv: Floats, n_bytes: float, has_rank: Ints, has_depth: Ints, first: int, count: int) -> int:
    """Where in `has` the rank stands that hands over most cheaply inside its domain."""
    best, best_price = first, HUGE
    for i in range(first, first + count):
        if has_depth[i] >= MOST_HAND_OVERS:
            continue
        rank = has_rank[i]
        cost = price(load[2, rank], n_bytes * inv[2, rank]) * (1.0 + DEPTH_FACTOR * has_depth[i])
        if cost < best_price:
            best, best_price = i, cost
    return best


def add_load(
    load: Floats, inv: Floats, up: Floats, inv_up: Floats, domain: Ranks, src: int, dst: int, kind: int, n_bytes: float
) -> None:
    """Put the bytes (negative: take them back) of one hop onto its links."""
    lane = kind % STAGED
    if lane == HAND_OVER:
        load[2, src] += n_bytes * inv[2, src]
        load[3, dst] += n_bytes * inv[3, dst]
    elif lane != LOCAL:
        load[0, src] += n_bytes * inv[0, src]
        load[1, dst] += n_bytes * inv[1, dst]
        up[domain[src]] += n_bytes * inv_up[domain[src]]


def exit_of(
    load: Floats, inv: Floats, up: Floats, inv_up: Floats, members: Ranks, first_member: int, last_member: int, n_bytes: float,
    has_rank: Ints, has_depth: Ints, first: int, count: int, home: int, staging: int, of_domain: int,
) -> tuple[float, int]:
    """The cheapest way out of a group: its price, and the place in `has`, or -1 - rank for a rank that would stage."""
    best, best_price = first, HUGE
    for i in range(first, first + count):
        rank = has_rank[i]
        cost = price(load[0, rank], n_bytes * inv[0, rank]) * (1.0 + DEPTH_FACTOR * has_depth[i])
        if cost < best_price:
            best, best_price = i, cost
    if staging:
        at = feeder(load, inv, n_bytes, has_rank, has_depth, first, count)
        hand = price(load[2, has_rank[at]], n_bytes * inv[2, has_rank[at]])
        for k in range(first_member, last_member):
            rank = members[k]
            cost = STAGING_FACTOR * (
                price(load[0, rank], n_bytes * inv[0, rank]) + price(load[3, rank], n_bytes * inv[3, rank]) + hand
            )
            if cost < best_price:
                known = False
                for i in range(first, first + count):
                    if has_rank[i] == rank:
                        known = True
                if not known:
                    best, best_price = -1 - rank, cost
    return best_price + price(up[of_domain], n_bytes * inv_up[of_domain]), best


def entry_of(
    load: Floats, inv: Floats, members: Ranks, first_member: int, last_member: int, needers: Ranks, first: int, last: int,
    n_bytes: float, staging: int, place: int,
) -> int:
    """The rank of an away group at which the chunk enters most cheaply; -1 - rank for one that would stage."""
    n = last - first
    cheapest = HUGE
    for k in range(first, last):
        cheapest = min(cheapest, price(load[2, needers[k]], n_bytes * inv[2, needers[k]]))
    best, best_price = int(needers[first]), HUGE
    for k in range(first, last):
        rank = needers[k]
        cost = price(load[1, rank], n_bytes * inv[1, rank])
        if rank - members[first_member] != place:
            cost *= 1.0 + CROSS_FACTOR
        if n > 1:
            own = price(load[2, rank], n_bytes * inv[2, rank])
            cost += own + (n - 2) * min(own, cheapest) - price(load[3, rank], n_bytes * inv[3, rank])
        if cost < best_price:
            best, best_price = rank, cost
    if staging:
        for k in range(first_member, last_member):
            rank = members[k]
            own = price(load[2, rank], n_bytes * inv[2, rank])
            cost = STAGING_FACTOR * (price(load[1, rank], n_bytes * inv[1, rank]) + own) + (n - 1) * min(own, cheapest)
            if cost < best_price:
                known = False
                for i in range(first, last):
                    if needers[i] == rank:
                        known = True
                if not known:
                    best, best_price = -1 - rank, cost
    return best


def route(
    pattern: int, n_bytes: float, at: int, load: Floats, inv: Floats, up: Floats, inv_up: Floats, domain: Ranks, member_ptr: Ints,
    members: Ranks, local_ptr: Ints, local: Ranks, group_ptr: Ints, group_domain: Ranks, group_home: Flags, holder_ptr: Ints,
    holders: Ranks, needer_ptr: Ints, needers: Ranks, staging: int, most_depth: int, least_inv: float,
    hop_src: Ranks, hop_dst: Ranks, hop_parent: Ranks,
    hop_kind: Kinds, has_rank: Ints, has_hop: Ints, has_depth: Ints, has_first: Ints, has_count: Ints, reach: Ints,
    out_price: Floats, out_at: Ints, fresh: Ints,
) -> int:
    """Route one chunk of a pattern: write its hops from `at` on, add its loads, return how many hops there are."""
    n = 0
    for k in range(local_ptr[pattern], local_ptr[pattern + 1]):
        hop_src[at + n], hop_dst[at + n], hop_parent[at + n], hop_kind[at + n] = local[k], local[k], -1, LOCAL
        n += 1
    g0, g1 = group_ptr[pattern], group_ptr[pattern + 1]
    free = 0
    n_left = 0
    n_fresh = 0
    for g in range(g0, g1):
        j = g - g0
        has_first[j], has_count[j], reach[j], out_price[j] = free, 0, -1, -1.0
        room = (holder_ptr[g + 1] - holder_ptr[g]) + (needer_ptr[g + 1] - needer_ptr[g])
        free += room + (g1 - g0) + 1  # every domain served can add one rank that stages
        fresh[j] = 0
        if group_home[g]:
            reach[j] = 0
            fresh[j] = 1
            n_fresh += 1
            for k in range(holder_ptr[g], holder_ptr[g + 1]):
                i = has_first[j] + has_count[j]
                has_rank[i], has_hop[i], has_depth[i] = holders[k], -1, 0
                has_count[j] += 1
        else:
            n_left += 1
    for g in range(g0, g1):
        if group_home[g]:
            n = feed(
                g, g - g0, at, n, n_bytes, load, inv, needer_ptr, needers, -1, hop_src, hop_dst, hop_parent, hop_kind, has_rank,
                has_hop,
                has_depth, has_first, has_count,
            )
    # Domains are served in a ring; the chain ends where NICs are the busiest, because its end need not send.
    target, most = g0, -1.0
    for g in range(g0, g1):
        if group_home[g]:
            continue
        own = HUGE
        for k in range(needer_ptr[g], needer_ptr[g + 1]):
            own = min(own, price(load[0, needers[k]], n_bytes * inv[0, needers[k]]))
        own += price(up[group_domain[g]], n_bytes * inv_up[group_domain[g]])
        if own > most:
            target, most = g - g0, own
    served = -1
    while n_left:
        target += 1
        if target >= g1 - g0:
            target = 0
        if reach[target] >= 0:
            continue
        sender, cheapest = -1, HUGE
        for step in range(-1, g1 - g0):
            j = step
            if step < 0:  # the domain served last comes first: where its link is nearly idle, no other can be cheaper
                j = served
            elif n_fresh == 0 and cheapest <= (1.0 + BRANCH_FACTOR) * IDLE_PRICE * n_bytes * least_inv:
                break
            if j < 0 or reach[j] < 0 or reach[j] >= most_depth or (step >= 0 and j == served):
                continue
            g = g0 + j
            if out_price[j] < 0.0:
                d = group_domain[g]
                out_price[j], out_at[j] = exit_of(
                    load, inv, up, inv_up, members, member_ptr[d], member_ptr[d + 1], n_bytes, has_rank, has_depth, has_first[j],
                    has_count[j], group_home[g], staging, d,
                )
            cost = out_price[j]
            if reach[j] > 0:
                cost *= 1.0 + RELAY_FACTOR
            if served >= 0 and j != served and not fresh[j]:
                cost *= 1.0 + BRANCH_FACTOR
            if cost < cheapest:
                sender, cheapest = j, cost
        out = out_at[sender]
        if out < 0:  # hand over to a rank that stages, which sends
            by = feeder(load, inv, n_bytes, has_rank, has_depth, has_first[sender], has_count[sender])
            rank = -1 - out
            hop_src[at + n], hop_dst[at + n], hop_parent[at + n] = has_rank[by], rank, has_hop[by]
            hop_kind[at + n] = HAND_OVER + STAGED
            add_load(load, inv, up, inv_up, domain, has_rank[by], rank, HAND_OVER, n_bytes)
            out = has_first[sender] + has_count[sender]
            has_rank[out], has_hop[out], has_depth[out] = rank, n, has_depth[by] + 1
            has_count[sender] += 1
            n += 1
        src = has_rank[out]
        g = g0 + target
        d = group_domain[g]
        entry = entry_of(
            load, inv, members, member_ptr[d], member_ptr[d + 1], needers, needer_ptr[g], needer_ptr[g + 1], n_bytes, staging,
            src - members[member_ptr[group_domain[g0 + sender]]],
        )
        kind = INJECT if has_hop[out] < 0 else RELAY
        skip = entry
        if entry < 0:
            entry, skip = -1 - entry, -1
            kind += STAGED
        hop_src[at + n], hop_dst[at + n], hop_parent[at + n], hop_kind[at + n] = src, entry, has_hop[out], kind
        add_load(load, inv, up, inv_up, domain, src, entry, kind, n_bytes)
        i = has_first[target]
        has_rank[i], has_hop[i], has_depth[i] = entry, n, 0
        has_count[target] = 1
        reach[target] = reach[sender] + 1
        n += 1
        n = feed(
            g, target, at, n, n_bytes, load, inv, needer_ptr, needers, skip, hop_src, hop_dst, hop_parent, hop_kind, has_rank,
            has_hop,
            has_depth, has_first, has_count,
        )
        out_price[sender] = -1.0
        served = target
        n_fresh -= fresh[sender]
        fresh[sender] = 0
        n_left -= 1
    return n


def feed(
    g: int, j: int, at: int, n: int, n_bytes: float, load: Floats, inv: Floats, needer_ptr: Ints, needers: Ranks, skip: int,
    hop_src: Ranks, hop_dst: Ranks, hop_parent: Ranks, hop_kind: Kinds, has_rank: Ints, has_hop: Ints, has_depth: Ints,
    has_first: Ints, has_count: Ints,
) -> int:
    """Hand the chunk over to every needer of a group but `skip`, each from the cheapest rank that has it; the hops so far."""
    for k in range(needer_ptr[g], needer_ptr[g + 1]):
        rank = needers[k]
        if rank == skip:
            continue
        by = feeder(load, inv, n_bytes, has_rank, has_depth, has_first[j], has_count[j])
        src = has_rank[by]
        hop_src[at + n], hop_dst[at + n], hop_parent[at + n], hop_kind[at + n] = src, rank, has_hop[by], HAND_OVER
        load[2, src] += n_bytes * inv[2, src]
        load[3, rank] += n_bytes * inv[3, rank]
        i = has_first[j] + has_count[j]
        has_rank[i], has_hop[i], has_depth[i] = rank, n, has_depth[by] + 1
        has_count[j] += 1
        n += 1
    return n


def busiest(load: Floats, up: Floats) -> float:
    """The highest load of any link."""
    most = 0.0
    for row in range(4):
        for i in range(load.shape[1]):
            most = max(most, load[row, i])
    for i in range(len(up)):
        most = max(most, up[i])
    return most


def sweep(
    order: Ints, above: float, pattern: Ints, n_bytes: Floats, first_hop: Ints, n_hops: Ints, load: Floats, inv: Floats,
    up: Floats, inv_up: Floats, domain: Ranks, member_ptr: Ints, members: Ranks, local_ptr: Ints, local: Ranks, group_ptr: Ints,
    group_domain: Ranks, group_home: Flags, holder_ptr: Ints, holders: Ranks, needer_ptr: Ints, needers: Ranks, staging: int,
    most_depth: int, least_inv: float,
    hop_src: Ranks, hop_dst: Ranks, hop_parent: Ranks, hop_kind: Kinds, has_rank: Ints, has_hop: Ints, has_depth: Ints,
    has_first: Ints, has_count: Ints, reach: Ints, out_price: Floats, out_at: Ints, fresh: Ints,
) -> int:
    """Route the chunks in `order`; one that has hops is routed anew if a link above the load `above` carries it.

    Returns how many were routed.
    """
    n_routed = 0
    for c in order:
        at = first_hop[c]
        if n_hops[c] > 0:
            touches = False
            for h in range(at, at + n_hops[c]):
                lane = hop_kind[h] % STAGED
                if lane == HAND_OVER:
                    touches = touches or load[2, hop_src[h]] > above or load[3, hop_dst[h]] > above
                elif lane != LOCAL:
                    touches = touches or load[0, hop_src[h]] > above or load[1, hop_dst[h]] > above
                    touches = touches or up[domain[hop_src[h]]] > above
            if not touches:
                continue
            for h in range(at, at + n_hops[c]):
                add_load(load, inv, up, inv_up, domain, hop_src[h], hop_dst[h], hop_kind[h], -n_bytes[c])
        n_hops[c] = route(
            pattern[c], n_bytes[c], at, load, inv, up, inv_up, domain, member_ptr, members, local_ptr, local, group_ptr,
            group_domain,
            group_home, holder_ptr, holders, needer_ptr, needers, staging, most_depth, least_inv, hop_src, hop_dst, hop_parent,
            hop_kind,
            has_rank, has_hop,
            has_depth, has_first, has_count, reach, out_price, out_at, fresh,
        )
        n_routed += 1
    return n_routed


FUNCTIONS = ("price", "feeder", "add_load", "exit_of", "entry_of", "feed", "route", "busiest", "sweep")
