"""One call of attention over a ring, an all-gather or an all-to-all, as published benchmarks of PyTorch code time it.

T = operations / rate of the kernel alone + traffic to memory of every ring step + communication that attention doesn't hide.
The ring is simulated on the event kernel with the tasks of a training step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from shardroute.planner.backends.channels import Path, channel_law
from shardroute.planner.backends.links import path_costs
from shardroute.planner.layouts.tensors import DTYPES
from shardroute.planner.simulator import simulate
from shardroute.planner.steps.graphs import Builder, RingWork
from shardroute.planner.steps.transfers import NOTHING, Flow, send_recv
from shardroute.planner.steps.works import BACKWARD_FLOPS
from shardroute.planner.validation.attention_calls import AttentionCall
from shardroute.planner.validation.kernels import Kernel, kernel_curves
from shardroute.planner.validation.systems import System, ring_system

_BYTES: Final = DTYPES["bf16"]  # as of fp16


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Memory traffic of one ring step in bytes an element of a rank's output, forward and backward."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Block:
    """What one kernel works on: mask, direction, rows of queries, and the length of the sequence that its chart is read at."""

    mask: str
    direction: str
    queries: float
    seq: float


# The rate of a kernel on a block of a call.
Rates = Callable[[AttentionCall, Block], float]


def attention_s(call: AttentionCall, traffic: StepTraffic, rates: Rates) -> float:
    """Seconds of a call: forward, or backward, or both for "fwd+bwd"."""
    return sum(_pass_s(call, direction, traffic, rates) for direction in call.direction.split("+"))


def chart_rate(call: AttentionCall, block: Block) -> float:
    """The rate that the kernel's own chart gives."""
    return kernel_curves()[Kernel(call.system, call.kernel, block.mask, block.direction)].at(block.seq)


def _pass_s(call: AttentionCall, direction: str, traffic: StepTraffic, rates: Rates) -> float:
    system = ring_system(call.system)
    flops = call.flops * (BACKWARD_FLOPS if direction == "bwd" else 1.0)
    kv = call.tokens * 2 * call.kv_heads * call.head_dim * _BYTES
    output = call.tokens * call.heads * call.head_dim
    match call.scheme:
        case "ring" | "hybrid" | "ulysses":
            n = call.cp // call.ulysses
            around = _exchange_s(call, system, output, kv)
            if n == 1:
                return around + flops / rates(call, Block(call.mask, direction, call.seq, call.seq))
            step_bytes = traffic.forward if direction == "fwd" else traffic.backward
            more_s = output * step_bytes / system.machine.hbm_Bps
            first_s, block_s = _blocks_s(call, flops, direction, n, rates)
            # Backward every hop carries gradients too, and one more takes them home.
            hop, home = _hop(call, system, kv if direction == "fwd" else 2 * kv), NOTHING
            if direction == "bwd":
                home = _hop(call, system, kv)
            n_hops = n - 1 if direction == "fwd" else n
            ring = RingWork(n, first_s + more_s, block_s + more_s, n_hops, hop, home, NOTHING, NOTHING)
            return around + _ring_s(ring, system)
        case "all-gather":
            gathered = _gather_s(call, system, kv)
            worst = (2 * call.cp - 1) / call.cp if call.layout == "contiguous" and call.mask == "causal" else 1.0
            rate = rates(call, Block(call.mask, direction, call.seq / call.cp, call.seq))
            return gathered * (2 if direction == "bwd" else 1) + worst * flops / rate
        case _:  # group-cast: all is fetched beside attention, which is as long as the kernel unless fetching is longer
            compute = flops / rates(call, Block("full", direction, call.seq / call.cp, call.seq / call.cp))
            return max(compute, _gather_s(call, system, kv) * (2 if direction == "bwd" else 1))


def _blocks_s(call: AttentionCall, flops: float, direction: str, n: int, rates: Rates) -> tuple[float, float]:
    """Seconds of the first block of the slowest rank of a ring of n, and of each other one."""
    length = call.seq / call.cp * call.ulysses
    whole = flops / n / rates(call, Block("full", direction, length, length))
    if call.mask == "full":
        return whole, whole
    diagonal = flops / n / rates(call, Block("causal", direction, length, length))
    match call.layout:
        case "zigzag":  # every other block is half of a square; on the first rank the half with half of the queries
            return diagonal, flops / n / rates(call, Block("full", direction, length / 2, length))
        case "striped":  # every block is causal
            return diagonal, diagonal
        case _:  # contiguous: the last rank has whole squares
            return diagonal, 2 * whole


def _ring_s(ring: RingWork, system: System) -> float:
    machine, build = system.machine, Builder(system.n_sms)
    build.compute(0.0)
    build.ring(ring, overlapped=True)
    build.move(ring.last, 0)
    return simulate(build.graph((machine.nvlink_Bps, machine.gpu_nic_Bps))).makespan_s


def _hop(call: AttentionCall, system: System, n_bytes: float) -> Flow:
    machine, calibration = system.machine, system.calibration
    law = channel_law(machine, calibration)
    assert law is not None
    if call.n_nodes > 1:  # the ring goes across nodes, and waits for its slowest hop
        return send_recv(law, n_bytes, call.cp, False, Path.NIC)
    flow = send_recv(law, n_bytes, call.cp, True, Path.NVLINK)
    # The law's peak is that of the machine whose calibration it is; some systems' links are slower.
    return replace(flow, rate_Bps=min(flow.rate_Bps, machine.nvlink_Bps * path_costs(calibration)[0].efficiency))


def _exchange_s(call: AttentionCall, system: System, output: float, kv: float) -> float:
    """Ulysses: query, keys and values in, output out, and their copies to and from the order of sending."""
    if call.ulysses == 1:
        return 0.0
    moved = 2 * output * _BYTES + kv
    copied = 2 * moved / system.machine.hbm_Bps
    return _spread_s(system, moved, call.ulysses) + copied


def _gather_s(call: AttentionCall, system: System, kv: float) -> float:
    """All-gather: what comes from other nodes enters a node once, over all its NICs, and goes on over NVLink."""
    n, near = call.cp, min(call.cp, system.machine.gpus_per_domain)
    return _links_s(system, kv * (n - 1), kv * (n - near) / near)


def _spread_s(system: System, n_bytes: float, group: int) -> float:
    """A rank sends (or receives) n_bytes less its own part, spread evenly over the others of its group."""
    near = min(group, system.machine.gpus_per_domain)
    return _links_s(system, n_bytes * (near - 1) / group, n_bytes * (group - near) / group)


def _links_s(system: System, nvlink_bytes: float, nic_bytes: float) -> float:
    """A launch, then a GPU's NVLink and NICs side by side. Not by curves of collectives: some systems' links are slower."""
    machine, calibration = system.machine, system.calibration
    nvlink, nic = path_costs(calibration)
    nvlink_s = nvlink_bytes / (machine.nvlink_Bps * nvlink.efficiency)
    return calibration.launch_s + max(nvlink_s, nic_bytes / (machine.gpu_nic_Bps * nic.efficiency))
