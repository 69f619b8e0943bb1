"""A bare tensor and its layouts as a user types them: `256,2048,7168`, `dp=8,tp=32`, `R,S1`, `0-15`."""

import re
from collections.abc import Sequence
from dataclasses import replace

from shardroute.planner.layouts.meshes import Mesh, place
from shardroute.planner.layouts.notation import MAX_RANKS
from shardroute.planner.layouts.placements import Partial, Placement, Replicate, parse_placement
from shardroute.planner.problems import Problem, one_tensor
from shardroute.topologies.errors import InputError
from shardroute.topologies.units import parse_rate


def tensor_problem(
    shape: str,
    dtype: str,
    from_mesh: str | None,
    from_placements: str | None,
    to_mesh: str | None,
    to_placements: str | None,
    *,
    from_ranks: str | None = None,
    to_ranks: str | None = None,
) -> Problem:
    """The problem of one tensor between two meshes. Source ranks count from 0 and destination ranks follow, unless they are
    given; those of a sum (P at the source) are the source's.
    """
    dims = parse_shape(shape)
    source_axes, target_axes = parse_axes("--from-mesh", from_mesh), parse_axes("--to-mesh", to_mesh)
    source = _mesh(source_axes, from_ranks, "--from-ranks", 0)
    source_placements = parse_placements("--from-placements", from_placements)
    adds = any(isinstance(placement, Partial) for placement in source_placements)
    target = _mesh(target_axes, to_ranks, "--to-ranks", min(source.ranks) if adds else max(source.ranks) + 1)
    target_placements = parse_placements("--to-placements", to_placements)
    if any(isinstance(placement, Partial) for placement in target_placements):
        raise InputError(f"--to-placements {to_placements!r}: a destination can't be partial; use S0, S1, ... or R")
    n_ranks = 1 + max(*source.ranks, *target.ranks)
    summed, source_placements = _addends(source, source_placements)
    held, needed = place(dims, source, source_placements), place(dims, target, target_placements)
    return replace(one_tensor(dims, dtype, held, needed, n_ranks=n_ranks), summed=summed)


def _addends(mesh: Mesh, placements: list[Placement]) -> tuple[bool, list[Placement]]:
    """Whether ranks of the mesh hold addends, and the placements by which they lie. Raises InputError where it isn't clear
    which ranks' are to be added.
    """
    partial = [axis for axis, placement in zip(mesh.axes, placements, strict=False) if isinstance(placement, Partial)]
    if not partial:
        return False, placements
    for axis, size, placement in zip(mesh.axes, mesh.sizes, placements, strict=False):
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            raise InputError(f"--from-placements: axis {axis} is {placement}; sums are planned, P or P(sum)")
        if isinstance(placement, Replicate) and size > 1:
            raise InputError(
                f"--from-placements: axis {axis} is R beside P on axis {partial[0]}: its ranks hold the same addends, which "
                f"would count {size} times; plan the ranks of one place on {axis} (--from-ranks, --to-ranks)"
            )
    return True, [Replicate() if isinstance(placement, Partial) else placement for placement in placements]


def parse_shape(text: str) -> tuple[int, ...]:
    """`256,2048,7168` -> (256, 2048, 7168)."""
    if not re.fullmatch(r"\s*\d{1,18}(\s*[,x]\s*\d{1,18})*\s*", text):
        raise InputError(f"--shape {text!r}: expected sizes such as 256,2048,7168")
    return tuple(int(n.strip()) for n in re.split(r"[,x]", text))  # int itself takes fewer characters for space than \s does


def parse_axes(option: str, text: str | None) -> dict[str, int]:
    """`dp=8,tp=32` -> {"dp": 8, "tp": 32}, in that order."""
    if text is None:
        raise InputError(f"{option} is missing: name the mesh's axes in rank order, such as {option} dp=8,tp=32")
    axes: dict[str, int] = {}
    for item in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(\d{1,9})\s*", item)
        if match is None:
            raise InputError(f"{option} {text!r}: {item!r} isn't an axis; expected NAME=SIZE, such as dp=8,tp=32")
        if match[1] in axes:
            raise InputError(f"{option} {text!r}: axis {match[1]} is given twice")
        axes[match[1]] = int(match[2])
    return axes


def parse_placements(option: str, text: str | None) -> list[Placement]:
    """`R,S1,SS0:4` -> [Replicate(), Shard(1), StridedShard(0, 4)]; `_S(0,4)` is DTensor's way to write the last one."""
    if text is None:
        raise InputError(f"{option} is missing: one placement an axis, S0 (shard dim 0) or R (replicate), such as {option} R,S1")
    try:
        return [parse_placement(item) for item in re.split(r",(?![^(]*\))", text)]
    except InputError as error:
        raise InputError(f"{option} {text!r}: {error}") from None


def parse_ranks(option: str, text: str) -> list[int]:
    """`0-3,8` -> [0, 1, 2, 3, 8]."""
    ranks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", item)
        if match is None:
            raise InputError(f"{option} {text!r}: {item!r} isn't a rank; expected numbers and ranges such as 0-7,16")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= MAX_RANKS:
            raise InputError(f"{option} {text!r}: {item.strip()!r} must rise and stay below {MAX_RANKS}")
        if len(ranks) + last - first >= MAX_RANKS:
            raise InputError(f"{option} {text[:60]!r}: names more than {MAX_RANKS} ranks; name each once")
        ranks.extend(range(first, last + 1))
    return ranks


def ranges_text(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: [0, 1, 2, 3, 8] -> `0-3,8`."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_nics(option: str, texts: Sequence[str]) -> dict[int, float]:
    """`["17=25GB/s", "16-23=200Gb/s"]` -> bytes per second by GPU; what comes later holds. 0 is a NIC that is down."""
    nics: dict[int, float] = {}
    n_named = 0
    for text in texts:
        gpus, equals, rate = text.partition("=")
        if not equals:
            raise InputError(f"{option} {text!r}: expected GPUs and what their NICs carry, such as 16-23=200Gb/s")
        nic_Bps = 0.0 if rate.strip() == "0" else parse_rate(rate.strip())
        named = parse_ranks(option, gpus)
        n_named += len(named)
        if n_named > MAX_RANKS:
            raise InputError(f"{option} {text!r}: with those before it names more than {MAX_RANKS} GPUs; name each once")
        nics.update(dict.fromkeys(named, nic_Bps))
    return nics


def _mesh(axes: dict[str, int], ranks: str | None, option: str, first: int) -> Mesh:
    size = 1
    for n in axes.values():
        size *= n
    if size > MAX_RANKS:
        raise InputError(f"a mesh of {size} ranks is more than shardroute plans for ({MAX_RANKS})")
    return Mesh.of(axes, range(first, first + size) if ranks is None else parse_ranks(option, ranks))
