"""The plans by which predictions are held against an emulated cluster: each strategy over several layouts, and ring attention.

All are for 16 ranks in 4 domains of 4, and small enough to take a second or so at the rates of `machines`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.arguments import tensor_problem
from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.layouts.fragments import Fragments, Ints, dense_strides
from shardroute.planner.layouts.tensors import Layout
from shardroute.planner.plans import SOURCE, TARGET, Bundles, Op, Plan, Steps, ranges
from shardroute.planner.problems import Problem
from shardroute.planner.refits import groups_problem
from shardroute.planner.ring.strategies import ring_plan
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.strategies import make_plan
from shardroute.planner.shares import Told, heard
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.topologies import Topology

N_DOMAINS: Final = 4
N_RANKS: Final = 16
# A message takes a NIC of `machines` 33 ms: far longer than to start it, and a thirtieth of the whole or less.
MESSAGE_BYTES: Final = 32 * 2**10
# It chooses its messages itself, by the machine's memory.
_GATHER: Final = "gather-broadcast"
_RING: Final = "ring"


@dataclass(frozen=True, slots=True)
class Case:
    """A change of layouts, what it is in words, and the strategies that it is planned with."""

    name: str
    what: str
    make: Callable[[Topology], Problem]
    strategies: Sequence[str]

    def plans(self, topology: Topology, calibration: Calibration, progress: Told | None = None) -> list[Plan]:
        """The plans, in the order of the strategies; `progress` is told the share that is made. Raises as `make_plan` does."""
        problem, tell, found = self.make(topology), heard(progress), []
        for strategy in self.strategies:
            found.append(_plan(problem, strategy, topology, calibration))
            tell(len(found) / len(self.strategies))
        return found


def _plan(problem: Problem, strategy: str, topology: Topology, calibration: Calibration) -> Plan:
    if strategy == _RING:
        return moves_of_ring(_attention(topology))
    message_bytes = None if strategy == _GATHER else MESSAGE_BYTES
    return make_plan(problem, topology, strategy, options=Options(message_bytes=message_bytes, calibration=calibration))


def _replicas(topology: Topology) -> Problem:
    return tensor_problem("1024,2048", "bf16", "tp=2", "S0", "dp=3,tp=4", "R,S1", to_ranks="4-15")


def _dense(topology: Topology) -> Problem:
    return _model("llama-3-8b", 4096, None, "TP4 x PP2", "TP2 x DP4")


def _colocated(topology: Topology) -> Problem:
    return _model("llama-3-8b", 1024, 8, "FSDP16", "TP4 x DP4", to_first_rank=0)


def _experts(topology: Topology) -> Problem:
    return _model("mixtral-8x7b", 1024, 2, "TP2 x PP2 x EP4", "TP4 x DP2")


def _keys_and_values(topology: Topology) -> Problem:
    return moves_of_ring(_attention(topology)).problem


CASES: Final = (
    Case(
        "replicas", "a tensor of 4 MB from 2 trainers of one domain to 3 replicas of TP4", _replicas,
        ("direct", "domain-relay", _GATHER, "m2n-pack", "greedy", "optimal"),
    ),
    Case(
        "dense", "Llama 3 8B, scaled down 4,096 times, TP4 x PP2 -> TP2 x DP4", _dense,
        ("direct", "domain-relay", _GATHER, "greedy", "optimal"),
    ),
    Case(
        "colocated", "8 layers of Llama 3 8B, scaled down 1,024 times, FSDP16 -> TP4 x DP4 on the same GPUs", _colocated,
        ("direct", "domain-relay", _GATHER, "greedy", "optimal"),
    ),
    Case(
        "experts", "2 layers of Mixtral 8x7B, scaled down 1,024 times, TP2 x PP2 x EP4 -> TP4 x DP2", _experts,
        ("direct", "domain-relay", _GATHER, "m2n-pack", "hybrid", "greedy", "optimal"),
    ),
    Case(
        "ring attention", "K and V of 6,144 tokens over 16 ranks, each of which needs all", _keys_and_values,
        (_RING, "direct", "domain-relay", "greedy"),
    ),
)  # fmt: skip


def cases_named(names: Sequence[str]) -> tuple[Case, ...]:
    """Those of CASES that have one of these names, in their own order; all if no name is given.

    Raises InputError for a name that none has.
    """
    known = [case.name for case in CASES]
    for name in names:
        if name not in known:
            raise InputError(f"case {name!r} is not known; expected one of {', '.join(known)}")
    return tuple(case for case in CASES if not names or case.name in names)


def _model(
    name: str, scale: int, n_layers: int | None, source: str, target: str, to_first_rank: int | None = None
) -> Problem:
    """The problem of a shipped model, shrunk, and cut to its first layers."""
    model = load_model(name, scale)
    if n_layers is not None:
        kept = tuple(p for p in model.parameters if p.layer is None or p.layer < n_layers)
        model = replace(model, n_layers=n_layers, parameters=kept, pipeline_splits=(), published=None)
    return groups_problem(model, parse_spec(source), [parse_spec(target)], to_first_rank=to_first_rank)[0]


def _attention(topology: Topology) -> Plan:
    """Ring attention whose K and V take a NIC 0.1 s a rank: 384 tokens of 2 heads of 64 in bf16."""
    attention = Attention((384 * N_RANKS,), N_RANKS, 8, 2, 64, dtype="bf16")
    return ring_plan(attention, topology, _RING)


def moves_of_ring(plan: Plan) -> Plan:
    """What a plan of ring attention moves, without what it computes: K and V go the same way in the same messages, and stay
    where they would be computed with. Who waited for a COMPUTE waits for what that waited for.
    """
    steps = plan.steps
    tensors = [i for i, tensor in enumerate(plan.problem.tensors) if tensor.name in ("k", "v")]
    kept = np.flatnonzero(steps.op == Op.COPY)
    bundles = plan.bundles
    assert np.isin(bundles.tensor[ranges(bundles.ptr, steps.bundle[kept])[0]], tensors).all()
    after = _waits(steps, kept)
    moved = Steps(
        op=steps.op[kept], lane=steps.lane[kept], backend=steps.backend[kept], bundle=np.arange(len(kept), dtype=np.int32),
        src=steps.src[kept], dst=steps.dst[kept], group=steps.group[kept],
        src_at=np.where(steps.src_at[kept] == SOURCE, SOURCE, TARGET),
        dst_at=np.full(len(kept), TARGET), after_ptr=np.cumsum([0, *map(len, after)]),
        after=np.array([step for of in after for step in of], dtype=np.int32),
    )  # fmt: skip
    entry, owner = ranges(bundles.ptr, steps.bundle[kept])
    tensor = np.searchsorted(tensors, bundles.tensor[entry]).astype(np.int32)
    carried = Bundles(
        np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(kept)))]), tensor, bundles.piece[entry],
        np.full(len(entry), -1),
    )  # fmt: skip
    of_class = int(plan.tensor_class[tensors[0]])
    boxes, shape = plan.boxes[of_class], plan.problem.tensors[tensors[0]].shape
    places = np.unique(np.stack([steps.dst[kept][owner], bundles.piece[entry]], axis=1), axis=0)
    target = _placed(shape, places[:, 0], boxes.lo[places[:, 1]], boxes.hi[places[:, 1]])
    names = tuple((plan.problem.tensors[i].name,) for i in tensors)
    source = plan.problem.source
    sources = tuple(source.fragments[i] for i in tensors)
    problem = Problem(
        tuple(plan.problem.tensors[i] for i in tensors), Layout(sources, names), Layout((target,) * len(tensors), names),
        plan.problem.n_ranks,
    )  # fmt: skip
    return Plan(
        strategy=plan.strategy, topology=plan.topology, problem=problem, boxes=(boxes,), bundles=carried, steps=moved,
        group_ptr=np.zeros(1, np.int64), group_ranks=np.zeros(0, np.int32), slot_bytes=np.zeros(0, np.int64),
    )  # fmt: skip


def _waits(steps: Steps, kept: Ints) -> list[list[int]]:
    """For each step that is kept, those that it waits for, by their new numbers."""
    number = {step: i for i, step in enumerate(kept.tolist())}
    through: dict[int, set[int]] = {}  # what waiting for a step that isn't kept comes to
    found = []
    for step in range(len(steps)):
        waits = steps.after[steps.after_ptr[step] : steps.after_ptr[step + 1]].tolist()
        all_ = set().union(*({number[w]} if w in number else through[w] for w in waits))
        if step in number:
            found.append(sorted(all_))
        else:
            through[step] = all_
    return found


def _placed(shape: tuple[int, ...], rank: NDArray[np.int32], lo: Ints, hi: Ints) -> Fragments:
    """Boxes of a tensor where they would lie in a buffer of all of it."""
    n = len(rank)
    strides = np.repeat(dense_strides(np.array([shape], dtype=np.int64)), n, axis=0)
    return Fragments(
        shape, rank.astype(np.int32), lo, hi, np.zeros(n, np.int32), (lo * strides).sum(axis=1), strides,
        np.full(n, int(np.prod(shape))),
    )  # fmt: skip
