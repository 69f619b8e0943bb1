"""`auto`: the plan that is predicted to be fastest, and why it was chosen.

A strategy is not tried where it can't win, or where planning and predicting it would take longer than all else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardroute.planner.plans import Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import STRATEGIES, backend_for, pieces_of, with_windows
from shardroute.planner.routing.sums import SUMMING, plan_sums
from shardroute.planner.shares import Told, heard, parts
from shardroute.planner.simulator.refit import Prediction, predict
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.topologies import Topology
from shardroute.topologies.units import format_seconds

# Pairs of a pattern and a rank that needs it, above which `optimal` is not tried: its trees alone would be as many columns
# (DeepSeek-V3 from 256 to 256 GPUs has 65,000 and takes 2 s; 2.8 T parameters over 4,096 GPUs 4 million).
OPTIMAL_PAIRS = 200_000
# Pairs above which `domain-relay` is not tried beside `greedy`: planning and predicting it takes as long as the balanced plan.
RULES_PAIRS = 1_000_000
# Pairs above which `direct` is not tried: it wins where latency rules, and with many pairs each holder sends all copies itself,
# in one tangle of flows that takes longest to predict (Qwen3-235B from 128 to 128 GPUs: 57,000 pairs, 10 s).
DIRECT_PAIRS = 10_000
# The share of planning in planning and predicting: a quarter to a third from 300 thousand to 1.1 million steps (DeepSeek-V3).
PLANNING_SHARE = 0.25
# The share of cutting tensors into pieces, once for all strategies.
CUTTING_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan chosen and its prediction, the seconds predicted for each strategy that was tried, and the reason in words."""

    plan: Plan
    prediction: Prediction
    predicted_s: tuple[tuple[str, float], ...]
    reason: str


def choose(
    problem: Problem,
    topology: Topology,
    calibration: Calibration,
    options: Options | None = None,
    progress: Told | None = None,
) -> Choice:
    """The fastest plan by prediction among the strategies that suit the problem's size; progress is told the share done."""
    options = Options() if options is None else options
    if problem.summed:

        def sums(way: str, _told: Told) -> Plan:
            return with_windows(plan_sums(problem, topology, way, options), options)

        return _fastest([*SUMMING], sums, calibration, (), progress)
    cutting, progress = parts(progress, (CUTTING_SHARE, 1.0 - CUTTING_SHARE))
    whole, backend = pieces_of(problem, cutting), backend_for(problem, topology)
    n_pairs = sum(len(needers) for pieces in whole for needers in pieces.needers)
    tried: list[str] = ["greedy"]
    left_out = []
    if n_pairs <= OPTIMAL_PAIRS:
        tried.append("optimal")
    else:
        left_out.append(f"optimal left out: {n_pairs:,} pairs of pattern and needing rank, it is tried up to {OPTIMAL_PAIRS:,}")
    if n_pairs <= RULES_PAIRS:
        tried.append("domain-relay")
    else:
        left_out.append(f"domain-relay left out: it is tried up to {RULES_PAIRS:,} pairs")
    if n_pairs <= DIRECT_PAIRS:
        tried.append("direct")

    def plan(strategy: str, told: Told) -> Plan:
        heard = replace(options, told=told)
        return with_windows(STRATEGIES[strategy].plan(problem, whole, topology, backend, heard), options)

    return _fastest(tried, plan, calibration, left_out, progress)


def _fastest(
    names: Sequence[str],
    make: Callable[[str, Told], Plan],
    calibration: Calibration,
    left_out: Sequence[str],
    progress: Told | None,
) -> Choice:
    """The fastest of the plans that these strategies make, the first of equals."""
    done = heard(progress)
    plans: dict[str, Plan] = {}
    for name in names:

        def planning(share: float, n_done: int = len(plans)) -> None:
            done(PLANNING_SHARE * (n_done + share) / len(names))

        plans[name] = make(name, planning)
        planning(1.0)
    predictions: dict[str, Prediction] = {}
    for name, plan in plans.items():

        def told(share: float, n_done: int = len(predictions)) -> None:
            done(PLANNING_SHARE + (1 - PLANNING_SHARE) * (n_done + share) / len(plans))

        same = next((p for other, p in predictions.items() if _same_steps(plans[other], plan)), None)
        found = predict(plan, calibration, progress=told) if same is None else same
        predictions[name] = replace(found, timeline=replace(found.timeline, digest=plan.digest))
    seconds = {strategy: prediction.predicted_s for strategy, prediction in predictions.items()}
    best = min(seconds, key=lambda strategy: seconds[strategy])
    return Choice(plans[best], predictions[best], tuple(seconds.items()), _reason(best, seconds, left_out))


def _same_steps(one: Plan, other: Plan) -> bool:
    """Whether two plans differ in the name of their strategy only: `greedy` may take the trees of `domain-relay` as they are."""
    return len(one.steps) == len(other.steps) and replace(one, strategy=other.strategy).digest == other.digest


def _reason(best: str, seconds: dict[str, float], left_out: Sequence[str]) -> str:
    others = [f"{name} {format_seconds(value)}" for name, value in seconds.items() if name != best]
    shown = f"{best} is predicted at {format_seconds(seconds[best])}" + (f", {', '.join(others)}" if others else "")
    return "; ".join([shown, *left_out])
