"""Layouts from and to frameworks, on plain recorded data; tests/test_torch_exchange.py has the frameworks' own objects."""

import json
import pickle
import struct

import numpy as np
import pytest

from shardroute.planner.exchange import (
    Sharding,
    StoredChunk,
    StoredTensor,
    from_partition_spec,
    from_torch_placements,
    inventory_of,
    inventory_of_checkpoint,
    load_safetensors,
    problem_between,
    to_torch,
)
from shardroute.planner.layouts.meshes import Mesh
from shardroute.planner.layouts.placements import Partial, Replicate, Shard, StridedShard
from shardroute.planner.layouts.tensors import Tensor
from shardroute.topologies.errors import InfeasibleError, InputError


def boxes(fragments):
    rows = zip(fragments.rank.tolist(), fragments.lo.tolist(), fragments.hi.tolist(), strict=True)
    return {rank: (lo, hi) for rank, lo, hi in rows}


def test_torch_placements_are_read_from_their_text() -> None:
    texts = ["R", "S(0)", "S(-1)", "_S(0, 4)", "P(sum)"]  # str() of torch 2.13's placements

    found = from_torch_placements(texts, n_dims=3)

    assert found == (Replicate(), Shard(0), Shard(2), StridedShard(0, 4), Partial("sum"))


def test_a_sharding_becomes_arguments_for_torch() -> None:
    mesh = Mesh.of({"dp": 2, "tp": 2}, [0, 2, 1, 3])

    found = to_torch(Sharding(mesh, (Shard(0), Shard(0)), ("tp", "dp")))

    assert (found.mesh, found.mesh_dim_names) == ([[0, 2], [1, 3]], ("dp", "tp"))
    assert (found.placements, found.shard_order) == ((("S", 0), ("S", 0)), ((0, (1, 0)),))
    assert to_torch(Sharding(mesh, (StridedShard(0, 2), Partial()))).placements == (("_S", 0, 2), ("P", "sum"))


def test_a_partition_spec_splits_a_dim_by_the_first_axis_first() -> None:
    found = from_partition_spec((8, 4), {"x": 2, "y": 2}, [("y", "x"), None], device_ids=[3, 2, 1, 0])

    # Device 3 is (x, y) = (0, 0), 2 is (0, 1), 1 is (1, 0), 0 is (1, 1); block = 2 * y + x.
    assert {rank: lo[0] for rank, (lo, _) in boxes(found.fragments((8, 4))).items()} == {3: 0, 1: 2, 2: 4, 0: 6}


def test_axes_that_a_partition_spec_leaves_out_replicate() -> None:
    found = from_partition_spec((8,), {"x": 2, "y": 2}, ["y"])

    assert found == Sharding(Mesh.of({"x": 2, "y": 2}), (Replicate(), Shard(0)), ("y", "x"))


@pytest.mark.parametrize(
    ("shape", "spec", "message"),
    [
        ((6,), [("x", "y")], "needs dim 0 of shape \\(6,\\) to divide by 4"),
        ((8, 8), ["x", "x"], "axis 'x' is used twice"),
        ((8,), ["z"], "axis 'z' isn't in mesh x=2,y=2"),
        ((8,), [None, "x"], "has 2 entries, but shape"),
        ((8,), [object()], "says nothing about where it lies"),
    ],
)
def test_what_jax_refuses_is_refused(shape, spec, message) -> None:
    with pytest.raises(InputError, match=message):
        from_partition_spec(shape, {"x": 2, "y": 2}, spec)


CHECKPOINT = (
    StoredTensor("step", (), "torch.int64", (StoredChunk((), (), "__0_0.distcp"),)),
    StoredTensor(
        "w",
        (4, 6),
        "torch.bfloat16",
        (
            StoredChunk((0, 0), (2, 6), "__0_0.distcp"),
            StoredChunk((2, 0), (1, 6), "__1_0.distcp"),
            StoredChunk((3, 0), (1, 6), "__1_1.distcp"),
        ),
    ),
)


def test_chunks_of_a_checkpoint_lie_on_the_rank_that_wrote_them() -> None:
    found = inventory_of_checkpoint(pickle.loads(pickle.dumps(CHECKPOINT)))

    w = found.layout.fragments[1]
    assert (w.rank.tolist(), w.lo[:, 0].tolist(), w.buffer.tolist()) == ([0, 1, 1], [0, 2, 3], [0, 0, 1])
    assert found.layout.buffers == (("step",), ("w", "w#1"))
    assert [tensor.dtype for tensor in found.tensors] == ["i64", "bf16"]


def test_chunks_of_a_checkpoint_lie_where_they_are_told_to() -> None:
    found = inventory_of_checkpoint(CHECKPOINT, {"__0_0.distcp": 4, "__1_0.distcp": 4, "__1_1.distcp": 2})

    assert found.layout.fragments[1].rank.tolist() == [4, 4, 2]


def test_a_checkpoint_file_of_no_known_rank_is_named() -> None:
    stored = StoredTensor("w", (1,), "f32", (StoredChunk((0,), (1,), "model.bin"),))

    with pytest.raises(InputError, match=r"w: the rank of file 'model.bin' isn't known"):
        inventory_of_checkpoint([stored])


def write_safetensors(path, tensors) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, n_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)  # no data: only headers are read


def test_a_safetensors_index_gives_each_file_to_a_rank(tmp_path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"x": ("BF16", [2, 3], 12), "scale": ("F8_E8M0", [], 1)})
    write_safetensors(tmp_path / "b.safetensors", {"y": ("F32", [5], 20)})
    weight_map = {"x": "a.safetensors", "scale": "a.safetensors", "y": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    found = load_safetensors(tmp_path)
    told = load_safetensors(tmp_path, {"a.safetensors": 3, "b.safetensors": 3})

    shapes = {tensor.name: (tensor.shape, tensor.dtype) for tensor in found.tensors}
    assert shapes == {"scale": ((), "f8_e8m0"), "x": ((2, 3), "bf16"), "y": ((5,), "f32")}
    assert [f.rank.tolist() for f in found.layout.fragments] == [[0], [0], [1]]
    assert told.layout.ranks.tolist() == [3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x01", "no safetensors header"),
        (struct.pack("<Q", 2**40) + b"{}", "no safetensors header"),
        (struct.pack("<Q", 2) + b"[]", "header: expected a JSON object"),
        (struct.pack("<Q", 20) + b'{"x": {"dtype": "F32"', "header: expected JSON"),
    ],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path, content, message) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)

    with pytest.raises(InputError, match=rf"m.safetensors: .*{message}"):
        load_safetensors(path)


def test_a_safetensors_header_that_contradicts_itself_is_refused(tmp_path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"x": ("F32", [5], 4)})

    with pytest.raises(InputError, match="x takes 4 bytes, but its shape and dtype take 20"):
        load_safetensors(tmp_path / "m.safetensors")


def side(shape=(8,), dtype="bf16", ranks=(0, 1), names=("w",)):
    sharding = Sharding(Mesh.of({"x": len(ranks)}, ranks), (Shard(0),))
    return inventory_of([(Tensor(name, shape, dtype), sharding) for name in names])


def test_two_sides_join_by_name_and_what_only_the_source_has_is_left_out() -> None:
    problem = problem_between(side(names=("a", "b", "c")), side(names=("c", "a"), ranks=(5, 4)))

    assert [tensor.name for tensor in problem.tensors] == ["c", "a"]
    assert problem.n_ranks == 6
    assert np.shares_memory(problem.source.fragments[0].lo, problem.source.fragments[1].lo)


def test_two_sides_that_disagree_are_refused_by_name() -> None:
    with pytest.raises(InfeasibleError, match="the source has no tensor b"):
        problem_between(side(), side(names=("w", "b")))
    with pytest.raises(InputError, match=r"w: shape \(8,\) in the source, \(9,\)"):
        problem_between(side(), side((9,)))
    with pytest.raises(InputError, match="w: bf16 in the source, f32 in the destination"):
        problem_between(side(), side(dtype="f32"))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ({"x": [0, 4], "y": [2, 6]}, "y lies at bytes 2 to 6 of the data, which overlaps"),
        ({"x": [-4, 0], "y": [0, 4]}, "x lies at bytes -4 to 0 of the data, which overlaps another tensor, or starts before"),
        ({"x": [0, 4], "y": [2**40, 2**40 + 4]}, "which ends after the file"),
    ],
)
def test_tensors_lie_apart_and_inside_their_safetensors_file(tmp_path, offsets, message) -> None:
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": pair} for name, pair in offsets.items()}
    text = json.dumps(header).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))

    with pytest.raises(InputError, match=message):
        load_safetensors(tmp_path / "m.safetensors")


@pytest.mark.parametrize("name", ["n" * 400, "a\0b"])
def test_an_index_may_name_files_that_no_file_can_be_called(tmp_path, name) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))

    with pytest.raises(InputError, match="can't be read"):
        load_safetensors(tmp_path)


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (StoredChunk((0,), (1,), "__0_0.distcp"), r"w: offsets \[0\] of a chunk"),
        (StoredChunk((0, 0), (2**63, 1), "__0_0.distcp"), r"w: sizes \[9223372036854775808, 1\]"),
        (StoredChunk((0, 0), (1, 1), "__99999999999_0.distcp"), "rank 99999999999 of file"),
        (StoredChunk((0, 0), (9, 1), "__0_0.distcp"), "w: .* leaves the tensor"),
    ],
)
def test_a_chunk_that_is_no_box_of_its_tensor_is_refused(chunk, message) -> None:
    with pytest.raises(InputError, match=message):
        inventory_of_checkpoint([StoredTensor("w", (4, 6), "f32", (chunk,))])


def test_many_chunks_of_one_tensor_are_numbered_rank_by_rank() -> None:
    n = 30_000
    chunks = tuple(StoredChunk((i,), (1,), f"__{i % 2}_{i}.distcp") for i in range(n))

    found = inventory_of_checkpoint([StoredTensor("w", (n,), "f32", chunks)])

    assert found.layout.fragments[0].buffer.tolist() == [i // 2 for i in range(n)]
