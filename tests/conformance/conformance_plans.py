"""The plans that every transport must carry, by what they are hard at."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from hand_plans import HandPlan, column_shards, gathered, lane_ordered, relay_chain, row_shards, rows_to_columns

from shardroute.planner.arguments import tensor_problem
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.plans import TARGET, WINDOW_BYTES, Lane, Plan
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

N_RANKS: Final = 8  # of every case, so that one world runs them all
LARGE_MIB = 18  # of a piece that is larger than a window; less where those have been set to less
MOST_WINDOW_BYTES = WINDOW_BYTES  # less where small windows are tried


def through_all_places() -> Plan:
    """Source to slot, slot to slot, slot to target, target to target and target to slot, and copies within a rank."""
    hand = HandPlan(slots=[48, 48])
    t = hand.tensor((4, 6), row_shards((4, 6), [0]), place((4, 6), Mesh.of({"x": 3}, [1, 2, 3]), [Replicate()]))
    bundle = hand.bundle((t, [(0, 4), (0, 3)]), (t, [(0, 4), (3, 6)]))
    staged = hand.copy(bundle, 0, 1, dst_at=0)
    onward = hand.copy(bundle, 1, 2, [staged], src_at=0, dst_at=1)
    here = hand.copy(bundle, 2, 2, [onward], src_at=1, lane=Lane.LOCAL)
    back = hand.copy(bundle, 2, 1, [here], src_at=TARGET, lane=Lane.RELAY)
    again = hand.copy(bundle, 1, 3, [back], src_at=TARGET, dst_at=1, lane=Lane.RELAY)
    hand.copy(bundle, 3, 3, [again], src_at=1, lane=Lane.LOCAL)
    return hand.build(N_RANKS)


def strided_box_of_four_dims() -> Plan:
    """A 4-D tensor with an odd itemsize, from one cut to another, into a buffer that is transposed and has gaps."""
    shape = (3, 4, 5, 6)
    source = place(shape, Mesh.of({"x": 2}, [0, 1]), [Shard(1)])
    target = Fragments(shape, [2], [[0, 1, 0, 2]], [[3, 4, 5, 5]], [0], [7], [[1, 4, 13, 70]], [250])
    return _planned("direct", one_tensor(shape, "f8_e4m3", source, target))


def nothing_to_move() -> Plan:
    """A step that carries nothing, for a tensor that nobody needs."""
    hand = HandPlan()
    hand.tensor((2, 2), row_shards((2, 2), [0]), Fragments.dense((2, 2), [], np.zeros((0, 2)), np.zeros((0, 2))))
    hand.copy(hand.bundle(), 0, 1)
    return hand.build(N_RANKS)


def signals_only(n_turns: int = 20) -> Plan:
    """Empty copies back and forth between two ranks, then one piece that waits for the last of them."""
    hand = HandPlan()
    t = hand.tensor((4, 4), row_shards((4, 4), [0]), row_shards((4, 4), [1]))
    nothing, before = hand.bundle(), []
    for turn in range(n_turns):
        before = [hand.copy(nothing, turn % 2, 1 - turn % 2, before, lane=Lane.CREDIT)]
    hand.copy(hand.bundle((t, [(0, 4), (0, 4)])), 0, 1, before)
    return hand.build(N_RANKS)


def all_to_all(n_ranks: int = N_RANKS, width: int = 48) -> Plan:
    """Rows to columns over the same ranks: everybody sends to everybody, at once."""
    hand = HandPlan()
    shape = (n_ranks * 4, n_ranks * width)
    t = hand.tensor(shape, row_shards(shape, range(n_ranks)), column_shards(shape, range(n_ranks)))
    for shift in range(n_ranks):
        for src in range(n_ranks):
            dst = (src + shift) % n_ranks
            piece = hand.bundle((t, [(4 * src, 4 * src + 4), (width * dst, width * dst + width)]))
            hand.copy(piece, src, dst, lane=Lane.LOCAL if src == dst else Lane.INJECT)
    return hand.build(n_ranks)


def far_into_memory() -> Plan:
    """Pieces beyond 2 GiB of rank 1's memory: in a buffer at the source, and in its destination, which lies behind that buffer.

    Untouched memory costs nothing, but a machine without so much free can't run it.
    """
    hand = HandPlan()
    far = 2**31 + 4096
    t = hand.tensor((4, 8), row_shards((4, 8), [0]), row_shards((4, 8), [1]), "u8")
    held = Fragments((2, 8), [1], [[0, 0]], [[2, 8]], [0], [far], [[8, 1]], [far + 64])
    back = hand.tensor((2, 8), held, row_shards((2, 8), [0]), "u8")
    hand.copy(hand.bundle((t, [(0, 4), (0, 8)])), 0, 1)
    hand.copy(hand.bundle((back, [(0, 2), (0, 8)])), 1, 0)
    return hand.build(N_RANKS)


def large_pieces() -> Plan:
    """Some MiB in one run, and as many each way in rows of 4 KiB: more than a window for packing holds otherwise."""
    hand, half = HandPlan(), LARGE_MIB // 2
    long, wide = (1, half * 2**20), (half * 2**10, 4096)
    t = hand.tensor(long, row_shards(long, [0]), row_shards(long, [1]))
    hand.copy(hand.bundle((t, [(0, 1), (0, long[1])])), 0, 1)
    rows = wide[0] // 2
    u = hand.tensor(wide, column_shards(wide, [0, 1]), row_shards(wide, [0, 1]))
    for src in (0, 1):
        piece = hand.bundle((u, [((1 - src) * rows, (2 - src) * rows), (src * 2048, (src + 1) * 2048)]))
        hand.copy(piece, src, 1 - src)
        stays = hand.bundle((u, [(src * rows, (src + 1) * rows), (src * 2048, (src + 1) * 2048)]))
        hand.copy(stays, src, src, lane=Lane.LOCAL)
    return hand.build(N_RANKS)


def windows_used_again(n_pieces: int = 20) -> Plan:
    """Pieces of 1 MiB whose rows lie apart, more of them each way than a window for packing holds, in one step and in many."""
    hand = HandPlan()
    shape = (2 * n_pieces * 256, 4096)
    t = hand.tensor(shape, column_shards(shape, [0, 1]), row_shards(shape, [0, 1]))
    for src in (0, 1):
        first = (1 - src) * n_pieces * 256
        pieces = [[(first + 256 * k, first + 256 * k + 256), (2048 * src, 2048 * src + 2048)] for k in range(n_pieces)]
        half = n_pieces // 2
        hand.copy(hand.bundle(*((t, piece) for piece in pieces[:half])), src, 1 - src)
        for piece in pieces[half:]:
            hand.copy(hand.bundle((t, piece)), src, 1 - src, lane=Lane.RELAY)
        stays = [(src * n_pieces * 256, (src + 1) * n_pieces * 256), (2048 * src, 2048 * src + 2048)]
        hand.copy(hand.bundle((t, stays)), src, src, lane=Lane.LOCAL)
    return hand.build(N_RANKS)


def planned(strategy: str) -> Plan:
    """What a strategy makes of a tensor over eight ranks, cut finely so that relays, credits and staging are used."""
    mesh = Mesh.of({"x": 2, "y": 2}, [0, 1, 2, 3])
    shape = (64, 96)
    target = place(shape, Mesh.of({"r": 2, "t": 2}, [4, 5, 6, 7]), [Replicate(), Shard(1)])
    return _planned(strategy, one_tensor(shape, "bf16", place(shape, mesh, [Shard(0), Replicate()]), target), message_bytes=256)


def summed(axes: str, source: str, target: str, strategy: str, dtype: str = "f32", n_rows: int = 64) -> Plan:
    """Addends of ranks on a mesh added up, in steps of at most 8 kB where whole tensors are."""
    problem = tensor_problem(f"{n_rows},96", dtype, axes, source, axes, target)
    return _planned(strategy, problem, message_bytes=None if "S" in target else 2**13)


def _planned(strategy: str, problem, message_bytes: int | None = None) -> Plan:
    topology = build_topology(load_machine("cpu-processes"), min_gpus=problem.n_ranks)
    return make_plan(problem, topology, strategy, message_bytes)


def _idle(plan: Plan) -> Plan:
    """The same plan among more ranks, of which some have nothing to do."""
    topology = build_topology(load_machine("cpu-processes"), min_gpus=N_RANKS)
    window_bytes = min(plan.window_bytes, MOST_WINDOW_BYTES)
    return replace(plan, problem=replace(plan.problem, n_ranks=N_RANKS), topology=topology, window_bytes=window_bytes)


_CASES: Final[Mapping[str, Callable[[], Plan]]] = {
    "strided rows to columns": rows_to_columns,
    "order along relays": partial(relay_chain, 6, n_chunks=3),
    "collectives through reused slots": partial(gathered, 5),
    "collectives in queue order": lane_ordered,
    "collectives in rounds": lambda: replace(gathered(5), window_bytes=64),
    "relays through staging": through_all_places,
    "strided 4-D boxes": strided_box_of_four_dims,
    "nothing to move": nothing_to_move,
    "zero bytes": signals_only,
    "many peers": all_to_all,
    "large offsets": far_into_memory,
    "large pieces": large_pieces,
    "windows used again": windows_used_again,
    "direct": partial(planned, "direct"),
    "domain-relay": partial(planned, "domain-relay"),
    "gather-broadcast": partial(planned, "gather-broadcast"),
    "greedy": partial(planned, "greedy"),
    "a barrier a tensor": partial(planned, "m2n-pack"),
    "all-reduce in one shot": partial(summed, "dp=8", "P", "R", "one-shot"),
    "all-reduce in two shots": partial(summed, "dp=8", "P", "R", "two-shot", "bf16"),
    "an all-reduce in rounds": lambda: replace(summed("dp=8", "P", "R", "one-shot"), window_bytes=2**15),
    "all-reduces among some of the ranks": partial(summed, "dp=2,tp=4", "P,S1", "R,S1", "one-shot", "bf16"),
    "reduce-scatter": partial(summed, "dp=4,tp=2", "P,S1", "S0,S1", "one-shot"),
}
CASES: Final[Mapping[str, Callable[[], Plan]]] = {
    name: (lambda make=make: _idle(make())) for name, make in _CASES.items()
}
# These rest on the order of queues alone, which checking doesn't follow, or name no place for what they carry.
UNPROVED: Final = ("collectives in queue order", "nothing to move")
