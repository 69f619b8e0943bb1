"""Sizes of messages and libraries by the program, against trying every one."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.backends.channels import Path
from shardroute.planner.plans import Backend, Lane
from shardroute.planner.routing.carriage import carry
from shardroute.planner.routing.costs import PUTS, costs_of
from shardroute.planner.routing.options import Options
from shardroute.planner.routing.routes import Routes
from shardroute.planner.routing.sizes import LARGEST_MESSAGE_BYTES
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

PIECE = 64 * 2**10
EVERY = (Backend.NCCL, Backend.NCCL_PUT, Backend.NVSHMEM)


def chains(*lengths_and_pieces):
    """A tree for each (hops over NICs, pieces of 64 KiB): from domain to domain on one rail, and a hand-over at the end."""
    src, dst, parent, lane, ptr, tree = [], [], [], [], [0], []
    for i, (n_hops, n_pieces) in enumerate(lengths_and_pieces):
        for hop in range(n_hops):
            src.append(8 * hop + i % 8)
            dst.append(8 * (hop + 1) + i % 8)
            parent.append(hop - 1)
            lane.append(Lane.RELAY if hop else Lane.INJECT)
        src.append(dst[-1])
        dst.append(dst[-1] // 8 * 8 + (i + 1) % 8)
        parent.append(n_hops - 1)
        lane.append(Lane.HAND_OVER)
        ptr.append(len(src))
        tree += [i] * n_pieces
    n = len(tree)
    return Routes(
        tree_ptr=np.array(ptr), src=np.array(src, np.int32), dst=np.array(dst, np.int32), lane=np.array(lane, np.uint8),
        parent=np.array(parent), staged=np.zeros(len(src), bool), tensor=np.zeros(n, np.int64), piece=np.arange(n),
        n_bytes=np.full(n, PIECE), tree=np.array(tree),
    )  # fmt: skip


def tried(lengths_and_pieces, sizes, costs, near_by, far_by):
    """Seconds with these sizes of messages, tree by tree: the busiest port, and filling the longest chain."""
    busy, fill = {}, 0.0
    for i, ((n_hops, n_pieces), size) in enumerate(zip(lengths_and_pieces, sizes, strict=True)):
        hops = [(Path.NIC, far_by, 8 * hop + i % 8, 8 * (hop + 1) + i % 8) for hop in range(n_hops)]
        end = hops[-1][3]
        hops.append((Path.NVLINK, near_by, end, end // 8 * 8 + (i + 1) % 8))
        alone = 0.0
        for path, by, src, dst in hops:
            n_queues = costs.queues(size, path, by)
            at_once = 1 if by in PUTS and path is Path.NVLINK else n_queues
            link = costs.near_Bps if path is Path.NVLINK else costs.far_Bps
            rate, start = costs.rate_Bps(size, path, by), costs.start_s(size, path, by)
            for port in ((path, "out", src), (path, "in", dst)):
                each = 1 / min(link, n_queues * rate) + start / at_once / size
                busy[port] = busy.get(port, 0.0) + n_pieces * PIECE * each
            alone += start + size / rate
        fill = max(fill, alone)
    return max(busy.values()) + fill


@pytest.mark.parametrize("n_hops", [1, 3, 7])
def test_of_one_tree_the_size_is_the_best_of_all(n_hops) -> None:
    topology = build_topology(load_machine("dgx-h100"), None, 64)
    costs = costs_of(topology, 64, Options())
    sizes = [PIECE * 2**k for k in range(int(np.log2(LARGEST_MESSAGE_BYTES / PIECE)) + 1)]
    best_s = min(tried([(n_hops, 4000)], [size], costs, Backend.NCCL, Backend.NCCL) for size in sizes)

    found = carry(chains((n_hops, 4000)), topology, costs, Options(), 10.0)

    assert found.seconds == pytest.approx(best_s, rel=1e-2)
    assert found.seconds <= best_s * (1 + 1e-6)
    assert tried([(n_hops, 4000)], found.message_bytes, costs, found.near, found.far) == pytest.approx(best_s, rel=0.05)


def test_deep_trees_travel_in_smaller_messages_than_flat_ones() -> None:
    topology = build_topology(load_machine("dgx-h100"), None, 64)

    flat, deep = (carry(chains((n, 4000)), topology, costs_of(topology, 64, Options()), Options(), 10.0) for n in (1, 7))

    assert deep.message_bytes[0] < flat.message_bytes[0]


@given(st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3000)), min_size=1, max_size=3), st.integers(0, 10), st.data())
def test_no_choice_of_sizes_and_libraries_beats_the_program(trees, exponent, data) -> None:
    topology = build_topology(load_machine("gb200-nvl72"), None, 576)
    topology = build_topology(load_machine("dgx-h100"), None, 64) if exponent % 2 else topology
    options = Options(backends=EVERY)
    costs = costs_of(topology, topology.n_gpus, options)
    sizes = [PIECE * 2 ** data.draw(st.integers(0, 10)) for _ in trees]

    found = carry(chains(*trees), topology, costs, options, 10.0)

    for near_by, far_by in product(costs.backends(), repeat=2):
        assert found.seconds <= tried(trees, sizes, costs, near_by, far_by) * (1 + 1e-6)


def test_a_size_that_the_user_gave_is_kept() -> None:
    topology = build_topology(load_machine("dgx-h100"), None, 64)
    options = Options(message_bytes=3 * PIECE)

    found = carry(chains((2, 100)), topology, costs_of(topology, 64, options), options, 10.0)

    assert found.message_bytes.tolist() == [3 * PIECE]
