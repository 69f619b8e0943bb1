"""Layout files: what is written comes back, and what is wrong is named by the path of its key."""

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings

from shardroute.planner.exchange import Inventory, layout_schema, load_layout, parse_layout, save_layout
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.overlaps import overlap
from shardroute.planner.layouts.placements import Replicate, Shard
from shardroute.planner.testing import fused_problems, tensor_problems
from shardroute.topologies.errors import InfeasibleError, InputError


def document(**changes):
    rows = {"name": "rows", "mesh": {"axes": ["dp", "tp"], "sizes": [2, 2], "ranks": [4, 5, 6, 7]}, "placements": ["R", "S0"]}
    fragment = {"rank": 1, "lo": [0, 0], "hi": [2, 3], "offset": 6, "buffer_size": 12}
    return {
        "format": "shardroute-layout",
        "version": 1,
        "layouts": [rows],
        "tensors": [
            {"name": "w", "shape": [8, 3], "dtype": "bf16", "layout": "rows"},
            {"name": "q", "shape": [2, 3], "dtype": "bf16", "buffers": ["qkv"], "layout": {"fragments": [fragment]}},
        ],
        "aliases": [{"buffer": "qkv", "memory": "pool"}],
    } | changes


def test_a_document_gives_the_fragments_that_it_says() -> None:
    found = parse_layout(document())

    assert found.layout.fragments[0] == place((8, 3), Mesh.of({"dp": 2, "tp": 2}, range(4, 8)), [Replicate(), Shard(0)])
    q = found.layout.fragments[1]
    assert (q.strides.tolist(), q.offset.tolist(), q.buffer_size.tolist()) == ([[3, 1]], [6], [12])
    assert found.layout.buffers == (("w",), ("qkv",))
    assert found.aliases == {"qkv": "pool"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=tensor_problems() | fused_problems())
def test_a_saved_layout_comes_back_equal(problem, tmp_path) -> None:
    inventory = Inventory(problem.tensors, problem.target, {problem.target.buffers[0][0]: "m"})

    save_layout(inventory, tmp_path / "a.json")

    assert load_layout(tmp_path / "a.json") == inventory


def test_tensors_that_name_one_layout_share_its_fragments() -> None:
    tensors = [{"name": n, "shape": [8, 3], "dtype": "bf16", "layout": "rows"} for n in "ab"]

    found = parse_layout(document(tensors=tensors, aliases=[]))

    assert found.layout.fragments[0] is found.layout.fragments[1]


def with_tensor(**changes):
    return document(tensors=[document()["tensors"][0] | changes], aliases=[])


def with_fragment(**changes):
    return with_tensor(shape=[2, 3], layout={"fragments": [{"rank": 1, "lo": [0, 0], "hi": [2, 3]} | changes]})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (document(version=2), "version: this shardroute reads version 1, found 2"),
        (document(format="other"), "format: expected one of shardroute-layout, found 'other'"),
        (document(tensor=[]), "tensor: unknown key; expected one of format, version, tensors"),
        (with_tensor(shape=[8, -1]), r"tensors\[0\].shape\[1\]: .*>= 0.*found -1"),
        (with_tensor(shape="8"), r"tensors\[0\].shape: expected a list, found '8'"),
        (with_tensor(dtype="f7"), "layouts\\[0\\] of tensor w: dtype 'f7' is not known"),
        (with_tensor(layout="columns"), r"tensors\[0\].layout: no layout is called 'columns'; `layouts` has rows"),
        (with_tensor(layout={}), r"tensors\[0\].layout of tensor w: expected a mesh with placements, or fragments"),
        (with_tensor(shape=[]), r"layouts\[0\] of tensor w: placement S0 on axis tp: .* is a scalar"),
        (with_fragment(rank=-1), r"tensors\[0\].layout.fragments\[0\].rank"),
        (with_fragment(lo=[0]), r"fragments\[0\].lo: 1 numbers, but the tensor has 2 dims"),
        (with_fragment(hi=[2, 4]), r"layout of tensor w: fragment 0 of rank 1: box \[0:2, 0:4\].* leaves the tensor"),
        (with_fragment(buffer_size=5), "reaches elements 0 to 5 of a buffer of 5"),
        (with_fragment(buffer=1), "uses buffer 1, but the tensor names only"),
        (with_fragment(strides=[2**59, 1]), r"tensor w: fragment 0 of rank 1: .* reach over 2\^59"),
        (document(layouts=[{}]), r"layouts\[0\].name: expected a name"),
        (document(aliases=[{"buffer": "b", "memory": "m"}]), "alias of buffer b: no tensor has a buffer of that name"),
        ([], "expected a table"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(data, message) -> None:
    with pytest.raises(InputError, match=message):
        parse_layout(data)


def test_a_partial_layout_is_infeasible_with_the_tensor_named() -> None:
    mesh = {"axes": ["tp"], "sizes": [2]}

    with pytest.raises(InfeasibleError, match=r"tensors\[0\].layout of tensor w: axis tp is P\(sum\)"):
        parse_layout(with_tensor(layout={"mesh": mesh, "placements": ["P(sum)"]}))


def fused(dtype="bf16", size=24):
    q, k = ({"rank": 0, "lo": [0], "hi": [8], "offset": at, "buffer_size": n} for at, n in ((0, 24), (8, size)))
    return [
        {"name": "q", "shape": [8], "dtype": "bf16", "buffers": ["qkv"], "layout": {"fragments": [q]}},
        {"name": "k", "shape": [8], "dtype": dtype, "buffers": ["qkv"], "layout": {"fragments": [k]}},
    ]


def test_tensors_of_one_buffer_must_agree_on_it() -> None:
    with pytest.raises(InputError, match="buffer qkv: bf16 for tensor q, f32 for k"):
        parse_layout(document(tensors=fused("f32"), aliases=[]))
    with pytest.raises(InputError, match="buffer qkv of rank 0: 24 elements for tensor q, 25 for k"):
        parse_layout(document(tensors=fused(size=25), aliases=[]))


def test_a_file_that_is_no_json_is_named(tmp_path) -> None:
    (tmp_path / "a.json").write_text("{")

    with pytest.raises(InputError, match=r"a.json: expected JSON"):
        load_layout(tmp_path / "a.json")
    with pytest.raises(InputError, match=r"b.json: can't be read"):
        load_layout(tmp_path / "b.json")


def test_the_schema_names_every_key_of_a_tensor() -> None:
    schema = json.loads(json.dumps(layout_schema()))

    assert set(schema["$defs"]["TensorEntry"]["properties"]) == {"name", "shape", "dtype", "layout", "buffers"}
    assert schema["$defs"]["FragmentEntry"]["required"] == ["rank", "lo", "hi"]


def test_a_layout_nested_too_deeply_is_refused(tmp_path) -> None:
    path = tmp_path / "l.json"
    path.write_bytes(b"[" * 100_000 + b"]" * 100_000)

    with pytest.raises(InputError, match=r"l\.json: expected JSON"):
        load_layout(path)


@pytest.mark.parametrize("name", ["nowhere/l.json", ".", "", "n" * 400, "a\0b"])
def test_a_path_that_cannot_be_written_or_read_is_refused(tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(InputError, match="can't write the layout to"):
        save_layout(parse_layout(document()), name)
    with pytest.raises(InputError, match="can't be read"):
        load_layout(name)


def test_a_pipe_is_refused_before_it_can_block(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(InputError, match="it is a pipe or socket, expected a file"):
        load_layout(tmp_path / "pipe")


def test_a_tensor_that_no_rank_needs_moves_nowhere() -> None:
    held = parse_layout(document())
    empty = {"name": "w", "shape": [8, 3], "dtype": "bf16", "layout": {"fragments": []}}
    needed = parse_layout(document(tensors=[empty], aliases=[]))

    source, target = (side.layout.fragments[0] for side in (held, needed))

    assert len(overlap(source, target)) == 0
    with pytest.raises(InfeasibleError, match="no source rank holds it"):
        overlap(target, source)


def test_a_rank_above_the_most_that_are_accepted_is_named_by_its_key() -> None:
    with pytest.raises(InputError, match=r"layouts\[0\].mesh.ranks\[0\]: .*2147483647"):
        parse_layout(document(layouts=[{"name": "rows", "mesh": {"axes": ["x"], "sizes": [1], "ranks": [2**31 - 1]}}]))
