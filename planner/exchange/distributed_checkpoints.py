"""torch.distributed.checkpoint (DCP): what a checkpoint's metadata says of its tensors, as plain data and as one side's layout.

Rule: torch is never imported. `describe_checkpoint` reads the Metadata object that the caller got from torch
(`FileSystemReader(folder).read_metadata()`); its result is plain, so it can be saved and read where torch is absent.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from shardroute.planner.exchange.inventories import Inventory
from shardroute.planner.layouts.fragments import MAX_ELEMENTS, Fragments, Ints, Ranks, check_shape
from shardroute.planner.layouts.notation import MAX_RANKS
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.topologies.errors import InputError

_WRITTEN_BY: Final = re.compile(r"__(\d{1,18})_\d+\.distcp")  # torch's FileSystemWriter: __RANK_FILE.distcp


class MetadataLike(Protocol):
    """What is read of a torch.distributed.checkpoint.metadata.Metadata."""

    @property
    def state_dict_metadata(self) -> Mapping[str, object]:
        """Tensors have `size`, `properties.dtype` and `chunks` with `offsets` and `sizes`; other entries have none of them."""

    @property
    def storage_data(self) -> object:
        """A mapping from an index with `fqn` and `offset` to where that chunk lies, with `relative_path`."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor, and the file that it lies in."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint with its chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[StoredChunk, ...]


def describe_checkpoint(metadata: MetadataLike) -> tuple[StoredTensor, ...]:
    """The tensors of a checkpoint in name order; entries that aren't tensors are left out.

    Raises InputError for a chunk whose file the metadata doesn't name.
    """
    files: dict[tuple[str, tuple[int, ...]], str] = {}
    if isinstance(metadata.storage_data, Mapping):
        for index, info in metadata.storage_data.items():
            offset = getattr(index, "offset", None)
            files[str(getattr(index, "fqn", "")), _ints(offset or ())] = str(getattr(info, "relative_path", ""))
    found = []
    for name, entry in sorted(metadata.state_dict_metadata.items()):
        chunks = getattr(entry, "chunks", None)
        if chunks is None:
            continue
        stored = []
        for chunk in chunks:
            offsets = _ints(chunk.offsets)
            if (name, offsets) not in files:
                raise InputError(f"checkpoint: {name}: the metadata names no file for the chunk at {list(offsets)}")
            stored.append(StoredChunk(offsets, _ints(chunk.sizes), files[name, offsets]))
        shape, properties = getattr(entry, "size", ()), getattr(entry, "properties", None)
        found.append(StoredTensor(name, _ints(shape), str(getattr(properties, "dtype", None)), tuple(stored)))
    return tuple(found)


def inventory_of_checkpoint(stored: Sequence[StoredTensor], ranks: Mapping[str, int] | None = None) -> Inventory:
    """The layout of a checkpoint: each chunk dense in a buffer of its own on the rank of its file.

    `ranks` says which rank has a file, by its name; without it, the rank that wrote it (`__3_0.distcp` is rank 3's). Raises
    InputError for a file whose rank isn't known, and for a chunk that isn't a box of its tensor.
    """
    tensors: list[Tensor] = []
    fragments: list[Fragments] = []
    buffers: list[tuple[str, ...]] = []
    for entry in stored:
        lo, hi = _corners(entry)
        filled = (hi > lo).all(axis=1)
        rank = np.array([_rank_of(chunk.file, entry.name, ranks) for chunk in entry.chunks], dtype=np.int32)[filled]
        try:
            boxes = Fragments.dense(entry.shape, rank, lo[filled], hi[filled])
        except InputError as error:
            raise InputError(f"checkpoint: {entry.name}: {error}") from None
        number = _number_of_rank(rank)
        tensors.append(Tensor(entry.name, entry.shape, entry.dtype))
        fragments.append(
            Fragments(
                boxes.shape, boxes.rank, boxes.lo, boxes.hi, number, boxes.offset, boxes.strides,
                boxes.buffer_size,
            )
        )  # fmt: skip
        names = [entry.name, *(f"{entry.name}#{i}" for i in range(1, int(number.max(initial=0)) + 1))]
        buffers.append(tuple(names))
    return Inventory(tuple(tensors), Layout(tuple(fragments), tuple(buffers)))


def _corners(entry: StoredTensor) -> tuple[Ints, Ints]:
    """The boxes of a tensor's chunks, int64[n_chunks, n_dims] twice."""
    check_shape(entry.shape)
    for chunk in entry.chunks:
        for name, values in (("offsets", chunk.offsets), ("sizes", chunk.sizes)):
            if len(values) != len(entry.shape) or any(not 0 <= n < MAX_ELEMENTS for n in values):
                raise InputError(f"checkpoint: {entry.name}: {name} {list(values)} of a chunk of a tensor of shape {entry.shape}")
    table = np.array([(chunk.offsets, chunk.sizes) for chunk in entry.chunks], dtype=np.int64)
    lo, sizes = table.reshape(len(entry.chunks), 2, len(entry.shape)).swapaxes(0, 1)
    return lo, lo + sizes


def _number_of_rank(rank: Ranks) -> Ranks:
    """For each entry, how many before it are of the same rank."""
    order = np.argsort(rank, kind="stable")
    first = np.searchsorted(rank[order], rank[order])
    number = np.empty_like(rank)
    number[order] = np.arange(len(rank)) - first
    return number


def _rank_of(file: str, name: str, ranks: Mapping[str, int] | None) -> int:
    written = _WRITTEN_BY.fullmatch(file)
    rank = ranks.get(file) if ranks is not None else int(written[1]) if written is not None else None
    if rank is not None and not 0 <= rank < MAX_RANKS:
        raise InputError(f"checkpoint: {name}: rank {rank} of file {file!r}; expected 0 to {MAX_RANKS - 1}")
    if rank is not None:
        return rank
    raise InputError(f"checkpoint: {name}: the rank of file {file!r} isn't known; name it in `ranks`")


def _ints(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
