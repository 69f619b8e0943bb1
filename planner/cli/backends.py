"""The libraries that carry steps between GPUs, as commands spell them: `nccl`, `nccl-put`, `nvshmem`."""

from typing import Annotated

import numpy as np
import typer

from shardroute.planner.cli.options import check_known
from shardroute.planner.plans import Backend, Plan
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import MachineKind
from shardroute.topologies.topologies import Topology

BACKENDS = {b.label: b for b in Backend if b is not Backend.PROCESSES}
# Their steps are calls of NCCL as the system that they re-state makes them.
_NCCL_ALONE = ("gather-broadcast", "m2n-pack", "hybrid")

BackendsOption = Annotated[
    str | None,
    typer.Option(
        "--backends", help=f"Libraries that may carry steps between GPUs: {', '.join(BACKENDS)}; of several, what is cheapest."
    ),
]


def parse_backend(option: str, name: str) -> Backend:
    """The backend of that name; InputError, with those that exist, for another."""
    check_known(option, name, BACKENDS)
    return BACKENDS[name]


def parse_backends(text: str, strategy: str, topology: Topology) -> tuple[Backend, ...]:
    """The backends of "nccl,nvshmem"; InputError for one twice, a machine without GPUs, a strategy that leaves no choice."""
    if topology.machine.kind is MachineKind.CPU:
        raise InputError(f"--backends {text}: {topology.machine.name} has no GPUs; leave it out")
    if strategy in _NCCL_ALONE:
        raise InputError(f"--backends {text}: strategy {strategy} is carried by NCCL alone; leave it out")
    found = tuple(parse_backend("--backends", name.strip()) for name in text.split(","))
    if len(set(found)) < len(found):
        raise InputError(f"--backends {text}: names one twice")
    return found


def carried_by(plan: Plan) -> str:
    """What carries the plan's bytes between ranks: "nvshmem 71%, nccl 29%"."""
    steps = plan.steps
    between = steps.src != steps.dst
    n_bytes = np.bincount(steps.backend[between], weights=plan.step_bytes[between].astype(np.float64), minlength=len(Backend))
    shares = [(n_bytes[backend] / max(1.0, n_bytes.sum()), name) for name, backend in BACKENDS.items() if n_bytes[backend]]
    return ", ".join(f"{name} {share:.0%}" for share, name in sorted(shares, reverse=True)) or "nothing moves between ranks"
