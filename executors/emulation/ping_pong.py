"""What an emulated cluster reaches, by its own ping-pong: a calibration fitted to runs of small plans on it.

Disjoint pairs of ranks send each other messages in turn, all pairs at once: in domains over NVLink, between domains over NICs.
Small messages give a path's latency, large ones beside others of half their size its bandwidth (so that what a link lets through
at once doesn't count), small ones of many pieces what a piece costs; copies within a rank give the rate of its memory.
Predictions rest on these figures alone.
"""

import datetime
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from shardroute.executors.emulation.emulate import Links, emulate
from shardroute.executors.foresee import starting_ranks_s
from shardroute.executors.launching.processes import machine_text
from shardroute.executors.launching.ranks import EMULATED
from shardroute.executors.run import DEFAULT_TIMEOUT_S, RunResult
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.plans import SOURCE, TARGET, Backend, Boxes, Bundles, Lane, Op, Plan, Steps
from shardroute.planner.problems import Problem
from shardroute.planner.shares import Told, parts
from shardroute.topologies.calibrations import Calibration, calibration_figure, calibration_from_figures
from shardroute.topologies.errors import RunError
from shardroute.topologies.topologies import Topology

LIBRARY: Final = "emulated links"
# A message of many pieces has so many of 8 bytes; a large one takes its link so long at the nominal rate, and one of half its
# size goes beside it.
_PIECE_BYTES, _PIECES, _LARGE_S = 8, 64, 0.1
# Where links are faster than processes, as NVLink is: this takes them a millisecond or more, long against any latency.
_MOST_LARGE_BYTES: Final = 4 * 2**20
# Turns of each kind. Those of small messages take well below a millisecond each, so many cost nothing.
_SMALL, _MANY, _HALF, _LARGE, _LOCAL = 40, 40, 8, 8, 16
_LOCAL_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class _Kind:
    """Turns of one kind: how many, how many pieces each, of how many bytes."""

    turns: int
    pieces: int
    piece_bytes: int


@dataclass(frozen=True, slots=True)
class _Hops:
    """Seconds of one hop of each kind: median over turns and pairs."""

    small_s: float
    many_s: float
    half_s: float
    large_s: float


def calibrate_emulated(
    topology: Topology, links: Links | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S, progress: Told | None = None
) -> Calibration:
    """The costs of the topology's links as they are emulated here, measured now; takes some seconds. `progress` is told the share
    that is done.

    A path that no pair of GPUs has (one domain, or one GPU a domain) is taken for the other one, at its nominal rate.
    Raises RunError when a run fails, or what was measured contradicts the model: something else held up the machine.
    """
    machine = topology.machine
    nvlink_Bps, nic_Bps = float(topology.nvlink_Bps[0]), float(topology.nic_Bps[0])
    near, far, starting_s = _near_pairs(topology), _far_pairs(topology), starting_ranks_s(topology.n_gpus, EMULATED)
    found: list[_Hops] = []
    paths = ((near, nvlink_Bps), (far, nic_Bps))
    weights = [starting_s + _turns_s(rate_Bps) if pairs else 0.0 for pairs, rate_Bps in paths]
    *playing, copying = parts(progress, (*weights, starting_s))
    for (pairs, rate_Bps), told in zip(paths, playing, strict=True):
        found.append(_play(topology, pairs, rate_Bps, links, timeout_s, told) if pairs else _Hops(0.0, 0.0, 0.0, 0.0))
    memory_Bps = _local(topology, links, timeout_s, copying)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = f"measured on {today} on {platform.node()} ({machine_text()}) by ping-pong, see executors/emulation/ping_pong.py"
    nominal = "no pair of GPUs has this path: taken for nominal, nothing measured"
    measured = [hops for hops, pairs in zip(found, (near, far), strict=True) if pairs]
    piece_s = float(np.mean([(h.many_s - h.small_s) / (_PIECES - 1) for h in measured])) if measured else 0.0
    values: list[tuple[str, float, str]] = [  # in the order of a calibration file
        ("step.launch", 0.0, "part of the latency, which is from the start of a step to its arrival"),
        ("step.piece", max(piece_s, 0.0), source),
    ]
    for path, hops, pairs, rate_Bps in (("nvlink", found[0], near, nvlink_Bps), ("nic", found[1], far, nic_Bps)):
        share = _reached(hops, rate_Bps) / rate_Bps if pairs else 1.0
        values.append((f"{path}.latency", hops.small_s, source if pairs else nominal))
        values.append((f"{path}.efficiency", min(share, 1.0), source if pairs else nominal))
    values.append(("memory.efficiency", min(2 * memory_Bps / machine.hbm_Bps, 1.0), source))
    figures = [calibration_figure(key, float(f"{value:.4g}"), text) for key, value, text in values]
    return calibration_from_figures(machine.name, LIBRARY, today, machine_text(), figures)


def _reached(hops: _Hops, rate_Bps: float) -> float:
    """Bytes per second that large messages show beside those of half their size."""
    large, half = _large(rate_Bps), _half(rate_Bps)
    more_s = hops.large_s - hops.half_s
    if more_s <= 0:
        raise RunError(
            f"a message of {large} bytes took {hops.large_s:g} s and one of {half} bytes {hops.half_s:g} s; is the machine busy? "
            "Measure when it is idle"
        )
    return (large - half) / more_s


def _large(rate_Bps: float) -> int:
    return max(min(int(rate_Bps * _LARGE_S), _MOST_LARGE_BYTES) // _PIECE_BYTES, 2) * _PIECE_BYTES


def _half(rate_Bps: float) -> int:
    return _large(rate_Bps) // (2 * _PIECE_BYTES) * _PIECE_BYTES


def _near_pairs(topology: Topology) -> list[tuple[int, int]]:
    """Neighbours within domains, each rank in one pair at most."""
    found = []
    for domain in range(topology.n_domains):
        members = np.flatnonzero(topology.domain == domain).tolist()
        found += list(zip(members[::2], members[1::2], strict=False))
    return found


def _far_pairs(topology: Topology) -> list[tuple[int, int]]:
    """Ranks at one place of neighbouring domains, each rank in one pair at most."""
    found: list[tuple[int, int]] = []
    for domain in range(0, topology.n_domains - 1, 2):
        here, there = (np.flatnonzero(topology.domain == d).tolist() for d in (domain, domain + 1))
        found += list(zip(here, there, strict=False))
    return found


def _kinds(rate_Bps: float) -> tuple[_Kind, ...]:
    return (
        _Kind(_SMALL, 1, _PIECE_BYTES), _Kind(_MANY, _PIECES, _PIECE_BYTES), _Kind(_HALF, 1, _half(rate_Bps)),
        _Kind(_LARGE, 1, _large(rate_Bps)),
    )  # fmt: skip


def _turns_s(rate_Bps: float) -> float:
    """Seconds that the turns take on links that keep to their rate and start at once."""
    return sum(kind.turns * kind.pieces * kind.piece_bytes for kind in _kinds(rate_Bps)) / rate_Bps


def _play(
    topology: Topology, pairs: Sequence[tuple[int, int]], rate_Bps: float, links: Links | None, timeout_s: float, told: Told
) -> _Hops:
    kinds = _kinds(rate_Bps)
    plan = _turns(topology, pairs, kinds)
    found = emulate(plan, links=links, timeout_s=timeout_s, progress=told, foreseen_s=_turns_s(rate_Bps))
    end_s = found.timeline.end_s.reshape(-1, len(pairs))
    hop_s = np.diff(end_s, axis=0)
    edges = np.cumsum([0, *(kind.turns for kind in kinds)])
    # The first turn of a kind still belongs to the one before, and what was warmed up counts.
    medians = [float(np.median(hop_s[a : b - 1])) for a, b in pairwise(edges)]
    return _Hops(*medians)


def _local(topology: Topology, links: Links | None, timeout_s: float, told: Told) -> float:
    """Bytes per second of copies within a rank."""
    plan = _turns(topology, [(0, 0)], [_Kind(_LOCAL, 1, _LOCAL_BYTES)])
    found: RunResult = emulate(plan, links=links, timeout_s=timeout_s, progress=told)
    spans = found.timeline.end_s - found.timeline.start_s
    return _LOCAL_BYTES / float(np.median(spans))


def _turns(topology: Topology, pairs: Sequence[tuple[int, int]], kinds: Sequence[_Kind]) -> Plan:
    """Steps turn by turn, pair by pair; in each turn the ranks of a pair change places, and it waits for the turn before."""
    tensors, sources, targets, boxes = [], [], [], []
    rows: list[tuple[int, int, int, int]] = []  # of each step: tensor, its first piece, sender, receiver
    for number, kind in enumerate(kinds):
        # Rows by sender, so that each rank has one block of them; pieces take the left half, so that several don't lie together.
        senders = [(a, b, -(-kind.turns // 2)) for a, b in pairs] + [(b, a, kind.turns // 2) for a, b in pairs]
        if pairs[0][0] == pairs[0][1]:
            senders = [(a, b, kind.turns) for a, b in pairs]
        n_rows = np.array([turns * kind.pieces for _, _, turns in senders])
        width = kind.piece_bytes * (2 if kind.pieces > 1 else 1)
        first = np.cumsum(n_rows) - n_rows
        lo = np.stack([first, np.zeros_like(first)], axis=1)
        hi = np.stack([first + n_rows, np.full_like(first, width)], axis=1)
        shape = (int(n_rows.sum()), width)
        sources.append(Fragments.dense(shape, [a for a, _, _ in senders], lo, hi))
        targets.append(Fragments.dense(shape, [b for _, b, _ in senders], lo, np.minimum(hi, [shape[0], kind.piece_bytes])))
        row = np.stack([np.arange(shape[0]), np.zeros(shape[0], np.int64)], axis=1)
        boxes.append(Boxes(row, row + np.array([1, kind.piece_bytes])))
        tensors.append(Tensor(f"turns-{number}", shape, "u8"))
        turn_of: dict[int, int] = {}
        for turn in range(kind.turns):
            for pair in range(len(pairs)):
                sender = pair if turn % 2 == 0 or len(senders) == len(pairs) else pair + len(pairs)
                at = turn_of.get(sender, 0)
                turn_of[sender] = at + 1
                rows.append((number, int(first[sender]) + at * kind.pieces, senders[sender][0], senders[sender][1]))
    table = np.array(rows, dtype=np.int64)
    counts = np.array([kind.pieces for kind in kinds])[table[:, 0]]
    n, ptr = len(table), np.cumsum([0, *counts])
    piece = np.arange(ptr[-1]) - np.repeat(ptr[:-1] - table[:, 1], counts)
    bundles = Bundles(ptr, np.repeat(table[:, 0], counts), piece, np.full(len(piece), -1))
    order = np.arange(n, dtype=np.int32)
    before = order - np.int32(len(pairs))
    steps = Steps(
        op=np.full(n, Op.COPY), lane=np.full(n, Lane.INJECT), backend=np.full(n, Backend.NCCL), bundle=order,
        src=table[:, 2].astype(np.int32), dst=table[:, 3].astype(np.int32), group=np.full(n, -1),
        src_at=np.full(n, SOURCE), dst_at=np.full(n, TARGET),
        after_ptr=np.concatenate([[0], np.cumsum(before >= 0)]), after=before[before >= 0],
    )  # fmt: skip
    names = tuple((tensor.name,) for tensor in tensors)
    problem = Problem(tuple(tensors), Layout(tuple(sources), names), Layout(tuple(targets), names), topology.n_gpus)
    return Plan(
        strategy="ping-pong", topology=topology, problem=problem, boxes=tuple(boxes), bundles=bundles, steps=steps,
        group_ptr=np.zeros(1, np.int64), group_ranks=np.zeros(0, np.int32), slot_bytes=np.zeros(0, np.int64),
    )  # fmt: skip
