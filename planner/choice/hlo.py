"""Reads the collectives out of an XLA HLO text dump, as `--xla_dump_to` with `--xla_dump_hlo_as_text` writes it.

Only lines that define a collective are read, and the module's header; so a dump of any backend, before or after optimisation,
will do. A collective in the body of a loop counts once: the text doesn't say how often the loop turns.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from shardroute.planner.choice.operations import DTYPE_BYTES, Operation, joined
from shardroute.planner.shares import Told, heard
from shardroute.topologies.collectives import Collective
from shardroute.topologies.errors import InputError
from shardroute.topologies.files import read_file
from shardroute.topologies.topologies import MAX_GPUS

# The dump of a step of a large model has some tens of megabytes.
_MOST_BYTES: Final = 2**29
# Lines between two shares that are told: some milliseconds.
_LINES: Final = 1000

_OPS: Final = {
    "all-gather": Collective.ALL_GATHER,
    "all-reduce": Collective.ALL_REDUCE,
    "reduce-scatter": Collective.REDUCE_SCATTER,
    "all-to-all": Collective.ALL_TO_ALL,
    "ragged-all-to-all": Collective.ALL_TO_ALL,
    "collective-broadcast": Collective.BROADCAST,
    "collective-permute": Collective.PERMUTE,
}
_HEADER: Final = re.compile(r"HloModule\s+(?P<name>[^\s,]+)(?P<rest>[^\n]*)")
# What every module has, printed last: a computation that runs, closed by a brace at the start of a line.
_ENTRY: Final = re.compile(r"^ENTRY\b", re.MULTILINE)
_CLOSED: Final = re.compile(r"^\}", re.MULTILINE)
# A shape may be a tuple of tuples, so it is split off by counting brackets; what follows it is the operation.
_START: Final = re.compile(r"^\s*(?:ROOT\s+)?%?(?P<name>[\w.\-]+)\s*=\s*")
_OPERATION: Final = re.compile(r"\s*(?P<op>[a-z\-]+?)(?P<start>-start)?\(")
_LEAF: Final = re.compile(r"(?P<dtype>[a-z]+[0-9a-z]*)\[(?P<dims>[0-9,<=\s]*)\]")
_GROUPS: Final = re.compile(r"replica_groups=(?P<text>\{(?:[^{}]|\{[^{}]*\})*\}|\[[0-9,]+\]<=\[[0-9,]+\](?:T\([0-9,]+\))?)")
_IOTA: Final = re.compile(r"\[(?P<shape>[0-9,]+)\]<=\[(?P<dims>[0-9,]+)\](?:T\((?P<order>[0-9,]+)\))?")
_PAIRS: Final = re.compile(r"source_target_pairs=\{(?P<text>(?:\{[0-9]+,[0-9]+\},?\s*)*)\}")


@dataclass(frozen=True, slots=True)
class HloModule:
    """The collectives of a module, in the order of its text, over all devices of its program."""

    name: str
    n_devices: int
    operations: tuple[Operation, ...]


def read_hlo(path: str, devices_per_process: int = 1, progress: Told | None = None) -> HloModule:
    """The collectives of a dump; progress is told the share of its lines that is read. Raises InputError for a file that is none,
    and for a collective that can't be read.
    """
    try:
        text = read_file(path, _MOST_BYTES).decode()
    except UnicodeDecodeError:
        raise InputError(f"{path}: expected the text of an HLO module (--xla_dump_hlo_as_text), found other bytes") from None
    return parse_hlo(text, path, devices_per_process, progress)


def parse_hlo(text: str, where: str, devices_per_process: int = 1, progress: Told | None = None) -> HloModule:
    """read_hlo of a text; `where` stands in front of errors."""
    header = _HEADER.search(text)
    if header is None:
        raise InputError(f"{where}: expected an XLA dump that begins with HloModule; XLA writes one with --xla_dump_to=FOLDER")
    entry = _ENTRY.search(text)
    if entry is None or _CLOSED.search(text, entry.end()) is None:
        raise InputError(f"{where}: cut short: its ENTRY computation doesn't end; copy the file anew, or dump again")
    n_devices = _count(header["rest"], "num_partitions") * _count(header["rest"], "replica_count")
    if n_devices > MAX_GPUS:
        raise InputError(f"{where}: num_partitions x replica_count: expected at most {MAX_GPUS} devices, found {n_devices}")
    found, done, lines = [], heard(progress), text.splitlines()
    for number, line in enumerate(lines, 1):
        if number % _LINES == 0:
            done(number / len(lines))
        try:
            split = _split(line)
            if split is None:
                continue
            name, shape, op, started = split
            found.append(_operation(name, shape, op, started, line, n_devices, devices_per_process))
        except InputError as error:
            raise InputError(f"{where}, line {number}: {error}") from None
    return HloModule(header["name"], n_devices, tuple(found))


def _count(header: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d{{1,9}})", header)
    return 1 if match is None else int(match[1])


def _split(line: str) -> tuple[str, str, Collective, bool] | None:
    """Name, shape, operation and whether it is the first half of an asynchronous one; None for any other line."""
    start = _START.match(line)
    if start is None:
        return None
    end = _shape_end(line, start.end())
    match = _OPERATION.match(line, end)
    if match is None or match["op"] not in _OPS:
        return None
    return start["name"], line[start.end() : end], _OPS[match["op"]], match["start"] is not None


def _shape_end(line: str, at: int) -> int:
    """Where the shape that begins at `at` ends: behind its closing bracket, or before the first space.

    Raises InputError for brackets that don't close.
    """
    if not line.startswith("(", at):
        space = line.find(" ", at)
        return len(line) if space < 0 else space
    depth = 0
    for i in range(at, len(line)):
        depth += {"(": 1, ")": -1}.get(line[i], 0)
        if depth == 0:
            return i + 1
    raise InputError(f"the brackets of a shape don't close: {line[at : at + 80]!r}")


def _operation(
    name: str, shape: str, op: Collective, started: bool, line: str, n_devices: int, devices_per_process: int
) -> Operation:
    leaves = _output_leaves(shape, op) if started else list(_leaves(shape))
    if not leaves:
        raise InputError(f"{name}: no shape can be read in {shape[:80]!r}")
    output = sum(size for _, size in leaves)
    pairs = _pairs(name, line) if op is Collective.PERMUTE else ()
    groups = joined(pairs) if pairs else _groups(name, line, n_devices)
    n_devices = max(n_devices, 1 + max(rank for group in groups for rank in group))
    return Operation(
        op=op,
        n_bytes=max(output * len(max(groups, key=len)) if op is Collective.REDUCE_SCATTER else output, 1),
        dtype=leaves[0][0],
        groups=groups,
        pairs=pairs,
        n_devices=n_devices,
        xla_bytes=output,
        devices_per_process=devices_per_process,
        name=name,
    )


def _leaves(shape: str) -> Iterator[tuple[str, int]]:
    """(dtype, bytes) of each array of a shape, layouts left out."""
    for match in _LEAF.finditer(re.sub(r"\{[^{}]*\}", "", shape)):
        if match["dtype"] not in DTYPE_BYTES:
            raise InputError(f"dtype {match['dtype']!r} is unknown; expected one of {', '.join(DTYPE_BYTES)}")
        dims = [int(n) for n in re.findall(r"\d+", match["dims"])]
        yield match["dtype"], DTYPE_BYTES[match["dtype"]] * math.prod(dims)


def _output_leaves(shape: str, op: Collective) -> list[tuple[str, int]]:
    """The results in the shape of a started operation, which names operands too: (operands, results, ...)."""
    if op is Collective.ALL_REDUCE or not shape.startswith("("):
        return list(_leaves(shape))
    parts = _parts(shape[1:-1])
    return list(_leaves(parts[1] if len(parts) > 1 else parts[0]))


def _parts(text: str) -> list[str]:
    """The members of a tuple's text, split at commas outside of brackets."""
    parts, depth, begin = [], 0, 0
    for i, letter in enumerate(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [*parts, text[begin:]]


def _pairs(name: str, line: str) -> tuple[tuple[int, int], ...]:
    match = _PAIRS.search(line)
    if match is None or not match["text"].strip():
        raise InputError(f"{name}: expected source_target_pairs={{{{0,1}},...}} on the line of a collective-permute")
    numbers = [int(n) for n in re.findall(r"\d+", match["text"])]
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def _groups(name: str, line: str, n_devices: int) -> tuple[tuple[int, ...], ...]:
    match = _GROUPS.search(line)
    if match is None:
        if "replica_groups=" in line:
            raise InputError(f"{name}: these replica_groups can't be read; expected {{{{0,1}},{{2,3}}}} or [2,2]<=[4]")
        return (tuple(range(n_devices)),)
    iota = _IOTA.fullmatch(match["text"])
    if iota is not None:
        return _iota_groups(name, iota)
    groups = [tuple(int(n) for n in re.findall(r"\d+", group)) for group in re.findall(r"\{([^{}]*)\}", match["text"][1:-1])]
    return tuple(group for group in groups if group) or (tuple(range(n_devices)),)


def _iota_groups(name: str, match: re.Match[str]) -> tuple[tuple[int, ...], ...]:
    """`[4,2]<=[2,4]T(1,0)`: count through [2,4], turn its axes, read off 4 groups of 2."""
    shape, dims = ([int(n) for n in match[key].split(",") if n] for key in ("shape", "dims"))
    order = [int(n) for n in match["order"].split(",") if n] if match["order"] else list(range(len(dims)))
    if not 0 < math.prod(shape) == math.prod(dims) or len(shape) != 2 or sorted(order) != list(range(len(dims))):
        raise InputError(f"{name}: replica_groups {match[0]} don't fit: expected [groups,size]<=[dims]T(order of dims)")
    if math.prod(dims) > MAX_GPUS:
        raise InputError(f"{name}: replica_groups {match[0]} name more devices than any machine has ({MAX_GPUS})")
    ranks = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape)
    return tuple(tuple(row) for row in ranks.tolist())
