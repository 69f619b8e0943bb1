"""Refits as NCCL M2N's model benchmark times them: which tensors, which bytes, in which order, between which synchronisations.

From its source as first published (nccl_m2n/benchmarks/reshard_model_bench.cu of nccl-extensions). Parameters come from a list of
the checkpoint's names, shapes and dtypes. The experts of a layer are grouped to one tensor a projection. A tensor that all layers
have is a *pattern*: its calls, layer after layer, go to one stream for each pipeline stage, then all streams are waited for; what
is published is the sum of these times over all patterns. The benchmark has placements of its own: training splits experts over EP
and other weights over TP; generation splits all by TP; norms, routers and scales are whole everywhere.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.models.parameters import Model, Role
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.plans import Op
from shardroute.planner.problems import Problem
from shardroute.planner.routing import m2n_window
from shardroute.planner.routing.m2n_window import Way
from shardroute.planner.routing.sizes import split_all
from shardroute.planner.routing.strategies import backend_for, pieces_of
from shardroute.planner.shares import Told, parts
from shardroute.planner.simulator.refit import predict
from shardroute.topologies.calibrations import Calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import Machine
from shardroute.topologies.topologies import Topology, build_topology

# Names that the benchmark splits by TP along dim 0, and along dim 1; it keeps all others whole.
_COLUMNS: Final = (
    "q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight", "q_a_proj.weight",
    "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "kv_b_proj.weight",
)  # fmt: skip
_ROWS: Final = ("o_proj.weight", "down_proj.weight")
_VOCABULARY: Final = ("embed_tokens.weight", "lm_head.weight")
_EXPERTS: Final = ".experts."
_LAYER: Final = re.compile(r"layers\.(\d+)")
# Turns of the stages that are simulated of a pattern. With four times as many no pattern changes by more than 2 %.
_TURNS: Final = 3
# A leader passes on what its 8 blocks of threads have received, 256 KiB each (CHUNK_SIZE_BYTES). That would be many steps, so a
# part is cut into 8 chunks at most; with 16 no prediction differs by more than 1 %.
_CHUNK_BYTES: Final = 8 * 256 * 2**10
_MOST_CHUNKS: Final = 8


@dataclass(frozen=True, slots=True)
class Split:
    """A dim in equal parts."""

    dim: int
    n_parts: int


@dataclass(frozen=True, slots=True)
class BenchTensor:
    """A tensor of the benchmark: the pipeline stage that has it, and how training and generation split it, None for not."""

    tensor: Tensor
    stage: int
    source: Split | None
    target: Split | None

    @property
    def pattern(self) -> str:
        """What is timed together: its name without the layer's number."""
        return _LAYER.sub("layers.X", self.tensor.name)

    @property
    def buffer_bytes(self) -> int:
        """What a rank of either side takes for it: the larger of the two sides' parts."""
        return self.tensor.n_bytes // min(1 if split is None else split.n_parts for split in (self.source, self.target))


@dataclass(frozen=True, slots=True)
class Bench:
    """A run of the benchmark: its pipeline stages, ranks of a stage and of generation, and its tensors in order of their names.

    Training ranks come first, stage after stage.
    """

    n_stages: int
    stage_ranks: int
    target_ranks: int
    tensors: tuple[BenchTensor, ...]

    @property
    def n_ranks(self) -> int:
        """All ranks."""
        return self.n_stages * self.stage_ranks + self.target_ranks

    @property
    def patterns(self) -> dict[str, list[BenchTensor]]:
        """The tensors by pattern, in the order in which they are timed."""
        found: dict[str, list[BenchTensor]] = {}
        for one in self.tensors:
            found.setdefault(one.pattern, []).append(one)
        return dict(sorted(found.items()))

    @property
    def target_buffer_bytes(self) -> int:
        """What a generation rank needs: each tensor has a buffer of its own."""
        return sum(one.buffer_bytes for one in self.tensors)

    def problem(self, tensors: Sequence[BenchTensor]) -> Problem:
        """The problem of moving these tensors; like ones share their fragments."""
        made: dict[tuple[object, ...], tuple[Fragments, Fragments]] = {}
        sides = []
        for one in tensors:
            key = (one.tensor.shape, one.stage, one.source, one.target)
            if key not in made:
                first = one.stage * self.stage_ranks
                held = _placed(one.tensor.shape, one.source, range(first, first + self.stage_ranks))
                needed = _placed(one.tensor.shape, one.target, range(self.n_ranks - self.target_ranks, self.n_ranks))
                made[key] = held, needed
            sides.append(made[key])
        buffers = tuple((one.tensor.name,) for one in tensors)
        source, target = (Layout(tuple(side[i] for side in sides), buffers) for i in range(2))
        return Problem(tuple(one.tensor for one in tensors), source, target, self.n_ranks)


@dataclass(frozen=True, slots=True)
class PatternTime:
    """What a pattern is predicted to take, and how many tensors it has."""

    name: str
    n_tensors: int
    time_s: float


def bench(model: Model, source: ParallelSpec, target: ParallelSpec) -> Bench:
    """The benchmark's tensors of a model between two layouts, EP within the ranks of a stage (Megatron's parallel folding).

    A tensor whose dims the splits don't divide is left out, as there.
    """
    n_stages = source.size(Axis.PP)
    stage_ranks = source.size(Axis.TP) * source.size(Axis.CP) * source.size(Axis.DP)
    stored = [parameter.tensor for parameter in model.parameters] + _copies(model)
    n_layers = 1 + max(int(found[1]) for tensor in stored if (found := _LAYER.search(tensor.name)))
    tensors = []
    for tensor in stored:
        found = _LAYER.search(tensor.name)
        dim, experts = _tp_dim(tensor), _EXPERTS in tensor.name
        held = Split(0, source.size(Axis.EP)) if experts else _split(dim, source.size(Axis.TP))
        needed = _split(dim, target.size(Axis.TP))
        if all(split is None or tensor.shape[split.dim] % split.n_parts == 0 for split in (held, needed)):
            early = "embed_tokens" in tensor.name
            stage = int(found[1]) * n_stages // n_layers if found else 0 if early else n_stages - 1
            tensors.append(BenchTensor(tensor, stage, held, needed))
    tensors.sort(key=lambda one: one.tensor.name)
    return Bench(n_stages, stage_ranks, target.size(Axis.TP) * target.size(Axis.DP), tuple(tensors))


def pattern_times(
    run: Bench, machine: Machine, domain_gpus: int, calibration: Calibration, way: Way, progress: Told | None = None
) -> list[PatternTime]:
    """What each pattern of the run is predicted to take, in order; patterns that are alike are simulated once.

    progress is told the share that is done.

    domain_gpus: of an NVLink domain of the system, 0 for those of the machine. Raises InputError where NCCL's LSA teams would be
    parts of a host, which no machine here can be.
    """
    n_gpus = lsa_ranks(run.stage_ranks, domain_gpus or machine.gpus_per_host * machine.hosts_per_domain)
    if n_gpus % machine.gpus_per_host:
        raise InputError(
            f"stages of {run.stage_ranks} ranks: teams of {n_gpus} GPUs are no whole hosts of {machine.gpus_per_host}; "
            f"take stages of a multiple of {machine.gpus_per_host} ranks"
        )
    teams = replace(machine, hosts_per_domain=n_gpus // machine.gpus_per_host, figures=())
    topology = build_topology(teams, None, run.n_ranks)
    known: dict[tuple[object, ...], float] = {}
    found = []
    told = parts(progress, [min(len(tensors), _TURNS * run.n_stages) for tensors in run.patterns.values()])
    for (name, tensors), done in zip(run.patterns.items(), told, strict=True):
        key = tuple((one.tensor.shape, one.tensor.dtype, one.stage, one.source, one.target) for one in tensors)
        if key not in known:
            known[key] = _pattern_s(run, tensors, topology, calibration, way)
        found.append(PatternTime(name, len(tensors), known[key]))
        done(1.0)
    return found


def lsa_ranks(stage_ranks: int, domain_gpus: int) -> int:
    """Ranks of what M2N takes for an NVLink domain: NCCL's LSA team of a communicator of one stage and all of generation.

    Teams are equal runs of a communicator's ranks within a domain (computeLsaSize in NCCL's src/dev_runtime.cc: the greatest
    common divisor of the runs), so 32 ranks of a stage before 128 in domains of 64 make teams of 32. Between teams bytes go
    over NICs, even where NVLink joins them.
    """
    return math.gcd(stage_ranks, domain_gpus)


def _pattern_s(run: Bench, tensors: Sequence[BenchTensor], topology: Topology, calibration: Calibration, way: Way) -> float:
    of_stage = [[one for one in tensors if one.stage == stage] for stage in range(run.n_stages)]
    n_more = max(0, max(map(len, of_stage)) - _TURNS)
    # As long as all stages have tensors left each turn takes as long as the first; how they run out is simulated.
    part = [one for stage in of_stage for one in stage[: max(len(stage) - n_more, min(len(stage), 1))]]
    problem = run.problem(part)
    pieces = pieces_of(problem)
    if way is Way.RING:
        largest = max(int(p.n_elements.max(initial=0)) * cls.itemsize for p, cls in zip(pieces, problem.classes, strict=True))
        pieces = tuple(split_all(problem, pieces, max(_CHUNK_BYTES, -(-largest // _MOST_CHUNKS))))
    plan = m2n_window.plan(problem, pieces, topology, backend_for(problem, topology), way)
    timeline = predict(plan, calibration).timeline
    if not n_more:
        return timeline.total_s
    # Each tensor ends with a barrier, the second of its two.
    ends = timeline.end_s[np.flatnonzero(plan.steps.op == Op.BARRIER)[1::2]]
    first = [i for i, one in enumerate(part) if one.stage not in {before.stage for before in part[:i]}]
    return timeline.total_s + n_more * float(np.mean(ends[first]))


def _copies(model: Model) -> list[Tensor]:
    """What DeepSeek-V3's checkpoint stores once more with the layer that predicts further tokens (its README_WEIGHTS.md: shared
    with the main model): the embedding and the output layer.
    """
    names = {Role.EMBEDDING: "embed_tokens.weight", Role.LM_HEAD: "shared_head.head.weight"}
    layers = [parameter.layer for parameter in model.parameters if parameter.role is Role.MTP_PROJ]
    shared = [parameter for parameter in model.parameters if parameter.role in names]
    return [replace(p.tensor, name=f"model.layers.{layer}.{names[p.role]}") for layer in layers for p in shared]


def _tp_dim(tensor: Tensor) -> int | None:
    """The dim that the benchmark splits by TP, found by the tensor's name; experts have theirs behind the experts'."""
    if len(tensor.shape) < 2:
        return None
    experts = _EXPERTS in tensor.name
    if tensor.name.endswith(_COLUMNS):
        return 1 if experts else 0
    if tensor.name.endswith(_ROWS):
        return 2 if experts else 1
    return 0 if not experts and any(name in tensor.name for name in _VOCABULARY) else None


def _split(dim: int | None, n_parts: int) -> Split | None:
    return None if dim is None or n_parts == 1 else Split(dim, n_parts)


def _placed(shape: tuple[int, ...], split: Split | None, ranks: range) -> Fragments:
    """Copies of the parts one after the other, as M2N's mesh of copies and parts has them."""
    n_parts = 1 if split is None else split.n_parts
    mesh = Mesh.of({"copy": len(ranks) // n_parts, "part": n_parts}, ranks)
    return place(shape, mesh, [Replicate(), Replicate() if split is None else Shard(split.dim)])
