"""Weights in 8 bits with the scales that travel beside them, as logical tensors of their own.

Rule: a block of the weight has one scale; the last block of a dim may be short. What isn't a linear layer's weight stays.
"""

from dataclasses import dataclass, replace

from shardroute.planner.layouts.models.parameters import Model, Parameter, Role
from shardroute.planner.layouts.tensors import Tensor
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are stored: their dtype, rows and columns of a block, dtype and name of its scale, and the source."""

    dtype: str
    rows: int
    columns: int
    scale_dtype: str
    suffix: str
    source: str


PRECISIONS = {
    "fp8-block": Precision(
        "f8_e4m3", 128, 128, "f32", "_scale_inv",
        "deepseek-ai/DeepSeek-V3 README_WEIGHTS.md: weight_scale_inv, float32, one for each 128 x 128 block of a weight",
    ),
    "mxfp8": Precision(
        "f8_e4m3", 1, 32, "f8_e8m0", "_scale",
        "OCP Microscaling Formats (MX) 1.0: blocks of 32 along the input, one E8M0 scale each",
    ),
}  # fmt: skip

# Linear layers, as DeepSeek-V3's own checkpoint has them: the router, the embedding, the output layer, norms and the
# projection in front of an MTP layer stay in bf16.
QUANTISED = frozenset({
    Role.Q_PROJ, Role.K_PROJ, Role.V_PROJ, Role.O_PROJ, Role.Q_A_PROJ, Role.Q_B_PROJ, Role.LATENT_Q_PROJ, Role.KV_A_PROJ,
    Role.KV_B_PROJ, Role.GATE_PROJ, Role.UP_PROJ, Role.DOWN_PROJ, Role.UNGATED_UP, Role.EXPERT_GATE, Role.EXPERT_UP,
    Role.EXPERT_DOWN, Role.EXPERT_UNGATED_UP, Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN, Role.SHARED_UNGATED_UP,
})  # fmt: skip


def with_scales(model: Model, name: str) -> Model:
    """The model with its linear weights in 8 bits, each followed by its scales.

    Raises InputError for an unknown precision and for experts that the checkpoint stacks in one tensor (GPT-OSS).
    """
    if name not in PRECISIONS:
        raise InputError(f"precision {name!r} is unknown; expected one of {', '.join(PRECISIONS)}")
    if model.shapes(Role.EXPERT_GATE_UP):
        raise InputError(f"{model.name}: {name} isn't known for its stacked experts, which are published as MXFP4")
    precision = PRECISIONS[name]
    parameters: list[Parameter] = []
    for parameter in model.parameters:
        if parameter.role not in QUANTISED:
            parameters.append(parameter)
            continue
        weight = replace(parameter, tensor=replace(parameter.tensor, dtype=precision.dtype))
        parameters += [weight, _scales(weight, precision)]
    return replace(model, parameters=tuple(parameters), precision=name)


def _scales(weight: Parameter, precision: Precision) -> Parameter:
    shape = weight.tensor.shape
    block = (*(1,) * (len(shape) - 2), precision.rows, precision.columns)
    scaled = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    tensor = Tensor(weight.tensor.name + precision.suffix, scaled, precision.scale_dtype)
    return Parameter(tensor, weight.role, weight.layer, weight=weight, block=block)
