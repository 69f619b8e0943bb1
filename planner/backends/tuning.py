"""What NCCL's own tuning model expects of a collective: latency + bytes / bandwidth for each algorithm and protocol.

Formulas and constants are those of NCCL 2.28 to 2.30, src/graph/tuning.cc, except the bandwidths, which a calibration
gives as measured. A node of NCCL is an NVLink domain here. Where NCCL would choose by more than time (SHARP in the network,
PAT for one GPU a node), nothing is modelled.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.links import path_costs
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.collectives import Collective
from shardroute.topologies.costs import CollectiveCost
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine

Floats = NDArray[np.float64]

_US: Final = 1e-6


class Algorithm(StrEnum):
    """NCCL's algorithms; NVLS stands for NVLS Tree where there are several domains."""

    RING = "ring"
    TREE = "tree"
    NVLS = "NVLS"


class Protocol(StrEnum):
    """NCCL's protocols."""

    LL = "LL"
    LL128 = "LL128"
    SIMPLE = "Simple"


@dataclass(frozen=True, slots=True)
class _Latency:
    """Microseconds: base of a call, of a hop over NVLink, of a hop over the network; [algorithm, protocol] of tuning.cc."""

    base: float
    near: float
    far: float


_LATENCIES: Final = {
    (Algorithm.TREE, Protocol.LL): _Latency(6.8, 0.6, 5.0),
    (Algorithm.TREE, Protocol.LL128): _Latency(14.0, 1.25, 8.5),
    (Algorithm.TREE, Protocol.SIMPLE): _Latency(8.4, 4.0, 14.0),
    (Algorithm.RING, Protocol.LL): _Latency(6.6, 0.6, 2.7),
    (Algorithm.RING, Protocol.LL128): _Latency(14.0, 1.9, 4.0),
    (Algorithm.RING, Protocol.SIMPLE): _Latency(8.4, 3.4, 14.0),
}
_NVLS_TREE_FAR: Final = 14.0
# The network latency in the constants above is that of InfiniBand: base 8.4 + network 14 us, of which calibrations write 5 us
# as launch. A calibration with a slower network adds the difference to each hop.
_NIC_LATENCY_S: Final = 17.4e-6
# getNetOverhead: microseconds that a step of a ring costs at least between nodes; Simple posts three times.
_NET_OVERHEAD: Final = 1.0
# Share of a ring's bandwidth: LL sends a flag with each 4 bytes, LL128 120 of 128; trees 0.92 and what a protocol leaves.
_RING_SHARE: Final = {Protocol.LL: 0.5, Protocol.LL128: 0.92, Protocol.SIMPLE: 1.0}
_TREE_SHARE: Final = {Protocol.LL: 0.92 / 3.8, Protocol.LL128: 0.92 * 7 / 9, Protocol.SIMPLE: 0.92}
# treeCorrectionFactor, for 64 B, 128 B, ... 256 MB.
_TREE_CORRECTION: Final = {
    Protocol.LL: (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    Protocol.LL128: (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    Protocol.SIMPLE: (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
}  # fmt: skip
# NVLS is not used on fewer GPUs of a domain: H200 of 4 ran the ring where 5 and more ran NVLS
# (https://github.com/stas00/ml-engineering, network/README.md), and so do XLA's tables of GB200.
_NVLS_LEAST_RANKS: Final = 5


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that do a collective together: n_ranks, spread evenly over n_domains NVLink domains."""

    n_ranks: int
    n_domains: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.n_domains <= self.n_ranks:
            raise InputError(f"group: expected 1 to {self.n_ranks} domains for {self.n_ranks} ranks, found {self.n_domains}")

    @property
    def domain_ranks(self) -> int:
        """Ranks in the fullest domain."""
        return -(-self.n_ranks // self.n_domains)


def tuned_s(
    op: Collective, n_bytes: Floats, group: Group, machine: Machine, calibration: Calibration, only: Algorithm | None = None
) -> tuple[Floats, str]:
    """Seconds of the collective for each of n_bytes, and by which algorithm and protocol the largest of them runs.

    op is one that NCCL tunes: all-gather, all-reduce, reduce-scatter or broadcast. `only` forces an algorithm, as NCCL_ALGO does.
    Raises InputError when the calibration has no [collectives], or the algorithm can't do the operation.
    """
    cost = collective_cost(calibration)
    choices = list(_choices(op, n_bytes, group, machine, calibration, cost))
    if only is not None:
        choices = [choice for choice in choices if choice[0] is only]
        if not choices:
            raise InputError(f"{op} over {group.n_ranks} ranks in {group.n_domains} domains: NCCL has no {only} for it")
    table = np.stack([time for _, _, time in choices])
    best = table.argmin(axis=0)
    algorithm, protocol, _ = choices[int(best[int(np.argmax(n_bytes))])]
    return table.min(axis=0), f"{algorithm} {protocol}"


def tuned_choice(
    op: Collective, n_bytes: float, group: Group, machine: Machine, calibration: Calibration
) -> tuple[Algorithm, Protocol]:
    """The algorithm and protocol by which the collective is expected to run: those of the least time. Raises as tuned_s."""
    choices = list(_choices(op, np.array([n_bytes], np.float64), group, machine, calibration, collective_cost(calibration)))
    algorithm, protocol, _ = min(choices, key=lambda choice: float(choice[2][0]))
    return algorithm, protocol


def collective_cost(calibration: Calibration) -> CollectiveCost:
    """The calibration's [collectives]; InputError when it has none."""
    if calibration.collectives is None:
        raise InputError(f"calibration of {calibration.machine} ({calibration.library}) has no table [collectives]")
    return calibration.collectives


def domain_nic_Bps(group: Group, machine: Machine, cost: CollectiveCost) -> float:
    """What the NICs of a domain's members carry together, each way, under a ring or tree."""
    return group.domain_ranks * machine.gpu_nic_Bps * cost.nic_efficiency


def all_reduce_bound(group: Group, machine: Machine, cost: CollectiveCost) -> tuple[float, float]:
    """What NVLink and what the NICs let through of an all-reduce by NVLS, in bytes reduced per second.

    Over two domains each NIC sends its share once; over more, both trees pass through a domain's NICs.
    """
    if group.n_domains == 1:
        return cost.nvls_Bps, np.inf
    return cost.nvls_Bps, domain_nic_Bps(group, machine, cost) / (1 if group.n_domains == 2 else 2)


def _choices(
    op: Collective, n_bytes: Floats, group: Group, machine: Machine, calibration: Calibration, cost: CollectiveCost
) -> list[tuple[Algorithm, Protocol, Floats]]:
    n, domains = group.n_ranks, group.n_domains
    reduces = op is Collective.ALL_REDUCE
    gathers = op in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    if not (reduces or gathers or op is Collective.BROADCAST):
        raise InputError(f"{op}: NCCL's tuning model has no such operation")
    n_steps = 2 * (n - 1) if reduces else n - 1 if gathers else n
    n_far = 0 if domains == 1 else 2 * (domains - 1) if reduces else domains - 1 if gathers else domains
    bus = cost.ring_Bps if domains == 1 else min(cost.ring_Bps, domain_nic_Bps(group, machine, cost))
    ll_Bps = cost.ll_Bps if domains == 1 else np.inf
    extra_us = max(path_costs(calibration)[1].latency_s - _NIC_LATENCY_S, 0.0) / _US
    found = []
    for protocol in Protocol:
        latency = _LATENCIES[Algorithm.RING, protocol]
        least = 0.0 if domains == 1 else _NET_OVERHEAD * (3 if protocol is Protocol.SIMPLE else 1)
        start_us = latency.base + (n_steps - n_far) * max(latency.near, least) + n_far * (latency.far + extra_us)
        bandwidth = min(ll_Bps if protocol is Protocol.LL else np.inf, bus * _RING_SHARE[protocol])
        found.append((Algorithm.RING, protocol, start_us * _US + n_bytes / (bandwidth * n / n_steps)))
    if not reduces:
        return found
    hops = np.ceil(np.log2(domains))
    for protocol in Protocol:
        latency = _LATENCIES[Algorithm.TREE, protocol]
        start_us = latency.base + 2 * ((group.domain_ranks - 1) * latency.near + hops * (latency.far + extra_us))
        # A tree sends each byte up and down: half of the bus.
        bandwidth = min(ll_Bps if protocol is Protocol.LL else np.inf, bus * _TREE_SHARE[protocol]) / 2
        found.append((Algorithm.TREE, protocol, start_us * _US + n_bytes / (bandwidth * _correction(protocol, n_bytes))))
    if group.domain_ranks >= _NVLS_LEAST_RANKS:
        start = cost.nvls_start_s + 2 * hops * (_NVLS_TREE_FAR + extra_us) * _US
        found.append((Algorithm.NVLS, Protocol.SIMPLE, start + n_bytes / min(all_reduce_bound(group, machine, cost))))
    return found


def _correction(protocol: Protocol, n_bytes: Floats) -> Floats:
    factors = np.asarray(_TREE_CORRECTION[protocol], dtype=np.float64)
    at = np.log2(np.maximum(n_bytes / 64, 1)).astype(np.int64)
    return factors[np.minimum(at, len(factors) - 1)]
