"""Models by how many parameters they have: shipped ones, and shipped ones with more or fewer experts as stand-ins for others.

Rule: a stand-in is never passed off as the model that it stands for; its name and its note say what it is made of.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shardroute.planner.layouts import Model, Role, load_model, model_names
from shardroute.topologies.errors import InputError

# Parameters of models whose config.json isn't shipped: counts alone, as the two are spoken of; in BF16 5.6 TB and 4.8 TB.
STAND_INS: Final[Mapping[str, tuple[str, float]]] = {"kimi-k3": ("Kimi K3", 2.8e12), "qwen-3.8": ("Qwen 3.8", 2.4e12)}

# How far a stand-in's number of parameters may be from what was asked for, as a share: counts are given in two digits or so.
OFF: Final = 0.05

_COUNT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([MBT])", re.IGNORECASE)
_FACTORS: Final = {"M": 1e6, "B": 1e9, "T": 1e12}
# Parameters with one entry an expert along dim 0.
_PER_EXPERT: Final = frozenset({
    Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN, Role.EXPERT_UNGATED_UP, Role.EXPERT_GATE_UP, Role.EXPERT_GATE_UP_BIAS,
    Role.EXPERT_DOWN_TRANSPOSED, Role.EXPERT_DOWN_BIAS, Role.ROUTER, Role.ROUTER_BIAS, Role.ROUTER_CORRECTION,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class StudiedModel:
    """A model of a study: its name for people, and what must be said of it ("" for a shipped one as it is).

    asked   parameters that were asked for
    met     those of `model` before it is scaled down; of a stand-in within OFF of what was asked for
    """

    name: str
    asked: float
    met: int
    model: Model
    note: str


def studied_model(size: str, base: str | None, load: Callable[[str], Model], step: int = 1) -> StudiedModel:
    """The model that a size says: a shipped name or path, a name of STAND_INS, or a count such as "2.8T".

    A count is met by changing the number of experts of `base`, or of the shipped model nearest in size that can meet it, to the
    multiple of `step` that comes nearest. `load` loads a name, whole or scaled down. Raises InputError for what is none of these,
    for a base without experts, and for a count that no such multiple meets.
    """
    known = STAND_INS.get(size.lower())
    count = known[1] if known is not None else parameter_count(size)
    if count is None:
        model = load(size)
        met = load_model(size).n_parameters if model.scale > 1 else model.n_parameters
        return StudiedModel(model.name, float(met), met, model, "")
    found = _nearest(count, step) if base is None else _stand_in(load_model(base), count, step, base)
    whole = load_model(found.name)
    title = known[0] if known is not None else "stand-in"
    alone = "" if known is None else f"{known[0]} is known here by its number of parameters alone. "
    note = (
        f"{alone}In the place of {count_text(count)} parameters stands {whole.name} with {found.n_experts:,} experts a layer "
        f"instead of {whole.n_experts:,}: {count_text(found.met, 4)} in all."
    )
    model = with_experts(load(found.name), found.n_experts)
    return StudiedModel(f"{title}, {count_text(count)}", count, found.met, model, note)


def parameter_count(text: str) -> float | None:
    """`2.8T` -> 2.8e12, `235B` -> 235e9; None for any other text."""
    match = _COUNT.fullmatch(text.strip())
    return None if match is None else float(match[1]) * _FACTORS[match[2].upper()]


def count_text(n_parameters: float, digits: int = 3) -> str:
    """A number of parameters in three digits, or as many as are wanted: `2.8T`, `671B`, `40M`."""
    rounded = float(f"{n_parameters:.{digits}g}")
    unit = next((u for u in ("T", "B", "M") if rounded >= _FACTORS[u]), "M")
    return f"{rounded / _FACTORS[unit]:.{digits + 1}g}{unit}"


def with_experts(model: Model, n_experts: int) -> Model:
    """The model with another number of experts in each layer that has some; all else as it is. Takes one without scales."""
    if not model.n_experts:
        raise InputError(f"{model.name} has no experts, of which another size would have more or fewer; take one that has")
    assert model.precision is None
    parameters = tuple(
        replace(p, tensor=replace(p.tensor, shape=(n_experts, *p.tensor.shape[1:])), stored=None) if p.role in _PER_EXPERT else p
        for p in model.parameters
    )
    name = f"{model.name} with {n_experts} experts"
    return replace(model, name=name, n_experts=n_experts, parameters=parameters, published=None)


@dataclass(frozen=True, slots=True)
class _StandIn:
    """A model, by what it is loaded by, with so many experts, which give it so many parameters."""

    name: str
    n_experts: int
    met: int


def _stand_in(model: Model, count: float, step: int, name: str) -> _StandIn:
    if not model.n_experts:
        raise InputError(f"{model.name} has no experts, of which another size would have more or fewer; take one that has")
    n_of_experts = sum(p.tensor.n_elements for p in model.parameters if p.role in _PER_EXPERT)
    one, rest = n_of_experts // model.n_experts, model.n_parameters - n_of_experts
    n = max(round((count - rest) / one / step) * step, step)
    met = rest + n * one
    if abs(met - count) > OFF * count:
        raise InputError(
            f"{count_text(count)} parameters: {model.name} comes nearest with {n} experts a layer, {count_text(met)}, which is "
            f"off by more than {OFF:.0%} (experts come in multiples of {step}); take another model, size or layout"
        )
    return _StandIn(name, n, met)


def _nearest(count: float, step: int) -> _StandIn:
    """The stand-in made of the shipped model whose own number of parameters is nearest, by ratio, of those that can be one."""
    models = [model for model in map(load_model, model_names()) if model.n_experts]
    models.sort(key=lambda model: (abs(math.log(model.n_parameters / count)), model.name))
    for model in models:
        try:
            return _stand_in(model, count, step, model.name)
        except InputError:
            continue
    raise InputError(f"{count_text(count)} parameters: no shipped model comes within {OFF:.0%} of it by more or fewer experts")
