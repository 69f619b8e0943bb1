"""The strategies by name, and planning with one: problem in, plan out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from shardroute.planner.layouts.overlaps import Pieces, overlap
from shardroute.planner.plans import Backend, Plan
from shardroute.planner.problems import Problem
from shardroute.planner.routing import gather_broadcast, greedy, hybrid, m2n_pack, optimal
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.rules import Rule, plan_by_rule
from shardroute.planner.routing.sums import SUMMING, plan_sums
from shardroute.planner.shares import Told, parts
from shardroute.topologies.errors import InfeasibleError, InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

# Routing looks at each needing rank of a pattern by itself: beyond this, minutes go by.
MOST_RANKS = 2**16

# The share of `pieces_of` in planning: 0.5 s of 6 s with DeepSeek-V3 between 1,024 and 1,024 GPUs.
PIECES_SHARE = 0.08

Planner = Callable[[Problem, Sequence[Pieces], Topology, Backend, Options], Plan]


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to route a problem: its name, one line for people, and the function that plans by it."""

    name: str
    summary: str
    plan: Planner


def _gather_broadcast(problem: Problem, whole: Sequence[Pieces], topology: Topology, backend: Backend, options: Options) -> Plan:
    return gather_broadcast.plan(problem, whole, topology, backend, options.message_bytes, told=options.told)


STRATEGIES: Mapping[str, Strategy] = {
    s.name: s
    for s in (
        Strategy(
            "direct",
            "each needing rank fetches each piece from one holder",
            partial(plan_by_rule, Rule.DIRECT),
        ),
        Strategy(
            "domain-relay",
            "one copy of each piece into each NVLink domain, relayed on",
            partial(plan_by_rule, Rule.RELAY),
        ),
        Strategy(
            "gather-broadcast",
            "all-gather whole tensors, broadcast them (the usual baseline)",
            _gather_broadcast,
        ),
        Strategy(
            "m2n-pack",
            "as NCCL M2N does it: pack, store and forward, unpack, tensor by tensor",
            m2n_pack.plan,
        ),
        Strategy(
            "hybrid",
            "as NeMo RL does it: feed-forward weights by m2n-pack, then broadcast the rest",
            hybrid.plan,
        ),
        Strategy(
            "greedy",
            "balances replicas, entry GPUs and relays over all tensors at once",
            greedy.plan,
        ),
        Strategy(
            "optimal",
            "the same by linear programs, with the gap to what no plan beats",
            optimal.plan,
        ),
    )
}


# Seconds that planning, predicting and reporting took by each beside `greedy`: the geometric mean over Qwen3-30B-A3B to 8 and to
# 32 replicas and DeepSeek-V3 from 256 to 256 GPUs, as far as they were tried. `auto` tries several.
_EFFORT: Final[Mapping[str, float]] = {
    "direct": 0.25, "domain-relay": 0.5, "gather-broadcast": 0.25, "m2n-pack": 1.3, "hybrid": 0.7, "greedy": 1.0, "optimal": 1.2,
    "auto": 2.7,
}  # fmt: skip


def effort(strategy: str) -> float:
    """About what planning by a strategy and predicting takes, beside the others; 1 for one that isn't known."""
    return _EFFORT.get(strategy, 1.0)


def pieces_of(problem: Problem, progress: Told | None = None) -> tuple[Pieces, ...]:
    """The pieces of each class of the problem; progress is told the share of them that is done.

    Raises InfeasibleError when a needed element is held nowhere, InputError above MOST_RANKS.
    """
    if problem.n_ranks > MOST_RANKS:
        raise InputError(f"the layouts use {problem.n_ranks:,} ranks; plans are made for up to {MOST_RANKS:,}")
    if problem.summed:
        ways = " or ".join(SUMMING)
        raise InfeasibleError(f"the source is partial, and its addends are no copies of each other; plan with {ways}")
    found = []
    told = parts(progress, [len(cls.source) + len(cls.target) for cls in problem.classes])
    for cls, done in zip(problem.classes, told, strict=True):
        try:
            found.append(overlap(cls.source, cls.target))
        except InfeasibleError as error:
            name = problem.tensors[int(cls.members[0])].name
            raise InfeasibleError(f"tensor {name}: {error}; `check --from-json --to-json` lists all that is lacking") from None
        done(1.0)
    return tuple(found)


def make_plan(
    problem: Problem, topology: Topology, strategy: str, message_bytes: int | None = None, options: Options | None = None
) -> Plan:
    """The plan of `strategy` for the problem on the topology (rank i on GPU i).

    `message_bytes` bounds pieces and bundles; None chooses it by size. It goes before that of `options`. Raises InputError for an
    unknown strategy or too few GPUs, InfeasibleError when no source rank holds something that is needed. A problem of addends
    takes the strategies of `sums`.
    """
    if problem.summed:
        options = with_message_bytes(options, message_bytes)
        return with_windows(plan_sums(problem, topology, strategy, options), options)
    if strategy in SUMMING:
        raise InputError(f"strategy {strategy} adds up, and nothing of the source is partial (placement P)")
    if strategy not in STRATEGIES:
        raise InputError(f"strategy {strategy!r} is not known; expected one of {', '.join(STRATEGIES)}")
    options = with_message_bytes(options, message_bytes)
    whole, rest = pieces_of(problem, options.part(0.0, PIECES_SHARE).told), options.part(PIECES_SHARE, 1.0)
    plan = STRATEGIES[strategy].plan(problem, whole, topology, backend_for(problem, topology), rest)
    return with_windows(plan, options)


def with_message_bytes(options: Options | None, message_bytes: int | None) -> Options:
    """The options, or none that were set, with another size of messages unless that is None."""
    options = Options() if options is None else options
    return options if message_bytes is None else replace(options, message_bytes=message_bytes)


def with_windows(plan: Plan, options: Options) -> Plan:
    """The plan with the windows that the options allow; a plan that is made has those that are the default."""
    return plan if plan.window_bytes == options.window_bytes else replace(plan, window_bytes=options.window_bytes)


def make_solution(problem: Problem, topology: Topology, options: Options | None = None) -> optimal.Solution:
    """The plan of `optimal` with its objective, bound and gap. Raises as make_plan does."""
    options = Options() if options is None else options
    whole, rest = pieces_of(problem, options.part(0.0, PIECES_SHARE).told), options.part(PIECES_SHARE, 1.0)
    found = optimal.solution(problem, whole, topology, backend_for(problem, topology), rest)
    return replace(found, plan=with_windows(found.plan, options))


def backend_for(problem: Problem, topology: Topology) -> Backend:
    """The library that is meant to carry the problem's steps on the topology; InputError where it has too few GPUs."""
    if problem.n_ranks > topology.n_gpus:
        raise InputError(
            f"the layouts use {problem.n_ranks} GPUs, but {topology.title} has {topology.n_gpus}"
        )
    return Backend.PROCESSES if topology.machine.kind is MachineKind.CPU else Backend.NCCL
