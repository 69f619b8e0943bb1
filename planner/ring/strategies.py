"""The strategies by name, and the plan of an attention call by one of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shardroute.planner.plans import Backend, Plan
from shardroute.planner.ring.all_gather import add_all_gather
from shardroute.planner.ring.drafts import Draft
from shardroute.planner.ring.pass_q import add_pass_q
from shardroute.planner.ring.ring_attention import add_ring
from shardroute.planner.ring.tensors import Heads, Pass
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.shares import Told, parts
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

# A ring of 512 ranks: some 800,000 steps, which take a minute to plan and predict forward, and longer backward.
_MAX_BLOCKS: Final = 2**18
# The share of planning in planning, predicting and reporting a call: 0.42 for rings of 64 and 128, forward and backward.
RING_PLANNING_SHARE: Final = 0.42
# The share of adding steps in planning: of rings of 128 in 1.4 s and 2.3 s; the rest puts them in columns and looks at these.
_ADDED: Final = 0.95


@dataclass(frozen=True, slots=True)
class Options:
    """What a strategy may be told.

    ulysses      ranks that share heads under `hybrid`; by default the most that the call and the NVLink domains allow
    head_stride  KV heads that `all-gather` gathers at a time; by default one
    backend      what is meant to carry copies; by default processes on a CPU machine, NCCL's send and receive on GPUs
    """

    ulysses: int | None = None
    head_stride: int | None = None
    backend: Backend | None = None


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to compute an attention call: how it cuts heads, and the steps that it adds."""

    name: str
    summary: str
    heads: Callable[[Attention, Topology, Options], Heads]
    add: Callable[[Draft, Told], None]  # tells the share of them that it has added


def _whole(attention: Attention, topology: Topology, options: Options) -> Heads:
    return Heads()


def _by_stride(attention: Attention, topology: Topology, options: Options) -> Heads:
    stride = 1 if options.head_stride is None else options.head_stride
    if stride < 1 or attention.n_kv_heads % stride:
        raise InputError(
            f"a head stride of {stride} doesn't divide the {attention.n_kv_heads} KV heads; every gather takes equally many"
        )
    groups = attention.n_kv_heads // stride
    return Heads(groups, groups)


def _all_split(attention: Attention, topology: Topology, options: Options) -> Heads:
    return _split(attention, attention.n_ranks)


def _domain_split(attention: Attention, topology: Topology, options: Options) -> Heads:
    if options.ulysses is not None:
        degree = options.ulysses
        if degree < 1 or attention.n_ranks % degree:
            raise InputError(f"a Ulysses degree of {degree} doesn't divide the {attention.n_ranks} ranks of the call")
        if not _inside_domains(attention, topology, degree):
            raise InputError(
                f"a Ulysses degree of {degree} reaches over the NVLink domains of {topology.machine.name}, and hybrid exchanges "
                "inside a domain; take fewer, or strategy ulysses, which exchanges over all ranks"
            )
        return _split(attention, degree)
    for degree in range(attention.n_ranks, 0, -1):
        if attention.n_ranks % degree == 0 and _fits(attention, degree) and _inside_domains(attention, topology, degree):
            return _split(attention, degree)
    raise AssertionError("degree 1 always fits")


def _inside_domains(attention: Attention, topology: Topology, degree: int) -> bool:
    domain = topology.domain[: attention.n_ranks].reshape(-1, degree)
    return bool((domain == domain[:, :1]).all())


def _fits(attention: Attention, degree: int) -> bool:
    return attention.n_heads % degree == 0 and (attention.n_kv_heads % degree == 0 or degree % attention.n_kv_heads == 0)


def _split(attention: Attention, degree: int) -> Heads:
    if degree > attention.n_heads:
        raise InputError(f"{attention.n_heads} heads are fewer than the Ulysses degree {degree}: some ranks would have none")
    if attention.n_heads % degree:
        raise InputError(f"{attention.n_heads} heads don't split evenly over a Ulysses degree of {degree}")
    if not _fits(attention, degree):
        raise InputError(
            f"{attention.n_kv_heads} KV heads neither split evenly over a Ulysses degree of {degree} nor repeat evenly over it"
        )
    return Heads(degree, min(degree, attention.n_kv_heads), degree)


RING_STRATEGIES: Final[Mapping[str, Strategy]] = {
    strategy.name: strategy
    for strategy in (
        Strategy("ring", "K and V travel round all ranks", _whole, add_ring),
        Strategy("all-gather", "every rank gathers K and V, some heads at a time", _by_stride, add_all_gather),
        Strategy("ulysses", "all-to-all from parts of the sequence to groups of heads", _all_split, add_ring),
        Strategy("hybrid", "all-to-all inside an NVLink domain, a ring across", _domain_split, add_ring),
        Strategy("pass-q", "queries travel, K and V stay", _whole, add_pass_q),
    )
}


def ring_plan(
    attention: Attention,
    topology: Topology,
    strategy: str,
    what: Pass = Pass.FORWARD,
    options: Options | None = None,
    progress: Told | None = None,
) -> Plan:
    """The plan of the call by the strategy of that name, rank i on GPU i; progress is told the share that is done.

    Raises InputError for an unknown strategy, too few GPUs, and what the strategy can't split, with the reason.
    """
    if strategy not in RING_STRATEGIES:
        raise InputError(f"attention strategy {strategy!r} is not known; expected one of {', '.join(RING_STRATEGIES)}")
    if attention.n_ranks > topology.n_gpus:
        raise InputError(f"the call is over {attention.n_ranks} ranks, and {topology.machine.name} has {topology.n_gpus} GPUs")
    chosen, asked = RING_STRATEGIES[strategy], Options() if options is None else options
    _check_options(strategy, asked)
    cpu = topology.machine.kind is MachineKind.CPU
    if asked.backend is not None and cpu != (asked.backend is Backend.PROCESSES):
        raise InputError(f"backend {asked.backend.label} doesn't run on {topology.machine.name}; leave it out")
    heads = chosen.heads(attention, topology, asked)
    # With split 1 heads are cut only to be gathered group by group; otherwise each rank has its own.
    n_blocks = attention.n_ranks * max(attention.n_ranks // heads.split, heads.q_groups if heads.split == 1 else 1)
    if n_blocks > _MAX_BLOCKS:
        raise InputError(
            f"{strategy} over {attention.n_ranks} ranks has {n_blocks} blocks of attention, and a plan of one call at most "
            f"{_MAX_BLOCKS}; take fewer ranks or larger blocks; `shardroute ring` predicts steps of more GPUs"
        )
    adding, made = parts(progress, (_ADDED, 1.0 - _ADDED))
    draft = Draft(attention, what, heads, topology)
    chosen.add(draft, adding)
    adding(1.0)
    default = Backend.PROCESSES if cpu else Backend.NCCL
    plan = draft.plan(strategy, default if asked.backend is None else asked.backend)
    made(1.0)
    return plan


def _check_options(strategy: str, options: Options) -> None:
    for name, value, owner in (("Ulysses degree", options.ulysses, "hybrid"), ("head stride", options.head_stride, "all-gather")):
        if value is not None and strategy != owner:
            raise InputError(f"a {name} is for strategy {owner} only; {strategy} has none")
