"""shardroute.topologies.calibrations: measured costs, their files, and the refusal to guess."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shardroute.topologies.calibrations import (
    Calibration,
    PathCost,
    calibration_figure,
    calibration_from_figures,
    calibration_names,
    calibration_to_dict,
    check_calibration,
    default_calibration,
    load_calibration,
    nominal_calibration,
    save_calibration,
)
from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import MachineKind, load_machine, machine_names

SHIPPED = Path(__file__).parent.parent / "topologies" / "calibrations"


def cpu_calibration(source: str = "measured", **values: float) -> Calibration:
    numbers = {
        "step.launch": 2e-6,
        "step.piece": 1e-6,
        "cpu.cores": 2.0,
        "cpu.copy_bandwidth": 4.2e9,
    } | values
    figures = [calibration_figure(key, value, source) for key, value in numbers.items()]
    return calibration_from_figures("cpu-processes", "NumPy", "2026-11-30", "NumPy 2", figures)


@pytest.mark.parametrize("name", machine_names())
def test_every_shipped_machine_has_a_calibration_of_its_kind(name: str) -> None:
    machine = load_machine(name)

    calibration = default_calibration(name)

    check_calibration(calibration, machine)
    assert calibration.machine == name
    assert len(calibration.figures) >= (6 if machine.kind is MachineKind.CPU else 26)
    assert bool(calibration.curves) is (machine.kind is MachineKind.GPU)


def test_the_shipped_calibrations_are_those_of_the_machines() -> None:
    assert calibration_names() == machine_names()


def test_an_h100_copy_costs_what_the_fit_to_the_published_ring_says() -> None:
    calibration = load_calibration("dgx-h100")

    assert calibration.nvlink is not None
    assert calibration.p2p is not None
    assert calibration.launch_s + calibration.nvlink.latency_s == pytest.approx(calibration.p2p.start_s)
    assert calibration.p2p.peak_Bps == 290e9


def test_a_constant_that_nobody_measured_says_so() -> None:
    sources = {figure.key: figure.source for figure in load_calibration("hgx-h200").figures}

    assert sources["step.piece"].startswith("assumption")
    assert sources["nvlink.latency"].startswith("assumption")


def test_predicting_for_a_machine_without_calibration_is_refused_with_the_ways_out() -> None:
    with pytest.raises(InputError) as caught:
        default_calibration("my-cluster")

    assert "'my-cluster'" in str(caught.value)
    assert "--calibration FILE" in str(caught.value)
    assert "--calibration nominal" in str(caught.value)


def test_nominal_costs_nothing_but_the_nominal_rates_and_says_its_name() -> None:
    calibration = nominal_calibration(load_machine("dgx-h100"))

    assert calibration.nvlink == calibration.nic == PathCost(0.0, 1.0)
    assert (calibration.launch_s, calibration.piece_s) == (0.0, 0.0)
    assert calibration.library == "none (nominal rates)"


def test_processes_have_no_nominal_rates() -> None:
    with pytest.raises(InputError, match="no nominal rates"):
        nominal_calibration(load_machine("cpu-processes"))


def test_a_calibration_of_the_other_kind_is_refused() -> None:
    with pytest.raises(InputError, match="has no nvlink and nic costs"):
        check_calibration(load_calibration("cpu-processes"), load_machine("dgx-h100"))
    with pytest.raises(InputError, match="has no cpu"):
        check_calibration(load_calibration("dgx-h100"), load_machine("cpu-processes"))


@pytest.mark.parametrize("name", machine_names())
def test_a_calibration_survives_json_and_its_file(name: str, tmp_path: Path) -> None:
    calibration = load_calibration(name)

    save_calibration(calibration, tmp_path / "copy.toml")

    assert load_calibration(str(tmp_path / "copy.toml")) == calibration
    assert json.loads(json.dumps(calibration_to_dict(calibration)))["launch_s"] == calibration.launch_s


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.floats(0, 1e3),
    st.floats(1e-3, 1e18),
    st.floats(0.1, 1e4),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip),
)
@example(1e-7, 4.2e9, 2.0, 'a "quoted" \\ line,\nthen \x7f and µ')
def test_a_measured_calibration_reads_back_with_every_digit_and_any_source(
    tmp_path: Path, piece_s: float, copy_Bps: float, cores: float, source: str
) -> None:
    values = {"step.piece": piece_s, "cpu.copy_bandwidth": copy_Bps, "cpu.cores": cores}
    calibration = cpu_calibration(source, **values)

    save_calibration(calibration, tmp_path / "measured.toml")

    assert load_calibration(str(tmp_path / "measured.toml")) == calibration


def test_a_calibration_without_sources_is_not_written(tmp_path: Path) -> None:
    bare = replace(cpu_calibration(), figures=())

    with pytest.raises(InputError, match=r"no source for step\.launch, step\.piece, cpu\.cores"):
        save_calibration(bare, tmp_path / "bare.toml")

    assert not (tmp_path / "bare.toml").exists()


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"can't write the calibration to .*absent"):
        save_calibration(cpu_calibration(), tmp_path / "absent" / "my.toml")
    with pytest.raises(InputError, match="ends in"):
        save_calibration(cpu_calibration(), tmp_path / "my.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nvlink": PathCost(0.0, 1.0)}, "nic: missing"),
        ({"cores": None}, "cpu.cores: missing"),
        ({"cores": None, "copy_Bps": None}, "found neither"),
        ({"launch_s": -1e-6}, "step.launch: expected a number from 0"),
        ({"piece_s": float("nan")}, "step.piece"),
        ({"copy_Bps": 0.0}, "cpu.copy_bandwidth: expected a number above 0"),
    ],
)
def test_impossible_costs_are_never_stored(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(cpu_calibration(), figures=(), **changes)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("latency_s", "efficiency"), [(-1e-6, 0.5), (float("inf"), 0.5), (0.0, 0.0), (0.0, 1.01)]
)
def test_an_impossible_path_cost_is_refused(latency_s: float, efficiency: float) -> None:
    with pytest.raises(InputError, match="expected"):
        PathCost(latency_s, efficiency)


def test_a_number_may_not_part_from_the_figure_that_backs_it() -> None:
    with pytest.raises(InputError, match=r"step\.launch: the figure says '2e-06 s'"):
        replace(cpu_calibration(), launch_s=1.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "efficiency = { value = 0.822",
            "efficiency = { value = 1.3",
            "my.toml: nvlink.efficiency: expected a number",
        ),
        (
            'latency = { value = "17.2 us"',
            "latency = { value = 13",
            "nvlink.latency: expected text such as '18 us', found 13",
        ),
        ("[nic]", "[wifi]", "my.toml: wifi: unknown key; expected one of machine, library"),
        ("[step]", "[[step]]", "my.toml: step: expected a table, found"),
        ("launch = {", "lunch = {", "my.toml: step.lunch: unknown key; expected one of launch, piece"),
        ('library = "', 'book = "', "my.toml: "),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_its_name_and_the_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    text = (SHIPPED / "dgx-h100.toml").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "my.toml").write_text(text.replace(old, new, 1), encoding="utf-8")

    with pytest.raises(InputError) as caught:
        load_calibration(str(tmp_path / "my.toml"))

    assert message in str(caught.value)


def test_a_file_without_one_of_the_two_paths_is_refused(tmp_path: Path) -> None:
    text = (SHIPPED / "dgx-h100.toml").read_text(encoding="utf-8")
    start, end = text.index("[nic]"), text.index("[step]")
    (tmp_path / "my.toml").write_text(text[:start] + text[end:], encoding="utf-8")

    with pytest.raises(InputError, match=r"my\.toml: .*nic: missing, though nvlink is given"):
        load_calibration(str(tmp_path / "my.toml"))


def test_an_unknown_name_is_refused_with_the_close_one() -> None:
    with pytest.raises(InputError, match="did you mean dgx-h100"):
        load_calibration("dgx-h10")


def test_an_unknown_or_missing_figure_is_refused() -> None:
    with pytest.raises(InputError, match=r"nic\.speed: unknown figure"):
        calibration_figure("nic.speed", 1.0, "measured")
    with pytest.raises(InputError, match=r"step\.piece: missing"):
        calibration_from_figures("m", "l", "d", "v", [calibration_figure("step.launch", 0.0, "measured")])
