"""How busy a plan makes each link, at nominal rates: what strategies are compared by, whatever a library reaches."""

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.plans import Op, Plan
from shardroute.planner.routing.links import link_rates, uplink_rates
from shardroute.topologies.errors import InputError


def link_seconds(plan: Plan) -> NDArray[np.float64]:
    """Seconds of NIC out, NIC in, NVLink out and NVLink in of every GPU, then of every domain's uplink: float64[4 * n_gpus +
    n_domains].

    Only for plans of copies: a collective's rings are the simulator's to choose. A link without bandwidth that carries bytes is
    busy for ever (infinity).
    """
    steps, topology = plan.steps, plan.topology
    if (steps.op != Op.COPY).any():
        raise InputError(f"plan {plan.strategy}: link loads are defined for copies, but it has collectives; simulate it")
    n, domain = topology.n_gpus, topology.domain
    moves = steps.src != steps.dst
    src, dst, n_bytes = steps.src[moves].astype(np.int64), steps.dst[moves].astype(np.int64), plan.step_bytes[moves]
    near = domain[src] == domain[dst]
    link = np.concatenate([np.where(near, 2 * n, 0) + src, np.where(near, 3 * n, n) + dst, 4 * n + domain[src[~near]]])
    total = np.bincount(
        link, weights=np.concatenate([n_bytes, n_bytes, n_bytes[~near]]), minlength=4 * n + topology.n_domains
    ).astype(np.float64)
    rate = np.concatenate([link_rates(topology).ravel(), uplink_rates(topology, plan.problem.n_ranks)])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(total > 0, total / rate, 0.0)


def busiest_s(plan: Plan) -> float:
    """Seconds of the plan's busiest link."""
    return float(link_seconds(plan).max(initial=0.0))
