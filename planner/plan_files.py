"""Plans on disk: one zip of a JSON header and one `.npy` member a column; `numpy.load` opens it too.

Columns are stored as they are, so that a rank can map them and read no more than its part (see `parts`): 2.8 trillion parameters
between 2,048 and 2,048 GPUs are 216 MB, packed they were 61 and took a second to unpack.

Rule: what is read back is validated as if it were made anew, and nothing in the file can run code (no pickle).
"""

import hashlib
import json
import mmap
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from shardroute.planner.file_kinds import mistaken
from shardroute.planner.layouts.fragments import Fragments
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.plans import WINDOW_BYTES, Boxes, Bundles, Computes, Plan, Steps
from shardroute.planner.problems import Problem
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.shares import Told, parts
from shardroute.topologies.documents import check_keys
from shardroute.topologies.errors import InputError, PlanError
from shardroute.topologies.files import READINGS, written_whole
from shardroute.topologies.topologies import Topology, topology_from_dict, topology_to_dict

FORMAT = "shardroute-plan"
SCHEMA = 1
# A file that claims more than this once unpacked is refused before it is read: plans for 16,384 GPUs stay under 2 GB.
MAX_UNPACKED_BYTES: Final = 4 * 2**30
# Columns are stored as they are, and packed they shrink to a third; what unpacks to far more is made to fill memory.
_MOST_PACKED: Final = 16
_SMALL_BYTES: Final = 2**26

# The share of reading in loading: of m2n-pack's plan of DeepSeek-V3, 144 MB in 0.56 s; the rest assembles and validates.
_UNPACKED: Final = 0.5

_HEADER: Final = "header.json"
_FRAGMENT_COLUMNS: Final = ("rank", "buffer", "offset", "buffer_size", "lo", "hi", "strides")
_SHORT: Final = ("rank", "buffer")  # of 32 bits
_COLUMNS: Final = frozenset(
    ["fragments.n", "boxes.n", "boxes.lo", "boxes.hi", "group_ptr", "group_ranks", "slot_bytes"]
    + [f"fragments.{name}" for name in _FRAGMENT_COLUMNS]
    + [f"{kind.__name__.lower()}.{name}" for kind in (Bundles, Steps, Computes) for name in kind.__dataclass_fields__]
)
# The format that numpy.lib.format describes, for lists of whole numbers. NumPy itself reads the header as Python, which
# damaged files can make fail in many ways.
_NPY: Final = re.compile(rb"\{'descr': '([<|][iu][1248])', 'fortran_order': (?:False|True), 'shape': \((\d{1,12}),\), \} *\n")
_NPY_STARTS: Final = {b"\x93NUMPY\x01\x00": "<H", b"\x93NUMPY\x02\x00": "<I"}  # version, and how its header's length is written

Columns = list[tuple[str, NDArray[np.generic]]]
_Int = TypeVar("_Int", np.int32, np.int64)


class _TensorHead(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    shape: list[int]
    dtype: str
    source: int
    target: int
    source_buffers: list[str]
    target_buffers: list[str]


class _AttentionHead(msgspec.Struct, forbid_unknown_fields=True):
    lengths: list[int]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    batch: int
    causal: bool
    packed: bool
    layout: str
    dtype: str
    grad_dtype: str


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    schema: int
    strategy: str
    topology: dict[str, object]
    n_ranks: int
    about: list[tuple[str, str]]
    fragment_shapes: list[list[int]]
    tensors: list[_TensorHead]
    attention: _AttentionHead | None = None
    summed: bool = False
    window_bytes: int = WINDOW_BYTES


def plan_parts(plan: Plan) -> tuple[bytes, Columns]:
    """The plan as canonical header bytes and named columns; the digest is taken over exactly these."""
    distinct = list(_numbered(plan.problem))
    header = _header(plan.strategy, plan.topology, plan.problem, plan.attention, plan.window_bytes)
    columns: Columns = [("fragments.n", np.array([len(f) for f in distinct], dtype=np.int64))]
    for name in _FRAGMENT_COLUMNS:
        dtype = np.int32 if name in _SHORT else np.int64
        columns.append((f"fragments.{name}", _join([getattr(f, name) for f in distinct], dtype)))
    columns.append(("boxes.n", np.array([len(b.lo) for b in plan.boxes], dtype=np.int64)))
    columns.append(("boxes.lo", _join([b.lo for b in plan.boxes], np.int64)))
    columns.append(("boxes.hi", _join([b.hi for b in plan.boxes], np.int64)))
    columns += [(f"bundles.{name}", column) for name, column in plan.bundles.columns()]
    columns += [(f"steps.{name}", column) for name, column in plan.steps.columns()]
    columns += [
        ("group_ptr", plan.group_ptr),
        ("group_ranks", plan.group_ranks),
        ("slot_bytes", plan.slot_bytes),
    ]
    if plan.attention is not None:
        columns += [(f"computes.{name}", column) for name, column in plan.computes.columns()]
    return header, columns


def _numbered(problem: Problem) -> dict[Fragments, int]:
    """The distinct layouts of a problem, numbered as they first occur."""
    distinct: dict[Fragments, int] = {}
    for fragments in (*problem.source.fragments, *problem.target.fragments):
        distinct.setdefault(fragments, len(distinct))
    return distinct


def _header(strategy: str, topology: Topology, problem: Problem, attention: Attention | None, window_bytes: int) -> bytes:
    """The canonical header: keys in order, without spaces, and nothing said that is so by default."""
    distinct = _numbered(problem)
    header: dict[str, object] = {
        "format": FORMAT,
        "schema": SCHEMA,
        "strategy": strategy,
        "topology": topology_to_dict(topology),
        "n_ranks": problem.n_ranks,
        "about": [list(pair) for pair in problem.about],
        "fragment_shapes": [list(f.shape) for f in distinct],
        "tensors": [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "source": distinct[problem.source.fragments[i]],
                "target": distinct[problem.target.fragments[i]],
                "source_buffers": list(problem.source.buffers[i]),
                "target_buffers": list(problem.target.buffers[i]),
            }
            for i, tensor in enumerate(problem.tensors)
        ],
    }
    if problem.summed:
        header["summed"] = True
    if window_bytes != WINDOW_BYTES:  # else left out, so that older files keep their digests
        header["window_bytes"] = window_bytes
    if attention is not None:
        header["attention"] = {name: getattr(attention, name) for name in _AttentionHead.__struct_fields__}
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()


def _written(attention: Attention | None) -> list[tuple[str, np.dtype[np.generic]]]:
    """The columns of a plan file with their dtypes, in the order in which they are written."""
    none, start = np.zeros(0, np.int64), np.zeros(1, np.int64)
    long, short = np.dtype(np.int64), np.dtype(np.int32)
    steps = Steps(*[none] * 9, start, none)  # type: ignore[arg-type, call-arg]  # cast when made
    bundles = Bundles(start, none, none, none)  # type: ignore[arg-type]  # the same
    groups: list[tuple[str, Bundles | Steps | Computes]] = [("bundles", bundles), ("steps", steps)]
    groups += [] if attention is None else [("computes", Computes.none())]
    of = {group: [(f"{group}.{name}", column.dtype) for name, column in columns.columns()] for group, columns in groups}
    return [
        ("fragments.n", long), *((f"fragments.{name}", short if name in _SHORT else long) for name in _FRAGMENT_COLUMNS),
        ("boxes.n", long), ("boxes.lo", long), ("boxes.hi", long), *of["bundles"], *of["steps"],
        ("group_ptr", long), ("group_ranks", short), ("slot_bytes", long), *of.get("computes", ()),
    ]  # fmt: skip


def save_plan(plan: Plan, path: str | Path, progress: Told | None = None) -> None:
    """Write the plan; the file appears whole or not at all. progress is told the share that is written.

    Raises InputError where it can't be, or isn't to be, written.
    """
    header, columns = plan_parts(plan)
    with written_whole(path, "the plan") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_HEADER, header, zipfile.ZIP_DEFLATED, compresslevel=1)
        for (name, column), done in zip(columns, parts(progress, [column.nbytes for _, column in columns]), strict=True):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, column, allow_pickle=False)
            done(1.0)


def load_plan(path: str | Path, progress: Told | None = None) -> Plan:
    """Read a plan; progress is told the share that is done. Raises InputError when there is no such file, PlanError when it isn't
    a whole plan of a known schema.
    """
    unpacked, assembled = parts(progress, (_UNPACKED, 1.0 - _UNPACKED))
    with _unreadable(path), zipfile.ZipFile(path) as archive:
        READINGS.info("read %s", path)
        members = _members(archive, path)
        header = archive.read(_HEADER)
        columns = {}
        for (name, info), done in zip(members.items(), parts(unpacked, [m.file_size for m in members.values()]), strict=True):
            if name != _HEADER:
                columns[name] = _read_column(name, archive.read(info))
            done(1.0)
    with contradictions(path):
        decoded = _decode_header(header)
        problem, boxes, bundles = _assemble(decoded, columns)
        steps = Steps(*(columns[f"steps.{f}"] for f in Steps.__dataclass_fields__))  # type: ignore[arg-type]
        plan = Plan(
            decoded.strategy, topology_from_dict(decoded.topology), problem, boxes, bundles, steps, *_small_columns(columns),
            *_attention(decoded, columns), decoded.window_bytes,
        )  # fmt: skip
    assembled(1.0)
    return plan


@dataclass(frozen=True, slots=True, eq=False)
class PlanRecord:
    """A plan file that was read but for its steps: `steps` are columns by name, not validated, in memory that the file backs.

    digest      of the whole plan, the one that load_plan finds; computed from the file's bytes where they are as save_plan writes
                them
    """

    digest: str
    strategy: str
    topology: Topology
    problem: Problem
    boxes: tuple[Boxes, ...]
    bundles: Bundles
    steps: Mapping[str, NDArray[np.generic]]
    group_ptr: NDArray[np.int64]
    group_ranks: NDArray[np.int32]
    slot_bytes: NDArray[np.int64]
    window_bytes: int


@contextmanager
def mapped_plan(path: str | Path) -> Iterator[PlanRecord]:
    """The plan file, mapped for as long as the block lasts. Raises as load_plan does, but for what is wrong with steps."""
    with _unreadable(path):
        file = open(path, "rb")  # noqa: SIM115 - closed below, after the map
    with file:
        READINGS.info("read %s", path)
        with _unreadable(path):
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with zipfile.ZipFile(file) as archive:
                members = _members(archive, path)
                header = archive.read(_HEADER)
                contents = {name: _content(archive, info, data) for name, info in members.items() if name != _HEADER}
            columns = {name: _read_column(name, content) for name, content in contents.items()}
            sha = hashlib.sha256(header)
            for name, column in columns.items():
                sha.update(column_mark(name, column))
                sha.update(column.data)
        with contradictions(path):
            decoded = _decode_header(header)
            problem, boxes, bundles = _assemble(decoded, columns)
            topology, attention = topology_from_dict(decoded.topology), _attention(decoded, columns)[0]
            canonical = _header(decoded.strategy, topology, problem, attention, decoded.window_bytes)
            as_written = header == canonical and [(name, c.dtype) for name, c in columns.items()] == _written(attention)
            record = PlanRecord(
                sha.hexdigest() if as_written else load_plan(path).digest,  # one that was edited says the same in other bytes
                decoded.strategy, topology, problem, boxes, bundles,
                {name: columns[f"steps.{name}"] for name in Steps.__dataclass_fields__}, *_small_columns(columns),
                decoded.window_bytes,
            )  # fmt: skip
        yield record


def column_mark(name: str, column: NDArray[np.generic]) -> bytes:
    """What a plan's digest takes in before the bytes of a column."""
    return f"\n{name} {column.dtype.str} {column.shape}\n".encode()


@contextmanager
def _unreadable(path: str | Path) -> Iterator[None]:
    """Turn what fails on a missing, damaged or foreign file into an InputError or PlanError that names it."""
    if not os.path.isfile(path):  # False, too, for names that no file can have
        raise InputError(mistaken(path, "a plan") or f"no plan file {path}; `shardroute plan ... -o {path}` writes one")
    try:
        yield
    except (PlanError, InputError) as error:
        raise PlanError(f"{path}: {error}") from error
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, OSError, RuntimeError) as error:
        if words := mistaken(path, "a plan"):
            raise PlanError(words) from error
        raise PlanError(f"{path}: not a shardroute plan, or cut short ({error}); plan again, or copy the file anew") from error


@contextmanager
def contradictions(path: str | Path) -> Iterator[None]:
    """Turn what columns that contradict each other can raise into a PlanError that names the file."""
    try:
        yield
    except KeyError as error:
        raise PlanError(f"{path}: column {error.args[0]} is missing") from error
    except (PlanError, InputError) as error:
        raise PlanError(f"{path}: {error}") from error
    except (ValueError, IndexError, TypeError, OverflowError) as error:
        raise PlanError(f"{path}: the columns contradict each other ({error})") from error


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo, data: mmap.mmap) -> bytes | memoryview:
    """A member's bytes, from the map where they are stored as they are."""
    if info.compress_type != zipfile.ZIP_STORED:
        return archive.read(info)
    # A member is a header of 30 bytes, its name, extra fields, and what it holds (PKWARE APPNOTE 4.3.7).
    start = info.header_offset
    if data[start : start + 4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"member {info.filename} has no header")
    start += 30 + sum(struct.unpack_from("<HH", data, start + 26))
    content = memoryview(data)[start : start + info.file_size]
    if len(content) != info.file_size or zlib.crc32(content) != info.CRC:
        raise zipfile.BadZipFile(f"member {info.filename} is damaged")
    return content


def _members(archive: zipfile.ZipFile, path: str | Path) -> dict[str, zipfile.ZipInfo]:
    """The members by the names of their columns. Raises PlanError for any that no plan has, before they are unpacked."""
    found = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if _HEADER not in found:
        raise PlanError(f"not a shardroute plan: it has no {_HEADER}")
    unknown = sorted(name for name in found if name != _HEADER and name not in _COLUMNS)
    if unknown or len(found) < len(archive.infolist()):
        raise PlanError(f"not a shardroute plan: {f'it has a member {unknown[0]!r}' if unknown else 'a member stands twice'}")
    for info in found.values():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise PlanError(f"not a shardroute plan: member {info.filename} is packed in a way that plans never are")
    unpacked, packed = sum(info.file_size for info in found.values()), os.stat(path).st_size
    for info in found.values():
        stored = info.compress_type == zipfile.ZIP_STORED
        if info.header_offset + info.compress_size > packed or (stored and info.file_size != info.compress_size):
            raise PlanError(f"member {info.filename} claims {info.compress_size} bytes, more than the file has")
    if unpacked > min(MAX_UNPACKED_BYTES, max(_SMALL_BYTES, _MOST_PACKED * packed)):
        raise PlanError(f"unpacks from {packed} bytes to {unpacked}; this is not a plan that shardroute wrote")
    return found


def _decode_header(data: bytes) -> _Header:
    try:
        head = msgspec.json.decode(data)
        check_keys(data, head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InputError) as error:
        raise PlanError(f"header.json: {error}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise PlanError(f"not a shardroute plan: header.json doesn't say format {FORMAT!r}")
    if head.get("schema") != SCHEMA:
        raise PlanError(
            f"plan schema {head.get('schema')!r}; this shardroute reads schema {SCHEMA}: plan again with this version"
        )
    try:
        return msgspec.convert(head, _Header)
    except msgspec.ValidationError as error:
        raise PlanError(f"header.json: {error}") from error


def _assemble(header: _Header, columns: dict[str, NDArray[np.generic]]) -> tuple[Problem, tuple[Boxes, ...], Bundles]:
    n_dims = [len(shape) for shape in header.fragment_shapes]
    lengths = _counts(columns["fragments.n"], len(n_dims), "fragments.n")
    flat = {
        name: _split(columns[f"fragments.{name}"], lengths if name in (*_SHORT, "offset", "buffer_size") else
                     [n * d for n, d in zip(lengths, n_dims, strict=True)], f"fragments.{name}")
        for name in _FRAGMENT_COLUMNS
    }  # fmt: skip
    distinct = []
    for i, shape in enumerate(header.fragment_shapes):
        lo, hi, strides = (flat[name][i].reshape(lengths[i], n_dims[i]) for name in ("lo", "hi", "strides"))
        rank, buffer = (_exactly(flat[name][i], np.int32, f"fragments.{name}") for name in _SHORT)
        distinct.append(Fragments(tuple(shape), rank, lo, hi, buffer, flat["offset"][i], strides, flat["buffer_size"][i]))
    for head in header.tensors:
        if not (0 <= head.source < len(distinct) and 0 <= head.target < len(distinct)):
            raise PlanError(f"tensor {head.name}: layout number out of range")
    problem = Problem(
        tuple(Tensor(h.name, tuple(h.shape), h.dtype) for h in header.tensors),
        Layout(
            tuple(distinct[h.source] for h in header.tensors),
            tuple(tuple(h.source_buffers) for h in header.tensors),
        ),
        Layout(
            tuple(distinct[h.target] for h in header.tensors),
            tuple(tuple(h.target_buffers) for h in header.tensors),
        ),
        header.n_ranks,
        tuple(header.about),
        header.summed,
    )
    class_dims = [len(c.shape) for c in problem.classes]
    n_boxes = _counts(columns["boxes.n"], len(class_dims), "boxes.n")
    if any(n > 1 and not d for n, d in zip(n_boxes, class_dims, strict=True)):
        raise PlanError("column boxes.n: a tensor without dims has several pieces")
    sizes = [n * d for n, d in zip(n_boxes, class_dims, strict=True)]
    boxes = tuple(
        Boxes(lo.reshape(n, d), hi.reshape(n, d))
        for lo, hi, n, d in zip(
            _split(columns["boxes.lo"], sizes, "boxes.lo"),
            _split(columns["boxes.hi"], sizes, "boxes.hi"),
            n_boxes,
            class_dims,
            strict=True,
        )
    )
    bundles = Bundles(*(columns[f"bundles.{f}"] for f in Bundles.__dataclass_fields__))  # type: ignore[arg-type]
    return problem, boxes, bundles


def _small_columns(columns: dict[str, NDArray[np.generic]]) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """group_ptr, group_ranks and slot_bytes."""
    group_ptr, group_ranks, slot_bytes = (_integers(columns[n], n) for n in ("group_ptr", "group_ranks", "slot_bytes"))
    return (
        _exactly(group_ptr, np.int64, "group_ptr"),
        _exactly(group_ranks, np.int32, "group_ranks"),
        _exactly(slot_bytes, np.int64, "slot_bytes"),
    )


def _attention(header: _Header, columns: dict[str, NDArray[np.generic]]) -> tuple[Attention | None, Computes]:
    """The attention call that the plan computes, if it does, and its COMPUTE steps."""
    if header.attention is None:
        return None, Computes.none()
    computes = Computes(*(columns[f"computes.{f}"] for f in Computes.__dataclass_fields__))  # type: ignore[arg-type]
    given = msgspec.structs.asdict(header.attention)
    return Attention(n_ranks=header.n_ranks, **given), computes


def _read_column(name: str, data: bytes | memoryview) -> NDArray[np.generic]:
    length = _NPY_STARTS.get(bytes(data[:8]))
    try:
        start = 8 + struct.calcsize(length) if length else 0
        end = start + struct.unpack_from(length, data, 8)[0] if length else 0
    except struct.error:
        end = 0
    header = _NPY.fullmatch(data, start, end) if 0 < end <= len(data) else None
    if header is None:
        raise PlanError(f"column {name}: expected a list of whole numbers as NumPy writes one")
    dtype, n = np.dtype(header[1].decode()), int(header[2])
    if len(data) - end != n * dtype.itemsize:
        raise PlanError(f"column {name}: {len(data) - end} bytes, but {n} values of {dtype} take {n * dtype.itemsize}")
    return np.frombuffer(data, dtype, n, end)


def _exactly(values: NDArray[np.integer], dtype: type[_Int], name: str) -> NDArray[_Int]:
    """The values as another dtype. Raises PlanError where it doesn't have them."""
    column = values.astype(dtype)
    if (column != values).any():
        raise PlanError(f"column {name}: values that {np.dtype(dtype).name} doesn't have")
    return column


def _integers(column: NDArray[np.generic], name: str) -> NDArray[np.integer]:
    if column.ndim != 1 or not np.issubdtype(column.dtype, np.integer):
        raise PlanError(f"column {name}: expected a list of whole numbers, found {column.dtype} of shape {column.shape}")
    return cast(NDArray[np.integer], column)


def _counts(column: NDArray[np.generic], n: int, name: str) -> list[int]:
    counts: list[int] = _integers(column, name).tolist()
    if len(counts) != n or min(counts, default=0) < 0:
        raise PlanError(f"column {name}: expected {n} counts, none negative")
    return counts


def _join(arrays: Sequence[NDArray[np.generic]], dtype: type) -> NDArray[np.generic]:
    return np.concatenate([np.zeros(0, dtype), *(a.ravel() for a in arrays)])


def _split(column: NDArray[np.generic], lengths: list[int], name: str) -> list[NDArray[np.int64]]:
    values = _integers(column, name)
    if sum(lengths) != len(values):
        raise PlanError(f"column {name}: {len(values)} values, expected {sum(lengths)}")
    whole = _exactly(values, np.int64, name)
    return list(np.split(whole, np.cumsum(lengths)[:-1])) if lengths else []
