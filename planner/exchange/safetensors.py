"""safetensors checkpoints: their headers, and the index over several files, as one side's layout.

Rule: only headers are read, never data. Each file lies on one rank: file i of the index, by name, on rank i unless told
otherwise.
"""

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from shardroute.planner.exchange.inventories import Inventory
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.shares import Told, parts
from shardroute.topologies.documents import convert, decode_json
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import opened, read_file

# A header is 8 bytes of length, little-endian, then JSON; the format's own reader refuses one above this (tensor.rs).
_MAX_HEADER_BYTES: Final = 100_000_000
_INDEX: Final = "model.safetensors.index.json"
# The share of reading headers, once the index is read: 60 of 5,000 tensors each.
_READ: Final = 0.75


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_safetensors_header(path: str | Path) -> tuple[Tensor, ...]:
    """The tensors of one file by their header, in name order. Raises InputError for a file that isn't what its header says.

    A file may also end after its header: headers can be had alone, without the terabytes behind them.
    """
    path = Path(path)
    with opened(path) as file:
        n_bytes = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
        text = file.read(length) if 0 <= length <= _MAX_HEADER_BYTES else b""
    if len(text) != length:
        raise InputError(f"{path.name}: no safetensors header (8 bytes of length, then as many of JSON)")
    header = decode_json(text, f"{path.name}: header")
    if not isinstance(header, dict):
        raise InputError(f"{path.name}: header: expected a JSON object")
    header.pop("__metadata__", None)
    found, places = [], []
    for name, data in sorted(header.items()):
        entry = convert(data, _Entry, f"{path.name}: {name}")
        tensor = Tensor(name, tuple(entry.shape), entry.dtype)
        first, last = entry.data_offsets
        if last - first != tensor.n_bytes:
            raise InputError(f"{path.name}: {name} takes {last - first} bytes, but its shape and dtype take {tensor.n_bytes}")
        found.append(tensor)
        places.append((first, last, name))
    at, n_data = 0, n_bytes - len(start) - length
    for first, last, name in sorted(places):
        if first < at or 0 < n_data < last:
            what = "overlaps another tensor, or starts before the data" if first < at else "ends after the file"
            raise InputError(f"{path.name}: {name} lies at bytes {first} to {last} of the data, which {what}")
        at = last
    return tuple(found)


def load_safetensors(
    path: str | Path, ranks: Mapping[str, int] | None = None, progress: Told | None = None
) -> Inventory:
    """The layout of a checkpoint: a folder, its index file, or one file. `ranks` says which rank has a file, by file name.
    progress is told the share that is done.

    Every tensor lies whole in a buffer of its own on the rank of its file. Raises InputError for an index that names a file or a
    tensor that isn't there, and for a file that `ranks` leaves out.
    """
    path = Path(path)
    if os.path.isdir(path):  # False, too, for names that no folder can have
        path = path / _INDEX if (path / _INDEX).exists() else path / "model.safetensors"
    if path.suffix != ".json":
        return _on_ranks({path.name: read_safetensors_header(path)}, ranks)
    weight_map = convert(decode_json(read_file(path, _MAX_HEADER_BYTES), path.name), _Index, path.name).weight_map
    files: dict[str, tuple[Tensor, ...]] = {}
    listed_in: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        listed_in.setdefault(file, []).append(name)
    reading, laying = parts(progress, (_READ, 1.0 - _READ))
    told = parts(reading, [len(listed_in[file]) for file in sorted(listed_in)])
    for file, done in zip(sorted(listed_in), told, strict=True):
        held = {tensor.name: tensor for tensor in read_safetensors_header(path.parent / file)}
        listed = sorted(listed_in[file])
        for name in listed:
            if name not in held:
                raise InputError(f"{path.name}: weight_map.{name}: {file} has no tensor of that name")
        files[file] = tuple(held[name] for name in listed)
        done(1.0)
    found = _on_ranks(files, ranks)
    laying(1.0)
    return found


def _on_ranks(files: Mapping[str, tuple[Tensor, ...]], ranks: Mapping[str, int] | None) -> Inventory:
    where = {file: rank for rank, file in enumerate(files)} if ranks is None else ranks
    tensors: list[Tensor] = []
    fragments: list[Fragments] = []
    placed: dict[tuple[tuple[int, ...], int], Fragments] = {}  # checkpoints have 100,000 tensors, of few shapes
    for file, held in files.items():
        if file not in where:
            raise InputError(f"{file}: no rank is given for it; `ranks` names {', '.join(sorted(where)) or 'no file'}")
        for tensor in held:
            tensors.append(tensor)
            key = tensor.shape, where[file]
            if key not in placed:
                shape = np.array([tensor.shape], dtype=np.int64).reshape(1, len(tensor.shape))
                placed[key] = Fragments.dense(tensor.shape, [where[file]], np.zeros_like(shape), shape)
            fragments.append(placed[key])
    return Inventory(tuple(tensors), Layout(tuple(fragments), tuple((tensor.name,) for tensor in tensors)))
