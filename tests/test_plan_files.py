"""Plan files: what is damaged, foreign or contradictory is refused in words, and never runs code."""

import json
import zipfile

import numpy as np
import pytest

from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.plan_files import load_plan, save_plan
from shardroute.planner.problems import one_tensor
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

    with pytest.raises(PlanError, match="Object arrays cannot be loaded"):
        load_plan(path)


def test_a_write_that_fails_leaves_no_half_file(tmp_path, path) -> None:
    with pytest.raises(InputError, match="can't write the plan"):
        save_plan(load_plan(path), tmp_path / "nowhere" / "b.plan")

    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.plan"]
