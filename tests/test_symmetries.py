"""Like rows and columns of a program as one: fewer of them, the same optimum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.routing.programs import Program, solve
from shardroute.planner.routing.symmetries import merged

small = st.integers(0, 3)


@st.composite
def programs(draw):
    """Some columns and rows, each repeated and all of them shuffled, so that many are alike; always feasible at 0."""
    n_columns, n_rows = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    copies = draw(st.integers(1, 3))
    cost = np.tile(np.array([draw(st.integers(-3, 3)) for _ in range(n_columns)], float), copies)
    upper = np.tile(np.array([draw(st.integers(1, 4)) for _ in range(n_columns)], float), copies)
    block = np.array([[draw(small) for _ in range(n_columns)] for _ in range(n_rows)], float)
    joined = np.array([draw(small) for _ in range(n_columns)], float)
    matrix = np.concatenate([np.kron(np.eye(copies), block), np.tile(joined, copies)[None, :]])
    high = np.tile(np.array([draw(st.integers(0, 9)) for _ in range(n_rows)], float), copies)
    high = np.append(high, float(draw(st.integers(0, 9))))
    columns, rows = draw(st.permutations(range(len(cost)))), draw(st.permutations(range(len(high))))
    matrix = matrix[rows][:, columns]
    row, column = np.nonzero(matrix)
    return Program(cost[columns], upper[columns], row, column, matrix[row, column], np.full(len(high), -np.inf), high[rows])


@given(programs())
def test_the_optimum_stays_the_same(program) -> None:
    found = merged(program).program

    assert len(found.cost) <= len(program.cost)
    assert solve(found, 10.0).cost == pytest.approx(solve(program, 10.0).cost, abs=1e-6)


@given(programs())
def test_the_optimum_of_the_merged_program_is_a_point_and_duals_of_the_first(program) -> None:
    like = merged(program)

    found = like.expanded(solve(like.program, 10.0))

    sums = np.bincount(program.row, weights=program.value * found.x[program.column], minlength=len(program.row_high))
    assert (sums <= program.row_high + 1e-6).all()
    assert program.cost @ found.x == pytest.approx(found.cost, abs=1e-6)
    weights = program.value * found.duals[program.row]
    reduced = program.cost - np.bincount(program.column, weights=weights, minlength=len(program.cost))
    assert found.duals @ program.row_high + np.minimum(reduced, 0) @ program.upper == pytest.approx(found.cost, abs=1e-6)


def test_what_is_alike_is_one_row_and_one_column() -> None:
    n = 50  # every x[d] up to 1, any two neighbours on a ring together up to 1
    ring = np.arange(n)
    program = Program(
        cost=np.full(n, -1.0), upper=np.ones(n), row=np.tile(ring, 2), column=np.concatenate([ring, (ring + 1) % n]),
        value=np.ones(2 * n), row_low=np.full(n, -np.inf), row_high=np.ones(n),
    )  # fmt: skip

    found = merged(program).program

    assert (found.cost.tolist(), found.value.tolist(), found.row_high.tolist()) == ([-float(n)], [2.0], [1.0])
    assert solve(found, 10.0).cost == pytest.approx(-n / 2)


def test_one_that_differs_makes_its_neighbours_differ() -> None:
    n = 5  # a chain: the ends are alike, so are those beside them, and the middle is alone
    program = Program(
        cost=np.full(n, -1.0), upper=np.ones(n), row=np.repeat(np.arange(n - 1), 2),
        column=np.stack([np.arange(n - 1), np.arange(1, n)], axis=1).ravel(), value=np.ones(2 * (n - 1)),
        row_low=np.full(n - 1, -np.inf), row_high=np.ones(n - 1),
    )  # fmt: skip

    found = merged(program).program

    assert sorted(found.cost.tolist()) == [-2.0, -2.0, -1.0]
    assert solve(found, 10.0).cost == pytest.approx(solve(program, 10.0).cost)
