"""Logs of NVSHMEM's perftest: what is read of them, and which figures of a calibration they give."""

from dataclasses import replace
from pathlib import Path

import pytest

from shardroute.planner.measurements.calibrate import calibrate_from_logs
from shardroute.planner.measurements.put_fits import put_figures
from shardroute.planner.measurements.put_logs import PutRun, PutTest, looks_like_put_log, read_put_log
from shardroute.topologies.calibrations import default_calibration
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine

LOGS = Path(__file__).parent / "data" / "logs"
H100, RACK = load_machine("dgx-h100"), load_machine("gb200-nvl72")
BASE = default_calibration("dgx-h100")
OPTIONS = "min_size: 4, max_size: 8, warmup iterations: 5, dir: write, bidirectional: 0, putget_issue :on_stream\n"
HERE = "mype: 0 mype_node: 0 device name: NVIDIA H100 80GB HBM3 bus id: 27\nmype: 1 mype_node: 1 device name: X bus id: 38\n"
TABLE = "# Bandwidth\nsize(B)     scope     Bandwidth (GB)\n1000000     None      100.000000\n4000000     None      200.000000\n"


def line(test: PutTest, start_s: float, rate_Bps: float, n_hosts: int) -> PutRun:
    sizes = tuple(2**k for k in range(12, 28, 2))
    return PutRun(test, 2, n_hosts, "", sizes, tuple(start_s + n / rate_Bps for n in sizes), "x.txt")


def test_each_table_is_a_run_with_its_pes_and_hosts() -> None:
    log = read_put_log((LOGS / "perftest.txt").read_text(), "perftest.txt")

    assert [(run.test, run.n_pes, run.n_hosts) for run in log.runs] == [
        (PutTest.LATENCY, 2, 1), (PutTest.BANDWIDTH, 2, 1), (PutTest.LATENCY, 2, 2), (PutTest.DEVICE_BANDWIDTH, 2, 2),
        (PutTest.SIGNAL, 2, 2), (PutTest.BARRIER, 8, 1),
    ]  # fmt: skip
    assert log.unused == ()
    assert log.runs[0].device == "NVIDIA H100 80GB HBM3"
    assert log.runs[5].time_s == pytest.approx((13.2e-6,))


def test_a_gb_is_ten_to_the_ninth_and_a_ping_pong_goes_there_and_back() -> None:
    (bandwidth,) = read_put_log(OPTIONS + HERE + TABLE, "bw.txt").runs
    ping = "#shmem_put_ping_lat\nsize(B)     scope     latency (us)\n8           None      10.000000\n"
    (signal,) = read_put_log(OPTIONS + HERE + ping, "shmem_put_signal_ping_pong_latency.log").runs

    assert bandwidth.n_bytes == (1_000_000, 4_000_000)
    assert bandwidth.time_s == pytest.approx((1e-5, 2e-5))
    assert (signal.test, signal.time_s) == (PutTest.SIGNAL, (5e-6,))


def test_lines_for_programs_are_read_as_the_tables_are() -> None:
    lines = (
        "Bandwidth\n&&&& PERF Bandwidth___None___size__1000000___Bandwidth 100.000000 +GB\n"
        "&&&& PERF Bandwidth___None___size__4000000___Bandwidth 200.000000 +GB\n"
    )

    assert read_put_log(OPTIONS + HERE + lines, "x").runs == read_put_log(OPTIONS + HERE + TABLE, "x").runs


@pytest.mark.parametrize("tag", ["0: ", "[1,0]<stdout>: "])
def test_tags_of_launchers_are_no_part_of_lines(tag: str) -> None:
    tagged = "".join(f"{tag}{text}\n" for text in (OPTIONS + HERE + TABLE).splitlines())

    assert read_put_log(tagged, "x").runs == read_put_log(OPTIONS + HERE + TABLE, "x").runs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (OPTIONS.replace("write", "read") + HERE + TABLE, "--dir read"),
        (OPTIONS.replace(":on_stream", ":host") + HERE + TABLE, "--issue host"),
        (OPTIONS.replace("bidirectional: 0", "bidirectional: 1") + HERE + TABLE, "--bidir"),
        (OPTIONS + HERE + TABLE.replace("Bandwidth (GB)", "latency(us)"), "take NVSHMEM 3"),
        (OPTIONS + HERE + TABLE.replace("# Bandwidth", "#alltoall_device"), "alltoall_device says nothing"),
    ],
)
def test_a_table_of_no_use_says_why(text: str, words: str) -> None:
    log = read_put_log(text, "x.txt")

    assert log.runs == ()
    assert words in log.unused[0]


def test_a_log_without_a_table_is_refused() -> None:
    assert looks_like_put_log(OPTIONS)
    with pytest.raises(InputError, match="x: found no results"):
        read_put_log(OPTIONS + HERE, "x")


def test_a_line_gives_start_and_rate_inside_a_domain_and_the_share_of_the_nic_across() -> None:
    near = [line(PutTest.LATENCY, 3e-6, 300e9, 1), line(PutTest.BANDWIDTH, 1e-6, 350e9, 1)]
    far = [line(PutTest.LATENCY, 6e-6, 40e9, 2), line(PutTest.DEVICE_BANDWIDTH, 2e-6, 45e9, 2)]

    values = {figure.key: figure.value for figure in put_figures([*far, *near], H100, BASE).figures}

    assert values == pytest.approx(
        {"put.start": 3e-6, "put.bandwidth": 350e9, "put.far_start": 6e-6, "nic.efficiency": 45 / 50}, rel=1e-6
    )


def test_two_hosts_of_a_rack_are_one_domain() -> None:
    found = put_figures([line(PutTest.BANDWIDTH, 1e-6, 700e9, 2)], RACK, BASE)

    assert [figure.key for figure in found.figures] == ["put.bandwidth"]


def test_a_ping_pong_with_a_signal_is_believed_before_puts_without() -> None:
    runs = [line(PutTest.SIGNAL, 7e-6, 40e9, 2), line(PutTest.LATENCY, 6e-6, 40e9, 2)]

    (start,) = put_figures(runs, H100, BASE).figures

    assert start.value == pytest.approx(7e-6, rel=1e-6)
    assert start.source.startswith("half of the way")


def test_what_threads_store_over_nvlink_says_nothing_of_copy_engines() -> None:
    found = put_figures([line(PutTest.DEVICE_BANDWIDTH, 1e-6, 400e9, 1)], H100, BASE)

    assert found.figures == ()
    assert "copy engines" in found.unused[0]


def test_runs_that_do_not_say_their_hosts_and_a_base_without_puts_are_told() -> None:
    lost = replace(line(PutTest.LATENCY, 3e-6, 300e9, 1), n_pes=0, n_hosts=0)

    assert "how many PEs" in put_figures([lost], H100, BASE).unused[0]
    assert "no [put]" in put_figures([lost], H100, replace(BASE, put=None, figures=())).unused[0]


def test_the_log_changes_the_calibration_of_puts_and_nothing_else() -> None:
    fitted = calibrate_from_logs([str(LOGS / "perftest.txt")], H100, BASE)

    put = fitted.calibration.put
    assert put.start_s == pytest.approx(2.9e-6, rel=0.03)
    assert put.bandwidth_Bps == pytest.approx(371e9, rel=0.02)
    assert put.far_start_s == pytest.approx(7.1e-6, rel=0.03)
    assert put.barrier_s == pytest.approx(13.2e-6 / 3)
    assert fitted.calibration.nic.efficiency == pytest.approx(47.2 / 50, rel=0.01)
    assert fitted.calibration.p2p == BASE.p2p


def test_of_two_logs_nccl_tests_and_nvbandwidth_say_what_both_say() -> None:
    logs = [str(LOGS / name) for name in ("perftest.txt", "nvbandwidth.txt")]

    assert calibrate_from_logs(logs, H100, BASE).calibration.put.bandwidth_Bps == pytest.approx(376.6e9, rel=1e-3)
