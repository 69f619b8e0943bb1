"""shardroute.topologies.machines: machine files, their figures, and the text that names a machine."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardroute.topologies.errors import InputError
from shardroute.topologies.machines import (
    MachineKind,
    load_machine,
    machine_from_dict,
    machine_names,
    machine_to_dict,
    parse_machine,
)

SHIPPED = Path(__file__).parent.parent / "topologies" / "machines"


def edited(tmp_path: Path, old: str, new: str, name: str = "my.toml") -> str:
    """Write dgx-h100.toml with one text replaced, and return the path."""
    text = (SHIPPED / "dgx-h100.toml").read_text(encoding="utf-8")
    assert text.count(old) >= 1
    path = tmp_path / name
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return str(path)


def refusal(path: str) -> str:
    with pytest.raises(InputError) as caught:
        load_machine(path)
    return str(caught.value)


def test_the_shipped_machines_are_these() -> None:
    assert machine_names() == ("cpu-processes", "dgx-b200", "dgx-h100", "gb200-nvl72", "hgx-h200")


@pytest.mark.parametrize(
    ("name", "gpus_per_unit", "nvlink_Bps", "nic_Bps", "memory_bytes"),
    [
        ("dgx-h100", 8, 450e9, 50e9, 80 * 10**9),
        ("hgx-h200", 8, 450e9, 50e9, 141 * 10**9),
        ("dgx-b200", 8, 900e9, 50e9, 180 * 10**9),
        ("gb200-nvl72", 72, 900e9, 50e9, 186 * 10**9),
    ],
)
def test_a_shipped_gpu_machine_has_its_vendors_rates_one_way(
    name: str, gpus_per_unit: int, nvlink_Bps: float, nic_Bps: float, memory_bytes: int
) -> None:
    machine = load_machine(name)

    assert machine.kind is MachineKind.GPU
    assert (machine.gpus_per_unit, machine.gpus_per_domain) == (gpus_per_unit, gpus_per_unit)
    assert (machine.nvlink_Bps, machine.gpu_nic_Bps) == (nvlink_Bps, nic_Bps)
    assert machine.memory_bytes == memory_bytes
    assert machine.oversubscription == 1.0


def test_processes_on_the_cpu_are_units_of_one_without_links() -> None:
    machine = load_machine("cpu-processes")

    assert machine.kind is MachineKind.CPU
    assert machine.gpus_per_unit == 1
    assert (machine.nvlink_Bps, machine.nic_Bps, machine.nics_per_gpu, machine.figures) == (0.0, 0.0, 0, ())


@pytest.mark.parametrize("name", ["dgx-h100", "hgx-h200", "dgx-b200", "gb200-nvl72"])
def test_every_figure_of_a_gpu_machine_names_a_document_or_says_that_it_is_an_assumption(name: str) -> None:
    figures = load_machine(name).figures

    assert [figure.key for figure in figures] == [
        "gpu.per_host",
        "gpu.memory",
        "gpu.memory_bandwidth",
        "nvlink.hosts_per_domain",
        "nvlink.bandwidth",
        "nic.per_gpu",
        "nic.bandwidth",
        "fabric.oversubscription",
    ]
    assert all("https://" in figure.source for figure in figures)


def test_a_figure_keeps_the_text_of_the_file_beside_its_si_value() -> None:
    figures = {figure.key: figure for figure in load_machine("dgx-h100").figures}

    assert (figures["nic.bandwidth"].text, figures["nic.bandwidth"].value) == ("400 Gb/s", 50e9)
    assert (figures["gpu.per_host"].text, figures["gpu.per_host"].value) == ("8", 8.0)


def test_a_path_that_ends_in_toml_is_read_and_names_the_machine(tmp_path: Path) -> None:
    path = edited(tmp_path, '"400 Gb/s"', '"200 Gb/s"')

    machine = load_machine(path)

    assert (machine.name, machine.nic_Bps) == ("my", 25e9)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'bandwidth = { value = "400 Gb/s"',
            "bandwidth = { value = 400",
            "my.toml: nic.bandwidth: expected text such as '400 Gb/s', above 0, found 400",
        ),
        ('value = "400 Gb/s"', 'value = "400 Gbps"', "my.toml: nic.bandwidth: '400 Gbps' is not a bandwidth"),
        ('value = "400 Gb/s"', 'value = "0 Gb/s"', "my.toml: nic.bandwidth: expected text such as"),
        (
            "per_host = { value = 8",
            'per_host = { value = "8"',
            "my.toml: gpu.per_host: expected a whole number",
        ),
        (
            "per_host = { value = 8",
            "per_host = { value = 0",
            "gpu.per_host: expected a whole number from 1, found 0",
        ),
        (
            "per_host = { value = 8",
            "per_host = { value = 7.5",
            "gpu.per_host: expected a whole number from 1, found 7.5",
        ),
        ("per_host = { value = 8", "per_host = { value = true", "my.toml: gpu.per_host: expected"),
        ("per_host = { value = 8", "per_host = { value = nan", "gpu.per_host: expected a whole number"),
        (
            "oversubscription = { value = 1.0",
            "oversubscription = { value = 0.5",
            "expected a number from 1.0, found 0.5",
        ),
        ('value = "80 GB"', 'value = "80 GB/s"', "my.toml: gpu.memory: '80 GB/s' is not a number of bytes"),
        (
            "[fabric]",
            "[fabrics]",
            "my.toml: fabrics: unknown key; expected one of title, kind, gpu, nvlink, nic, fabric",
        ),
        (
            "per_gpu = {",
            "per_card = {",
            "my.toml: nic.per_card: unknown key; expected one of per_gpu, bandwidth",
        ),
        ('title = "', 'heading = "', "my.toml: heading: unknown key"),
        ('kind = "gpu"', 'kind = "tpu"', "my.toml: kind: expected one of gpu, cpu, found 'tpu'"),
        ('kind = "gpu"', "kind = 3", "my.toml: kind: expected text, found 3"),
        ('kind = "gpu"', 'kind = "cpu"', "my.toml: gpu: a machine of kind 'cpu' has no such table"),
        ('model = "NVIDIA H100 SXM5 80 GB"', "", "my.toml: gpu.model: missing"),
        ("[gpu]", "[gpu", "my.toml: expected TOML"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_with_its_name_and_the_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = edited(tmp_path, old, new)

    assert message in refusal(path)


def test_a_figure_without_a_source_is_refused(tmp_path: Path) -> None:
    text = (SHIPPED / "dgx-h100.toml").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("bandwidth") and "400 Gb/s" in line)

    missing = edited(tmp_path, line, 'bandwidth = { value = "400 Gb/s" }', "missing.toml")
    blank = edited(tmp_path, line, 'bandwidth = { value = "400 Gb/s", source = " " }', "blank.toml")
    bare = edited(tmp_path, line, 'bandwidth = "400 Gb/s"', "bare.toml")

    assert "missing.toml: nic.bandwidth.source: missing" in refusal(missing)
    assert "blank.toml: nic.bandwidth: source is empty" in refusal(blank)
    assert "bare.toml: nic.bandwidth: expected a table { value = ..., source" in refusal(bare)
    assert "found '400 Gb/s'" in refusal(bare)


def test_a_gpu_machine_without_a_table_is_refused(tmp_path: Path) -> None:
    text = (SHIPPED / "dgx-h100.toml").read_text(encoding="utf-8")
    path = tmp_path / "my.toml"
    path.write_text(text[: text.index("[fabric]")], encoding="utf-8")

    assert "my.toml: fabric: missing" in refusal(str(path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'title = "\xe9"')

    assert "can't be read" in refusal(str(tmp_path / "absent.toml"))
    assert "can't be read" in refusal(str(tmp_path) + "/.toml")
    assert "latin.toml: expected UTF-8 text" in refusal(str(tmp_path / "latin.toml"))


def test_an_unknown_name_is_refused_with_the_close_one_and_all_names() -> None:
    message = refusal("dgx-h10")

    assert "unknown machine 'dgx-h10' (did you mean dgx-h100?)" in message
    assert all(name in message for name in machine_names())


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("dgx-h100 x 32", "dgx-h100", 32),
        ("dgx-h100x32", "dgx-h100", 32),
        ("  dgx-h100  x32 ", "dgx-h100", 32),
        ("dgx-h100 × 2", "dgx-h100", 2),
        ("gb200-nvl72 x 1", "gb200-nvl72", 1),
        ("dgx-h100", "dgx-h100", None),
    ],
)
def test_a_machine_text_gives_name_and_count(text: str, name: str, count: int | None) -> None:
    machine, n_units = parse_machine(text)

    assert (machine.name, n_units) == (name, count)


def test_a_machine_text_may_be_a_path_with_a_count(tmp_path: Path) -> None:
    path = edited(tmp_path, '"400 Gb/s"', '"200 Gb/s"')

    assert parse_machine(f"{path} x 4") == (load_machine(path), 4)
    assert parse_machine(f"{path}x4") == (load_machine(path), 4)
    assert parse_machine(path) == (load_machine(path), None)


@pytest.mark.parametrize("text", ["dgx-h100 x 0", "dgx-h100x-3"])
def test_a_count_below_one_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected a count from 1"):
        parse_machine(text)


@pytest.mark.parametrize("text", ["dgx-h100 x many", "dgx-h100 x 2.5"])
def test_a_count_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no count; write for example 'dgx-h100 x 32'"):
        parse_machine(text)


@pytest.mark.parametrize("text", ["", "dgx-h100 x", "dgx2"])
def test_a_machine_text_that_fits_nothing_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="unknown machine"):
        parse_machine(text)


@pytest.mark.parametrize("name", ["dgx-h100", "gb200-nvl72", "cpu-processes"])
def test_a_machine_survives_json(name: str) -> None:
    machine = load_machine(name)

    copy = machine_from_dict(json.loads(json.dumps(machine_to_dict(machine))))

    assert copy == machine
    assert hash(copy) == hash(machine)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("nic_Bps", -1.0, "nic.bandwidth: expected a number above 0, found -1.0"),
        ("nic_Bps", float("nan"), "nic.bandwidth: expected a number above 0"),
        ("nic_Bps", "400 Gb/s", "machine: nic_Bps: expected a number, found '400 Gb/s'"),
        ("gpus_per_host", 0, "gpu.per_host"),
        ("gpus_per_host", 2.5, "gpus_per_host: expected a whole number"),
        ("kind", "tpu", "kind"),
        ("nics", 1, "nics: unknown key"),
    ],
)
def test_a_dict_is_checked_as_strictly_as_a_file(key: str, value: object, message: str) -> None:
    data = {**machine_to_dict(load_machine("dgx-h100")), key: value}

    with pytest.raises(InputError) as caught:
        machine_from_dict(data)

    assert message in str(caught.value)


def test_a_dict_without_a_key_is_refused() -> None:
    data = machine_to_dict(load_machine("dgx-h100"))
    del data["nic_Bps"]

    with pytest.raises(InputError, match="nic_Bps: missing"):
        machine_from_dict(data)


def test_a_number_may_not_part_from_the_figure_that_backs_it() -> None:
    machine = load_machine("dgx-h100")

    with pytest.raises(InputError, match=r"nic\.bandwidth: the figure says '400 Gb/s'"):
        replace(machine, nic_Bps=25e9)

    assert replace(machine, nic_Bps=25e9, figures=()).nic_Bps == 25e9


def test_a_figures_text_must_say_its_value() -> None:
    machine = load_machine("dgx-h100")
    figures = tuple(replace(f, text="200 Gb/s") if f.key == "nic.bandwidth" else f for f in machine.figures)

    with pytest.raises(InputError, match="does not say the figure's value"):
        replace(machine, figures=figures)


@pytest.mark.parametrize("field", ["nvlink_Bps", "nic_Bps", "memory_bytes", "gpus_per_host"])
def test_a_machine_of_processes_with_gpu_figures_is_refused(field: str) -> None:
    data = machine_to_dict(load_machine("cpu-processes"))

    with pytest.raises(InputError, match="for kind 'cpu'"):
        machine_from_dict({**data, field: 8})


@pytest.mark.parametrize("content", ["a=" + "[" * 50_000, "a = " + "9" * 5000, "a\0=1"], ids=["deep", "digits", "nul"])
def test_toml_that_python_cannot_read_is_refused(tmp_path, content) -> None:
    path = tmp_path / "my.toml"
    path.write_text(content)

    with pytest.raises(InputError, match=r"my\.toml: expected TOML"):
        load_machine(str(path))


def test_a_machine_is_read_from_a_regular_file_of_some_size_only(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "large.toml").write_bytes(b"#" * 2**21)

    for name, message in (("pipe", "it is a pipe or socket"), ("large", "it has more than 1048576 bytes"), ("a\0b", "null byte")):
        with pytest.raises(InputError, match=message):
            load_machine(str(tmp_path / f"{name}.toml"))
