"""Linear programs: every way to solve gives the same optimum; the program over domains bounds every plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.planner.arguments import tensor_problem
from shardroute.planner.routing import programs
from shardroute.planner.routing.bounds import cuts, demand
from shardroute.planner.routing.loads import busiest_s
from shardroute.planner.routing.optimal import domain_bound_s
from shardroute.planner.routing.patterns import entries_of, patterns_of
from shardroute.planner.routing.programs import Program
from shardroute.planner.routing.strategies import make_plan, pieces_of
from shardroute.planner.testing import tensor_problems
from shardroute.topologies.calibrations import nominal_calibration
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

H100 = load_machine("dgx-h100")
WAYS = {
    "HiGHS by arrays": lambda program: programs._by_arrays(program, 10.0),
    "HiGHS through PuLP": lambda program: programs._by_pulp(program, 10.0, highs=True),
    "CBC through PuLP": lambda program: programs._by_pulp(program, 10.0, highs=False),
}


def program(least):
    """Minimise x + 2 y over x + y >= least, x <= 3, y - x = 0 left out; y <= 5."""
    inf = np.inf
    return Program(
        cost=np.array([1.0, 2.0]), upper=np.array([3.0, inf]), row=np.array([0, 0, 1]), column=np.array([0, 1, 1]),
        value=np.ones(3), row_low=np.array([least, -inf]), row_high=np.array([inf, 5.0]),
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_every_way_finds_the_optimum_and_its_duals(way) -> None:
    found = WAYS[way](program(4.0))

    assert found.x == pytest.approx([3.0, 1.0])
    assert found.cost == found.bound == pytest.approx(5.0)
    assert np.abs(found.duals) == pytest.approx([2.0, 0.0])  # one more of `least` costs one more y
    assert found.solver.startswith(way.partition(" ")[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_program_without_a_point_has_no_solution(way) -> None:
    assert WAYS[way](program(9.0)) is None


def test_where_highs_is_missing_cbc_solves() -> None:
    found = programs.solve(program(4.0), 10.0, highs=False)

    assert found.solver == "CBC through PuLP"
    assert found.cost == pytest.approx(5.0)


@pytest.mark.parametrize("way", WAYS)
def test_a_program_that_is_not_solved_in_time_gives_a_feasible_point_or_none(way) -> None:
    # An assignment of 60 to 60 with costs that make every start wrong: no solver ends in a microsecond.
    n = 60
    rows, columns = np.divmod(np.arange(n * n), n)
    hard = Program(
        cost=((rows * 37 + columns * 53) % 101).astype(float), upper=np.ones(n * n),
        row=np.concatenate([rows, n + columns]), column=np.tile(np.arange(n * n), 2), value=np.ones(2 * n * n),
        row_low=np.ones(2 * n), row_high=np.ones(2 * n),
    )  # fmt: skip
    ways = {
        "HiGHS by arrays": lambda: programs._by_arrays(hard, 1e-6),
        "HiGHS through PuLP": lambda: programs._by_pulp(hard, 1e-6, highs=True),
        "CBC through PuLP": lambda: programs._by_pulp(hard, 1e-6, highs=False),
    }

    found = ways[way]()

    if found is not None:
        sums = np.bincount(hard.row, weights=found.x[hard.column])
        assert sums == pytest.approx(np.ones(2 * n), abs=1e-6)


def test_solving_prints_nothing(capfd) -> None:
    programs.has_highs.cache_clear()

    programs.solve(program(4.0), 10.0)

    assert capfd.readouterr().out == ""


@settings(max_examples=40)
@given(problem=tensor_problems(n_ranks=20), strategy=st.sampled_from(["direct", "domain-relay", "greedy"]))
def test_no_plan_keeps_its_busiest_link_below_the_program_over_domains(problem, strategy) -> None:
    topology = build_topology(H100, None, problem.n_ranks)
    patterns = patterns_of(*entries_of(problem, pieces_of(problem)), topology)

    bound_s, _ = domain_bound_s(patterns, topology, problem.n_ranks, 10.0)

    assert busiest_s(make_plan(problem, topology, strategy)) >= bound_s * (1 - 1e-6)


def test_the_program_over_domains_agrees_with_the_cut_that_binds() -> None:
    # 16 MB on ranks 0 and 1 of domain 0 go to domains 1 and 2, once to each; every domain has 8 NICs.
    problem = tensor_problem("16000000", "u8", "x=2", "S0", "dp=2,tp=8", "R,S0", to_ranks="8-15,16-23")
    topology = build_topology(H100, None, problem.n_ranks)
    whole = pieces_of(problem)
    patterns = patterns_of(*entries_of(problem, whole), topology)

    by_domains, _ = domain_bound_s(patterns, topology, problem.n_ranks, 10.0)
    best_cut = cuts(demand(problem, whole, topology), topology, nominal_calibration(H100))[0].seconds

    # 32 MB over 24 NICs would take 27 us, but domain 0 can't send less than 16 MB over its 8: 40 us.
    assert by_domains == pytest.approx(16e6 / (8 * 50e9), rel=1e-6)
    assert best_cut >= by_domains * (1 - 1e-9)
