"""Lower bounds: the time that no plan can beat, each with the cut that gives it.

Every bound is bytes that must cross some boundary, divided by all that the boundary can carry at the machine's nominal rates:

- into a domain: what its ranks need and none of its ranks holds, over its NICs (less by the fabric's oversubscription);
- out of a domain: what others need and only it holds, over its NICs;
- all domains together: every domain takes in what it lacks, and whatever is sent leaves some NIC (relays included);
- into a rank: what it needs and doesn't hold, over its NVLink ports and NICs together; out of a rank: what only it holds;
- on CPUs: every byte is copied once by some core.

Latency is left out, so for payloads of a few kilobytes the bound is loose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.overlaps import Pieces
from shardroute.planner.problems import Problem
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InfeasibleError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology


@dataclass(frozen=True, slots=True)
class Cut:
    """A boundary, the bytes that must cross it, and the seconds that this takes at least."""

    name: str
    n_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What the problem needs moved, by where it must go. All in bytes.

    into_domain, out_of_domain   int64[n_domains]: needed and not held there; needed elsewhere and held only there
    into_rank, out_of_rank       int64[n_ranks]: likewise
    local                        needed by a rank that holds it
    """

    into_domain: NDArray[np.int64]
    out_of_domain: NDArray[np.int64]
    into_rank: NDArray[np.int64]
    out_of_rank: NDArray[np.int64]
    local: int

    @property
    def n_bytes_cross_domain(self) -> int:
        """Unique bytes that each domain must take in, summed over domains: no plan moves less across them."""
        return int(self.into_domain.sum())


def demand(problem: Problem, pieces: Sequence[Pieces], topology: Topology) -> Demand:
    """The problem's demand on the topology's domains and ranks."""
    domain = topology.domain
    into_domain, out_of_domain = (np.zeros(topology.n_domains, dtype=np.int64) for _ in range(2))
    into_rank, out_of_rank = (np.zeros(problem.n_ranks, dtype=np.int64) for _ in range(2))
    local = 0
    for cls, of_class in zip(problem.classes, pieces, strict=True):
        elements = np.zeros(len(of_class.holders), dtype=np.int64)
        np.add.at(elements, of_class.pattern, of_class.n_elements)
        for holders, needers, n_elements in zip(of_class.holders, of_class.needers, elements.tolist(), strict=True):
            n_bytes = n_elements * cls.itemsize * len(cls.members)
            away = needers[~np.isin(needers, holders)]
            into_rank[away] += n_bytes
            local += n_bytes * (len(needers) - len(away))
            if len(holders) == 1 and len(away):
                out_of_rank[holders[0]] += n_bytes
            held_in = np.unique(domain[holders])
            lacking = np.setdiff1d(domain[needers], held_in)
            into_domain[lacking] += n_bytes
            if len(held_in) == 1 and len(lacking):
                out_of_domain[held_in[0]] += n_bytes
    return Demand(into_domain, out_of_domain, into_rank, out_of_rank, local)


def cuts(needs: Demand, topology: Topology, calibration: Calibration) -> list[Cut]:
    """All bounds, the tightest first; empty when nothing has to move. The calibration serves CPU machines only (their copy
    rate).
    """
    if topology.machine.kind is MachineKind.CPU:
        n_bytes = int(needs.into_rank.sum()) + needs.local
        rate = (calibration.cores or 0.0) * (calibration.copy_Bps or 0.0)
        return [_cut("memory of the host", n_bytes, rate)] if n_bytes else []
    ranks = slice(0, len(needs.into_rank))  # GPUs beyond the ranks take no part
    nic = np.bincount(topology.domain[ranks], weights=topology.nic_Bps[ranks], minlength=topology.n_domains)
    nic /= topology.machine.oversubscription
    ports = (topology.nvlink_Bps + topology.nic_Bps)[ranks]
    found = [
        *_worst("NICs into domain", needs.into_domain, nic),
        *_worst("NICs out of domain", needs.out_of_domain, nic),
        *_worst("ports into rank", needs.into_rank, ports),
        *_worst("ports out of rank", needs.out_of_rank, ports),
    ]
    if needs.n_bytes_cross_domain:
        found.append(_cut("NICs out of all domains", needs.n_bytes_cross_domain, float(nic.sum())))
    return sorted(found, key=lambda cut: (-cut.seconds, cut.name))


def _worst(name: str, n_bytes: NDArray[np.int64], rate: NDArray[np.float64]) -> list[Cut]:
    where = np.flatnonzero(n_bytes)
    if not len(where):
        return []
    with np.errstate(divide="ignore"):
        seconds = n_bytes[where] / rate[where]
    i = int(where[np.argmax(seconds)])
    return [_cut(f"{name} {i}", int(n_bytes[i]), float(rate[i]))]


def _cut(name: str, n_bytes: int, rate: float) -> Cut:
    if rate <= 0:
        raise InfeasibleError(f"{n_bytes} bytes must cross {name}, but it has no bandwidth")
    return Cut(name, n_bytes, n_bytes / rate)
