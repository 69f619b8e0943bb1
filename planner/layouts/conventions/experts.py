"""Stacked experts as every framework here keeps them: gate and up share a buffer, down is cut by columns."""

from shardroute.planner.layouts.conventions.buffers import Cut, even, keep
from shardroute.planner.layouts.conventions.sides import Cutting
from shardroute.planner.layouts.models.parameters import Role


def stacked_cuts(role: Role, shape: tuple[int, ...], experts: Cut, tp: int) -> Cutting | None:
    """How a projection of stacked experts is cut `tp` ways in each expert; None for roles that frameworks keep differently."""
    match role:
        case Role.EXPERT_GATE:
            return Cutting([experts, even(shape[1], tp, buffer=2 * shape[1] // tp), keep(shape[2])])
        case Role.EXPERT_UP:
            width = shape[1] // tp
            return Cutting([experts, even(shape[1], tp, before=width, buffer=2 * width), keep(shape[2])])
        case Role.EXPERT_UNGATED_UP:
            return Cutting([experts, even(shape[1], tp), keep(shape[2])])
        case Role.EXPERT_DOWN:
            return Cutting([experts, keep(shape[1]), even(shape[2], tp)])
        case Role.EXPERT_DOWN_TRANSPOSED:
            return Cutting([experts, even(shape[1], tp), keep(shape[2])], (0, 2, 1))
        case _:
            return None
