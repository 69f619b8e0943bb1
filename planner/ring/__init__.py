"""Attention calls over ranks as plans: ring, all-gather, Ulysses, hybrid, pass-Q.

call = Attention((131072,), n_ranks=16, n_heads=32, n_kv_heads=8, head_dim=128)
plan = ring_plan(call, build_topology(load_machine("gb200-nvl72"), min_gpus=16), "ring", Pass.RECOMPUTE)
check(plan)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardroute.planner.ring.overlaps import Overlap, overlap_of
    from shardroute.planner.ring.reports import RingReport, ring_report
    from shardroute.planner.ring.strategies import RING_STRATEGIES, Options, ring_plan
    from shardroute.planner.ring.tensors import Pass
    from shardroute.planner.ring.workloads import Attention, SequenceLayout

__all__ = [
    "RING_STRATEGIES",
    "Attention",
    "Options",
    "Overlap",
    "Pass",
    "RingReport",
    "SequenceLayout",
    "overlap_of",
    "ring_plan",
    "ring_report",
]

_HOMES = {
    "RING_STRATEGIES": "strategies", "Attention": "workloads", "Options": "strategies", "Overlap": "overlaps", "Pass": "tensors",
    "RingReport": "reports", "SequenceLayout": "workloads", "overlap_of": "overlaps", "ring_plan": "strategies",
    "ring_report": "reports",
}  # fmt: skip


def __getattr__(name: str) -> object:
    # Loaded when asked for: a plan carries its attention call, so `plans` imports this package, whose builders import `plans`.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
