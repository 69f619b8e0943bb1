"""Lower bounds: the time that no plan can beat, each with the cut that gives it.

Every bound but the last is bytes that must cross some boundary, divided by all that the boundary can carry at the machine's
nominal rates:

- into a domain: what its ranks need and none of its ranks holds, over its NICs, or its uplink where the fabric is oversubscribed;
- out of some domains: what is needed elsewhere and held only there, once; and, where all that hold or need a piece are among
  them, once for every one of them that lacks it (relays included). The sets tried are those that occur as holders, or as holders
  and needers, of a pattern, and all domains together;
- into a rank: what it needs and doesn't hold, over its NVLink ports and NICs together (ports alone if all ranks lie in one
  domain); out of some ranks: what only they hold;
- without staging memory: what must enter a domain at the ranks that need it, over their NICs;
- on CPUs: every byte is copied once by some core;
- latency: whatever moves takes the start of one message.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.problems import Problem
from shardroute.planner.routing.patterns import Patterns, entries_of, patterns_of
from shardroute.topologies.calibrations import Calibration, check_calibration, least_start_s
from shardroute.topologies.errors import InfeasibleError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

# Sets of domains or ranks that are tried, the ones with most bytes first: comparing all with all grows with the square.
MOST_SETS = 256
# Groups above which no cut by the ranks that need is sought; it matters without staging alone.
MOST_GROUPS = 200_000
# Numbers of a set that a cut's name spells out.
SHOWN = 4


@dataclass(frozen=True, slots=True)
class Cut:
    """A boundary, the bytes that must cross it, and the seconds that this takes at least."""

    name: str
    n_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes that must cross out of (or into) a set of domains or ranks."""

    members: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What the problem needs moved, by where it must go. All in bytes.

    into_domain, out_of_domain   int64[n_domains]: needed and not held there; needed elsewhere and held only there
    into_rank, out_of_rank       int64[n_ranks]: likewise
    local                        needed by a rank that holds it
    out_of_homes                 held only in these domains and needed elsewhere
    among_domains                held and needed only in these domains, once for each of them that lacks it
    out_of_holders               held only by these ranks and needed by others
    into_needers                 needed in a domain that lacks it, by none but these ranks of it
    """

    into_domain: NDArray[np.int64]
    out_of_domain: NDArray[np.int64]
    into_rank: NDArray[np.int64]
    out_of_rank: NDArray[np.int64]
    local: int
    out_of_homes: tuple[Crossing, ...] = ()
    among_domains: tuple[Crossing, ...] = ()
    out_of_holders: tuple[Crossing, ...] = ()
    into_needers: tuple[Crossing, ...] = ()

    @property
    def n_bytes_cross_domain(self) -> int:
        """Unique bytes that each domain must take in, summed over domains: no plan moves less across them."""
        return int(self.into_domain.sum())


def demand(problem: Problem, pieces: Sequence[Pieces], topology: Topology) -> Demand:
    """The problem's demand on the topology's domains and ranks."""
    entries, holders, needers = entries_of(problem, pieces)
    return demand_of(patterns_of(entries, holders, needers, topology), problem.n_ranks, topology.n_domains)


def demand_of(patterns: Patterns, n_ranks: int, n_domains: int, *, into_needers: bool = True) -> Demand:
    """The same, from the problem's patterns; without `into_needers`, which bound only plans that don't stage, if it is False."""
    n_bytes = patterns.n_bytes
    pattern_of = np.repeat(np.arange(len(patterns)), np.diff(patterns.group_ptr))
    away = ~patterns.home
    n_home = np.bincount(pattern_of[patterns.home], minlength=len(patterns))
    n_away = np.bincount(pattern_of[away], minlength=len(patterns))
    n_holders = np.array([len(h) for h in patterns.holder_sets], dtype=np.int64)
    need_group = np.repeat(np.arange(len(pattern_of)), np.diff(patterns.needers[0]))
    hold_group = np.repeat(np.arange(len(pattern_of)), np.diff(patterns.holders[0]))
    n_others = np.bincount(pattern_of[need_group], minlength=len(patterns))  # needers that don't hold

    into_rank = _sum(patterns.needers[1], n_bytes[pattern_of[need_group]], n_ranks)
    into_domain = _sum(patterns.domain[away], n_bytes[pattern_of[away]], n_domains)
    one_home = patterns.home & ((n_home == 1) & (n_away > 0))[pattern_of]
    out_of_domain = _sum(patterns.domain[one_home], n_bytes[pattern_of[one_home]], n_domains)
    one_holder = ((n_holders == 1) & (n_others > 0))[pattern_of[hold_group]]
    out_of_rank = _sum(patterns.holders[1][one_holder], n_bytes[pattern_of[hold_group]][one_holder], n_ranks)
    local = int((np.diff(patterns.local[0]) * n_bytes).sum())

    ptr, crossing = patterns.group_ptr, np.flatnonzero(n_away > 0)
    homes = [patterns.domain[a : a + n] for a, n in zip(ptr[crossing].tolist(), n_home[crossing].tolist(), strict=True)]
    every = [patterns.domain[a:b] for a, b in zip(ptr[crossing].tolist(), ptr[crossing + 1].tolist(), strict=True)]
    moving = np.flatnonzero(n_others > 0)
    needer_ptr = patterns.needers[0]
    groups = np.flatnonzero(away)
    groups = groups if into_needers and len(groups) <= MOST_GROUPS else groups[:0]
    at_needers = [patterns.needers[1][needer_ptr[g] : needer_ptr[g + 1]] for g in groups.tolist()]
    return Demand(
        into_domain, out_of_domain, into_rank, out_of_rank, local,
        _crossings(homes, n_bytes[crossing]),
        _crossings(every, (n_bytes * n_away)[crossing]),
        _crossings([patterns.holder_sets[k] for k in moving.tolist()], n_bytes[moving]),
        _crossings(at_needers, n_bytes[pattern_of[groups]]),
    )  # fmt: skip


def cuts(needs: Demand, topology: Topology, calibration: Calibration, *, staging: bool = True) -> list[Cut]:
    """All bounds, the tightest first; empty when nothing has to move. `staging` says that ranks may hold pieces for others.

    The calibration serves for the copy rate of CPU machines, and for the start of a message. Raises InputError where it lacks
    what the machine needs, InfeasibleError where bytes must cross a boundary without bandwidth.
    """
    if topology.machine.kind is MachineKind.CPU:
        n_bytes = int(needs.into_rank.sum()) + needs.local
        check_calibration(calibration, topology.machine)
        assert calibration.cores is not None
        assert calibration.copy_Bps is not None
        rate = calibration.cores * calibration.copy_Bps
        return [_cut("memory of the host", n_bytes, rate)] if n_bytes else []
    ranks = slice(0, len(needs.into_rank))  # GPUs beyond the ranks take no part
    nic: NDArray[np.float64] = np.bincount(
        topology.domain[ranks], weights=topology.nic_Bps[ranks], minlength=topology.n_domains
    ).astype(np.float64)
    fabric = np.bincount(topology.domain, weights=topology.nic_Bps) / topology.machine.oversubscription
    what = "uplinks" if (fabric < nic).any() else "NICs"
    nic = np.minimum(nic, fabric)
    one_domain = len(np.unique(topology.domain[ranks])) == 1
    ports = (topology.nvlink_Bps + (0.0 if one_domain else topology.nic_Bps))[ranks]
    found = [
        *_worst(f"{what} into domain", needs.into_domain, nic),
        *_worst(f"{what} out of domain", needs.out_of_domain, nic),
        *_worst_set(f"{what} out of domains", needs.out_of_homes, nic),
        *_worst_set(f"{what} among domains", needs.among_domains, nic),
        *_worst("ports into rank", needs.into_rank, ports),
        *_worst("ports out of rank", needs.out_of_rank, ports),
        *_worst_set("ports out of ranks", needs.out_of_holders, ports),
    ]
    if needs.n_bytes_cross_domain:
        found.append(_cut(f"{what} out of all domains", needs.n_bytes_cross_domain, float(nic.sum())))
    if not staging:
        found += _worst_set("NICs into ranks that need it", needs.into_needers, topology.nic_Bps[ranks], least_members=1)
    latency_s = _latency(needs, calibration)
    if latency_s:
        found.append(Cut("latency of one message", 0, latency_s))
    return sorted(found, key=lambda cut: (-cut.seconds, cut.name))


def _latency(needs: Demand, calibration: Calibration) -> float:
    """Seconds that the first message takes before its bytes flow; 0 when nothing moves or no GPU costs are known."""
    if not needs.into_rank.any():
        return 0.0
    return least_start_s(calibration, between_domains=needs.n_bytes_cross_domain > 0)


def _sum(row: NDArray[np.integer], n_bytes: NDArray[np.int64], n_rows: int) -> NDArray[np.int64]:
    total = np.zeros(n_rows, dtype=np.int64)
    np.add.at(total, row, n_bytes)
    return total


def _crossings(sets: Iterable[NDArray[np.integer]], n_bytes: NDArray[np.int64]) -> tuple[Crossing, ...]:
    """For the distinct sets, the bytes of all sets inside each; sets with most bytes of their own are kept first."""
    own: dict[tuple[int, ...], int] = {}
    for members, count in zip(sets, n_bytes.tolist(), strict=True):
        key = tuple(sorted(members.tolist()))
        own[key] = own.get(key, 0) + count
    kept = sorted(own, key=lambda key: (-own[key], key))[:MOST_SETS]
    as_sets = {key: frozenset(key) for key in own}
    return tuple(Crossing(key, sum(own[k] for k in own if as_sets[k] <= as_sets[key])) for key in kept)


def _worst(name: str, n_bytes: NDArray[np.int64], rate: NDArray[np.float64]) -> list[Cut]:
    where = np.flatnonzero(n_bytes)
    if not len(where):
        return []
    with np.errstate(divide="ignore"):
        seconds = n_bytes[where] / rate[where]
    i = int(where[np.argmax(seconds)])
    return [_cut(f"{name} {i}", int(n_bytes[i]), float(rate[i]))]


def _worst_set(name: str, found: Sequence[Crossing], rate: NDArray[np.float64], least_members: int = 2) -> list[Cut]:
    """The tightest of the sets; single domains and ranks have cuts of their own."""
    sets = [(c, float(rate[list(c.members)].sum())) for c in found if len(c.members) >= least_members and c.n_bytes]
    if not sets:
        return []
    crossing, total = max(sets, key=lambda pair: pair[0].n_bytes / pair[1] if pair[1] else float("inf"))
    shown = ", ".join(map(str, crossing.members[:SHOWN]))
    more = len(crossing.members) - SHOWN
    return [_cut(f"{name} {shown}" + (f" and {more} more" if more > 0 else ""), crossing.n_bytes, total)]


def _cut(name: str, n_bytes: int, rate: float) -> Cut:
    if rate <= 0:
        raise InfeasibleError(f"{n_bytes} bytes must cross {name}, but it has no bandwidth")
    return Cut(name, n_bytes, n_bytes / rate)
