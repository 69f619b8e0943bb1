"""Laws of the layout function of own_layout.py, for shapes, ranks and blocks that Hypothesis thinks up.

    pip install pytest hypothesis
    pytest examples/test_own_layout.py
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from own_layout import dealt_rows

from shardroute.planner import check, make_plan, one_tensor
from shardroute.planner.testing import layouts
from shardroute.topologies import build_topology, load_machine

TWELVE = build_topology(load_machine("cpu-processes"), 12)  # as many ranks as `layouts` uses
shapes = st.tuples(st.integers(1, 40), st.integers(1, 4))


@given(shapes, st.integers(1, 5), st.integers(1, 7))
def test_every_element_is_held_once_and_no_two_lie_in_one_place(shape, n_ranks, n_rows) -> None:
    found = dealt_rows(shape, range(n_ranks), n_rows)

    held, used = np.zeros(shape, int), set()
    for i, rank in enumerate(found.rank.tolist()):
        for row in range(found.lo[i, 0], found.hi[i, 0]):
            for column in range(shape[1]):
                held[row, column] += 1
                used.add((rank, int(found.offset[i] + (row - found.lo[i, 0]) * shape[1] + column)))
    assert (held == 1).all()
    assert len(used) == held.size


@given(st.data(), shapes, st.integers(1, 5), st.integers(1, 7))
def test_from_it_any_layout_can_be_planned_and_the_plan_delivers(data, shape, n_ranks, n_rows) -> None:
    problem = one_tensor(shape, "bf16", dealt_rows(shape, range(n_ranks), n_rows), data.draw(layouts(shape)))

    check(make_plan(problem, TWELVE, "direct"))  # raises where an element would be missing, doubled, or from the wrong rank
