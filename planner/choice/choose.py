"""Chooses what carries an operation: first the rules of what is possible and correct, then predicted time.

NCCL as it is stays the choice unless another way is faster by more than the model's own error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shardroute.planner.choice.operations import Operation
from shardroute.planner.choice.ways import Option, Setting, Way, options
from shardroute.planner.choice.xla import Assigned, RuleSet, Wanted, assign, flags, hazards
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one release of XLA does with an operation when NVSHMEM is enabled: backend, the rule that decided, hazards, flags.

    wanted_flags: XLA_FLAGS with which that release runs what was chosen, or another way that is predicted to be as fast; None
    where it can't. wanted_way: which way that is.
    """

    rules: RuleSet
    assigned: Assigned
    reason: str
    hazards: tuple[str, ...]
    wanted_flags: tuple[str, ...] | None
    wanted_way: Way | None


@dataclass(frozen=True, slots=True)
class Choice:
    """The way chosen, why, every way with its time or what rules it out, and what XLA's own rules say."""

    operation: Operation
    chosen: Option
    decided_by: str
    margin: float | None
    options: tuple[Option, ...]
    verdicts: tuple[Verdict, ...]


_WANTED: Final = {
    Way.NCCL: Wanted.NCCL,
    Way.NCCL_PUT: Wanted.PUTS,
    Way.NCCL_COPY_ENGINE: Wanted.PUTS,
    Way.NCCL_SYMMETRIC: Wanted.SYMMETRIC,
    Way.NVSHMEM_PUT: Wanted.NVSHMEM,
    Way.NVSHMEM_REDUCE: Wanted.NVSHMEM,
}


def choose(operation: Operation, setting: Setting, rule_sets: tuple[RuleSet, ...] = ()) -> Choice:
    """The way for an operation, and what each of XLA's rule sets makes of it.

    `margin` is how much longer NCCL takes than the best other way, None where there is none. Raises InputError when NCCL
    itself can't be priced.
    """
    found = options(operation, setting)
    nccl = next(option for option in found if option.way is Way.NCCL)
    if nccl.seconds is None:
        raise InputError(nccl.reason)
    others = sorted((o for o in found if o.possible and o.way is not Way.NCCL), key=lambda o: (o.seconds, o.way))
    chosen, margin = nccl, None
    if not others:
        ruled_out = "; ".join(f"{o.way}: {o.reason}" for o in found if not o.possible)
        decided = f"rule: nothing else is possible ({ruled_out})" if ruled_out else "rule: nothing else does this operation"
    else:
        worth = [o for o in others if _margin(nccl, o) > o.error]
        best = (worth or others)[0]
        margin = _margin(nccl, best)
        if worth:
            chosen = best
            decided = f"margin: NCCL is predicted to take {1 + margin:.3g} times as long; the model's error is {best.error:.0%}"
        elif margin > 0:
            decided = f"margin: NCCL stays, as {best.way} gains {margin:.1%}, within the model's error of {best.error:.0%}"
        else:
            decided = "cost: no other way is predicted to be faster"
    as_fast = [chosen, *(o for o in others if o is not chosen and o.seconds == chosen.seconds)]
    verdicts = tuple(_verdict(rules, operation, setting, as_fast) for rules in rule_sets)
    return Choice(operation, chosen, decided, margin, tuple(found), verdicts)


def _margin(nccl: Option, other: Option) -> float:
    assert nccl.seconds is not None
    assert other.seconds is not None
    return nccl.seconds / other.seconds - 1


def _verdict(rules: RuleSet, operation: Operation, setting: Setting, wanted: Sequence[Option]) -> Verdict:
    """`wanted` are equally fast, the chosen one first."""
    assigned, reason = assign(rules, operation, setting.machine.gpus_per_domain)
    found, way = None, None
    for option in wanted:
        # The flag enables NVSHMEM, but the release's own rule decides where it is used.
        refused = _WANTED[option.way] is Wanted.NVSHMEM and assigned is not Assigned.NVSHMEM
        if not refused and (found := flags(rules, operation, _WANTED[option.way])) is not None:
            way = option.way
            break
    return Verdict(
        rules=rules,
        assigned=assigned,
        reason=reason,
        hazards=tuple(hazards(operation, setting.machine.gpus_per_domain)) if assigned is Assigned.NVSHMEM else (),
        wanted_flags=None if found is None else tuple(found),
        wanted_way=way,
    )
