"""A training step as tasks of the event kernel: what one GPU computes and moves, in order and with what may overlap.

All GPUs do the same (zigzag makes causal work even), so the tasks of one stand for all. Lanes: computing, hops of the ring,
gathering weights, scattering gradients. A collective of the tensor axis stands in the computing lane, since what follows needs
it; so does a hop that doesn't overlap. A hop that does overlap takes SMs from what is computed while it runs, and so do the
gathers of weights and the scatters of gradients.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.held_sms import HELD_FIRST
from shardroute.planner.simulator import TaskGraph, in_order, merge_dependencies
from shardroute.planner.steps.transfers import Flow, Link

_COMPUTE, _RING, _WEIGHTS, _GRADIENTS = range(4)
_HELD, _HOP, _BLOCK = range(3)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RingWork:
    """Attention of one layer and pass: a block of first_s seconds (a rank's own keys), then blocks of block_s, each with a hop.

    `last` comes after the last block (the gradients of keys and values go home); `whole` before the first (all-gather,
    all-to-all in) and `after` behind all (all-to-all out, reduce-scatter). Backward passes n_blocks hops instead of
    n_blocks - 1.
    """

    n_blocks: int
    first_s: float
    block_s: float
    n_hops: int
    hop: Flow
    last: Flow
    whole: Flow
    after: Flow

    @property
    def computed_s(self) -> float:
        """Seconds of all blocks."""
        return self.first_s + (self.n_blocks - 1) * self.block_s


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One pass over one layer: seconds of products before and after attention, attention, the tensor axis's collectives."""

    before_s: float
    attention: RingWork
    after_s: float
    gather: Flow
    scatter: Flow


@dataclass(frozen=True, slots=True)
class StepWork:
    """All of a step: passes of a layer (`again` when the backward pass computes it again), weights, logits, optimizer."""

    forward: LayerWork
    again: LayerWork | None
    backward: LayerWork
    weights: Flow
    gradients: Flow
    logits_s: float
    optimizer_s: float
    overlapped: bool
    n_sms: int


class Builder:
    """Tasks in order of index; each method appends some and returns the index of the last. The GPU has n_sms SMs."""

    def __init__(self, n_sms: int) -> None:
        self._n_sms = n_sms
        self._delay: list[Floats] = []
        self._amount: list[Floats] = []
        self._cap: list[Floats] = []
        self._weight: list[Floats] = []
        self._link: list[Ints] = []
        self._lane: list[Ints] = []
        self._owner: list[Ints] = [np.zeros(0, np.int64)]
        self._dep: list[Ints] = [np.zeros(0, np.int64)]
        self._latest: dict[int, int] = {}  # of each lane beside computing
        self.n = 0

    def compute(self, seconds: float, after: int = -1) -> int:
        """One task that computes."""
        return self._append(_COMPUTE, np.array([0.0]), np.array([seconds]), np.array([1.0]), np.array([int(Link.SMS)]), after)

    def move(self, flow: Flow, lane: int, after: int = -1) -> int:
        """One flow; none when it has no bytes (the index is then that of the task before).

        Outside the computing lane it runs beside what is computed: a task of its own holds its SMs, from when it begins.
        """
        if flow.link is Link.NONE:
            return self.n - 1
        if flow.n_sms and lane != _COMPUTE:
            share, sms = flow.n_sms / self._n_sms, np.array([int(Link.SMS)])
            self._append(-1, np.zeros(1), np.array([share * flow.alone_s]), np.array([share]), sms, after, HELD_FIRST)
            if lane in self._latest:
                self._needs(np.array([self.n - 1]), np.array([self._latest[lane]]))
            self._latest[lane] = self.n
        return self._append(
            lane, np.array([flow.start_s]), np.array([flow.n_bytes]), np.array([flow.rate_Bps]), np.array([int(flow.link)]), after
        )

    def ring(self, work: RingWork, overlapped: bool) -> int:
        """The blocks and hops of one ring. Block i + 1 needs hop i; hop i needs block i - 1, whose slot it fills.

        A hop that runs beside a block holds its SMs as a task of its own, which takes them from the block.
        """
        n, n_hops = work.n_blocks, work.n_hops if work.hop.link is not Link.NONE else 0
        share = work.hop.n_sms / self._n_sms if overlapped else 0.0
        # hop 0, block 0, hop 1, block 1, ... and what is left of the blocks; before each hop what holds its SMs, if it holds any
        round_of = [_HELD, _HOP, _BLOCK] if share else [_HOP, _BLOCK]
        part = np.array(round_of * n_hops + [_BLOCK] * (n - n_hops), dtype=np.int64)
        first = self.n
        at_held, at_hop, at_block = (first + np.flatnonzero(part == which) for which in (_HELD, _HOP, _BLOCK))
        amount = np.array([share * work.hop.alone_s, work.hop.n_bytes, work.block_s])[part]
        amount[at_block[0] - first] = work.first_s
        self._delay.append(np.array([0.0, work.hop.start_s, 0.0])[part])
        self._amount.append(amount)
        self._cap.append(np.array([share or 1.0, work.hop.rate_Bps, 1.0])[part])
        self._weight.append(np.array([HELD_FIRST, 1.0, 1.0])[part])
        sms = int(Link.SMS)
        self._link.append(np.array([sms, int(work.hop.link), sms])[part])
        self._lane.append(np.array([-1, _RING if overlapped else _COMPUTE, _COMPUTE])[part])
        if n_hops:
            n_needing = min(n_hops, n - 1)
            self._needs(at_block[1 : n_needing + 1], at_hop[:n_needing])
            for moved in (at_hop, at_held) if share else (at_hop,):
                self._needs(moved[1:], at_block[: n_hops - 1])
                if first:
                    self._needs(moved[:1], np.array([first - 1]))
            if share:
                self._needs(at_held[1:], at_hop[:-1])
        self.n += len(part)
        return self.n - 1

    def graph(self, capacity: tuple[float, float]) -> TaskGraph:
        """The task graph over the links of one GPU (NVLink, NIC) with these capacities, and its SMs together."""
        link = np.concatenate(self._link)
        lane = np.concatenate(self._lane)
        owner, dep = np.concatenate(self._owner), np.concatenate(self._dep)
        order = np.argsort(owner, kind="stable")
        needs = (np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=self.n))]), dep[order].astype(np.int32))
        dep_ptr, dep_tasks = merge_dependencies(in_order(lane), needs)
        return TaskGraph(
            start_s=np.zeros(self.n), delay_s=np.concatenate(self._delay), amount=np.concatenate(self._amount),
            cap=np.concatenate(self._cap), weight=np.concatenate(self._weight),
            route_ptr=np.concatenate([[0], np.cumsum(link >= 0)]), route_links=link[link >= 0].astype(np.int32),
            dep_ptr=dep_ptr, dep_tasks=dep_tasks, capacity=np.array([*capacity, 1.0]),
        )  # fmt: skip

    def _append(
        self, lane: int, delay: Floats, amount: Floats, cap: Floats, link: Ints, after: int, weight: float = 1.0
    ) -> int:  # fmt: skip
        self._delay.append(delay)
        self._amount.append(amount)
        self._cap.append(cap)
        self._weight.append(np.array([weight]))
        self._link.append(link)
        self._lane.append(np.array([lane]))
        if after >= 0:
            self._needs(np.array([self.n]), np.array([after]))
        self.n += 1
        return self.n - 1

    def _needs(self, tasks: Ints, deps: Ints) -> None:
        self._owner.append(tasks)
        self._dep.append(deps)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The graph of a step of `n_layers` layers; the task that ends each layer's forward pass and backward pass, in order."""

    graph: TaskGraph
    forward_ends: tuple[int, ...]
    backward_ends: tuple[int, ...]


def step_graph(work: StepWork, n_layers: int, capacity: tuple[float, float]) -> StepGraph:
    """The tasks of a step. A layer's weights are gathered while the layer before computes, two layers' being held at most."""
    build = Builder(work.n_sms)
    build.compute(0.0)  # a task to wait for, so that every graph has a dependency
    forward_ends: list[int] = []
    backward_ends: list[int] = []
    for _ in range(n_layers):
        gathered = build.move(work.weights, _WEIGHTS, forward_ends[-2] if len(forward_ends) > 1 else 0)
        forward_ends.append(_layer(build, work.forward, gathered, work.overlapped))
    build.compute(work.logits_s)
    ends = list(forward_ends[-2:])
    for _ in range(n_layers):
        gathered = build.move(work.weights, _WEIGHTS, ends[-2] if len(ends) > 1 else 0)
        if work.again is not None:
            _layer(build, work.again, gathered, work.overlapped)
        backward_ends.append(_layer(build, work.backward, gathered, work.overlapped))
        ends.append(backward_ends[-1])
        last = build.move(work.gradients, _GRADIENTS, backward_ends[-1])
    build.compute(work.optimizer_s, last)
    return StepGraph(build.graph(capacity), tuple(forward_ends), tuple(backward_ends))


def _layer(build: Builder, work: LayerWork, gathered: int, overlapped: bool) -> int:
    ring = work.attention
    build.move(work.gather, _COMPUTE)
    build.compute(work.before_s, gathered)
    build.move(ring.whole, _COMPUTE)
    build.ring(ring, overlapped)
    build.move(ring.last, _COMPUTE)
    build.move(ring.after, _COMPUTE)
    build.compute(work.after_s)
    build.move(work.scatter, _COMPUTE)
    build.move(work.gather, _COMPUTE)
    return build.move(work.scatter, _COMPUTE)
