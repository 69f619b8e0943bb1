"""Placements, one a mesh axis, with the meaning that DTensor gives them, and how they are written.

Rule: axes apply one after the other, so a later one splits what an earlier one left. A split of `length` by `n` gives
ceil(length / n) to each part until nothing is left (torch.chunk), so the last ones may be short or empty.
"""

import re
from dataclasses import dataclass
from typing import Final

from shardroute.topologies.errors import InputError

_NOTATION: Final = re.compile(
    r"(?P<replicate>R)|S\(?(?P<dim>\d{1,3})\)?"
    r"|(?:SS(?P<short_dim>\d{1,3}):(?P<short_factor>\d{1,9})|_S\((?P<long_dim>\d{1,3})\s*,\s*(?P<long_factor>\d{1,9})\))"
    r"|P(?:\((?P<reduce_op>[a-z_]+)\))?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Shard:
    """This axis splits tensor dim `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S{self.dim}"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along this axis holds the same."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class StridedShard:
    """This axis splits each of `split_factor` parts of tensor dim `dim`: DTensor's `_StridedShard`.

    FSDP over TP shards a dim by TP first, though its mesh is (dp, tp): `[StridedShard(0, split_factor=tp), Shard(0)]`. With 4
    rows over 2 x 2 ranks, rank (dp, tp) = (0, 0) holds row 0, (1, 0) row 1, (0, 1) row 2, (1, 1) row 3.
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise InputError(f"placement {self}: the split factor must be at least 1")

    def __str__(self) -> str:
        return f"SS{self.dim}:{self.split_factor}"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank along this axis holds one term of a sum (or another reduction). It can be said, not planned."""

    reduce_op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


Placement = Shard | Replicate | StridedShard | Partial


def parse_placement(text: str) -> Placement:
    """The placement that a text says: `R`, `S0`, `SS0:4` or `_S(0,4)` (strided), `P(sum)`. Raises InputError."""
    match = _NOTATION.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"{text.strip()!r} isn't a placement; expected R (replicate), S0 (shard dim 0), SS0:4 (strided, split factor 4) "
            "or P(sum) (partial)"
        )
    if match["replicate"]:
        return Replicate()
    if match["dim"]:
        return Shard(int(match["dim"]))
    if dim := match["short_dim"] or match["long_dim"]:
        return StridedShard(int(dim), int(match["short_factor"] or match["long_factor"]))
    return Partial((match["reduce_op"] or "sum").lower())
