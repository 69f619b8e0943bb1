"""What other strategies would make of a plan's problem on its machine, by prediction.

Rule: rivals are planned with the options that a plan gets when none are given; a plan doesn't say which it was made with.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from shardroute.planner.plans import Plan
from shardroute.planner.reports import Busiest, busiest_of, traffic
from shardroute.planner.ring.strategies import RING_PLANNING_SHARE, RING_STRATEGIES, ring_plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.routing.auto import CUTTING_SHARE, DIRECT_PAIRS, OPTIMAL_PAIRS, PLANNING_SHARE, RULES_PAIRS
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import STRATEGIES, effort, make_plan, pieces_of
from shardroute.planner.routing.sums import SUMMING
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import Prediction, predict
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InfeasibleError, InputError
from shardroute.topologies.topologies import Topology

# Pairs of a pattern and a rank that needs it, above which a strategy isn't tried unless it is named: those of `auto` where it has
# one. m2n-pack and hybrid send each piece to its needers or relays one by one, as domain-relay does.
_MOST_PAIRS: Final = {
    "direct": DIRECT_PAIRS, "optimal": OPTIMAL_PAIRS, "domain-relay": RULES_PAIRS, "m2n-pack": RULES_PAIRS, "hybrid": RULES_PAIRS,
}  # fmt: skip


class Rival(msgspec.Struct, frozen=True):
    """A strategy's plan in numbers; `why_not` says why there is none, and the numbers are then None.

    ratio   its predicted time over that of the plan that it is beside, None where that is 0 or unknown
    """

    strategy: str
    predicted_s: float | None = None
    ratio: float | None = None
    n_steps: int | None = None
    n_bytes_cross_domain: int | None = None
    peak_staging_bytes: int | None = None
    busiest: Busiest | None = None
    why_not: str = ""


def strategies_for(plan: Plan) -> tuple[str, ...]:
    """The names of the strategies that suit the plan's kind of problem."""
    if plan.attention is not None:
        return tuple(RING_STRATEGIES)
    return tuple(SUMMING) if plan.problem.summed else tuple(STRATEGIES)


def rivals_of(
    plan: Plan,
    predicted_s: float,
    calibration: Calibration,
    names: Sequence[str] | None = None,
    progress: Told | None = None,
) -> list[Rival]:
    """The other strategies, fastest first, those without a plan last; progress is told the share that was tried.

    Of `names` each is tried; without them those that don't take too long. Raises InputError for a name that doesn't suit the
    plan's kind of problem.
    """
    known = strategies_for(plan)
    for name in names or ():
        if name not in known:
            raise InputError(f"strategy {name!r} can't do what this plan does; expected one of {', '.join(known)}")
    chosen = [name for name in known if name != plan.strategy] if names is None else list(dict.fromkeys(names))
    weights = [effort(name) for name in chosen]
    cutting, *told = parts(progress, (CUTTING_SHARE * sum(weights), *weights))
    n_pairs = 0
    if names is None and plan.attention is None and not plan.problem.summed:
        n_pairs = sum(len(needers) for pieces in pieces_of(plan.problem, cutting) for needers in pieces.needers)
    found: list[Rival] = []
    for name, done in zip(chosen, told, strict=True):
        if n_pairs > _MOST_PAIRS.get(name, n_pairs):
            why = f"{n_pairs:,} pairs of pattern and needing rank, more than {_MOST_PAIRS[name]:,}, take long; name it to try"
            found.append(Rival(name, why_not=why))
            continue
        found.append(_rival(plan, predicted_s, calibration, name, done))
        done(1.0)
    return sorted(found, key=lambda rival: (rival.predicted_s is None, rival.predicted_s or 0.0, rival.strategy))


def predict_anew(
    plan: Plan,
    strategy: str,
    calibration: Calibration,
    topology: Topology | None = None,
    progress: Told | None = None,
) -> tuple[Plan, Prediction]:
    """The plan of another strategy, or for another topology, of the plan's problem, and its prediction; progress is told the
    share that is done. Raises as `make_plan` and `ring_plan` do.
    """
    topology = plan.topology if topology is None else topology
    share = PLANNING_SHARE if plan.attention is None else RING_PLANNING_SHARE
    planning, predicting = parts(progress, (share, 1.0 - share))
    if plan.attention is not None:
        other = ring_plan(plan.attention, topology, strategy, Pass(dict(plan.problem.about)["pass"]), progress=planning)
    else:
        other = make_plan(plan.problem, topology, strategy, options=Options(told=planning))
    return other, predict(other, calibration, progress=predicting)


def _rival(plan: Plan, predicted_s: float, calibration: Calibration, name: str, progress: Told) -> Rival:
    try:
        other, prediction = predict_anew(plan, name, calibration, progress=progress)
    except (InputError, InfeasibleError) as error:
        return Rival(name, why_not=str(error))
    return Rival(
        strategy=name,
        predicted_s=prediction.predicted_s,
        ratio=prediction.predicted_s / predicted_s if predicted_s else None,
        n_steps=len(other.steps),
        n_bytes_cross_domain=traffic(other).n_bytes_cross_domain,
        peak_staging_bytes=other.peak_staging_bytes,
        busiest=busiest_of(prediction),
    )
