"""Plans of attention over 4 ranks that between them have all kinds of steps."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardroute.planner.plans import Plan
from shardroute.planner.ring.strategies import Options, ring_plan
from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import Attention, SequenceLayout
from shardroute.topologies import build_topology, load_machine

N_RANKS = 4


def planned(strategy: str = "ring", what: Pass = Pass.RECOMPUTE, options: Options | None = None, **changes: object) -> Plan:
    call = replace(Attention((64,), N_RANKS, 8, 4, 8, dtype="f64"), **changes)
    topology = build_topology(load_machine("cpu-processes"), min_gpus=8)
    return ring_plan(call, topology, strategy, what, options)


CASES: Mapping[str, Callable[[], Plan]] = {
    "ring": planned,
    "ring, striped, o and lse given": lambda: planned(what=Pass.BACKWARD, layout=SequenceLayout.STRIPED, dtype="f32"),
    "ring, packed, gradients wider": lambda: planned(
        lengths=(5, 17, 1, 40), packed=True, n_kv_heads=2, dtype="f32", grad_dtype="f64"
    ),
    "all-gather, two groups of heads": lambda: planned("all-gather", options=Options(head_stride=2)),
    "all-gather, four groups, full, batch": lambda: planned("all-gather", causal=False, batch=2),
    "hybrid": lambda: planned("hybrid", options=Options(ulysses=2), layout=SequenceLayout.CONTIGUOUS),
    "ulysses": lambda: planned("ulysses", n_kv_heads=2),
    "pass-q": lambda: planned("pass-q", layout=SequenceLayout.STRIPED),
}
