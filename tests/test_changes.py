"""Ranks that go hold and need nothing; ranks that come need what another one does; nothing else changes."""

import numpy as np
import pytest

from shardroute.planner.arguments import parse_nics, tensor_problem
from shardroute.planner.changes import carried_over, changed_topology, of_ranks, with_new_ranks, without_ranks
from shardroute.planner.check import check
from shardroute.planner.routing.replans import replan
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

H100 = load_machine("dgx-h100")


def problem():
    """Ranks 0 to 3 hold, 4 to 11 need."""
    return tensor_problem("12,10", "f32", "dp=2,ep=2", "R,S0", "dp=2,tp=4", "R,S1")


def boxes(fragments):
    """What each rank has: its box and where it lies."""
    f = fragments
    rows = zip(f.rank, f.lo, f.hi, f.offset, f.strides, f.buffer_size, strict=True)
    return {int(rank): (lo.tolist(), hi.tolist(), int(at), strides.tolist(), int(n)) for rank, lo, hi, at, strides, n in rows}


def sides(of):
    return [boxes(layout.fragments[0]) for layout in (of.source, of.target)]


def test_of_some_ranks_only_theirs_is_left() -> None:
    chosen = np.isin(np.arange(12), [1, 3, 5, 6])

    left = of_ranks(problem(), chosen)

    for before, after in zip(sides(problem()), sides(left), strict=True):
        assert after == {rank: box for rank, box in before.items() if chosen[rank]}
    assert left.n_ranks == 12


def test_ranks_that_are_gone_hold_and_need_nothing() -> None:
    left = without_ranks(problem(), [0, 7])

    assert left.source.ranks.tolist() == [1, 2, 3]
    assert left.target.ranks.tolist() == [4, 5, 6, 8, 9, 10, 11]


def test_new_ranks_need_what_those_beside_them_do() -> None:
    grown = with_new_ranks(problem(), [12, 14, 3], [4, 5, 4])

    before, after = sides(problem())[1], sides(grown)[1]
    assert after == before | {12: before[4], 14: before[5], 3: before[4]}
    assert sides(grown)[0] == sides(problem())[0]
    assert grown.n_ranks == 15


def test_a_rank_that_comes_anew_no_longer_needs_what_it_did() -> None:
    changed = with_new_ranks(problem(), [4], [11])

    assert sides(changed)[1][4] == sides(problem())[1][11]


def test_a_chain_of_changes_keeps_tensors_that_are_alike_together() -> None:
    changed = without_ranks(with_new_ranks(problem(), [12], [4]), [4])

    assert len(changed.classes) == 1
    assert sides(changed)[1][12] == sides(problem())[1][4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: without_ranks(p, [12]), "rank 12 holds and needs nothing"),
        (lambda p: with_new_ranks(p, [12], [0]), "rank 0 needs nothing"),
        (lambda p: with_new_ranks(p, [12, 13], [4]), r"2 new ranks \[12, 13\] like 1 ranks \[4\]"),
        (lambda p: with_new_ranks(p, [12, 12], [4, 5]), "each once"),
    ],
)
def test_changes_that_make_no_sense_are_refused(change, message) -> None:
    with pytest.raises(InputError, match=message):
        change(problem())


def test_nics_change_and_units_come_and_the_rest_stays() -> None:
    before = changed_topology(build_topology(H100, 2), {3: 1e9, 5: 2e9}, 16)

    after = changed_topology(before, {3: 0.0, 20: 7e9}, 20)

    assert (before.n_gpus, after.n_gpus) == (16, 24)
    assert after.own_nic_Bps == ((3, 0.0), (5, 2e9), (20, 7e9))
    assert after.more == ()


def test_rates_of_nics_are_read_in_order() -> None:
    assert parse_nics("--nic", ["3-4=200Gb/s", "4=0", "7,9=1 GB/s"]) == {3: 25e9, 4: 0.0, 7: 1e9, 9: 1e9}


def test_a_host_that_steps_in_for_another_keeps_every_way() -> None:
    before = tensor_problem("64,4096", "bf16", "ep=8", "S0", "dp=2,tp=8", "R,S1")
    topology = build_topology(H100, 4)
    plan = make_plan(before, topology, "greedy")
    gone, new = list(range(16, 24)), list(range(24, 32))
    after = without_ranks(with_new_ranks(before, new, gone), gone)
    down = changed_topology(topology, dict.fromkeys(gone, 0.0), 32)

    stepped_in = replan(carried_over(plan, topology, gone=gone, new=new, like=gone), after, down)
    from_scratch = replan(plan, after, down)

    check(stepped_in.plan)
    assert stepped_in.n_bytes_anew == 0
    assert stepped_in.n_bytes_kept == before.n_bytes > from_scratch.n_bytes_kept


def planned():
    """A problem of 8 and 24 ranks on four DGX, with chains through three replicas, and its plan."""
    problem = tensor_problem("64,4096", "bf16", "ep=8", "S0", "dp=3,tp=8", "R,S1")
    topology = build_topology(H100, 4)
    return problem, topology, make_plan(problem, topology, "greedy")


@pytest.mark.parametrize("gone", [range(8, 16), range(16, 24), range(24, 32), [9, 17, 25, 30]])
def test_whom_a_rank_served_that_is_gone_its_server_serves(gone) -> None:
    problem, topology, plan = planned()
    down = changed_topology(topology, dict.fromkeys(gone, 0.0), 32)

    found, bare = (replan(p, without_ranks(problem, gone), down) for p in (carried_over(plan, topology, gone=gone), plan))

    check(found.plan)
    assert not np.isin([found.plan.steps.src, found.plan.steps.dst], list(gone)).any()
    assert found.n_bytes_kept > found.n_bytes_anew  # what is left of the chains loads links unevenly, so some give way
    assert found.n_bytes_kept > bare.n_bytes_kept


def test_what_only_ranks_that_are_gone_held_is_routed_anew_from_others() -> None:
    problem = tensor_problem("64,4096", "bf16", "dp=2,ep=8", "R,S0", "dp=2,tp=8", "R,S1")
    topology = build_topology(H100, 4)
    plan = make_plan(problem, topology, "greedy")
    gone = [0, 5]

    found = replan(carried_over(plan, topology, gone=gone), without_ranks(problem, gone), topology)

    check(found.plan)
    assert 0 < found.n_bytes_anew < problem.n_bytes
    assert not np.isin(found.plan.steps.src, gone).any()


def test_ranks_that_come_are_served_by_those_that_they_are_like() -> None:
    problem, topology, plan = planned()
    new, like = list(range(32, 40)), list(range(24, 32))
    grown = changed_topology(topology, {}, 40)

    start = carried_over(plan, grown, new=new, like=like)
    found = replan(start, with_new_ranks(problem, new, like), grown)

    arrives = start.steps.dst >= 32
    assert (start.steps.src[arrives] == start.steps.dst[arrives] - 8).all()
    check(found.plan)
    assert set(new) <= set(found.plan.steps.dst.tolist())


def test_several_that_come_for_one_that_is_gone_all_get_what_it_needed() -> None:
    problem, topology, plan = planned()
    grown = changed_topology(topology, {10: 0.0}, 34)
    after = without_ranks(with_new_ranks(problem, [32, 33], [10, 10]), [10])

    found = replan(carried_over(plan, grown, gone=[10], new=[32, 33], like=[10, 10]), after, grown)

    check(found.plan)
    assert found.n_bytes_kept + found.n_bytes_anew == problem.n_bytes


def test_collectives_are_not_carried_over() -> None:
    problem, topology, _ = planned()

    with pytest.raises(InputError, match="it has collectives"):
        carried_over(make_plan(problem, topology, "gather-broadcast"), topology, gone=[9])
