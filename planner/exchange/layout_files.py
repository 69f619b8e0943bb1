"""The plain JSON of one side's layout, for frameworks that have no other words: schema, loading, saving.

    {"format": "shardroute-layout", "version": 1,
     "layouts": [{"name": "rows", "mesh": {"axes": ["dp", "tp"], "sizes": [2, 4]}, "placements": ["R", "S0"]}],
     "tensors": [{"name": "w", "shape": [8, 8], "dtype": "bf16", "layout": "rows"},
                 {"name": "q", "shape": [4, 8], "dtype": "bf16", "buffers": ["qkv"],
                  "layout": {"fragments": [{"rank": 0, "lo": [0, 0], "hi": [4, 8], "offset": 16, "buffer_size": 64}]}}]}

A rank is the same GPU in the source's and the destination's file.
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from shardroute.planner.exchange.inventories import Inventory
from shardroute.planner.layouts.fragments import MAX_ELEMENTS, Fragments, Ints, check_shape, dense_strides
from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.notation import MAX_RANKS
from shardroute.planner.layouts.placements import parse_placement
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.shares import Told, parts
from shardroute.topologies.documents import convert, decode_json
from shardroute.topologies.errors import InputError, ShardrouteError
from shardroute.topologies.files import read_file, write_file

VERSION: Final = 1
# A hundred times what the largest model takes, every rank of 1,000 listed; reading takes some ten times as much memory.
MAX_BYTES: Final = 2**28
# Of all distinct layouts together: one line can stand for a mesh of a million. A hundred over 16,384 ranks are 1.6 million.
MAX_BOXES: Final = 2**22
# The share of decoding in loading, and what its parts take after that: converting, placing boxes, and looking at all of them.
_DECODED: Final = 0.5
# The share of listing boxes in saving.
_LISTED: Final = 0.5
_PARSING: Final = (0.3, 0.5, 0.2)

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_ELEMENTS)]
_Stride = Annotated[int, msgspec.Meta(ge=-MAX_ELEMENTS, le=MAX_ELEMENTS)]
_Rank = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)]


class Format(StrEnum):
    """What a file calls itself."""

    LAYOUT = "shardroute-layout"


class MeshEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Ranks, row-major over named axes; they count from 0 when none are given."""

    axes: list[str]
    sizes: list[_Size]
    ranks: list[_Rank] | None = None


class FragmentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The box [lo, hi) of the tensor on a rank, and its place in one of the tensor's buffers there; all in elements.

    buffer       an index into the tensor's `buffers`
    offset       where element `lo` lies in the buffer
    strides      distance between neighbours along each dim; default: row-major and dense
    buffer_size  the whole buffer's length; default: the box's
    """

    rank: _Rank
    lo: list[_Count]
    hi: list[_Count]
    buffer: _Rank = 0
    offset: _Count = 0
    strides: list[_Stride] | None = None
    buffer_size: _Count | None = None


class LayoutEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a tensor lies: a mesh with placements, or fragments.

    name        what tensors call it by, in the file's `layouts`
    placements  one an axis of the mesh: R, S0 (shard dim 0), SS0:4 (dim 0 strided, split factor 4)
    order       the axes in the order in which they split; default: the mesh's
    """

    name: str | None = None
    mesh: MeshEntry | None = None
    placements: list[str] | None = None
    order: list[str] | None = None
    fragments: list[FragmentEntry] | None = None


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor, the layout that it has (by name, or here), and the names of its buffers; default: one with the tensor's name."""

    name: str
    shape: list[_Count]
    dtype: str
    layout: str | LayoutEntry
    buffers: list[str] | None = None


class AliasEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory that a buffer lies in. A source and a destination buffer of one memory on one rank are the same bytes."""

    buffer: str
    memory: str


class LayoutDocument(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One side of a transfer: its tensors and what every rank holds of them."""

    format: Format
    version: int
    tensors: list[TensorEntry]
    layouts: list[LayoutEntry] = []
    aliases: list[AliasEntry] = []


def layout_schema() -> dict[str, object]:
    """The JSON Schema of a layout file."""
    schema: dict[str, object] = msgspec.json.schema(LayoutDocument)
    return schema


def load_layout(path: str | Path, progress: Told | None = None) -> Inventory:
    """The inventory in a layout file; progress is told the share that is done. Raises InputError led by the file's name
    and the path of the key that is wrong.
    """
    path = Path(path)
    decoded, parsed = parts(progress, (_DECODED, 1.0 - _DECODED))
    data = decode_json(read_file(path, MAX_BYTES), path.name)
    decoded(1.0)
    return parse_layout(data, path.name, parsed)


def parse_layout(data: object, where: str = "layout", progress: Told | None = None) -> Inventory:
    """The inventory that plain data says, as `load_layout` has it; `where` leads every message. progress is told the share."""
    if isinstance(data, Mapping) and data.get("version", VERSION) != VERSION:
        raise InputError(f"{where}: version: this shardroute reads version {VERSION}, found {data['version']!r}")
    converting, placing, joining = parts(progress, _PARSING)
    document = convert(data, LayoutDocument, where)
    converting(1.0)
    named: dict[str, tuple[str, LayoutEntry]] = {}
    for i, entry in enumerate(document.layouts):
        if entry.name is None or entry.name in named:
            raise InputError(f"{where}: layouts[{i}].name: expected a name that no other layout has, found {entry.name!r}")
        named[entry.name] = (f"layouts[{i}]", entry)
    tensors: list[Tensor] = []
    fragments: list[Fragments] = []
    placed: dict[tuple[str, tuple[int, ...]], Fragments] = {}
    n_boxes = 0
    for i, tensor in enumerate(document.tensors):
        shape = tuple(tensor.shape)
        if isinstance(tensor.layout, str) and tensor.layout not in named:
            known = ", ".join(named) or "none"
            raise InputError(f"{where}: tensors[{i}].layout: no layout is called {tensor.layout!r}; `layouts` has {known}")
        inline = f"tensors[{i}].layout"
        at, entry = named[tensor.layout] if isinstance(tensor.layout, str) else (inline, tensor.layout)
        try:
            tensors.append(Tensor(tensor.name, shape, tensor.dtype))
            if (at, shape) not in placed:
                placed[at, shape] = _fragments(shape, entry)
                n_boxes += len(placed[at, shape])
                if n_boxes > MAX_BOXES:
                    raise InputError(f"the layouts up to here have {n_boxes} boxes on all ranks; at most {MAX_BOXES} are read")
        except ShardrouteError as error:
            raise type(error)(f"{where}: {at} of tensor {tensor.name}: {error}") from None
        fragments.append(placed[at, shape])
        placing(len(fragments) / len(document.tensors))
    buffers = tuple((tensor.name,) if tensor.buffers is None else tuple(tensor.buffers) for tensor in document.tensors)
    try:
        aliases = {alias.buffer: alias.memory for alias in document.aliases}
        found = Inventory(tuple(tensors), Layout(tuple(fragments), buffers), aliases)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    joining(1.0)
    return found


def save_layout(inventory: Inventory, path: str | Path, progress: Told | None = None) -> None:
    """Write an inventory as a layout file, every layout as fragments; loading it gives an equal inventory. progress is
    told the share that is done.

    Raises InputError when the path can't be written to.
    """
    names = {fragments: f"layout{i}" for i, fragments in enumerate(dict.fromkeys(inventory.layout.fragments))}
    listing, writing = parts(progress, (_LISTED, 1.0 - _LISTED))
    layouts: list[LayoutEntry] = []
    for (fragments, name), done in zip(names.items(), parts(listing, [*map(len, names)]), strict=True):
        layouts.append(LayoutEntry(name=name, fragments=_entries(fragments)))
        done(1.0)
    layout = inventory.layout
    tensors = [
        TensorEntry(
            tensor.name, list(tensor.shape), tensor.dtype, names[fragments], None if buffers == (tensor.name,) else list(buffers)
        )
        for tensor, fragments, buffers in zip(inventory.tensors, layout.fragments, layout.buffers, strict=True)
    ]
    aliases = [AliasEntry(buffer, memory) for buffer, memory in sorted(inventory.aliases.items())]
    document = LayoutDocument(Format.LAYOUT, VERSION, tensors, layouts, aliases)
    write_file(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n", "the layout")
    writing(1.0)


def _fragments(shape: tuple[int, ...], entry: LayoutEntry) -> Fragments:
    if entry.fragments is not None:
        if entry.mesh is not None or entry.placements is not None or entry.order is not None:
            raise InputError("fragments and a mesh don't go together; give one of them")
        return _listed(shape, entry.fragments)
    if entry.mesh is None or entry.placements is None:
        raise InputError("expected a mesh with placements, or fragments")
    sizes, ranks = entry.mesh.sizes, entry.mesh.ranks
    n_places = int(np.prod(sizes, dtype=object)) if sizes else 1
    if ranks is None and n_places > MAX_RANKS:
        raise InputError(f"a mesh of {n_places} ranks is more than shardroute plans for ({MAX_RANKS})")
    mesh = Mesh(tuple(entry.mesh.axes), tuple(sizes), tuple(range(n_places) if ranks is None else ranks))
    return place(shape, mesh, [parse_placement(text) for text in entry.placements], entry.order)


def _listed(shape: tuple[int, ...], entries: list[FragmentEntry]) -> Fragments:
    n_dims = len(shape)
    check_shape(shape)
    for i, entry in enumerate(entries):
        for key, values in (("lo", entry.lo), ("hi", entry.hi), ("strides", entry.strides)):
            if values is not None and len(values) != n_dims:
                raise InputError(f"fragments[{i}].{key}: {len(values)} numbers, but the tensor has {n_dims} dims")

    def rows(values: list[list[int]]) -> Ints:
        return np.array(values, dtype=np.int64).reshape(len(entries), n_dims)

    lo, hi = rows([entry.lo for entry in entries]), rows([entry.hi for entry in entries])
    dense, size = dense_strides(hi - lo), (hi - lo).prod(axis=1, dtype=np.int64)
    return Fragments(
        shape=shape,
        rank=np.array([entry.rank for entry in entries], dtype=np.int32),
        lo=lo,
        hi=hi,
        buffer=np.array([entry.buffer for entry in entries], dtype=np.int32),
        offset=np.array([entry.offset for entry in entries], dtype=np.int64),
        strides=rows([d.tolist() if entry.strides is None else entry.strides for entry, d in zip(entries, dense, strict=True)]),
        buffer_size=np.array(
            [n if entry.buffer_size is None else entry.buffer_size for entry, n in zip(entries, size.tolist(), strict=True)],
            dtype=np.int64,
        ),
    )


def _entries(fragments: Fragments) -> list[FragmentEntry]:
    dense, sizes = dense_strides(fragments.extent), fragments.n_elements.tolist()
    return [
        FragmentEntry(
            rank, lo, hi, buffer, offset, None if strides == usual else strides, None if buffer_size == size else buffer_size
        )
        for rank, lo, hi, buffer, offset, strides, buffer_size, usual, size in zip(
            fragments.rank.tolist(), fragments.lo.tolist(), fragments.hi.tolist(), fragments.buffer.tolist(),
            fragments.offset.tolist(), fragments.strides.tolist(), fragments.buffer_size.tolist(), dense.tolist(), sizes,
            strict=True,
        )
    ]  # fmt: skip
