"""How `optimal` has its routes carried: which library on NVLink and on NICs, and how large messages are, by a linear program.

See docs/routing.md for the program and its assumptions. A message costs its start; a chain of hops is filled by one message a
hop. So small messages cost starts and large ones filling, and which is worse depends on how deep a tree is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.backends.channels import Path
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import Backend, Lane
from shardroute.planner.routing.costs import Costs
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.programs import Program, solve
from shardroute.planner.routing.routes import Routes
from shardroute.planner.routing.sizes import LARGEST_MESSAGE_BYTES
from shardroute.topologies.topologies import Topology

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Carriage:
    """near, far: the library on NVLink and on NICs; message_bytes: of each tree; seconds: what the program says it takes."""

    near: Backend
    far: Backend
    message_bytes: Ints
    seconds: float


def carry(routes: Routes, topology: Topology, costs: Costs, options: Options, time_limit_s: float) -> Carriage | None:
    """The best carriage of routes, or None where the program isn't solved in time or nothing moves.

    Each pair of libraries that `options.backends` allow gives one program; the least of their optima is the optimum of all, so no
    variable is integer.
    """
    if not (routes.lane <= Lane.HAND_OVER).any():
        return None
    group, far, near = _groups(routes)
    loads = _loads(routes, group, len(far), topology.n_gpus)
    sizes = _sizes(routes, options)
    backends = [b for b in options.backends if b in costs.backends()] or list(options.backends[:1])
    best: tuple[float, Backend, Backend, Floats] | None = None
    for near_by, far_by in product(backends, repeat=2):
        of_path = [_seconds(path, sizes, by, costs, options) for path, by in ((Path.NVLINK, near_by), (Path.NIC, far_by))]
        found = solve(_program(loads, near, far, of_path), time_limit_s)
        if found is not None and (best is None or found.cost < best[0]):
            best = (found.cost, near_by, far_by, found.x[2:].reshape(len(far), len(sizes)))
    if best is None:
        return None
    seconds, near_by, far_by, share = best
    return Carriage(near_by, far_by, sizes[share.argmax(axis=1)][group], seconds)


def _groups(routes: Routes) -> tuple[Ints, Ints, Ints]:
    """The group of each tree, and hops over NICs and over NVLink on the longest way down the trees of each group."""
    depth, first = routes.depths(), np.repeat(routes.tree_ptr[:-1], np.diff(routes.tree_ptr))
    chain = np.stack([routes.lane < Lane.HAND_OVER, routes.lane == Lane.HAND_OVER]).astype(np.int64)
    for level in range(1, int(depth.max(initial=0)) + 1):
        hop = np.flatnonzero(depth == level)
        chain[:, hop] += chain[:, first[hop] + routes.parent[hop]]
    longest = np.zeros((2, len(routes.tree_ptr) - 1), dtype=np.int64)
    for row in range(2):
        np.maximum.at(longest[row], routes.hop_trees, chain[row])
    kinds, group = np.unique(longest, axis=1, return_inverse=True)
    return group.reshape(-1), kinds[0], kinds[1]


def _loads(routes: Routes, group: Ints, n_groups: int, n_gpus: int) -> tuple[Floats, Floats]:
    """Bytes of each group on the NVLink ports and on the NICs, a row a port; ports with the same row are one."""
    n_bytes = np.bincount(routes.tree, weights=routes.n_bytes, minlength=len(routes.tree_ptr) - 1).astype(np.float64)
    tree, found = routes.hop_trees, []
    for hops in (np.flatnonzero(routes.lane == Lane.HAND_OVER), np.flatnonzero(routes.lane < Lane.HAND_OVER)):
        of_hop, bytes_of = group[tree[hops]], n_bytes[tree[hops]]
        ports = [
            np.bincount(end[hops].astype(np.int64) * n_groups + of_hop, weights=bytes_of, minlength=n_gpus * n_groups)
            for end in (routes.src, routes.dst)
        ]
        rows = np.unique(np.concatenate(ports).reshape(-1, n_groups).astype(np.float64), axis=0)
        found.append(rows[rows.any(axis=1)])
    return found[0], found[1]


def _sizes(routes: Routes, options: Options) -> Ints:
    """Sizes of messages to choose from: from the largest piece, doubled up to the largest message."""
    least = int(routes.n_bytes.max(initial=1))
    if options.message_bytes is not None:
        return np.array([max(least, options.message_bytes)])
    n = max(1, int(np.log2(max(LARGEST_MESSAGE_BYTES / least, 1.0))) + 1)
    return least * 2 ** np.arange(n)


def _seconds(path: Path, sizes: Ints, backend: Backend, costs: Costs, options: Options) -> tuple[Floats, Floats]:
    """For each size: seconds that a byte keeps its port, with its part of the message's start; seconds of one message alone."""
    per_byte, alone = [], []
    for size in sizes.tolist():
        n_queues = costs.queues(size, path, backend)
        if options.max_ops_in_flight is not None:
            n_queues = min(n_queues, options.max_ops_in_flight)
        rate, start = costs.rate_Bps(size, path, backend), costs.start_s(size, path, backend)
        part_of_start = start / size / costs.starts_at_once(n_queues, path, backend)
        per_byte.append(1 / min(costs.link_Bps(path), n_queues * rate) + part_of_start)
        alone.append(start + size / rate)
    return np.array(per_byte), np.array(alone)


def _program(loads: Sequence[Floats], near: Ints, far: Ints, of_path: Sequence[tuple[Floats, Floats]]) -> Program:
    """Minimise T + F over the share of each group's bytes that travels in messages of each size.

    T: seconds of the port that is busy longest. F: seconds of one message down the longest way of any group, which no port fills.
    """
    n_groups, n_sizes = len(near), len(of_path[0][0])
    fill = near[:, None] * of_path[0][1] + far[:, None] * of_path[1][1]
    busy = [np.einsum("pg,m->pgm", rows, per_byte) for rows, (per_byte, _) in zip(loads, of_path, strict=True)]
    ports = np.concatenate(busy).reshape(-1, n_groups * n_sizes)
    columns = 2 + np.arange(n_groups * n_sizes)  # column 0 is T, 1 is F
    port, at = np.nonzero(ports)
    of_group = np.repeat(np.arange(n_groups), n_sizes)
    first_port, first_fill = n_groups, n_groups + len(ports)
    return Program(
        cost=np.concatenate([[1.0, 1.0], np.zeros(len(columns))]),
        upper=np.concatenate([[np.inf, np.inf], np.ones(len(columns))]),
        row=np.concatenate([
            of_group, first_port + port, first_port + np.arange(len(ports)), first_fill + of_group,
            first_fill + np.arange(n_groups),
        ]),
        column=np.concatenate([
            columns, columns[at], np.zeros(len(ports), dtype=np.int64), columns, np.ones(n_groups, dtype=np.int64),
        ]),
        value=np.concatenate([np.ones(len(columns)), ports[port, at], -np.ones(len(ports)), fill.ravel(), -np.ones(n_groups)]),
        row_low=np.concatenate([np.ones(n_groups), np.full(len(ports) + n_groups, -np.inf)]),
        row_high=np.concatenate([np.ones(n_groups), np.zeros(len(ports) + n_groups)]),
    )  # fmt: skip
