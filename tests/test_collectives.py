"""shardroute.planner.backends.collectives and tuning: NCCL's tuning model by hand, and measured curves met exactly."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.backends.collectives import Algorithm, Collective, Group, collective_s, collective_times_s
from shardroute.planner.backends.tuning import tuned_s
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.collectives import CollectiveCurve
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine

MiB, GiB = 2**20, 2**30
H100 = load_machine("dgx-h100")
COSTS = default_calibration("dgx-h100")
BARE = replace(COSTS, curves=(), figures=())
RING_Bps, NVLS_Bps = COSTS.collectives.ring_Bps, COSTS.collectives.nvls_Bps


def curve(op: Collective, n_ranks: int, points: dict[int, float], n_domains: int = 1) -> CollectiveCurve:
    return CollectiveCurve(op, n_ranks, n_domains, tuple(points), tuple(points.values()), "a test")


def test_a_large_all_gather_is_a_ring_at_its_bus_bandwidth() -> None:
    found, how = collective_s(Collective.ALL_GATHER, 8 * GiB, Group(8), H100, BARE)

    assert found == pytest.approx((8.4 + 7 * 3.4) * 1e-6 + 8 * GiB * 7 / 8 / RING_Bps)
    assert how == "model: NCCL ring Simple"


def test_a_small_all_reduce_goes_by_protocol_ll() -> None:
    found, how = collective_s(Collective.ALL_REDUCE, 8, Group(8), H100, BARE)

    # The ring's 14 hops and the tree's 2 x 7 cost the same; the ring's base is 0.2 us less.
    assert found == pytest.approx((6.6 + 14 * 0.6) * 1e-6, rel=1e-3)
    assert how == "model: NCCL ring LL"


def test_a_large_all_reduce_of_a_whole_domain_is_done_by_nvls_and_of_four_ranks_by_a_ring() -> None:
    whole, how = collective_s(Collective.ALL_REDUCE, 16 * GiB, Group(8), H100, BARE)
    four, how_four = collective_s(Collective.ALL_REDUCE, 16 * GiB, Group(4), H100, BARE)

    assert whole == pytest.approx(COSTS.collectives.nvls_start_s + 16 * GiB / NVLS_Bps)
    assert four == pytest.approx((8.4 + 6 * 3.4) * 1e-6 + 16 * GiB * 6 / 4 / RING_Bps)
    assert (how, how_four) == ("model: NCCL NVLS Simple", "model: NCCL ring Simple")


def test_over_three_domains_an_all_reduce_is_bound_by_nics_which_carry_both_trees() -> None:
    nics_Bps = 8 * 50e9 * COSTS.collectives.nic_efficiency
    two, _ = collective_s(Collective.ALL_REDUCE, 64 * GiB, Group(16, 2), H100, BARE, Algorithm.NVLS)
    three, _ = collective_s(Collective.ALL_REDUCE, 64 * GiB, Group(24, 3), H100, BARE, Algorithm.NVLS)

    assert two == pytest.approx(64 * GiB / min(NVLS_Bps, nics_Bps), rel=1e-3)
    assert three == pytest.approx(64 * GiB / (nics_Bps / 2), rel=1e-3)


def test_a_forced_algorithm_is_taken_and_one_that_cannot_do_it_is_refused() -> None:
    forced, how = collective_s(Collective.ALL_REDUCE, 16 * GiB, Group(8), H100, COSTS, Algorithm.RING)

    assert forced == pytest.approx(16 * GiB * 14 / 8 / RING_Bps, rel=1e-3)
    assert how == "model: NCCL ring Simple"
    with pytest.raises(InputError, match="NCCL has no NVLS for it"):
        collective_s(Collective.ALL_GATHER, GiB, Group(8), H100, BARE, Algorithm.NVLS)


def test_a_slower_network_adds_its_latency_to_each_hop_between_domains() -> None:
    slow = replace(BARE, nic=replace(BARE.nic, latency_s=BARE.nic.latency_s + 10e-6))

    plain, slower = (collective_s(Collective.ALL_GATHER, 8, Group(32, 4), H100, costs)[0] for costs in (BARE, slow))

    assert slower - plain == pytest.approx(3 * 10e-6)


def test_an_all_to_all_over_domains_is_bound_by_what_leaves_them() -> None:
    found, _ = collective_s(Collective.ALL_TO_ALL, 8 * GiB, Group(32, 4), H100, BARE)

    assert found == pytest.approx(8 * GiB * 24 / 32 / (50e9 * COSTS.nic.efficiency), rel=1e-3)


def test_every_point_of_a_curve_is_met_exactly() -> None:
    points = {MiB: 30e-6, 4 * MiB: 55e-6, GiB: 4e-3}
    costs = replace(BARE, curves=(curve(Collective.ALL_REDUCE, 8, points),))

    times, how = collective_times_s(Collective.ALL_REDUCE, list(points), Group(8), H100, costs)

    assert times == pytest.approx(list(points.values()))
    assert how.startswith("measured on 8 ranks")


def test_beyond_a_curve_its_last_ratio_to_the_model_holds() -> None:
    modelled, _ = collective_times_s(Collective.ALL_REDUCE, [GiB, 4 * GiB], Group(8), H100, BARE)
    costs = replace(BARE, curves=(curve(Collective.ALL_REDUCE, 8, {MiB: 1e-4, GiB: 1.25 * modelled[0]}),))

    found, _ = collective_s(Collective.ALL_REDUCE, 4 * GiB, Group(8), H100, costs)

    assert found == pytest.approx(1.25 * modelled[1])


def test_between_two_groups_the_ratio_is_interpolated_in_the_logarithm_of_ranks() -> None:
    groups = {n: float(tuned_s(Collective.ALL_GATHER, np.array([float(n * MiB)]), Group(n), H100, BARE)[0][0]) for n in (2, 4, 8)}
    curves = (
        curve(Collective.ALL_GATHER, 2, {2 * MiB: groups[2]}),
        curve(Collective.ALL_GATHER, 8, {8 * MiB: 4 * groups[8]}),
    )

    found, how = collective_s(Collective.ALL_GATHER, 4 * MiB, Group(4), H100, replace(BARE, curves=curves))

    assert found == pytest.approx(2 * groups[4])  # halfway from ratio 1 to ratio 4, at equal bytes a rank
    assert how.startswith("measured on 2 and 8 ranks")


def test_a_point_that_was_disturbed_is_left_out() -> None:
    steady = {2**10: 12e-6, 2**12: 13e-6, 2**14: 14e-6}
    disturbed = {2**10: 170e-6, 2**12: 13e-6, 2**14: 14e-6}

    found, without = (
        collective_s(Collective.ALL_GATHER, 2**10, Group(8), H100, replace(BARE, curves=(curve(Collective.ALL_GATHER, 8, p),)))[0]
        for p in (disturbed, {k: v for k, v in steady.items() if k > 2**10})
    )

    assert found == pytest.approx(without)
    assert found < 20e-6


def test_one_rank_alone_needs_no_time() -> None:
    assert collective_s(Collective.ALL_REDUCE, GiB, Group(1), H100, COSTS) == (0.0, "one rank alone")


def test_without_costs_of_collectives_it_says_so() -> None:
    with pytest.raises(InputError, match=r"has no table \[collectives\]"):
        collective_s(Collective.ALL_REDUCE, GiB, Group(8), H100, replace(BARE, collectives=None))
    with pytest.raises(InputError, match=r"has no table \[p2p\]"):
        collective_s(Collective.ALL_TO_ALL, GiB, Group(8), H100, replace(BARE, p2p=None))


@given(st.sampled_from(list(Collective)), st.integers(1, 2**34), st.sampled_from([(2, 1), (5, 1), (8, 1), (16, 2), (256, 32)]))
def test_every_collective_takes_at_least_the_bytes_that_must_pass_the_slowest_boundary(
    op: Collective, n_bytes: int, group: tuple[int, int]
) -> None:
    n_ranks, n_domains = group
    # Into a domain must come what its ranks end up with and didn't hold: at least n_bytes / n_ranks of one other rank.
    nics_Bps = 50e9 * 8

    found, _ = collective_s(op, n_bytes, Group(n_ranks, n_domains), H100, BARE)

    assert found > (n_bytes / n_ranks / nics_Bps if n_domains > 1 else n_bytes / n_ranks / H100.nvlink_Bps)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_bytes": (4, 2)}, "bytes must rise"),
        ({"time_s": (1e-6,)}, "expected as many"),
        ({"time_s": (1e-6, -1e-6)}, "above 0 seconds"),
        ({"n_domains": 9}, "found 9 domains"),
        ({"source": " "}, "source is empty"),
    ],
)
def test_a_curve_that_no_measurement_gives_is_refused(change: dict[str, object], message: str) -> None:
    good = curve(Collective.ALL_GATHER, 8, {2: 1e-6, 4: 2e-6})

    with pytest.raises(InputError, match=message):
        replace(good, **change)
