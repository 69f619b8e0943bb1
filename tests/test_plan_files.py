"""Plan files: what is damaged, foreign or contradictory is refused in words, and never runs code."""

import json
import os
import stat
import struct
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from shardroute.planner.layouts import load_model, parse_spec
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.plan_files import load_plan, mapped_plan, save_plan
from shardroute.planner.plans import WINDOW_BYTES
from shardroute.planner.problems import one_tensor
from shardroute.planner.refits import refit_problem
from shardroute.planner.routing.strategies import make_plan
from shardroute.topologies.errors import InputError, PlanError
from shardroute.topologies.machines import load_machine
from shardroute.topologies.topologies import build_topology


@pytest.fixture
def path(tmp_path):
    problem = one_tensor(
        (8, 8), "f32", place((8, 8), Mesh.of({"x": 2}), [Shard(0)]), place((8, 8), Mesh.of({"x": 2}, [8, 9]), [Replicate()])
    )
    plan = make_plan(problem, build_topology(load_machine("dgx-h100"), None, 10), "domain-relay")
    save_plan(plan, tmp_path / "a.plan")
    return tmp_path / "a.plan"


def rewritten(path, **members):
    """The file with some members replaced (bytes) or left out (None)."""
    with zipfile.ZipFile(path) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    content |= members
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            if data is not None:
                archive.writestr(name, data)
    return path


def column(values):
    from io import BytesIO

    file = BytesIO()
    np.lib.format.write_array(file, np.asarray(values), allow_pickle=True)
    return file.getvalue()


def test_numpy_opens_a_plan_too(path) -> None:
    columns = np.load(path)

    assert columns["steps.src"].tolist() == load_plan(path).steps.src.tolist()


def test_a_file_that_is_cut_short_is_refused(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    with pytest.raises(PlanError, match="not a shardroute plan, or cut short"):
        load_plan(path)


def test_a_flipped_byte_is_noticed_or_changes_nothing(path) -> None:
    digest, good = load_plan(path).digest, path.read_bytes()
    noticed = 0

    for position in range(0, len(good), 11):
        data = bytearray(good)
        data[position] ^= 0xFF
        path.write_bytes(data)
        try:
            assert load_plan(path).digest == digest
        except PlanError:
            noticed += 1

    assert noticed > len(good) // 11 // 2


@pytest.mark.parametrize("content", [b"", b"PK", b"name = 'not a plan'", b"\x00" * 1000])
def test_a_foreign_file_is_refused(tmp_path, content) -> None:
    file = tmp_path / "x.plan"
    file.write_bytes(content)

    with pytest.raises(PlanError, match="not a shardroute plan"):
        load_plan(file)


def test_a_missing_file_says_how_to_make_one(tmp_path) -> None:
    with pytest.raises(InputError, match=r"no plan file .*none\.plan; `shardroute plan \.\.\. -o"):
        load_plan(tmp_path / "none.plan")


def test_another_zip_is_refused(tmp_path) -> None:
    file = tmp_path / "x.plan"
    with file.open("wb") as out:
        np.savez(out, a=np.arange(3))

    with pytest.raises(PlanError, match=r"it has no header\.json"):
        load_plan(file)


def test_a_later_schema_is_refused_by_number(path) -> None:
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read("header.json"))

    rewritten(path, **{"header.json": json.dumps(header | {"schema": 99}).encode()})

    with pytest.raises(PlanError, match="plan schema 99; this shardroute reads schema 1"):
        load_plan(path)


@pytest.mark.parametrize("name", ["steps.src.npy", "boxes.lo.npy", "fragments.rank.npy", "bundles.piece.npy", "slot_bytes.npy"])
def test_a_missing_column_is_named(path, name) -> None:
    rewritten(path, **{name: None})

    with pytest.raises(PlanError, match=f"column {name.removesuffix('.npy')} is missing"):
        load_plan(path)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("steps.src.npy", [10**6] * 4),
        ("steps.src.npy", [-5] * 4),
        ("steps.bundle.npy", [99] * 4),
        ("steps.op.npy", [9] * 4),
        ("steps.after.npy", [3, 3]),
        ("steps.after_ptr.npy", [0, 5, 1, 2, 2]),
        ("steps.dst.npy", [0.5] * 4),
        ("bundles.tensor.npy", [7, 7]),
        ("bundles.piece.npy", [-1, 0]),
        ("bundles.ptr.npy", [0, 3, 2]),
        ("boxes.n.npy", [-1]),
        ("boxes.n.npy", [2**62]),
        ("fragments.n.npy", [1, 1]),
        ("fragments.lo.npy", [0] * 8),
        ("fragments.buffer_size.npy", [1] * 4),
        ("group_ptr.npy", [1]),
    ],
)
def test_columns_that_contradict_each_other_are_refused(path, name, values) -> None:
    rewritten(path, **{name: column(values)})

    with pytest.raises(PlanError):
        load_plan(path)


def test_a_pickled_column_is_never_loaded(path) -> None:
    rewritten(path, **{"steps.src.npy": column(np.array([{"a": 1}] * 4, dtype=object))})

    with pytest.raises(PlanError, match=r"column steps\.src: expected a list of whole numbers"):
        load_plan(path)


def test_a_write_that_fails_leaves_no_half_file(tmp_path, path) -> None:
    with pytest.raises(InputError, match="can't write the plan"):
        save_plan(load_plan(path), tmp_path / "nowhere" / "b.plan")

    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.plan"]


def test_a_write_replaces_files_and_nothing_else(tmp_path, path) -> None:
    plan = load_plan(path)
    mine, link, pipe = tmp_path / "b.plan.part", tmp_path / "link.plan", tmp_path / "pipe"
    mine.write_text("a user's own")
    link.symlink_to(path.name)
    os.mkfifo(pipe)

    save_plan(plan, tmp_path / "b.plan")
    save_plan(plan, link)
    with pytest.raises(InputError, match=r"can't write the plan to .*pipe: it is a pipe or socket; name a file"):
        save_plan(plan, pipe)

    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert mine.read_text() == "a user's own"
    assert link.is_symlink()
    assert load_plan(link).digest == load_plan(tmp_path / "b.plan").digest == plan.digest
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.plan", "b.plan", "b.plan.part", "link.plan", "pipe"]


@pytest.mark.parametrize("name", ["", ".", "/", "n" * 400, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(path, monkeypatch, name) -> None:
    monkeypatch.chdir(path.parent)
    plan = load_plan(path)

    with pytest.raises(InputError, match="can't write the plan to"):
        save_plan(plan, name)
    with pytest.raises(InputError, match=r"no plan file|is a folder, and a plan is wanted"):
        load_plan(name)


def npy(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(header)) + header.encode() + data


@pytest.mark.parametrize(
    "data",
    [
        *(npy(f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({n},), }}\n") for n in (2**30, 2**40, 2**64, -1)),
        npy("{'descr': 'i8,,,', 'fortran_order': False, 'shape': (1,), }\n", bytes(8)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1,), }\n", bytes(8)),
        npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1, 1), }\n", bytes(8)),
        npy("(" * 9000),
        npy("-" * 9000 + "1"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        b"\x93NUMPY\x01",
        b"",
    ],
    ids=range(12),
)
def test_a_column_is_exactly_what_its_header_says(path, data) -> None:
    rewritten(path, **{"slot_bytes.npy": data})

    with pytest.raises(PlanError, match="column slot_bytes: "):
        load_plan(path)


def test_a_member_that_no_plan_has_is_never_unpacked(path) -> None:
    rewritten(path, **{"more.npy": column([1])})

    with pytest.raises(PlanError, match=r"it has a member 'more'"):
        load_plan(path)


def test_a_member_packed_in_another_way_is_refused(path) -> None:
    with zipfile.ZipFile(path) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name, data in content.items():
            archive.writestr(name, data)

    with pytest.raises(PlanError, match="is packed in a way that plans never are"):
        load_plan(path)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fragments.strides.npy", [-(2**63)] * 8),
        ("fragments.offset.npy", [2**60] * 4),
        ("fragments.buffer_size.npy", [2**63 - 1] * 4),
        ("fragments.rank.npy", [2**32] * 4),
        ("slot_bytes.npy", [2**62]),
        ("bundles.offset.npy", [2**62, 2**62]),
        ("boxes.hi.npy", [2**62] * 4),
        ("group_ptr.npy", np.array([2**64 - 1], np.uint64)),
    ],
)
def test_numbers_that_would_wrap_are_refused(path, name, values) -> None:
    rewritten(path, **{name: column(values)})

    with pytest.raises(PlanError):
        load_plan(path)


def test_the_size_of_a_tensor_is_counted_without_wrapping(path) -> None:
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read("header.json"))
    for tensor in header["tensors"]:
        tensor["shape"] = [2**32, 2**32]
    header["fragment_shapes"] = [[2**32, 2**32]] * len(header["fragment_shapes"])

    rewritten(path, **{"header.json": json.dumps(header).encode()})

    with pytest.raises(PlanError, match=r"has 2\^59 elements or more"):
        load_plan(path)


@pytest.mark.parametrize(("column_name", "row", "value"), [("group", 0, 0), ("group", 0, 2**31 - 1)])
def test_a_copy_names_no_group(path, column_name, row, value) -> None:
    plan = load_plan(path)
    values = getattr(plan.steps, column_name).copy()
    values[row] = value

    with pytest.raises(PlanError, match="column group of a COPY: values must be -1"):
        replace(plan, steps=replace(plan.steps, **{column_name: values}))


def test_what_must_be_recomputed_after_loading_travels_with_the_plan(tmp_path) -> None:
    model = load_model("deepseek-v3")
    problem, summary = refit_problem(model, parse_spec("PP16 x EP16"), parse_spec("TP1"))
    save_plan(make_plan(problem, build_topology(load_machine("dgx-h100"), None, problem.n_ranks), "direct"), tmp_path / "d.plan")

    about = dict(load_plan(tmp_path / "d.plan").problem.about)

    assert about["destination after loading"] == summary.target["after loading"]
    assert about["source convention"] == "megatron"


@pytest.mark.parametrize("edit", ["default written out", "spaces", "columns in another order", "wider numbers"])
def test_a_file_that_says_the_same_in_other_bytes_has_the_same_digest(path, edit) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    header = json.loads(members["header.json"])
    match edit:
        case "default written out":
            members["header.json"] = json.dumps(header | {"window_bytes": WINDOW_BYTES}, sort_keys=True).encode()
        case "spaces":
            members["header.json"] = json.dumps(header, indent=1).encode()
        case "columns in another order":
            members = dict(reversed(members.items()))
        case "wider numbers":
            members["steps.bundle.npy"] = column(load_plan(path).steps.bundle.astype(np.int64))
    edited = path.with_name("edited.plan")
    with zipfile.ZipFile(edited, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)

    with mapped_plan(edited) as record:
        assert record.digest == load_plan(edited).digest == load_plan(path).digest


def test_a_window_below_nothing_is_refused_by_its_name(path) -> None:
    with zipfile.ZipFile(path) as archive:
        header = json.loads(archive.read("header.json"))
    rewritten(path, **{"header.json": json.dumps(header | {"window_bytes": -1}).encode()})

    with pytest.raises(PlanError, match="window_bytes: expected 0 or more bytes, below 2\\^62, found -1") as found:
        load_plan(path)

    assert "column" not in str(found.value)
