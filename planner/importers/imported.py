"""What an importer gives: a specification and the convention that reads it, for one side or for both."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardroute.planner.layouts.models import model_names
from shardroute.planner.layouts.notation import ParallelSpec, parse_spec
from shardroute.topologies.errors import InputError


@dataclass(frozen=True, slots=True)
class ImportedLayout:
    """One side: its specification, who stores it so, the model as its user names it ("" if unsaid), and notes for the user."""

    spec: ParallelSpec
    convention: str
    model: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ImportedRefit:
    """Both sides of a refit, and whether they share their GPUs."""

    source: ImportedLayout
    target: ImportedLayout
    colocated: bool


def known_model(name: str) -> str | None:
    """The shipped model that a user's "Qwen/Qwen3-8B" or "/models/Qwen3-8B" is, by its last part; None if there is none."""
    last = name.rstrip("/").rpartition("/")[2].lower()
    return last if last in model_names() else None


def spec_of(sizes: Mapping[str, int], stage_layers: tuple[int, ...] = (), order: str = "") -> ParallelSpec:
    """The specification of these axes, those of size 1 left out: {"tp": 4, "pp": 2} is "TP4 x PP2"."""
    said = [
        f"{axis.upper()}{n}" + (f"[{','.join(map(str, stage_layers))}]" if axis == "pp" and stage_layers else "")
        for axis, n in sizes.items()
        if n > 1
    ]
    return parse_spec(" x ".join(said or ["TP1"]) + (f" order={order}" if order else ""))


def divided(n_gpus: int, by: int, what: str) -> int:
    """n_gpus / by. Raises InputError, led by `what`, where it isn't whole."""
    if n_gpus % by or n_gpus < by:
        raise InputError(f"{what}: {n_gpus} GPUs are no multiple of {by}, the ranks of one replica")
    return n_gpus // by
