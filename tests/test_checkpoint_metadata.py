"""The `.metadata` of a torch.distributed.checkpoint, read instruction by instruction and never unpickled."""

import os
import pickle
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.exchange import describe_checkpoint, read_checkpoint_metadata, read_inventory
from shardroute.topologies.errors import InputError


def sharded(n_ranks: int = 4):
    """Metadata of a [8, 6] weight by rows over ranks and of a bias on rank 0, of torch's own classes."""
    torch = pytest.importorskip("torch")
    metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    rows = 8 // n_ranks
    chunks = [metadata.ChunkStorageMetadata(torch.Size([rows * r, 0]), torch.Size([rows, 6])) for r in range(n_ranks)]
    properties = metadata.TensorProperties(dtype=torch.bfloat16)
    bias = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([6]))
    places = {("w", r): (f"__{r}_0.distcp", torch.Size([rows * r, 0])) for r in range(n_ranks)}
    places["b", 0] = ("__0_0.distcp", torch.Size([0]))
    return metadata.Metadata(
        state_dict_metadata={
            "w": metadata.TensorStorageMetadata(properties, torch.Size([8, 6]), chunks),
            "b": metadata.TensorStorageMetadata(metadata.TensorProperties(dtype=torch.float32), torch.Size([6]), [bias]),
            "lr": metadata.BytesStorageMetadata(),
        },
        storage_data={
            metadata.MetadataIndex(name, offset): filesystem._StorageInfo(file, 0, 10)
            for (name, _), (file, offset) in places.items()
        },
    )


def write(folder: Path, data: bytes) -> Path:
    (folder / ".metadata").write_bytes(data)
    return folder


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_it_says_what_torchs_own_object_says_whatever_the_pickles_protocol(tmp_path, protocol: int) -> None:
    metadata = sharded()

    stored = read_checkpoint_metadata(write(tmp_path, pickle.dumps(metadata, protocol)))

    assert stored == describe_checkpoint(metadata)
    assert [tensor.name for tensor in stored] == ["b", "w"]
    assert [chunk.offsets for chunk in stored[1].chunks] == [(0, 0), (2, 0), (4, 0), (6, 0)]


def test_a_folder_of_a_checkpoint_is_a_layout_with_each_chunk_on_the_rank_that_wrote_it(tmp_path) -> None:
    inventory = read_inventory(write(tmp_path, pickle.dumps(sharded())))

    weight = next(i for i, tensor in enumerate(inventory.tensors) if tensor.name == "w")
    assert inventory.tensors[weight].dtype == "bf16"
    assert inventory.layout.fragments[weight].rank.tolist() == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch 2.6, of its own use
def test_a_checkpoint_that_torch_saved_is_read(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = {"a": {"w": torch.zeros(3, 5)}, "n": torch.tensor(1), "lr": 0.1}

    with pytest.warns(UserWarning, match="torch.distributed is"):
        dcp.save(state, checkpoint_id=str(tmp_path))

    assert [(tensor.name, tensor.shape) for tensor in read_checkpoint_metadata(tmp_path)] == [("a.w", (3, 5)), ("n", ())]


class Malicious:
    """An object whose pickle would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_what_a_pickle_would_run_does_not_run(tmp_path) -> None:
    data = pickle.dumps({"x": Malicious(tmp_path / "made")})

    with pytest.raises(InputError, match="expected torch's Metadata, found dict"):
        read_checkpoint_metadata(write(tmp_path, data))

    assert not (tmp_path / "made").exists()
    pickle.loads(data)
    assert (tmp_path / "made").exists()  # so the pickle was one that runs


@pytest.mark.parametrize("data", [b"", b"hello", b"\x80\x04.", pickle.dumps([1]), b"\x80\x04cos\nsystem\n.", b"\x80\x04K\x01Q."])
def test_what_is_no_metadata_is_refused_by_the_files_name(tmp_path, data: bytes) -> None:
    with pytest.raises(InputError, match=r"\.metadata: "):
        read_checkpoint_metadata(write(tmp_path, data))


# A tuple in a tuple, deeper than the stack; and one that holds one twice that holds one twice, to 2^60.
DEEP = b")" + b"\x85" * 300_000
DOUBLED = b")" + b"".join(b"\x940h" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))


@pytest.mark.parametrize("nested", [DEEP, DOUBLED])
def test_a_nested_tuple_is_never_hashed_nor_made_text(tmp_path, nested: bytes) -> None:
    as_key = b"\x80\x04}" + nested + b"K\x01s."
    as_name = b"\x80\x04" + nested + b"\x8c\x01x\x93."

    with pytest.raises(InputError, match="a tuple is a key"):
        read_checkpoint_metadata(write(tmp_path, as_key))
    with pytest.raises(InputError, match="expected text, found tuple"):
        read_checkpoint_metadata(write(tmp_path, as_name))


@given(st.data())
def test_a_damaged_file_is_refused_in_words_or_read(tmp_path_factory, data) -> None:
    whole = bytearray(pickle.dumps(sharded(2)))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")

    path = write(folder, bytes(whole[: data.draw(st.integers(at, len(whole)))]))

    with suppress(InputError):  # any other exception fails the test
        read_checkpoint_metadata(path)
