"""shardroute.planner.measurements and `calibrate FILES`: logs in the programs' own formats, and what is fitted to them."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardroute.executors.commands import main
from shardroute.planner.backends.channels import Traffic
from shardroute.planner.backends.collectives import Collective, Group, collective_s
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate
from shardroute.planner.measurements.bandwidth_logs import read_bandwidth_log
from shardroute.planner.measurements.calibrate import calibrate_from_logs
from shardroute.planner.measurements.channel_fits import SendRecvRows, fit_channel_law, fit_line, fitted_errors
from shardroute.planner.measurements.nccl_logs import Test, read_nccl_log
from shardroute.planner.measurements.timeline_fits import calibrate_from_timelines
from shardroute.planner.plan_files import save_plan
from shardroute.planner.problems import one_tensor
from shardroute.planner.routing.strategies import make_plan
from shardroute.planner.simulator.refit import predict
from shardroute.planner.timelines import save_timeline
from shardroute.topologies.calibrations import (
    PathCost,
    calibration_figure,
    default_calibration,
    load_calibration,
    nominal_calibration,
)
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology

LOGS = Path(__file__).parent / "data" / "logs"
H100 = load_machine("dgx-h100")
BASE = default_calibration("dgx-h100")
ROW = "        1024           256     float     sum      -1    12.50    0.08    0.14      0    12.10    0.08    0.15      0\n"
RANKS = "".join(f"#  Rank  {i} Group  0 Pid  31{i} on n{i // 2} device  {i} [0x18] NVIDIA H100 80GB HBM3\n" for i in range(4))


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["shardroute", *arguments])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_log_says_its_test_ranks_hosts_device_and_rows() -> None:
    text = "./build/alltoall_perf -b 1K\n# nThread 1 nGpus 1\n" + RANKS + ROW

    (run,) = read_nccl_log(text, "a.txt")

    assert (run.test, run.n_ranks, run.n_hosts) == (Test.ALL_TO_ALL, 4, 2)
    assert run.device == "NVIDIA H100 80GB HBM3"
    assert (run.n_bytes, run.time_us) == ((1024,), (12.5,))


@pytest.mark.parametrize("tag", ["", "0: ", "[1,0]<stdout>: ", "[1,0]<stdout>:", "2026-07-22T10:00:00Z "])
def test_tags_before_lines_are_no_part_of_them(tag: str) -> None:
    text = "".join(tag + line + "\n" for line in ("all_reduce_perf", *RANKS.splitlines(), *ROW.splitlines()))

    (run,) = read_nccl_log(text, "a.txt")

    assert (run.n_ranks, run.n_bytes) == (4, (1024,))


@pytest.mark.parametrize(
    "row",
    [
        "        1024           256     float     sum    12.50    0.08    0.14  2e-07    12.10    0.08    0.15  1e-07\n",
        "        1024           256     float            12.50    0.08    0.14  0e+00    12.10    0.08    0.15  1e+00\n",
        "        1024           256     float    none      -1    12.50    0.08    0.08      0    12.10    0.08    0.08    N/A\n",
        "        1024           256      bf16     sum      -1    12.50    0.08    0.14    N/A    12.10    0.08    0.15    N/A\n",
    ],
)
def test_rows_of_older_and_newer_versions_are_read_alike(row: str) -> None:
    (run,) = read_nccl_log("sendrecv_perf\n" + RANKS + row, "a.txt")

    assert (run.n_bytes, run.time_us) == ((1024,), (12.5,))


def test_several_runs_in_one_file_are_told_apart() -> None:
    runs = read_nccl_log((LOGS / "collectives.txt").read_text(), "collectives.txt")

    assert [(run.test, run.n_ranks, run.n_hosts, len(run.n_bytes)) for run in runs] == [
        (Test.ALL_REDUCE, 8, 1, 11),
        (Test.ALL_GATHER, 16, 2, 4),
    ]
    assert runs[1].version == "2.21.5"


def test_without_lines_of_ranks_the_bandwidths_tell_how_many_there_were() -> None:
    row = "  8589934592    2147483648     float     sum      -1    31289  274.53  480.43      0    31294  274.49  480.36      0\n"

    (run,) = read_nccl_log("# all_reduce_perf\n" + row, "a.txt")

    assert run.n_ranks == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algbw busbw\n", "found no results"),
        (RANKS + ROW, "don't say of which test"),
        ("sendrecv_perf\n" + ROW, "how many ranks ran"),
        ("sendrecv_perf\n" + ROW.replace(".", ".1."), "found no results"),
    ],
)
def test_a_log_that_lacks_something_says_what(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_nccl_log(text, "log.txt")


def test_nvbandwidth_matrices_are_read_without_their_diagonal() -> None:
    copies, local = read_bandwidth_log((LOGS / "nvbandwidth.txt").read_text(), "nv.txt")

    assert (copies.name, len(copies.bandwidths_Bps)) == ("device_to_device_memcpy_write_ce", 12)
    assert copies.median_Bps == pytest.approx(376.6e9, rel=1e-3)
    assert local.median_Bps == pytest.approx(1249.6e9, rel=1e-3)


def test_a_bandwidth_of_nothing_is_refused() -> None:
    text = (LOGS / "nvbandwidth.txt").read_text()

    with pytest.raises(InputError, match="expected bandwidths above 0"):
        read_bandwidth_log(re.sub(r"\d+\.\d\d", "0.00", text), "log.txt")


def test_the_fit_finds_the_law_that_made_the_rows() -> None:
    made = replace(BASE.p2p, channel_Bps=20e9, one_way_channel_Bps=32e9, peak_Bps=300e9, start_s=2e-5, small_start_s=1e-5)
    sizes = 2.0 ** np.arange(10, 33)
    blank = [SendRecvRows(8, traffic, sizes, np.ones(len(sizes))) for traffic in (Traffic.RING, Traffic.ONE_WAY)]
    rows = [replace(r, time_s=1 + part) for r, part in zip(blank, np.split(fitted_errors(blank, made), 2), strict=True)]

    found = fit_channel_law(rows)

    for name in ("channel_Bps", "one_way_channel_Bps", "peak_Bps", "start_s", "small_channel_Bps", "small_start_s"):
        assert getattr(found, name) == pytest.approx(getattr(made, name), rel=0.02), name


def test_a_few_disturbed_rows_do_not_spoil_the_fit() -> None:
    sizes = 2.0 ** np.arange(10, 33)
    blank = SendRecvRows(8, Traffic.RING, sizes, np.ones(len(sizes)))
    time_s = 1 + fitted_errors([blank], BASE.p2p)
    time_s[[2, 14]] *= 4

    found = fit_channel_law([replace(blank, time_s=time_s)])

    assert found.channel_Bps == pytest.approx(BASE.p2p.channel_Bps, rel=0.1)
    assert found.peak_Bps == pytest.approx(BASE.p2p.peak_Bps, rel=0.1)


def test_too_few_sizes_are_refused() -> None:
    rows = SendRecvRows(8, Traffic.RING, np.array([1e3, 1e4]), np.array([1e-5, 1e-5]))

    with pytest.raises(InputError, match="fewer than 2 sizes"):
        fit_channel_law([rows])


def test_a_line_through_one_size_is_refused() -> None:
    with pytest.raises(InputError, match="times between domains are of one size"):
        fit_line(np.array([2.0**30, 2.0**30]), np.array([0.02, 0.021]), "between domains")


def test_logs_change_what_they_say_and_keep_the_rest_with_its_source() -> None:
    fitted = calibrate_from_logs([str(LOGS / "sendrecv_perf.txt"), str(LOGS / "nvbandwidth.txt")], H100, BASE)

    found = fitted.calibration
    sources = {figure.key: figure.source for figure in found.figures}
    assert found.p2p.peak_Bps == pytest.approx(290e9, rel=0.02)
    assert found.put.bandwidth_Bps == pytest.approx(376.6e9, rel=1e-3)
    assert found.nic == BASE.nic
    assert "median error" in sources["p2p.channel_bandwidth"]
    assert sources["nic.latency"].startswith("kept, as nothing measured here says otherwise: ")
    assert sources["p2p.one_way_channel_bandwidth"].startswith("assumption")


def test_collectives_become_curves_that_predictions_meet() -> None:
    fitted = calibrate_from_logs([str(LOGS / "collectives.txt")], H100, BASE)

    found, how = collective_s(Collective.ALL_GATHER, 2**28, Group(16, 2), H100, fitted.calibration)
    assert found == pytest.approx(1511e-6, rel=1e-3)
    assert how.startswith("measured on 16 ranks")
    # busbw 187.9 GB/s at 4 GiB, of the 8 x 50 GB/s that a DGX H100 has.
    assert fitted.calibration.collectives.nic_efficiency == pytest.approx(187.9 / 400, rel=1e-3)


def test_neither_kind_of_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")

    with pytest.raises(InputError, match=r"notes\.txt: expected the text output of nccl-tests"):
        calibrate_from_logs([str(tmp_path / "notes.txt")], H100, BASE)


def nic_plan():
    shape = (100_000_000,)
    source, target = place(shape, Mesh.of({"x": 1}), [Replicate()]), place(shape, Mesh.of({"x": 1}, [8]), [Replicate()])
    return make_plan(one_tensor(shape, "u8", source, target), build_topology(H100, None, 9), "direct")


def test_a_run_says_the_rate_of_what_bound_the_plan() -> None:
    plan = nic_plan()
    slow = replace(BASE, nic=PathCost(BASE.nic.latency_s, 0.5), figures=())
    measured = replace(predict(plan, slow).timeline, kind="measured")

    fitted = calibrate_from_timelines([("run.json", measured)], plan, BASE)

    assert fitted.fitted == ("nic.efficiency",)
    assert fitted.calibration.nic.efficiency == pytest.approx(0.5, rel=0.01)


def test_a_run_that_the_fabric_bound_gives_the_share_of_the_nics() -> None:
    thin = build_topology(replace(H100, oversubscription=16.0, figures=()), 2)
    plan = replace(nic_plan(), topology=thin)
    slow = replace(BASE, nic=PathCost(BASE.nic.latency_s, 0.5), figures=())
    measured = replace(predict(plan, slow).timeline, kind="measured")

    fitted = calibrate_from_timelines([("run.json", measured)], plan, BASE)

    assert predict(plan, BASE).resources[0].name.startswith("uplink of domain")
    assert fitted.calibration.nic.efficiency == pytest.approx(0.5, rel=0.01)


def test_a_run_bound_by_what_the_base_has_no_rate_of_is_refused() -> None:
    whole = place((2**28,), Mesh.of({"x": 1}), [Replicate()])
    plan = make_plan(one_tensor((2**28,), "u8", whole, whole), build_topology(H100, 1), "direct")
    base = nominal_calibration(H100)
    measured = replace(predict(plan, base).timeline, kind="measured")

    with pytest.raises(InputError, match=r"memory of GPU 0 binds the plan, but .* has no memory\.efficiency to fit"):
        calibrate_from_timelines([("run.json", measured)], plan, base)


def test_a_timeline_of_another_plan_is_refused() -> None:
    plan = nic_plan()
    measured = replace(predict(plan, BASE).timeline, kind="measured", digest="0" * 64)

    with pytest.raises(InputError, match=r"run\.json: a timeline of plan 0000"):
        calibrate_from_timelines([("run.json", measured)], plan, BASE)
    with pytest.raises(InputError, match="a predicted timeline"):
        calibrate_from_timelines([("run.json", predict(plan, BASE).timeline)], plan, BASE)


def test_the_command_writes_a_calibration_that_simulate_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, plan = str(tmp_path / "mine.toml"), str(tmp_path / "q.plan")
    save_plan(nic_plan(), plan)
    logs = [str(path) for path in sorted(LOGS.glob("*.txt"))]

    code, out, _ = command(capsys, monkeypatch, "calibrate", *logs, "--machine", "dgx-h100", "-o", mine)
    simulated, text, _ = command(capsys, monkeypatch, "simulate", plan, "--calibration", mine, "--json")

    assert (code, simulated) == (0, 0)
    assert "p2p.peak_bandwidth" in out
    assert load_calibration(mine).machine == "dgx-h100"
    assert json.loads(text)["predicted_s"] > 0


def test_the_command_fits_timelines_with_their_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, run = nic_plan(), str(tmp_path / "run.json")
    save_plan(plan, str(tmp_path / "q.plan"))
    save_timeline(replace(predict(plan, BASE).timeline, kind="measured"), run)

    code, out, _ = command(capsys, monkeypatch, "calibrate", run, "--plan", str(tmp_path / "q.plan"))
    without, _, error = command(capsys, monkeypatch, "calibrate", run)

    assert (code, without) == (0, 2)
    assert "nic.efficiency" in out
    assert "--plan FILE" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate"], "nothing to calibrate from"),
        (["calibrate", str(LOGS / "nvbandwidth.txt")], "give --machine"),
        (["calibrate", str(LOGS / "collectives.txt"), "--machine", "cpu-processes"], "has no GPUs"),
        (["calibrate", str(LOGS / "collectives.txt"), "--machine", "dgx-h100", "--base", "cpu-processes"], "are of CPUs"),
        (["calibrate", str(LOGS / "collectives.txt"), "--machine", "dgx-h100", "--plan", "q.plan"], "--plan goes with"),
        (["calibrate", str(LOGS / "absent.txt"), "--machine", "dgx-h100"], "absent.txt"),
        (["calibrate", str(LOGS / "nvbandwidth.txt"), "--here"], "--here measures this machine"),
        (["calibrate", "--here", "--machine", "dgx-h100"], "--here measures this machine"),
    ],
)
def test_a_users_mistake_ends_with_2_and_says_what_to_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, error = command(capsys, monkeypatch, *arguments)

    assert code == 2
    assert message in error


def test_a_base_without_sources_is_refused() -> None:
    with pytest.raises(InputError, match="has no figures with sources"):
        calibrate_from_logs([str(LOGS / "nvbandwidth.txt")], H100, replace(BASE, figures=()))
    assert calibration_figure("put.bandwidth", 1e9, "measured").text == "1000000000.0 B/s"
