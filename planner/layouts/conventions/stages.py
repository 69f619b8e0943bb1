"""Which pipeline stage holds which parameter, and how many layers a stage has.

Rule: the embedding is on the first stage, the final norm, the output layer and what predicts further tokens on the last;
a tied embedding, and one that such a layer reads, is on both.
"""

from dataclasses import dataclass

import numpy as np

from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class Stages:
    """Layers of each stage, first to last, and what decided them, for people.

    With virtual stages, `layers` has those of every virtual one; number i of them is on stage i % n_stages.
    """

    layers: tuple[int, ...]
    reason: str
    n_virtual: int = 1

    @property
    def n_stages(self) -> int:
        """How many stages there are, each counted once."""
        return len(self.layers) // self.n_virtual

    @property
    def stage_of_layer(self) -> tuple[int, ...]:
        """The stage of each layer."""
        return tuple((np.repeat(np.arange(len(self.layers)), self.layers) % self.n_stages).tolist())

    def holding(self, model: Model) -> list[tuple[int, ...]]:
        """For each parameter of the model, the stages that hold it, ascending."""
        first, last, of_layer = 0, self.n_stages - 1, self.stage_of_layer
        read_twice = model.tied or model.has_mtp

        def stages(parameter: Parameter) -> tuple[int, ...]:
            if parameter.layer is not None:
                return (of_layer[parameter.layer] if parameter.layer < model.n_layers else last,)
            if parameter.role is Role.EMBEDDING:
                return (first, last) if read_twice and last > first else (first,)
            return (last,)

        return [stages(parameter) for parameter in model.parameters]


def given_stages(model: Model, spec: ParallelSpec) -> Stages | None:
    """The stages that the specification lists, if it does.

    Raises InputError when they don't add up to the model's layers.
    """
    if spec.stage_layers is None:
        return None
    total = sum(spec.stage_layers)
    if total != model.n_layers:
        raise InputError(
            f"{spec}: the stages hold {total} layers, but {model.name} has {model.n_layers}; "
            f"an even choice is {_example(model.n_layers, spec.size(Axis.PP), len(spec.stage_layers))}"
        )
    return Stages(spec.stage_layers, "as given", spec.size(Axis.VPP))


def strict_stages(model: Model, spec: ParallelSpec) -> Stages:
    """The stages of a trainer: as given, else even, else a split that is known to be used for this model.

    Raises InputError when none of them applies: layers are never rounded or moved silently.
    """
    n_virtual, n_layers = spec.size(Axis.VPP), model.n_layers
    n_stages = spec.size(Axis.PP) * n_virtual
    given = given_stages(model, spec)
    if given is not None:
        return given
    if n_layers % n_stages == 0:
        return Stages((n_layers // n_stages,) * n_stages, "even", n_virtual)
    if n_virtual > 1:
        raise InputError(
            f"{spec}: PP{spec.size(Axis.PP)} x VPP{n_virtual} = {n_stages} virtual stages don't divide the {n_layers} layers of "
            f"{model.name}, and no list is given; list the layers of each, in the order of the layers"
            + (f": {_example(n_layers, spec.size(Axis.PP), n_stages)}" if n_stages <= n_layers else "")
        )
    for split in model.pipeline_splits:
        if len(split.layers) == n_stages:
            return Stages(split.layers, f"{n_layers} layers don't divide by {n_stages}; the split of {split.source}")
    divisors = [n for n in range(1, n_layers + 1) if n_layers % n == 0]
    near = [
        str(n)
        for n in (
            max(n for n in divisors if n < n_stages),
            min((n for n in divisors if n > n_stages), default=0),
        )
        if n
    ]
    raise InputError(
        f"{spec}: PP{n_stages} doesn't divide the {n_layers} layers of {model.name}, and no list is given; "
        f"use PP{' or PP'.join(near)}"
        + (f", or list the layers of each stage: {_example(n_layers, n_stages, n_stages)}" if n_stages <= n_layers else "")
    )


def vllm_stages(model: Model, spec: ParallelSpec) -> Stages:
    """The stages by vLLM's rule: as given (VLLM_PP_LAYER_PARTITION), else nearly even.

    vLLM `get_pp_indices`: one more layer for the last stage but one, the one before it, and so on, since the
    last stage also holds the output layer. 94 layers over PP4 are [23, 24, 24, 23]. Raises InputError for
    more stages than layers.
    """
    n_stages, n_layers = spec.size(Axis.PP), model.n_layers
    given = given_stages(model, spec)
    if given is not None:
        return given
    if n_stages > n_layers:
        raise InputError(f"{spec}: PP{n_stages} is above the {n_layers} layers of {model.name}; at most PP{n_layers} fits")
    base, extra = divmod(n_layers, n_stages)
    layers = [base] * n_stages
    for i in range(2, extra + 2):
        layers[-i] += 1
    return Stages(
        tuple(layers),
        "even" if extra == 0 else "vLLM's rule: the remainder goes to the stages before the last",
    )


def _example(n_layers: int, n_stages: int, n_parts: int) -> str:
    """The most even list of `n_parts` (virtual) stages, shorter at both ends, where the embedding and the output layer are."""
    base, extra = divmod(n_layers, n_parts)
    first = (n_parts - extra) // 2 + (n_parts - extra) % 2
    layers = [base + (first <= i < first + extra) for i in range(n_parts)]
    return f"PP{n_stages}[{','.join(str(n) for n in layers)}]"
