"""The hot loop: events in time order, and max-min sharing re-solved only where an event can change a rate.

Everything here stays inside the subset of Python that Numba compiles, and calls no library, so that the same lines run
compiled (over arrays) and plain (over lists) with the same bits. All of it stands in one file because Numba's cache looks
for changes only in the file of the function that it compiles: a caller would keep a stale copy of a callee from elsewhere.
Columns of one length are the rows of one table, for the same reason of cost: Numba passes a function each array as seven
words, and a call with sixty arrays costs more than most events.

Terms
  class       flows of one route, cap and weight. Max-min gives them one rate, so a class keeps one clock of *service*
              (units that each of its flows has been given since the class was last empty) and a heap of the flows' *goals*
              on that clock; a re-solve costs by classes, not by flows.
  level       rate / weight: what max-min equalises. Progressive filling raises one level until a link is full.
  bottleneck  the link that set a class's level; -1 where its cap did.

What an event can change. Let the *floor* be the least of: the old levels of the classes that lose flows, and the new
levels of the classes that gain some. Filling runs the same below the floor with and without the event, so lower classes keep
their rates. The new level of a lone class that gains flows is the water level of its tightest link: the x at which
sum(min(level, x) * weight) over the link, itself at x, meets the capacity; taking all gainers at x bounds it from below.
From there the change spreads only through full links, to classes at or above the floor. So: collect those, fill them anew
with the rest held fixed, and if a link that was left out is now over capacity, take it in and fill again.
"""

from typing import NamedTuple, Protocol, TypeVar

_Item = TypeVar("_Item")


class Column(Protocol[_Item]):
    """What the kernel needs of a column: an array when compiled, a list when plain."""

    def __getitem__(self, at: int, /) -> _Item: ...
    def __setitem__(self, at: int, value: _Item, /) -> None: ...


class Table(Protocol[_Item]):
    """Columns of one length: an array [column, row] when compiled, a list of lists when plain."""

    def __getitem__(self, column: int, /) -> Column[_Item]: ...


class State(NamedTuple):
    """All that the loop reads and writes; n tasks, k classes, m links, e = links over all routes of classes."""

    task_times: Table[float]  # [column, n]
    task_codes: Table[int]
    class_rates: Table[float]  # [column, k]
    class_codes: Table[int]
    link_rates: Table[float]  # [column, m]
    link_codes: Table[int]
    slots: Table[int]  # [column, e]
    next_tasks: Column[int]  # tasks that wait for a task, by NEXT_FROM..NEXT_TO
    ends: Column[float]  # tournament of the classes' next ends: leaf n_leaves + class, winner at 1
    fill_level: Column[float]  # [m + k] heap of links and caps by the level at which they are full
    fill_code: Column[int]  # [m + k] link, or m + class for a cap
    counts: Column[int]
    reached: Column[float]  # [1] largest share of a flow's amount, or of its time alone, that tolerance saved


# task_times. DUE_S and DUE_CODE are a heap of what comes that is no end of a flow, by (time, code): code task: its delay is
# over; task + n: its hold is. GOAL and QUEUE are a heap for each class, from QUEUE_FROM on: service at which a flow ends.
DELAY_S, AMOUNT, HOLD_S, READY_S, START_S, FINISH_S, DUE_S, GOAL = range(8)
# task_codes. CLASS -1: the task shares nothing, and takes HOLD_S after its delay.
CLASS, N_MISSING, NEXT_FROM, NEXT_TO, DUE_CODE, QUEUE = range(6)
# class_rates. PEAK: rate of a flow alone. LOAD: count * rate as last added to USE. SERVICE_S: when SERVICE was true.
CAP, WEIGHT, PEAK, RATE, LEVEL, LOAD, SERVICE, SERVICE_S, NEW_RATE, NEW_LEVEL = range(10)
# class_codes. ROUTE_FROM..ROUTE_TO: slots of its route. COUNT: flows now; COUNT_BEFORE: before the event at hand. MARK: 2 *
# solve: picked in this solve; + 1: filled. CHANGED, PICKED: lists of classes that the event touches, that the solve picked.
ROUTE_FROM, ROUTE_TO, QUEUE_FROM, COUNT, COUNT_BEFORE, BOTTLENECK, MARK, CHANGED, IS_CHANGED, PICKED = range(10)
# link_rates. USE: rate through it now. GAIN: weight of gaining classes. ROOM, SHARE: capacity, weight not yet filled.
CAPACITY, USE, GAIN, ROOM, SHARE, WATER = range(6)
# link_codes. LINK_MARK, WATER_MARK: the solve that took it in, that computed WATER. TAKEN, SUSPECTS: lists of links taken in,
# and of those left out that may be over capacity.
MEMBERS_FROM, N_MEMBERS, N_OPEN, LINK_MARK, WATER_MARK, TAKEN, SUSPECTS, IS_SUSPECT = range(8)
# slots. LINK: of the route place. The members of a link stand from MEMBERS_FROM on: MEMBER the class, MEMBER_SLOT its route
# place there; PLACE: where the member for this route place stands.
LINK, MEMBER, MEMBER_SLOT, PLACE = range(4)
# counts: lengths of the lists and heaps above, what is done so far, and sizes.
N_DUE, N_CHANGED, N_PICKED, N_TAKEN, N_SUSPECTS, N_DONE, N_SOLVES, N_WORK, N_LAST_PICKED = range(9)
N_TASKS, N_CLASSES, N_LINKS, N_LEAVES = range(9, 13)

# Times and levels that differ by less than this, relatively, differ by rounding only: 512 steps of a double. One event takes
# them all, so symmetric flows end together and cost one solve.
ROUNDING = 2.0**-43
# A link used to within this of its capacity is taken for full. Every link that is some class's bottleneck must pass: it lies
# within rounding of its capacity. One that passes and isn't full costs time only.
NEARLY_FULL = 1.0 - 1e-9
# Passes toward a water level; each pass gives a valid lower bound, later ones a closer one.
WATER_PASSES = 4
# Where a solve picked over 1 / BROAD of all classes, looking at every class for flows to end early costs little beside it.
BROAD = 8
# What an event costs, in classes re-solved (measured: plain, 22 us for an event with two, 200 us for one with sixty).
WORK_AN_EVENT = 4
INF = float("inf")


def sift_down(keys: Column[float], codes: Column[int], n: int, at: int, base: int) -> None:
    """Lower entry `at` of the heap of n entries that begins at `base` until its children are no smaller."""
    key = keys[base + at]
    code = codes[base + at]
    while 2 * at + 1 < n:
        child = 2 * at + 1
        left, right = base + child, base + child + 1
        if child + 1 < n and (keys[right] < keys[left] or (keys[right] == keys[left] and codes[right] < codes[left])):
            child += 1
            left = right
        if keys[left] > key or (keys[left] == key and codes[left] > code):
            break
        keys[base + at] = keys[left]
        codes[base + at] = codes[left]
        at = child
    keys[base + at] = key
    codes[base + at] = code


def push(keys: Column[float], codes: Column[int], n: int, base: int, key: float, code: int) -> None:
    """Add (key, code) to the heap of n entries that begins at `base`."""
    at = n
    while at > 0:
        parent = (at - 1) // 2
        if keys[base + parent] < key or (keys[base + parent] == key and codes[base + parent] < code):
            break
        keys[base + at] = keys[base + parent]
        codes[base + at] = codes[base + parent]
        at = parent
    keys[base + at] = key
    codes[base + at] = code


def pop(keys: Column[float], codes: Column[int], n: int, base: int) -> None:
    """Drop the first of the n entries of the heap that begins at `base`."""
    keys[base] = keys[base + n - 1]
    codes[base] = codes[base + n - 1]
    if n > 1:
        sift_down(keys, codes, n - 1, 0, base)


def set_end(ends: Column[float], n_leaves: int, leaf: int, end_s: float) -> None:
    """Set one leaf of the tournament and the winners above it."""
    at = n_leaves + leaf
    ends[at] = end_s
    while at > 1:
        at //= 2
        winner = min(ends[2 * at], ends[2 * at + 1])
        if ends[at] == winner:
            break
        ends[at] = winner


def note_change(codes: Table[int], counts: Column[int], c: int) -> None:
    """Remember that the event at hand touches class c, and its number of flows before."""
    if codes[IS_CHANGED][c] == 0:
        codes[IS_CHANGED][c] = 1
        codes[COUNT_BEFORE][c] = codes[COUNT][c]
        codes[CHANGED][counts[N_CHANGED]] = c
        counts[N_CHANGED] += 1


def finish(
    times: Table[float], codes: Table[int], next_tasks: Column[int], counts: Column[int], task: int, time_s: float
) -> None:
    """Record the end of a task and make due what waited for it last."""
    ready_s, n_missing = times[READY_S], codes[N_MISSING]
    times[FINISH_S][task] = time_s
    counts[N_DONE] += 1
    for at in range(codes[NEXT_FROM][task], codes[NEXT_TO][task]):
        waiting = next_tasks[at]
        ready_s[waiting] = max(ready_s[waiting], time_s)
        n_missing[waiting] -= 1
        if n_missing[waiting] == 0:
            due_s = ready_s[waiting] + times[DELAY_S][waiting]
            push(times[DUE_S], codes[DUE_CODE], counts[N_DUE], 0, due_s, waiting)
            counts[N_DUE] += 1


def end_first(s: State, c: int, now_s: float) -> None:
    """End the flow of class c that is next."""
    times, codes = s.task_times, s.task_codes
    note_change(s.class_codes, s.counts, c)
    count = s.class_codes[COUNT]
    base = s.class_codes[QUEUE_FROM][c]
    task = codes[QUEUE][base]
    pop(times[GOAL], codes[QUEUE], count[c], base)
    count[c] -= 1
    finish(times, codes, s.next_tasks, s.counts, task, max(now_s, times[START_S][task]))


def begin(s: State, task: int, time_s: float, now_s: float) -> None:
    """Start a task whose delay is over: its flow joins its class."""
    times, codes, counts = s.task_times, s.task_codes, s.counts
    times[START_S][task] = time_s
    c = codes[CLASS][task]
    if c < 0:
        hold_s = times[HOLD_S][task]
        if hold_s == 0.0:
            finish(times, codes, s.next_tasks, counts, task, time_s)
        else:
            push(times[DUE_S], codes[DUE_CODE], counts[N_DUE], 0, time_s + hold_s, task + counts[N_TASKS])
            counts[N_DUE] += 1
        return
    note_change(s.class_codes, counts, c)
    count, service, service_s = s.class_codes[COUNT], s.class_rates[SERVICE], s.class_rates[SERVICE_S]
    if count[c] == 0:
        service[c] = 0.0
    else:
        service[c] += s.class_rates[RATE][c] * (now_s - service_s[c])
    service_s[c] = now_s
    goal = service[c] + times[AMOUNT][task]
    push(times[GOAL], codes[QUEUE], count[c], s.class_codes[QUEUE_FROM][c], goal, task)
    count[c] += 1


def take_due(s: State, now_s: float, tolerance: float) -> None:
    """Apply all that falls on this instant: flows and holds that end, delays that are over, and what follows at once."""
    times, codes, counts, ends = s.task_times, s.task_codes, s.counts, s.ends
    n_leaves, n_tasks = counts[N_LEAVES], counts[N_TASKS]
    limit_s = now_s + now_s * ROUNDING
    while True:
        if ends[1] <= limit_s:
            at = 1
            while at < n_leaves:
                at = 2 * at if ends[2 * at] == ends[at] else 2 * at + 1
            c = at - n_leaves
            first = s.class_codes[QUEUE_FROM][c]
            end_s = ends[at]
            while end_s <= limit_s:
                end_first(s, c, now_s)
                if s.class_codes[COUNT][c] == 0:
                    break
                left = times[GOAL][first] - s.class_rates[SERVICE][c]
                end_s = s.class_rates[SERVICE_S][c] + left / s.class_rates[RATE][c]
            set_end(ends, n_leaves, c, INF)
            continue
        if counts[N_DUE] == 0:
            break
        code = codes[DUE_CODE][0]
        time_s = times[DUE_S][0]
        if time_s > limit_s:
            if tolerance == 0.0 or code >= n_tasks or codes[CLASS][code] < 0:
                break
            share = (time_s - now_s) * s.class_rates[PEAK][codes[CLASS][code]] / times[AMOUNT][code]
            if share > tolerance:
                break
            s.reached[0] = max(s.reached[0], share)
        pop(times[DUE_S], codes[DUE_CODE], counts[N_DUE], 0)
        counts[N_DUE] -= 1
        if code >= n_tasks:
            finish(times, codes, s.next_tasks, counts, code - n_tasks, time_s)
        else:
            begin(s, code, time_s, now_s)


def attach(class_codes: Table[int], link_codes: Table[int], slots: Table[int], c: int) -> None:
    """Make class c a member of its links."""
    for slot in range(class_codes[ROUTE_FROM][c], class_codes[ROUTE_TO][c]):
        link = slots[LINK][slot]
        at = link_codes[MEMBERS_FROM][link] + link_codes[N_MEMBERS][link]
        link_codes[N_MEMBERS][link] += 1
        slots[MEMBER][at] = c
        slots[MEMBER_SLOT][at] = slot
        slots[PLACE][slot] = at


def detach(class_codes: Table[int], link_codes: Table[int], slots: Table[int], c: int) -> None:
    """Take class c out of its links; the last member of each fills the gap."""
    for slot in range(class_codes[ROUTE_FROM][c], class_codes[ROUTE_TO][c]):
        link = slots[LINK][slot]
        link_codes[N_MEMBERS][link] -= 1
        last = link_codes[MEMBERS_FROM][link] + link_codes[N_MEMBERS][link]
        at = slots[PLACE][slot]
        slots[MEMBER][at] = slots[MEMBER][last]
        slots[MEMBER_SLOT][at] = slots[MEMBER_SLOT][last]
        slots[PLACE][slots[MEMBER_SLOT][at]] = at


def water_level(s: State, link: int) -> float:
    """A lower bound, mostly exact, of the level at which this link would be full if nothing else changed."""
    rate, weight, level, count = s.class_rates[RATE], s.class_rates[WEIGHT], s.class_rates[LEVEL], s.class_codes[COUNT]
    member = s.slots[MEMBER]
    first = s.link_codes[MEMBERS_FROM][link]
    last = first + s.link_codes[N_MEMBERS][link]
    water = 0.0
    for _ in range(WATER_PASSES):
        room = s.link_rates[CAPACITY][link]
        share = 0.0
        for at in range(first, last):
            c = member[at]
            if level[c] < water:
                room -= count[c] * rate[c]
            else:
                share += count[c] * weight[c]
        if share <= 0.0 or room / share <= water:
            break
        water = room / share
    return water


def find_floor(s: State, solve: int) -> float:
    """The level under which the event changes nothing; settles who is a member, and the bottleneck guess of gainers."""
    rates, codes, link_rates, link_codes, slots = s.class_rates, s.class_codes, s.link_rates, s.link_codes, s.slots
    count, count_before, changed = codes[COUNT], codes[COUNT_BEFORE], codes[CHANGED]
    use, gain, capacity, water, water_mark = (
        link_rates[USE], link_rates[GAIN], link_rates[CAPACITY], link_rates[WATER], link_codes[WATER_MARK]
    )  # fmt: skip
    floor = INF
    for at in range(s.counts[N_CHANGED]):
        c = changed[at]
        if count[c] < count_before[c]:
            floor = min(floor, rates[LEVEL][c])
            if count[c] == 0:
                detach(codes, link_codes, slots, c)
        elif count[c] > count_before[c]:
            if count_before[c] == 0:
                attach(codes, link_codes, slots, c)
            rates[LEVEL][c] = INF
            for slot in range(codes[ROUTE_FROM][c], codes[ROUTE_TO][c]):
                gain[slots[LINK][slot]] += count[c] * rates[WEIGHT][c]
    for at in range(s.counts[N_CHANGED]):
        c = changed[at]
        if count[c] <= count_before[c]:
            continue
        least = rates[CAP][c] / rates[WEIGHT][c]
        tightest = -1
        for slot in range(codes[ROUTE_FROM][c], codes[ROUTE_TO][c]):
            link = slots[LINK][slot]
            # Slack even with all gainers at `least`: its water level is higher, and its members need not be walked.
            if use[link] + gain[link] * least <= capacity[link]:
                continue
            if water_mark[link] != solve:
                water_mark[link] = solve
                water[link] = water_level(s, link)
            if water[link] < least:
                least = water[link]
                tightest = link
        codes[BOTTLENECK][c] = tightest
        floor = min(floor, least)
    for at in range(s.counts[N_CHANGED]):
        c = changed[at]
        for slot in range(codes[ROUTE_FROM][c], codes[ROUTE_TO][c]):
            gain[slots[LINK][slot]] = 0.0
    # Well under the levels meant, so that rounding leaves out none of them.
    return floor - 4.0 * ROUNDING * floor


def seed(s: State, solve: int) -> None:
    """Pick the changed classes; take the links by which one that is gone made itself felt."""
    codes, link_rates, link_codes, counts = s.class_codes, s.link_rates, s.link_codes, s.counts
    count, link_mark = codes[COUNT], link_codes[LINK_MARK]
    for at in range(counts[N_CHANGED]):
        c = codes[CHANGED][at]
        if count[c] == codes[COUNT_BEFORE][c]:
            continue
        if count[c] > 0:
            codes[MARK][c] = 2 * solve
            codes[PICKED][counts[N_PICKED]] = c
            counts[N_PICKED] += 1
            continue
        for slot in range(codes[ROUTE_FROM][c], codes[ROUTE_TO][c]):
            link = s.slots[LINK][slot]
            is_full = link_rates[USE][link] >= link_rates[CAPACITY][link] * NEARLY_FULL
            if link_mark[link] != solve and (link == codes[BOTTLENECK][c] or is_full):
                link_mark[link] = solve
                link_codes[TAKEN][counts[N_TAKEN]] = link
                counts[N_TAKEN] += 1


def spread(s: State, solve: int, floor: float) -> None:
    """Take the full links of each picked class, pick their members at or above the floor, and so on to the end.

    Sums for each link taken what the classes under the floor leave of it.
    """
    codes, link_rates, link_codes, counts = s.class_codes, s.link_rates, s.link_codes, s.counts
    rate, weight, level = s.class_rates[RATE], s.class_rates[WEIGHT], s.class_rates[LEVEL]
    count, mark, picked, bottleneck = codes[COUNT], codes[MARK], codes[PICKED], codes[BOTTLENECK]
    route_from, route_to = codes[ROUTE_FROM], codes[ROUTE_TO]
    capacity, use, link_mark, taken = link_rates[CAPACITY], link_rates[USE], link_codes[LINK_MARK], link_codes[TAKEN]
    slot_link, member = s.slots[LINK], s.slots[MEMBER]
    n_picked, n_taken = counts[N_PICKED], counts[N_TAKEN]
    at_class = 0
    at_link = 0
    while True:
        while at_class < n_picked:
            c = picked[at_class]
            at_class += 1
            for slot in range(route_from[c], route_to[c]):
                link = slot_link[slot]
                if link_mark[link] != solve and (link == bottleneck[c] or use[link] >= capacity[link] * NEARLY_FULL):
                    link_mark[link] = solve
                    taken[n_taken] = link
                    n_taken += 1
        if at_link == n_taken:
            break
        link = taken[at_link]
        at_link += 1
        room = capacity[link]
        share = 0.0
        n_open = 0
        first = link_codes[MEMBERS_FROM][link]
        for at in range(first, first + link_codes[N_MEMBERS][link]):
            c = member[at]
            if level[c] >= floor:
                share += count[c] * weight[c]
                n_open += 1
                if mark[c] < 2 * solve:
                    mark[c] = 2 * solve
                    picked[n_picked] = c
                    n_picked += 1
            else:
                room -= count[c] * rate[c]
        link_rates[ROOM][link] = room
        link_rates[SHARE][link] = share
        link_codes[N_OPEN][link] = n_open
    counts[N_PICKED] = n_picked
    counts[N_TAKEN] = n_taken


def fill(s: State, solve: int, floor: float) -> None:
    """Progressive filling of the picked classes over the links taken: sets NEW_LEVEL, NEW_RATE and BOTTLENECK.

    Links that were left out get their new use, and are SUSPECTS where that was over capacity at some moment.

    Filling a class raises the level at which its other links are full, never lowers it, so a link's place in the heap may
    be too early but never too late, and is corrected when it comes up.
    """
    codes, link_codes = s.class_codes, s.link_codes
    cap, weight, new_rate, new_level = (
        s.class_rates[CAP], s.class_rates[WEIGHT], s.class_rates[NEW_RATE], s.class_rates[NEW_LEVEL]
    )  # fmt: skip
    count, mark, bottleneck, picked = codes[COUNT], codes[MARK], codes[BOTTLENECK], codes[PICKED]
    route_from, route_to, taken = codes[ROUTE_FROM], codes[ROUTE_TO], link_codes[TAKEN]
    room, share, n_open, link_mark = s.link_rates[ROOM], s.link_rates[SHARE], link_codes[N_OPEN], link_codes[LINK_MARK]
    slot_link, member = s.slots[LINK], s.slots[MEMBER]
    fill_level, fill_code = s.fill_level, s.fill_code
    load, use, capacity, suspects, is_suspect = (
        s.class_rates[LOAD], s.link_rates[USE], s.link_rates[CAPACITY], link_codes[SUSPECTS], link_codes[IS_SUSPECT]
    )  # fmt: skip
    n_links, n_left = s.counts[N_LINKS], s.counts[N_PICKED]
    n_heap = 0
    n_suspects = 0
    for at in range(s.counts[N_TAKEN]):
        link = taken[at]
        if n_open[link] > 0:
            fill_level[n_heap] = room[link] / share[link]
            fill_code[n_heap] = link
            n_heap += 1
    for at in range(n_left):
        c = picked[at]
        mark[c] = 2 * solve
        if cap[c] < INF:
            fill_level[n_heap] = cap[c] / weight[c]
            fill_code[n_heap] = n_links + c
            n_heap += 1
    for at in range(n_heap // 2 - 1, -1, -1):
        sift_down(fill_level, fill_code, n_heap, at, 0)
    level = floor
    while n_left > 0:
        code = fill_code[0]
        full = fill_level[0]
        is_link = code < n_links
        if is_link and n_open[code] > 0 and room[code] / share[code] > full:
            fill_level[0] = room[code] / share[code]
            sift_down(fill_level, fill_code, n_heap, 0, 0)
            continue
        pop(fill_level, fill_code, n_heap, 0)
        n_heap -= 1
        if is_link and n_open[code] == 0:
            continue
        if full > level + level * ROUNDING:
            level = full
        first = link_codes[MEMBERS_FROM][code] if is_link else 0
        for at in range(first, first + link_codes[N_MEMBERS][code] if is_link else 1):
            c = member[at] if is_link else code - n_links
            if mark[c] != 2 * solve:
                continue
            mark[c] = 2 * solve + 1
            n_left -= 1
            bottleneck[c] = code if is_link else -1
            new_level[c] = level
            new_rate[c] = min(level * weight[c], cap[c])
            used = count[c] * new_rate[c]
            filled = count[c] * weight[c]
            more = used - load[c]
            load[c] = used
            for slot in range(route_from[c], route_to[c]):
                link = slot_link[slot]
                if link_mark[link] == solve:
                    room[link] -= used
                    share[link] -= filled
                    n_open[link] -= 1
                else:
                    use[link] += more
                    if use[link] > capacity[link] and is_suspect[link] == 0:
                        is_suspect[link] = 1
                        suspects[n_suspects] = link
                        n_suspects += 1
    s.counts[N_SUSPECTS] = n_suspects


def settle(s: State, solve: int, floor: float) -> None:
    """Fill, and while a link that was left out comes out over capacity, take it in and fill again."""
    link_codes, counts = s.link_codes, s.counts
    capacity, use, taken, suspects = s.link_rates[CAPACITY], s.link_rates[USE], link_codes[TAKEN], link_codes[SUSPECTS]
    while True:
        fill(s, solve, floor)
        n_taken = counts[N_TAKEN]
        for at in range(counts[N_SUSPECTS]):
            link = suspects[at]
            link_codes[IS_SUSPECT][link] = 0
            if use[link] > capacity[link] + capacity[link] * ROUNDING:
                link_codes[LINK_MARK][link] = solve
                taken[counts[N_TAKEN]] = link
                counts[N_TAKEN] += 1
        if counts[N_TAKEN] == n_taken:
            break
        spread(s, solve, floor)
    for at in range(n_taken):
        link = taken[at]
        use[link] = capacity[link] - s.link_rates[ROOM][link]


def adopt_rates(s: State, now_s: float) -> None:
    """Make the new rates of the picked classes theirs, and renew their next ends."""
    codes, ends, n_leaves, n_picked = s.class_codes, s.ends, s.counts[N_LEAVES], s.counts[N_PICKED]
    rate, new_rate, level, new_level = (
        s.class_rates[RATE], s.class_rates[NEW_RATE], s.class_rates[LEVEL], s.class_rates[NEW_LEVEL]
    )  # fmt: skip
    service, service_s, goal = s.class_rates[SERVICE], s.class_rates[SERVICE_S], s.task_times[GOAL]
    picked, queue_from, is_changed = codes[PICKED], codes[QUEUE_FROM], codes[IS_CHANGED]
    height = 1
    while (1 << height) < n_leaves:
        height += 1
    # Renewing all winners costs n_leaves steps, renewing one path costs height.
    all_at_once = n_picked * height > n_leaves
    for at in range(n_picked):
        c = picked[at]
        level[c] = new_level[c]
        if new_rate[c] != rate[c]:
            service[c] += rate[c] * (now_s - service_s[c])
            service_s[c] = now_s
            rate[c] = new_rate[c]
        elif is_changed[c] == 0:
            continue
        end_s = service_s[c] + (goal[queue_from[c]] - service[c]) / rate[c]
        if all_at_once:
            ends[n_leaves + c] = end_s
        else:
            set_end(ends, n_leaves, c, end_s)
    if all_at_once:
        for node in range(n_leaves - 1, 0, -1):
            ends[node] = min(ends[2 * node], ends[2 * node + 1])


def end_early(s: State, now_s: float, tolerance: float, of_all: bool) -> bool:
    """End the flows of picked classes, or of all, of which at most tolerance * amount is left; True where any did."""
    codes, rates = s.class_codes, s.class_rates
    count, picked, queue_from = codes[COUNT], codes[PICKED], codes[QUEUE_FROM]
    service, service_s, rate = rates[SERVICE], rates[SERVICE_S], rates[RATE]
    goal, amount, queue = s.task_times[GOAL], s.task_times[AMOUNT], s.task_codes[QUEUE]
    n_kept = 0
    ended = False
    for at in range(s.counts[N_CLASSES] if of_all else s.counts[N_PICKED]):
        c = at if of_all else picked[at]
        first = queue_from[c]
        while count[c] > 0:
            left = goal[first] - service[c] - rate[c] * (now_s - service_s[c])
            share = left / amount[queue[first]]
            if share > tolerance:
                break
            s.reached[0] = max(s.reached[0], share)
            end_first(s, c, now_s)
            ended = True
        if not of_all:
            if count[c] == 0:
                detach(codes, s.link_codes, s.slots, c)
            else:
                picked[n_kept] = c
                n_kept += 1
    s.counts[N_PICKED] = n_kept
    return ended


def solve_changed(s: State, now_s: float, tolerance: float) -> None:
    """Give every class that the event at hand can change its new rate and its new next end."""
    codes, rates, counts = s.class_codes, s.class_rates, s.counts
    count, count_before, changed = codes[COUNT], codes[COUNT_BEFORE], codes[CHANGED]
    if tolerance > 0.0 and counts[N_LAST_PICKED] * BROAD > counts[N_CLASSES]:
        end_early(s, now_s, tolerance, True)
    n_net = 0
    for at in range(counts[N_CHANGED]):
        if count[changed[at]] != count_before[changed[at]]:
            n_net += 1
    if n_net > 0:
        counts[N_SOLVES] += 1
        solve = counts[N_SOLVES]
        floor = find_floor(s, solve)
        seed(s, solve)
        spread(s, solve, floor)
        if tolerance > 0.0 and end_early(s, now_s, tolerance, False):
            spread(s, solve, floor)
        for at in range(counts[N_CHANGED]):
            c = changed[at]
            if count[c] == 0:
                for slot in range(codes[ROUTE_FROM][c], codes[ROUTE_TO][c]):
                    s.link_rates[USE][s.slots[LINK][slot]] -= rates[LOAD][c]
                rates[LOAD][c] = 0.0
        settle(s, solve, floor)
        adopt_rates(s, now_s)
    for at in range(counts[N_CHANGED]):
        c = changed[at]
        codes[IS_CHANGED][c] = 0
        end_s = INF
        if count[c] > 0:
            left = s.task_times[GOAL][codes[QUEUE_FROM][c]] - rates[SERVICE][c]
            end_s = rates[SERVICE_S][c] + left / rates[RATE][c]
        set_end(s.ends, counts[N_LEAVES], c, end_s)
    counts[N_LAST_PICKED] = counts[N_PICKED]
    counts[N_CHANGED] = 0
    counts[N_PICKED] = 0
    counts[N_TAKEN] = 0


def advance(s: State, tolerance: float, max_work: int) -> bool:
    """Run for about max_work more units of work (WORK_AN_EVENT each, and one for each class re-solved); True at the end."""
    counts = s.counts
    last = counts[N_WORK] + max_work
    while counts[N_WORK] < last:
        now_s = s.ends[1]
        if counts[N_DUE] > 0:
            now_s = min(now_s, s.task_times[DUE_S][0])
        if now_s == INF:
            return True
        take_due(s, now_s, tolerance)
        if counts[N_CHANGED] > 0:
            solve_changed(s, now_s, tolerance)
            counts[N_WORK] += counts[N_LAST_PICKED]
        counts[N_WORK] += WORK_AN_EVENT
    return False


# What is compiled, callees first.
FUNCTIONS = (
    *("sift_down", "push", "pop", "set_end", "note_change", "finish", "end_first", "begin", "take_due", "attach", "detach"),
    *("water_level", "find_floor", "seed", "spread", "fill", "settle", "adopt_rates", "end_early", "solve_changed", "advance"),
)
