"""The plan of a loop after ranks have gone or come: what still holds of it is kept, the rest is routed anew.

Rule: ranks keep their numbers, and every rank works out the same plan by itself.
"""

from collections.abc import Mapping, Sequence

from shardroute.planner.changes import carried_over, changed_topology, silent_nics, with_new_ranks, without_ranks
from shardroute.planner.plans import Plan
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.replans import Replanned, replan
from shardroute.topologies.errors import InputError


def plan_after(
    plan: Plan, *, gone: Sequence[int] = (), new: Mapping[int, int] | None = None, nics: Mapping[int, float] | None = None,
    options: Options | None = None,
) -> Replanned:  # fmt: skip
    """The plan without the ranks that are gone, with new ranks that each need what another (its value) needs, and with NICs of
    other rates (bytes per second, 0: down).

    What a rank that is gone held comes from another holder. Raises InfeasibleError, which names the tensor and the part of it,
    where nobody else holds something that is needed; InputError for ranks that the plan doesn't know, for one both gone and new,
    and for a plan with collectives.
    """
    came, like = list(new or {}), list((new or {}).values())
    both = sorted(set(came) & set(gone))
    if both:
        raise InputError(f"rank {both[0]} is both gone and new")
    problem = with_new_ranks(plan.problem, came, like) if came else plan.problem  # before any go: what these are like may be gone
    problem = without_ranks(problem, gone) if gone else problem
    topology = changed_topology(plan.topology, {}, problem.n_ranks)
    start = carried_over(plan, topology, gone=gone, new=came, like=like)
    rates = dict(nics or {}) | silent_nics(topology, gone)
    return replan(start, problem, changed_topology(topology, rates, problem.n_ranks), options)


def present_after(plan: Plan, gone: Sequence[int], new: Mapping[int, int] | None) -> list[int]:
    """The numbers of the ranks that are there after the change, ascending."""
    return sorted({*range(plan.problem.n_ranks), *(new or {})} - {*gone})
