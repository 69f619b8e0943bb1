"""The hot loop: events in time order, and max-min sharing re-solved only where an event can change a rate.

Everything here stays inside the subset of Python that Numba compiles, and calls no library, so that the same lines run
compiled (over arrays) and plain (over lists) with the same bits. All of it stands in one file because Numba's cache looks
for changes only in the file of the function that it compiles: a caller would keep a stale copy of a callee from elsewhere.
Columns of one length are the rows of one table: Numba passes a function each array as seven words, and a call with sixty
arrays costs more than most events. What a solve reads of a class lies side by side instead, WIDTH numbers a class: a solve
walks classes in no order of memory, and waits for each line of it.

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

With a tolerance an event costs what it changes by more than a trace. Only the links of the changed classes are filled, as if
no other bottleneck could move: a class of theirs rises to the level of its own at most. Links that are then over or under their
capacity by more than SLACK are filled in the next round, and so on: a change fades by the number of flows of each link it passes.
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
    """All that the loop reads and writes; n tasks, k classes, m links, e = links over all routes of classes, q resources."""

    task_times: Table[float]  # [column][n]
    task_codes: Table[int]
    class_rates: Column[float]  # [WIDTH * class + column]
    class_codes: Column[int]
    class_marks: Column[int]  # [k] 2 * solve: picked in this solve; + 1: filled. Of its own, so that many lie on a line
    class_lists: Table[int]  # [column][k]
    link_rates: Table[float]  # [column][m]
    link_codes: Table[int]
    slots: Table[int]  # [column][e]
    resources: Table[int]  # [column][q]
    next_tasks: Column[int]  # tasks that wait for a task, by NEXT_FROM..NEXT_TO
    ends: Column[float]  # tournament of the classes' next ends: leaf n_leaves + class, winner at 1
    fill_level: Column[float]  # [m + k] heap of links and caps by the level at which they are full
    fill_code: Column[int]  # [m + k] link, or m + class for a cap
    counts: Column[int]
    numbers: Column[float]


# task_times. ALONE_S: what its amount takes at the most that its cap and route allow. DUE_S and DUE_CODE are a heap of what
# comes that is no end of a flow, by (time, code), code being the task plus n times: 0, its delay is over; 1, it has moved what
# it moves without a link; 2, it asks for its resource; 3, it gives that back. GOAL and QUEUE are a heap for each class, from
# QUEUE_FROM on: service at which a flow ends. FINISH_S is also when a task on its way will, as far as known, have been done.
# LATE: what is added to AMOUNT where the task waits for more than BEHIND.
DELAY_S, AMOUNT, ALONE_S, READY_S, START_S, FINISH_S, DUE_S, GOAL, LATE = range(9)
# task_codes. CLASS -1: the task shares nothing, and takes ALONE_S after its delay. RESOURCE -1: it needs none. AFTER: the task
# behind it in the queue of its resource. BATCH: list of the tasks whose start (task + n) or end (task) a solve takes together.
# BEHIND: a task that it waits for without being late; -1 for none.
CLASS, N_MISSING, NEXT_FROM, NEXT_TO, DUE_CODE, QUEUE, RESOURCE, AFTER, BATCH, BEHIND = range(10)
# class_rates. DEMAND: count * weight. LOAD: count * rate as last added to USE. SERVICE_S: when SERVICE was true. RATE is 0 from
# the start of a first flow until its first solve.
LEVEL, DEMAND, LOAD, WEIGHT, CAP, RATE, SERVICE, SERVICE_S = range(8)
# class_codes. ROUTE_FROM..ROUTE_TO: slots of its route. COUNT: flows now; COUNT_BEFORE: before the event at hand.
COUNT, ROUTE_FROM, ROUTE_TO, BOTTLENECK, QUEUE_FROM, COUNT_BEFORE, IS_CHANGED = range(7)
# class_lists: classes that the event touches, that the solve picked, that a link at hand has still to fill.
CHANGED, PICKED, OPENED = range(3)
# link_rates. USE: rate through it now. GAIN: weight of gaining classes. ROOM, SHARE: capacity, weight not yet filled. TOP: no
# member's level is higher; the level at which the link was full when last filled, inf where it wasn't.
CAPACITY, USE, GAIN, ROOM, SHARE, WATER, TOP = range(7)
# link_codes. LINK_MARK, WATER_MARK: the solve that took it in, that computed WATER. TAKEN, SUSPECTS: lists of links taken in,
# and of those left out that may be over capacity.
MEMBERS_FROM, N_MEMBERS, N_OPEN, LINK_MARK, WATER_MARK, TAKEN, SUSPECTS, IS_SUSPECT = range(8)
# slots. LINK: of the route place. The members of a link stand from MEMBERS_FROM on: MEMBER the class, MEMBER_SLOT its route
# place there; PLACE: where the member for this route place stands.
LINK, MEMBER, MEMBER_SLOT, PLACE = range(4)
# resources. N_FREE: slots that no task holds. FIRST_WAITS..LAST_WAITS: ends of the queue for them; -1 where nobody waits.
N_FREE, FIRST_WAITS, LAST_WAITS = range(3)
# counts: lengths of the lists and heaps above, what is done so far, and sizes. N_MARKS: solves, and rounds of solves. N_SEEDS:
# the first of PICKED, whose other full links are taken too. N_ACTIVE: classes that have flows. N_MOVED: flows that have ended.
N_DUE, N_CHANGED, N_PICKED, N_TAKEN, N_SUSPECTS, N_DONE, N_SOLVES, N_WORK = range(8)
N_TASKS, N_LINKS, N_LEAVES, N_MARKS, N_SEEDS, N_ACTIVE, N_MOVED = range(8, 15)
# numbers. REACHED: largest share of a transfer's time (or of the mean one's) by which the instant of a solve missed its start
# or end. NEARLY: share of a link's capacity from which on a solve takes it for full. MOVED_S: time that all flows took that have
# ended. SLACK: share of its capacity by which a link may be over it or under it; 0: links are filled together, to rounding.
REACHED, NEARLY, MOVED_S, SLACK = range(4)

# Columns of class_rates and of class_codes.
WIDTH = 8
# Times and levels that differ by less than this, relatively, differ by rounding only: 512 steps of a double. One event takes
# them all, so symmetric flows end together and cost one solve.
ROUNDING = 2.0**-43
# A link used to within this of its capacity is taken for full. Every link that is some class's bottleneck must pass: it lies
# within rounding of its capacity. One that passes and isn't full costs time only.
NEARLY_FULL = 1.0 - 1e-9
# The same for solves that take many events together: they fill such links often, and to find that out costs a second filling
# (a third of all the time at NEARLY_FULL, on bursts of 10,000 flows at 1 %).
BATCH_FULL = 0.95
# Passes toward a water level; each pass gives a valid lower bound, later ones a closer one.
WATER_PASSES = 4
# What an event costs, in classes re-solved (measured: plain, 22 us for an event with two, 200 us for one with sixty).
WORK_AN_EVENT = 4
# SLACK over the tolerance: with a tenth the finish times of bursts have the errors that they have with links filled together
# (medians of 0.04 % at 1 %; with all of it 0.12 %).
SLACK_SHARE = 0.1
# Links of more classes than this are filled together: a round then costs as much, and more of them are needed (measured: bursts
# of 10,000 flows on 256 GPUs take 1.2 to 2 times as long in rounds; 8 flows a link on 1,024 GPUs 2 times as long together).
DENSE = 12
# Rounds after which links stay taken, so that rounds come to an end. Plans took 13 at most.
MOST_ROUNDS = 16
# What an index of the two hottest loops is taken through: what can't be negative, Numba needn't look at (3 % of a simulation).
UNSIGNED = 2**32 - 1
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


def note_change(codes: Column[int], lists: Table[int], counts: Column[int], c: int) -> None:
    """Remember that the event at hand touches class c, and its number of flows before."""
    row = WIDTH * c
    if codes[row + IS_CHANGED] == 0:
        codes[row + IS_CHANGED] = 1
        codes[row + COUNT_BEFORE] = codes[row + COUNT]
        lists[CHANGED][counts[N_CHANGED]] = c
        counts[N_CHANGED] += 1


def make_due(s: State, time_s: float, code: int) -> None:
    """Put what comes at this time among what is due."""
    push(s.task_times[DUE_S], s.task_codes[DUE_CODE], s.counts[N_DUE], 0, time_s, code)
    s.counts[N_DUE] += 1


def come_late(s: State, task: int) -> None:
    """Add what a task takes more if it has waited for others since the task that it is behind was done."""
    times, behind = s.task_times, s.task_codes[BEHIND][task]
    if behind < 0 or times[FINISH_S][behind] < times[READY_S][task] * (1.0 - ROUNDING):
        amount = times[AMOUNT][task]
        times[AMOUNT][task] = amount + times[LATE][task]
        times[ALONE_S][task] *= times[AMOUNT][task] / amount


def finish(s: State, task: int, time_s: float) -> None:
    """Record the end of a task, give its resource back, and make due what waited for it last."""
    times, codes, counts = s.task_times, s.task_codes, s.counts
    ready_s, n_missing = times[READY_S], codes[N_MISSING]
    times[FINISH_S][task] = time_s
    counts[N_DONE] += 1
    if codes[RESOURCE][task] >= 0:
        make_due(s, time_s, task + 3 * counts[N_TASKS])
    for at in range(codes[NEXT_FROM][task], codes[NEXT_TO][task]):
        waiting = s.next_tasks[at]
        ready_s[waiting] = max(ready_s[waiting], time_s)
        n_missing[waiting] -= 1
        if n_missing[waiting] == 0:
            if times[LATE][waiting] > 0.0:
                come_late(s, waiting)
            if codes[RESOURCE][waiting] >= 0:
                make_due(s, ready_s[waiting], waiting + 2 * counts[N_TASKS])
            else:
                make_due(s, ready_s[waiting] + times[DELAY_S][waiting], waiting)


def ask(s: State, task: int, time_s: float) -> None:
    """Give a task its resource where a slot is free; else it waits behind those who asked before."""
    resources, resource = s.resources, s.task_codes[RESOURCE][task]
    if resources[N_FREE][resource] > 0:
        resources[N_FREE][resource] -= 1
        make_due(s, time_s + s.task_times[DELAY_S][task], task)
        return
    if resources[FIRST_WAITS][resource] < 0:
        resources[FIRST_WAITS][resource] = task
    else:
        s.task_codes[AFTER][resources[LAST_WAITS][resource]] = task
    resources[LAST_WAITS][resource] = task
    s.task_codes[AFTER][task] = -1


def give_back(s: State, task: int, time_s: float) -> None:
    """Free the slot that a task held, for the first who waits."""
    resources, resource = s.resources, s.task_codes[RESOURCE][task]
    first = resources[FIRST_WAITS][resource]
    if first < 0:
        resources[N_FREE][resource] += 1
        return
    resources[FIRST_WAITS][resource] = s.task_codes[AFTER][first]
    make_due(s, time_s + s.task_times[DELAY_S][first], first)


def next_end_s(s: State, c: int) -> float:
    """When the next flow of class c ends at the class's rate; inf where it has none."""
    row = WIDTH * c
    if s.class_codes[row + COUNT] == 0:
        return INF
    left = s.task_times[GOAL][s.class_codes[row + QUEUE_FROM]] - s.class_rates[row + SERVICE]
    return s.class_rates[row + SERVICE_S] + left / s.class_rates[row + RATE]


def end_first(s: State, c: int, time_s: float) -> None:
    """End the flow of class c that is next."""
    row = WIDTH * c
    times, codes, class_codes = s.task_times, s.task_codes, s.class_codes
    note_change(class_codes, s.class_lists, s.counts, c)
    base = class_codes[row + QUEUE_FROM]
    task = codes[QUEUE][base]
    pop(times[GOAL], codes[QUEUE], class_codes[row + COUNT], base)
    class_codes[row + COUNT] -= 1
    s.counts[N_ACTIVE] -= 1 if class_codes[row + COUNT] == 0 else 0
    set_end(s.ends, s.counts[N_LEAVES], c, next_end_s(s, c))
    s.numbers[MOVED_S] += max(time_s - times[START_S][task], 0.0)
    s.counts[N_MOVED] += 1
    finish(s, task, max(time_s, times[START_S][task]))


def begin(s: State, c: int, task: int, time_s: float) -> None:
    """Add the flow of a task to its class: what it is served counts from this time on."""
    row = WIDTH * c
    times, rates, codes = s.task_times, s.class_rates, s.class_codes
    note_change(codes, s.class_lists, s.counts, c)
    if codes[row + COUNT] == 0:
        rates[row + SERVICE] = 0.0
        if codes[row + COUNT_BEFORE] == 0:
            rates[row + RATE] = 0.0
        s.counts[N_ACTIVE] += 1
    else:
        rates[row + SERVICE] += rates[row + RATE] * (time_s - rates[row + SERVICE_S])
    rates[row + SERVICE_S] = time_s
    goal = rates[row + SERVICE] + times[AMOUNT][task]
    push(times[GOAL], s.task_codes[QUEUE], codes[row + COUNT], codes[row + QUEUE_FROM], goal, task)
    codes[row + COUNT] += 1


def take_other(s: State, code: int, time_s: float) -> None:
    """Apply what comes that changes no rate: steps of tasks without a link, and of resources."""
    n_tasks = s.counts[N_TASKS]
    if code < n_tasks:
        s.task_times[START_S][code] = time_s
        if s.task_times[ALONE_S][code] > 0.0:
            make_due(s, time_s + s.task_times[ALONE_S][code], code + n_tasks)
        else:
            finish(s, code, time_s)
    elif code < 2 * n_tasks:
        finish(s, code - n_tasks, time_s)
    elif code < 3 * n_tasks:
        ask(s, code - 2 * n_tasks, time_s)
    else:
        give_back(s, code - 3 * n_tasks, time_s)


def take_batch(s: State, tolerance: float) -> float:
    """Apply the next events, as many as one solve may take together, in time order; the instant for the solve, inf for none.

    Each start and end of a flow has a window around its time: tolerance * the time that the transfer takes (for a start: that
    it would take alone), or that transfers took on average until now if that is longer, as far as so much time has passed: when
    a short flow came and went matters little to the others. Events are taken while some instant lies in all their windows; that
    nearest their mean is chosen, so an event that is taken alone is exact and a batch is late as much as it is early. Times of
    flows stay their own. What a flow is served counts from its own start, whichever the instant, so that chains don't drift.
    """
    times, codes, counts, ends = s.task_times, s.task_codes, s.counts, s.ends
    n_leaves, n_tasks = counts[N_LEAVES], counts[N_TASKS]
    mean_s = s.numbers[MOVED_S] / max(counts[N_MOVED], 1)
    low_s, high_s = -INF, INF
    first_s = INF
    sum_s = 0.0
    n_batch = 0
    while True:
        time_s = ends[1]
        is_end = True
        code = -1
        c = -1
        if counts[N_DUE] > 0 and times[DUE_S][0] < time_s:
            time_s = times[DUE_S][0]
            is_end = False
            code = codes[DUE_CODE][0]
            if code < n_tasks:
                c = codes[CLASS][code]
        if time_s == INF:
            break
        if not is_end and c < 0:
            if time_s > high_s:
                break
            pop(times[DUE_S], codes[DUE_CODE], counts[N_DUE], 0)
            counts[N_DUE] -= 1
            take_other(s, code, time_s)
            if n_batch == 0:
                break
            continue
        window_s = time_s * ROUNDING
        long_s = min(mean_s, time_s)
        if is_end:
            at = 1
            while at < n_leaves:
                at = 2 * at if ends[2 * at] == ends[at] else 2 * at + 1
            c = at - n_leaves
            code = codes[QUEUE][s.class_codes[WIDTH * c + QUEUE_FROM]]
            long_s = max(long_s, time_s - times[START_S][code])
        else:
            long_s = max(long_s, times[ALONE_S][code])
        window_s += tolerance * long_s
        if time_s - window_s > high_s:
            break
        if n_batch == 0:
            first_s = time_s
        stamp_s = first_s if tolerance == 0.0 else time_s
        if is_end:
            end_first(s, c, stamp_s)
        else:
            # A class's first flows share one clock, which has no rate yet to tell their starts apart.
            row = WIDTH * c
            has_no_rate = s.class_codes[row + COUNT] > 0 and s.class_rates[row + RATE] == 0.0
            if has_no_rate and s.class_rates[row + SERVICE_S] != stamp_s:
                break
            pop(times[DUE_S], codes[DUE_CODE], counts[N_DUE], 0)
            counts[N_DUE] -= 1
            times[START_S][code] = time_s
            begin(s, c, code, stamp_s)
        low_s = max(low_s, time_s - window_s)
        high_s = min(high_s, time_s + window_s)
        sum_s += time_s - first_s
        codes[BATCH][n_batch] = code if is_end else code + n_tasks
        n_batch += 1
    if tolerance == 0.0 or n_batch == 0:
        return first_s
    now_s = min(max(first_s + sum_s / n_batch, low_s), high_s)
    for at in range(n_batch):
        code = codes[BATCH][at]
        if code < n_tasks:
            time_s, long_s = times[FINISH_S][code], times[FINISH_S][code] - times[START_S][code]
        else:
            time_s, long_s = times[START_S][code - n_tasks], times[ALONE_S][code - n_tasks]
        long_s = max(long_s, min(mean_s, time_s))
        missed_s = abs(time_s - now_s) - time_s * ROUNDING
        if missed_s > s.numbers[REACHED] * long_s and long_s > 0.0:  # what takes no time beside the clock's steps has no share
            s.numbers[REACHED] = missed_s / long_s
    return now_s


def attach(class_codes: Column[int], link_codes: Table[int], slots: Table[int], c: int) -> None:
    """Make class c a member of its links."""
    row = WIDTH * c
    for slot in range(class_codes[row + ROUTE_FROM], class_codes[row + ROUTE_TO]):
        link = slots[LINK][slot]
        at = link_codes[MEMBERS_FROM][link] + link_codes[N_MEMBERS][link]
        link_codes[N_MEMBERS][link] += 1
        slots[MEMBER][at] = c
        slots[MEMBER_SLOT][at] = slot
        slots[PLACE][slot] = at


def detach(class_codes: Column[int], link_codes: Table[int], slots: Table[int], c: int) -> None:
    """Take class c out of its links; the last member of each fills the gap."""
    row = WIDTH * c
    for slot in range(class_codes[row + ROUTE_FROM], class_codes[row + ROUTE_TO]):
        link = slots[LINK][slot]
        link_codes[N_MEMBERS][link] -= 1
        last = link_codes[MEMBERS_FROM][link] + link_codes[N_MEMBERS][link]
        at = slots[PLACE][slot]
        slots[MEMBER][at] = slots[MEMBER][last]
        slots[MEMBER_SLOT][at] = slots[MEMBER_SLOT][last]
        slots[PLACE][slots[MEMBER_SLOT][at]] = at


def water_level(s: State, link: int) -> float:
    """A lower bound, mostly exact, of the level at which this link would be full if nothing else changed."""
    rates, codes, member = s.class_rates, s.class_codes, s.slots[MEMBER]
    first = s.link_codes[MEMBERS_FROM][link]
    last = first + s.link_codes[N_MEMBERS][link]
    water = 0.0
    for _ in range(WATER_PASSES):
        room = s.link_rates[CAPACITY][link]
        share = 0.0
        for at in range(first, last):
            c = member[at]
            row = WIDTH * c
            if rates[row + LEVEL] < water:
                room -= codes[row + COUNT] * rates[row + RATE]
            else:
                share += rates[row + DEMAND]
        if share <= 0.0 or room / share <= water:
            break
        water = room / share
    return water


def find_floor(s: State, solve: int) -> float:
    """The level under which the event changes nothing; settles who is a member, and the bottleneck guess of gainers."""
    rates, codes, link_rates, link_codes, slots = s.class_rates, s.class_codes, s.link_rates, s.link_codes, s.slots
    changed = s.class_lists[CHANGED]
    use, gain, capacity, water, water_mark = (
        link_rates[USE], link_rates[GAIN], link_rates[CAPACITY], link_rates[WATER], link_codes[WATER_MARK]
    )  # fmt: skip
    floor = INF
    for at in range(s.counts[N_CHANGED]):
        c = changed[at]
        row = WIDTH * c
        count, count_before = codes[row + COUNT], codes[row + COUNT_BEFORE]
        rates[row + DEMAND] = count * rates[row + WEIGHT]
        if count < count_before:
            floor = min(floor, rates[row + LEVEL])
            if count == 0:
                detach(codes, link_codes, slots, c)
        elif count > count_before:
            if count_before == 0:
                attach(codes, link_codes, slots, c)
            rates[row + LEVEL] = INF
            for slot in range(codes[row + ROUTE_FROM], codes[row + ROUTE_TO]):
                gain[slots[LINK][slot]] += rates[row + DEMAND]
    for at in range(s.counts[N_CHANGED]):
        c = changed[at]
        row = WIDTH * c
        if codes[row + COUNT] <= codes[row + COUNT_BEFORE]:
            continue
        least = rates[row + CAP] / rates[row + WEIGHT]
        tightest = -1
        for slot in range(codes[row + ROUTE_FROM], codes[row + ROUTE_TO]):
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
        codes[row + BOTTLENECK] = tightest
        floor = min(floor, least)
    for at in range(s.counts[N_CHANGED]):
        c = changed[at]
        row = WIDTH * c
        for slot in range(codes[row + ROUTE_FROM], codes[row + ROUTE_TO]):
            gain[slots[LINK][slot]] = 0.0
    # Well under the levels meant, so that rounding leaves out none of them.
    return floor - 4.0 * ROUNDING * floor


def seed(s: State, solve: int) -> None:
    """Pick the changed classes; take the links by which one that is gone made itself felt."""
    codes, lists, link_rates, link_codes, counts = s.class_codes, s.class_lists, s.link_rates, s.link_codes, s.counts
    link_mark, marks = link_codes[LINK_MARK], s.class_marks
    for at in range(counts[N_CHANGED]):
        c = lists[CHANGED][at]
        row = WIDTH * c
        if codes[row + COUNT] == codes[row + COUNT_BEFORE]:
            continue
        if codes[row + COUNT] > 0:
            marks[c] = 2 * solve
            lists[PICKED][counts[N_PICKED]] = c
            counts[N_PICKED] += 1
            continue
        for slot in range(codes[row + ROUTE_FROM], codes[row + ROUTE_TO]):
            link = s.slots[LINK][slot]
            is_full = link_rates[USE][link] >= link_rates[CAPACITY][link] * s.numbers[NEARLY]
            if link_mark[link] != solve and (link == codes[row + BOTTLENECK] or is_full):
                link_mark[link] = solve
                link_codes[TAKEN][counts[N_TAKEN]] = link
                counts[N_TAKEN] += 1
    counts[N_SEEDS] = counts[N_PICKED]


def spread(s: State, solve: int, floor: float) -> None:
    """Take the full links of each picked class, pick their members at or above the floor, and so on to the end.

    Sums for each link taken what the classes under the floor leave of it.
    """
    rates, codes, link_rates, link_codes, counts = s.class_rates, s.class_codes, s.link_rates, s.link_codes, s.counts
    picked, marks = s.class_lists[PICKED], s.class_marks
    capacity, use, top = link_rates[CAPACITY], link_rates[USE], link_rates[TOP]
    link_mark, taken = link_codes[LINK_MARK], link_codes[TAKEN]
    slot_link, member = s.slots[LINK], s.slots[MEMBER]
    n_picked, n_taken, n_links = counts[N_PICKED], counts[N_TAKEN], counts[N_LINKS]
    nearly = s.numbers[NEARLY]
    at_class = 0
    at_link = 0
    n_full = -1  # full links that aren't taken and may have members at or above the floor; -1: not counted
    # In rounds, others' full links wait for the next.
    n_seeds = counts[N_SEEDS] if s.numbers[SLACK] > 0.0 else counts[N_LEAVES]
    while True:
        while at_class < min(n_picked, n_seeds) and n_full != 0:
            c = picked[at_class]
            row = WIDTH * c
            at_class += 1
            for slot in range(codes[row + ROUTE_FROM], codes[row + ROUTE_TO]):
                link = slot_link[slot]
                if link_mark[link] == solve:
                    continue
                is_full = use[link] >= capacity[link] * nearly
                if is_full or link == codes[row + BOTTLENECK]:
                    link_mark[link] = solve
                    taken[n_taken] = link
                    n_taken += 1
                    if is_full and n_full > 0 and top[link] >= floor:
                        n_full -= 1
            if n_full < 0 and at_class > n_links and at_class >= counts[N_PICKED]:
                # So many are picked that to look at every link costs little; with all of these taken no class adds one.
                n_full = 0
                for link in range(n_links):
                    if link_mark[link] != solve and top[link] >= floor and use[link] >= capacity[link] * nearly:
                        n_full += 1
        if at_link == n_taken:
            break
        link = taken[at_link]
        at_link += 1
        room = capacity[link]
        share = 0.0
        n_open = 0
        first = link_codes[MEMBERS_FROM][link]
        for at in range(first, first + link_codes[N_MEMBERS][link]):
            c = member[at & UNSIGNED]
            row = WIDTH * c
            # Whether it is open, and picked already, is a coin toss to the processor: there is no branch to guess.
            is_open = 1 if rates[row + LEVEL] >= floor else 0
            share += rates[row + DEMAND] * is_open
            room -= rates[row + LOAD] * (1 - is_open)
            n_open += is_open
            mark = marks[c]
            picked[n_picked] = c
            n_picked += is_open if mark < 2 * solve else 0
            marks[c] = max(mark, 2 * solve * is_open)
        link_rates[ROOM][link] = room
        link_rates[SHARE][link] = share
        link_codes[N_OPEN][link] = n_open
    counts[N_PICKED] = n_picked
    counts[N_TAKEN] = n_taken


def fill(s: State, solve: int, floor: float) -> None:
    """Progressive filling of the picked classes over the links taken: sets their LEVEL, LOAD and BOTTLENECK.

    Links that were left out get their new use, and are SUSPECTS where that was over capacity at some moment; in rounds also
    where a class of theirs takes less, and there they limit their classes to the levels that these had.

    Filling a class raises the level at which its other links are full, never lowers it, so a link's place in the heap may
    be too early but never too late, and is corrected when it comes up.
    """
    rates, codes, link_codes = s.class_rates, s.class_codes, s.link_codes
    picked, opened, taken, marks = s.class_lists[PICKED], s.class_lists[OPENED], link_codes[TAKEN], s.class_marks
    room, share, n_open, link_mark = s.link_rates[ROOM], s.link_rates[SHARE], link_codes[N_OPEN], link_codes[LINK_MARK]
    slot_link, member = s.slots[LINK], s.slots[MEMBER]
    fill_level, fill_code = s.fill_level, s.fill_code
    use, capacity, suspects, is_suspect = (
        s.link_rates[USE], s.link_rates[CAPACITY], link_codes[SUSPECTS], link_codes[IS_SUSPECT]
    )  # fmt: skip
    top, n_links, n_left = s.link_rates[TOP], s.counts[N_LINKS], s.counts[N_PICKED]
    n_heap = 0
    n_suspects = 0
    in_rounds = s.numbers[SLACK] > 0.0
    for at in range(s.counts[N_TAKEN]):
        link = taken[at]
        top[link] = INF
        if n_open[link] > 0:
            fill_level[n_heap] = room[link] / share[link]
            fill_code[n_heap] = link
            n_heap += 1
    for at in range(n_left):
        c = picked[at]
        row = WIDTH * c
        marks[c] = 2 * solve
        if in_rounds and codes[row + BOTTLENECK] >= 0 and link_mark[codes[row + BOTTLENECK]] != solve:
            fill_level[n_heap] = rates[row + LEVEL]
            fill_code[n_heap] = n_links + c
            n_heap += 1
        elif rates[row + CAP] < INF:
            fill_level[n_heap] = rates[row + CAP] / rates[row + WEIGHT]
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
        n_open_now = 0
        if is_link:
            top[code] = level
            first = link_codes[MEMBERS_FROM][code]
            for at in range(first, first + link_codes[N_MEMBERS][code]):
                c = member[at & UNSIGNED]
                is_open = 1 if marks[c] == 2 * solve else 0
                opened[n_open_now] = c
                n_open_now += is_open
                marks[c] += is_open
        else:
            c = code - n_links
            n_open_now = 1 if marks[c] == 2 * solve else 0
            opened[0] = c
            marks[c] += n_open_now
        n_left -= n_open_now
        for at in range(n_open_now):
            c = opened[at]
            row = WIDTH * c
            if is_link:
                codes[row + BOTTLENECK] = code
            elif not in_rounds or codes[row + BOTTLENECK] < 0 or link_mark[codes[row + BOTTLENECK]] == solve:
                codes[row + BOTTLENECK] = -1
            rates[row + LEVEL] = level
            used = codes[row + COUNT] * min(level * rates[row + WEIGHT], rates[row + CAP])
            filled = rates[row + DEMAND]
            more = used - rates[row + LOAD]
            rates[row + LOAD] = used
            for slot in range(codes[row + ROUTE_FROM], codes[row + ROUTE_TO]):
                link = slot_link[slot]
                if link_mark[link] == solve:
                    room[link] -= used
                    share[link] -= filled
                    n_open[link] -= 1
                else:
                    use[link] += more
                    if is_suspect[link] == 0 and (use[link] > capacity[link] or (in_rounds and more < 0.0)):
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
    """Give the picked classes the rates of their new levels, and renew their next ends."""
    rates, codes, ends, n_leaves, n_picked = s.class_rates, s.class_codes, s.ends, s.counts[N_LEAVES], s.counts[N_PICKED]
    goal, picked = s.task_times[GOAL], s.class_lists[PICKED]
    height = 1
    while (1 << height) < n_leaves:
        height += 1
    # Renewing all winners costs n_leaves steps, renewing one path costs height.
    all_at_once = n_picked * height > n_leaves
    for at in range(n_picked):
        c = picked[at]
        row = WIDTH * c
        rate = rates[row + RATE]
        new_rate = min(rates[row + LEVEL] * rates[row + WEIGHT], rates[row + CAP])
        if new_rate != rate:
            if rate > 0.0:
                rates[row + SERVICE] += rate * (now_s - rates[row + SERVICE_S])
                rates[row + SERVICE_S] = now_s
            rates[row + RATE] = new_rate
        elif codes[row + IS_CHANGED] == 0:
            continue
        end_s = rates[row + SERVICE_S] + (goal[codes[row + QUEUE_FROM]] - rates[row + SERVICE]) / new_rate
        if all_at_once:
            ends[n_leaves + c] = end_s
        else:
            set_end(ends, n_leaves, c, end_s)
    if all_at_once:
        for node in range(n_leaves - 1, 0, -1):
            ends[node] = min(ends[2 * node], ends[2 * node + 1])


def settle_in_rounds(s: State, solve: int, floor: float, now_s: float) -> None:
    """Fill the links taken, then those that this puts over or under their capacity by more than SLACK, until there are none."""
    link_codes, counts = s.link_codes, s.counts
    capacity, use, taken, suspects = s.link_rates[CAPACITY], s.link_rates[USE], link_codes[TAKEN], link_codes[SUSPECTS]
    top, n_rounds = s.link_rates[TOP], 0
    while True:
        fill(s, solve, floor)
        n_rounds += 1
        for at in range(counts[N_TAKEN]):
            link = taken[at]
            use[link] = capacity[link] - s.link_rates[ROOM][link]
        adopt_rates(s, now_s)
        counts[N_WORK] += counts[N_PICKED]
        if n_rounds < MOST_ROUNDS:
            counts[N_PICKED] = 0
            counts[N_TAKEN] = 0
            counts[N_MARKS] += 1
            solve = counts[N_MARKS]
        n_taken = counts[N_TAKEN]
        for at in range(counts[N_SUSPECTS]):
            link = suspects[at]
            link_codes[IS_SUSPECT][link] = 0
            slack = capacity[link] * s.numbers[SLACK]
            if use[link] > capacity[link] + slack or (top[link] < INF and use[link] < capacity[link] - slack):
                link_codes[LINK_MARK][link] = solve
                taken[counts[N_TAKEN]] = link
                counts[N_TAKEN] += 1
        if counts[N_TAKEN] == n_taken:
            break
        counts[N_SEEDS] = 0
        spread(s, solve, floor)


def goes_in_rounds(s: State) -> bool:
    """Whether so many classes have flows, and so few of them share a changed one's links, that rounds cost least."""
    codes, counts, slot_link, n_members = s.class_codes, s.counts, s.slots[LINK], s.link_codes[N_MEMBERS]
    # A change of less than SLACK isn't followed, so a class counts for about 1 / SLACK others at most.
    if counts[N_ACTIVE] * s.numbers[SLACK] < 1.0:
        return False
    n_found = 0
    n_links = 0
    for at in range(counts[N_CHANGED]):
        row = WIDTH * s.class_lists[CHANGED][at]
        for slot in range(codes[row + ROUTE_FROM], codes[row + ROUTE_TO]):
            n_found += n_members[slot_link[slot]]
            n_links += 1
    return n_found <= DENSE * n_links


def solve_changed(s: State, now_s: float) -> None:
    """Give every class that the events at hand can change its new rate and its new next end."""
    rates, codes, counts, changed = s.class_rates, s.class_codes, s.counts, s.class_lists[CHANGED]
    n_net = 0
    for at in range(counts[N_CHANGED]):
        row = WIDTH * changed[at]
        if codes[row + COUNT] != codes[row + COUNT_BEFORE]:
            n_net += 1
    if n_net > 0:
        counts[N_SOLVES] += 1
        counts[N_MARKS] += 1
        solve = counts[N_MARKS]
        floor = find_floor(s, solve)
        slack = s.numbers[SLACK]
        if not goes_in_rounds(s):
            s.numbers[SLACK] = 0.0
        seed(s, solve)
        spread(s, solve, floor)
        for at in range(counts[N_CHANGED]):
            c = changed[at]
            row = WIDTH * c
            if codes[row + COUNT] == 0:
                for slot in range(codes[row + ROUTE_FROM], codes[row + ROUTE_TO]):
                    s.link_rates[USE][s.slots[LINK][slot]] -= rates[row + LOAD]
                rates[row + LOAD] = 0.0
        if s.numbers[SLACK] > 0.0:
            settle_in_rounds(s, solve, floor, now_s)
        else:
            settle(s, solve, floor)
            adopt_rates(s, now_s)
        s.numbers[SLACK] = slack
    for at in range(counts[N_CHANGED]):
        c = changed[at]
        row = WIDTH * c
        codes[row + IS_CHANGED] = 0
        set_end(s.ends, counts[N_LEAVES], c, next_end_s(s, c))
    counts[N_WORK] += counts[N_PICKED]
    counts[N_CHANGED] = 0
    counts[N_PICKED] = 0
    counts[N_TAKEN] = 0


def advance(s: State, tolerance: float, max_work: int) -> bool:
    """Run for about max_work more units of work (WORK_AN_EVENT each, and one for each class re-solved); True at the end."""
    counts = s.counts
    s.numbers[NEARLY] = NEARLY_FULL if tolerance == 0.0 else BATCH_FULL
    s.numbers[SLACK] = SLACK_SHARE * tolerance
    last = counts[N_WORK] + max_work
    while counts[N_WORK] < last:
        if counts[N_DUE] == 0 and s.ends[1] == INF:
            return True
        now_s = take_batch(s, tolerance)
        if counts[N_CHANGED] > 0:
            solve_changed(s, now_s)
        counts[N_WORK] += WORK_AN_EVENT
    return False


# What is compiled, callees first.
FUNCTIONS = (
    *("sift_down", "push", "pop", "set_end", "note_change", "make_due", "come_late", "finish", "ask", "give_back"),
    *("next_end_s", "end_first", "begin", "take_other", "take_batch", "attach", "detach", "water_level", "find_floor"),
    *("seed", "spread", "fill", "settle", "adopt_rates", "settle_in_rounds", "goes_in_rounds", "solve_changed", "advance"),
)
