"""A layout function of your own, planned against a mesh layout, run between processes, and verified byte by byte.

    python examples/own_layout.py

`dealt_rows` deals blocks of rows to ranks like cards, as block-cyclic libraries do; no mesh with even shards says that.
test_own_layout.py beside this file tests it with Hypothesis.
"""

import numpy as np

from shardroute.executors import run_plan
from shardroute.planner import Fragments, Mesh, Shard, check, make_plan, one_tensor, place
from shardroute.topologies import build_topology, format_seconds, load_machine


def dealt_rows(shape, ranks, n_rows):
    """Blocks of `n_rows` rows of a matrix, dealt to the ranks in turn; each rank stacks its own in one dense buffer."""
    lo_row = np.arange(0, shape[0], n_rows)
    hi_row = np.minimum(lo_row + n_rows, shape[0])
    turn = np.arange(len(lo_row))
    held = np.bincount(turn % len(ranks), weights=hi_row - lo_row, minlength=len(ranks)).astype(np.int64)
    return Fragments(
        shape=shape,
        rank=np.asarray(ranks)[turn % len(ranks)],
        lo=np.stack([lo_row, np.zeros_like(lo_row)], axis=1),
        hi=np.stack([hi_row, np.full_like(hi_row, shape[1])], axis=1),
        buffer=np.zeros_like(turn),
        offset=turn // len(ranks) * n_rows * shape[1],  # only the last block dealt can be short
        strides=np.tile([shape[1], 1], (len(turn), 1)),
        buffer_size=held[turn % len(ranks)] * shape[1],
    )


def main() -> None:
    """Dealt rows on three ranks to columns on two others."""
    shape = (1000, 64)
    source = dealt_rows(shape, ranks=[0, 1, 2], n_rows=16)
    target = place(shape, Mesh.of({"tp": 2}, ranks=[3, 4]), [Shard(1)])
    problem = one_tensor(shape, "f32", source, target)
    plan = make_plan(problem, build_topology(load_machine("cpu-processes"), problem.n_ranks), "direct")
    check(plan)
    result = run_plan(plan)
    assert not result.mismatches
    print(f"{len(source)} blocks moved in {format_seconds(result.measured_s)}; {result.verified.bytes} bytes compared, 0 wrong")


if __name__ == "__main__":
    main()
