"""Small inputs that would take much memory or time, or end in a traceback: each was one once. tools/fuzz.py looks for more."""

import json
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardroute.executors.launching.launches import find_place
from shardroute.planner.arguments import parse_nics, parse_ranks, parse_shape
from shardroute.planner.exchange import load_layout
from shardroute.planner.importers import layout_of_command, read_settings
from shardroute.planner.plan_files import load_plan
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.timelines import load_timeline
from shardroute.planner.validation.attention_calls import read_calls
from shardroute.topologies.errors import InputError, PlanError
from shardroute.topologies.importers import expand_hosts
from shardroute.topologies.machines import load_machine

MUCH_S = 3.0  # of processor time; each takes a few hundredths, and took minutes


@contextmanager
def soon() -> Iterator[None]:
    began = time.process_time()
    yield
    assert time.process_time() - began < MUCH_S


@pytest.mark.parametrize(
    "text", [b"a." * 200_000 + b"a = 1", b"[" + b"'a'. " * 200_000 + b"a]", b"x = {" + b"a ." * 200_000 + b"a = 1}"]
)
def test_a_toml_key_of_a_hundred_thousand_parts_is_refused_at_once(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "m.toml").write_bytes(text)

    with soon(), pytest.raises(InputError, match=r"m\.toml: line 1: a key of more than 64 parts"):
        load_machine(str(tmp_path / "m.toml"))


def test_a_long_word_in_a_toml_file_takes_no_time(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_bytes(b"title = '" + b"a" * 1_000_000 + b"'")

    with soon(), pytest.raises(InputError, match="kind: missing"):
        load_machine(str(tmp_path / "m.toml"))


def test_settings_over_settings_take_time_by_their_number(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("".join(f"k{i}:\n a: 1\n" for i in range(20_000)))
    (tmp_path / "two.yaml").write_text("".join(f"k{i}: x\n" for i in range(20_000)))

    with soon():
        settings = read_settings([tmp_path / "one.yaml", tmp_path / "two.yaml"], [f"k{i}.b=2" for i in range(2000)])

    assert (settings.text("k0.b"), settings.text("k19999")) == ("2", "x")
    assert not settings.has("k0.a")


def test_later_settings_hold_whatever_stood_above_or_below_them(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a:\n b: 1\n c: 2\nd: 3\n")

    settings = read_settings([tmp_path / "a.yaml"], ["a=4", "a.e=5", "d.f=6", "d=7", "d.g=8", "d=9"])

    assert (settings.text("a.e"), settings.text("d")) == ("5", "9")
    assert not settings.has("a.b")
    assert not settings.has("d.g")


@pytest.mark.parametrize(
    "expand",
    [
        lambda: expand_hosts("n[" + ",".join(["1-262143"] * 3000) + "]"),
        lambda: parse_ranks("--gone", ",".join(["0-1048575"] * 3000)),
        lambda: parse_nics("--nic", ["0-1048575=1GB/s"] * 3000),
    ],
    ids=["hosts", "ranks", "NICs"],
)
def test_lists_of_long_ranges_end_at_the_most_that_there_may_be(expand: Callable[[], object]) -> None:
    with soon(), pytest.raises(InputError, match="more than") as error:
        expand()

    assert len(str(error.value)) < 300


def test_a_short_layout_file_can_not_stand_for_hundreds_of_millions_of_boxes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("shardroute.planner.exchange.layout_files.MAX_BOXES", 4000)
    mesh = {"mesh": {"axes": ["x"], "sizes": [1000]}, "placements": ["R"]}
    tensors = [{"name": f"t{i}", "shape": [i + 1], "dtype": "u8", "layout": mesh} for i in range(300)]
    (tmp_path / "a.json").write_text(json.dumps({"format": "shardroute-layout", "version": 1, "tensors": tensors}))

    with pytest.raises(InputError, match=r"tensors\[4\]\.layout of tensor t4: the layouts up to here have 5000 boxes"):
        load_layout(tmp_path / "a.json")


def test_a_plan_that_unpacks_to_a_thousand_times_its_size_is_not_unpacked(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.plan", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("header.json", b" " * 100_000_000)

    with soon(), pytest.raises(PlanError, match=r"unpacks from \d+ bytes to 100000000; this is not a plan that shardroute wrote"):
        load_plan(tmp_path / "a.plan")


def test_text_that_is_no_utf_8_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    broken = b'{"format": "shardroute-\x83", "schema": 1}'  # which msgspec 0.22 doesn't call a mistake of JSON
    (tmp_path / "a.json").write_bytes(broken)
    with zipfile.ZipFile(tmp_path / "a.plan", "w") as archive:
        archive.writestr("header.json", broken)

    with pytest.raises(InputError, match=r"a\.json: not a shardroute timeline"):
        load_timeline(tmp_path / "a.json")
    with pytest.raises(PlanError, match=r"a\.plan: .*header\.json: "):
        load_plan(tmp_path / "a.plan")


def test_packed_documents_are_limited_since_their_masks_are_worked_out_between_any_two() -> None:
    with pytest.raises(InputError, match="2049 packed documents: at most 2048 are planned"):
        Attention((1,) * 2049, 2, 1, 1, 8, packed=True)


def test_a_table_with_a_field_too_long_for_csv_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a" * 200_000)

    with pytest.raises(InputError, match=r"t\.csv, line 1: field larger than field limit"):
        list(read_calls(tmp_path / "t.csv"))


@pytest.mark.parametrize("digits", ["9" * 5000, "٣", "²", ""])
def test_a_launcher_that_says_no_number_is_told_so(digits: str) -> None:
    with pytest.raises(InputError, match="the environment says RANK="):
        find_place(environment={"RANK": digits, "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"})


def test_a_name_too_long_for_a_file_is_no_file(cli) -> None:
    code, _, err = cli("diff", "a" * 5000, "b")

    assert code == 2
    assert err.startswith("error: no file aaa")


def test_what_unicode_calls_a_space_may_stand_beside_a_number() -> None:
    assert parse_shape("8\x1d,\x1c 6") == (8, 6)
    assert str(layout_of_command("VLLM_PP_LAYER_PARTITION=10,\x1d12 vllm serve m -pp 2").spec) == "PP2[10,12]"


@pytest.mark.parametrize("sizes", [(3_000_000_000, 3_000_000_000), (3_000_000_000, 2), (2, 3_000_000_000)])
def test_a_member_that_claims_more_than_the_file_has_is_not_read(tmp_path: Path, sizes: tuple[int, int]) -> None:
    with zipfile.ZipFile(tmp_path / "a.plan", "w") as archive:
        archive.writestr("header.json", b"{}")
    data = bytearray((tmp_path / "a.plan").read_bytes())
    at = data.index(b"PK\x01\x02") + 20  # both sizes in the central directory
    data[at : at + 8] = struct.pack("<II", *sizes)
    (tmp_path / "a.plan").write_bytes(data)

    with soon(), pytest.raises(PlanError, match=r"member header.json claims \d+ bytes, more than the file has"):
        load_plan(tmp_path / "a.plan")
