"""Run a plan on an emulated cluster: as `run` does, with the links of the plan's own topology."""

import sys
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from shardroute.executors.emulation.machines import check_emulated
from shardroute.executors.emulation.wirings import wiring_of
from shardroute.executors.foresee import foresee
from shardroute.executors.interpreting.interpret import compile_plan, to_columns
from shardroute.executors.launching.advances import once_begun
from shardroute.executors.launching.processes import ProcessSession
from shardroute.executors.launching.ranks import EMULATED
from shardroute.executors.messages.messages import lay_messages
from shardroute.executors.run import DEFAULT_TIMEOUT_S, RunResult, check_limits, result_of
from shardroute.planner.plans import Op, Plan
from shardroute.planner.shares import Told, parts
from shardroute.topologies.errors import InputError
from shardroute.topologies.topologies import Topology


class Links(Protocol):
    """Links that the kernel keeps to their rates: descriptors of the network namespaces of ranks 0, 1, ..."""

    @property
    def descriptors(self) -> Sequence[int]:
        """One a rank, at least."""


def emulate(
    plan: Plan, topology: Topology | None = None, *, links: Links | None = None, timeout_s: float = DEFAULT_TIMEOUT_S,
    repeats: int = 1, progress: Told | None = None, foreseen_s: float = 0.0,
) -> RunResult:  # fmt: skip
    """Run the plan `repeats` times between processes of this machine, and verify each run. Links have the rates of its topology,
    or of another with at least as many GPUs (rank i on GPU i).

    Without `links` the ranks keep to the rates themselves, over sockets. `progress` is told the share that is done, weighed by
    the seconds that one run of the plan is foreseen to take. Raises as `run_plan` does, and InputError for a topology
    whose links can't be emulated and for a plan that does more than move bytes.
    """
    topology = plan.topology if topology is None else topology
    if sys.platform != "linux":
        raise InputError(f"clusters are emulated on Linux only, and this is {sys.platform}; `shardroute run` runs plans there")
    check_emulated(topology)
    check_limits(timeout_s, repeats)
    if topology.n_gpus < plan.problem.n_ranks:
        raise InputError(f"{topology.title} has {topology.n_gpus} GPUs, the plan uses {plan.problem.n_ranks} ranks")
    check_moves(plan)
    foreseen = foresee(plan, EMULATED, foreseen_s)
    _, compiling, preparing, running = parts(progress, foreseen.parts_s(repeats))
    programs, buffers = compile_plan(plan)
    n_ranks = plan.problem.n_ranks
    descriptors = [] if links is None else list(links.descriptors[:n_ranks])
    namespace = np.array(descriptors if links is not None else [-1] * n_ranks, dtype=np.int64)
    messages = lay_messages(plan, programs, buffers)
    compiling(1.0)
    with ProcessSession(
        plan, programs, digest=plan.digest, timeout_s=timeout_s, n_trials=repeats, transport=EMULATED,
        messages=messages, wiring=to_columns(wiring_of(plan, topology, namespace), "wiring."),
        inherited=descriptors, foreseen=foreseen,
    ) as session:  # fmt: skip
        trials = session.run(once_begun(running), preparing)
    return result_of(plan, programs, buffers, EMULATED, trials, None, None)


def check_moves(plan: Plan) -> None:
    """Raise InputError for steps that emulated ranks don't do."""
    steps = plan.steps
    rings = np.isin(steps.op, (Op.ALL_GATHER, Op.BROADCAST))
    other = ~rings & ~np.isin(steps.op, (Op.COPY, Op.BARRIER))
    if plan.attention is not None or plan.problem.summed or other.any():
        raise InputError("an emulated cluster moves bytes, and this plan computes or adds up; run it with `shardroute run`")
    if (steps.dst_at[rings] < 0).any():
        step = int(np.flatnonzero(rings & (steps.dst_at < 0))[0])
        raise InputError(f"step {step}: collectives are emulated as rings, which end in staging slots; this one ends elsewhere")
