"""shardroute.planner.backends.channels: NCCL's channel law and puts, in closed form and against the published table."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.backends.channels import Path, Traffic, channel_law, put_law
from shardroute.planner.validation.published import published_permutes
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.machines import load_machine

KiB, MiB, GiB = 2**10, 2**20, 2**30
GB200 = channel_law(load_machine("gb200-nvl72"), default_calibration("gb200-nvl72"))
H100 = channel_law(load_machine("dgx-h100"), default_calibration("dgx-h100"))


def channels_by_loops(n_bytes: int, n_ranks: int, one_domain: bool, per_peer: int, chunk: int, total: int = 32) -> int:
    """As src/enqueue.cc writes it, with its loops."""
    least = per_peer
    while least * n_ranks > total and least > 1:
        least //= 2
    smallest, largest = (chunk // 8, chunk * 32) if one_domain else (chunk // 2, chunk)
    channels = max(min(least, -(-n_bytes // smallest)), 1)
    while n_bytes / channels > largest and channels <= per_peer / 2:
        channels *= 2
    return channels


@given(st.integers(0, 64 * GiB), st.integers(1, 2048), st.booleans(), st.sampled_from(Path))
def test_channels_are_those_of_nccls_own_loops(n_bytes: int, n_ranks: int, one_domain: bool, path: Path) -> None:
    per_peer, chunk = (32, 512 * KiB) if path is Path.NVLINK else (4, 128 * KiB)

    found = H100.channels(n_bytes, n_ranks, one_domain, path)

    assert int(found) == channels_by_loops(n_bytes, n_ranks, one_domain, per_peer, chunk)


def test_a_large_communicator_leaves_a_message_one_channel_until_it_exceeds_16_MiB() -> None:
    sizes = np.array([MiB, 16 * MiB, 32 * MiB, 512 * MiB, 4 * GiB])

    assert GB200.channels(sizes, 64).tolist() == [1, 1, 2, 32, 32]
    assert GB200.channels(sizes, 4).tolist() == [8, 8, 8, 32, 32]


def test_a_second_domain_in_the_communicator_gives_large_messages_all_channels_at_once() -> None:
    assert int(GB200.channels(16 * MiB, 64, one_domain=False)) == 32


def test_a_nic_of_400_gigabits_gets_four_channels_a_peer() -> None:
    assert H100.far_per_peer == 4
    assert H100.channels([GiB], 256, False, Path.NIC).tolist() == [4]


def test_a_message_takes_its_start_and_its_bytes_at_the_rate_of_its_channels() -> None:
    cost = GB200.cost

    found = GB200.send_recv_s([4 * MiB, 4 * GiB], 64)

    assert found[0] == pytest.approx(cost.start_s + 4 * MiB / cost.channel_Bps)
    assert found[1] == pytest.approx(cost.start_s + 4 * GiB / cost.peak_Bps)


def test_a_small_message_goes_by_the_slower_protocol() -> None:
    cost = GB200.cost

    assert GB200.send_recv_s(256 * KiB, 64) == pytest.approx(cost.small_start_s + 256 * KiB / cost.small_channel_Bps)


def test_sending_alone_is_faster_a_channel_and_pairs_until_their_channels_overlap() -> None:
    ring, pairs, one_way = (H100.rate_Bps([8 * MiB, 128 * MiB], 8, traffic=traffic) for traffic in Traffic)

    assert one_way[0] == pairs[0] == pytest.approx(4 * H100.cost.one_way_channel_Bps)
    assert pairs[1] == ring[1] < one_way[1]


def test_over_nics_the_message_is_bound_by_them() -> None:
    calibration = default_calibration("dgx-h100")

    found = H100.send_recv_s(GiB, 16, False, Path.NIC)

    assert found == pytest.approx(calibration.launch_s + calibration.nic.latency_s + GiB / (50e9 * calibration.nic.efficiency))


@pytest.mark.parametrize("machine", ["dgx-h100", "dgx-b200", "gb200-nvl72"])
def test_the_law_meets_the_published_permutes(machine: str) -> None:
    law = channel_law(load_machine(machine), default_calibration(machine))
    rows = [row for row in published_permutes() if row.machine == machine]

    errors = [abs(float(law.send_recv_s(r.n_bytes, r.n_ranks, traffic=r.traffic)) / r.time_s - 1) for r in rows]

    # The four rows of GB200 beyond that took 2 to 6 times as long as both their neighbours.
    assert np.median(errors) < 0.05
    assert sum(error > 0.3 for error in errors) <= (4 if machine == "gb200-nvl72" else 0)


@given(st.integers(1, 2**36), st.integers(1, 2**36), st.integers(2, 576))
def test_within_a_protocol_more_bytes_never_arrive_sooner_by_more_than_a_step_of_channels(a: int, b: int, n_ranks: int) -> None:
    small, large = sorted((a, b))
    chunk = int(H100.cost.near_chunk_bytes)
    if (small <= chunk) != (large <= chunk):
        return

    sooner, later = H100.send_recv_s([small, large], n_ranks)

    # A second channel halves what each carries: 16 MiB + 1 byte on two takes half the time of 16 MiB on one.
    assert later - H100.cost.small_start_s > (sooner - H100.cost.start_s) / 2 - 1e-9


def test_a_put_takes_no_channels_and_one_rate() -> None:
    law = put_law(load_machine("gb200-nvl72"), default_calibration("gb200-nvl72"))

    assert law.put_s(GiB) == pytest.approx(law.cost.start_s + GiB / law.cost.bandwidth_Bps)
    assert law.put_s(GiB, Path.NIC) == pytest.approx(law.cost.far_start_s + GiB / law.far_peak_Bps)
    assert [law.barrier_s(n) for n in (1, 2, 5, 64)] == pytest.approx([0, 2e-6, 6e-6, 12e-6])


def test_without_its_table_there_is_no_law() -> None:
    bare = replace(default_calibration("dgx-h100"), p2p=None, put=None, figures=())

    assert channel_law(load_machine("dgx-h100"), bare) is None
    assert put_law(load_machine("dgx-h100"), bare) is None
