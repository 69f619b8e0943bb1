"""Parallel layouts as people write them: "TP4 x PP8 x EP16" becomes a ParallelSpec.

Rule: an axis is a name and a size, in any case and order, with `x`, `*`, `,` or spaces between; PP may carry
the layers of each stage, "PP4[7,8,8,7]" (of each virtual stage with VPP), HSDP has its replicas and shards,
"HSDP8x4", and a last `order=tp-cp-ep-dp-pp` says which axes are fastest in rank order. What the axes mean, and
which ranks they give, is for a convention to say.
"""

import difflib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shardroute.topologies.errors import InputError

# Far above the largest clusters announced (xAI's Colossus, 200,000 GPUs in 2025); catches a slip early.
MAX_RANKS: Final = 2**20


class Axis(StrEnum):
    """The axes that a specification may name."""

    TP = "tp"
    PP = "pp"
    EP = "ep"
    ETP = "etp"
    CP = "cp"
    DP = "dp"
    VPP = "vpp"
    FSDP = "fsdp"
    HSDP = "hsdp"


_MEANINGS: Final = {
    Axis.TP: "tensor",
    Axis.PP: "pipeline",
    Axis.EP: "expert",
    Axis.ETP: "expert tensor",
    Axis.CP: "context",
    Axis.DP: "data",
    Axis.VPP: "virtual stages of a pipeline rank",
    Axis.FSDP: "fully sharded data",
    Axis.HSDP: "replicas of fully sharded data",
}
_EXAMPLE: Final = '"TP4 x PP8 x EP16"'
_MAX_DIGITS: Final = 18  # what int64 holds; Python itself refuses to read some thousands
_ITEM: Final = re.compile(
    r"(?P<name>[a-z]+?)(?P<size>-?[0-9]+)(?:x(?P<shards>[0-9]+))?(?P<layers>\[[^\]]*\])?", re.IGNORECASE
)
_ORDER: Final = re.compile(r"[\sx*×,]*\border\s*=\s*(?P<axes>[a-z]+(?:-[a-z]+)*)$", re.IGNORECASE)
_SEPARATOR: Final = re.compile(r"\s*[x*×,]\s*|\s+", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class ParallelSpec:
    """Sizes of parallel axes. An axis that isn't named has size 1; a convention may infer DP instead.

    axes          (axis, size) as given; the order is kept for display and has no meaning
    stage_layers  layers of each pipeline stage, or with VPP of each virtual one in order of layers, when given
    rank_order    the axes from the fastest in rank order to the slowest, when given

    HSDP holds the replicas; the shards of each are FSDP.

    Compared by meaning: "PP8 x TP4" equals "TP4 x PP8 x CP1", but DP1 differs from no DP, which may be
    inferred.

    Raises InputError for a repeated axis, a size below 1 or above MAX_RANKS, and stage layers that aren't one
    a stage.
    """

    axes: tuple[tuple[Axis, int], ...]
    stage_layers: tuple[int, ...] | None = None
    rank_order: tuple[Axis, ...] | None = None

    def __post_init__(self) -> None:
        names = [axis for axis, _ in self.axes]
        for axis, size in self.axes:
            name = axis.upper()
            if names.count(axis) > 1:
                sizes = " and ".join(f"{name}{n}" for a, n in self.axes if a is axis)
                raise InputError(f"{self}: {name} is given as {sizes}; an axis may be named once")
            if size < 1:
                raise InputError(f"{self}: {name}{size} has no ranks; use {name}1 or more, or leave {name} out")
            if size > MAX_RANKS:
                raise InputError(f"{self}: {name}{size} is above {MAX_RANKS}, the most ranks that are accepted")
        if self.names(Axis.HSDP) and not self.names(Axis.FSDP):
            n = self.size(Axis.HSDP)
            raise InputError(f"{self}: HSDP takes its replicas and the shards of each, such as HSDP{n}x8")
        if self.rank_order is not None and len(set(self.rank_order)) != len(self.rank_order):
            raise InputError(f"{self}: an axis is in the rank order twice; name each once, from the fastest to the slowest")
        if self.stage_layers is not None:
            self._check_stages(self.stage_layers)

    def _check_stages(self, layers: tuple[int, ...]) -> None:
        n_virtual = self.size(Axis.VPP)
        if n_virtual > 1 and len(layers) != self.size(Axis.PP) * n_virtual:
            raise InputError(
                f"{self}: {len(layers)} stages are listed, but PP{self.size(Axis.PP)} x VPP{n_virtual} has "
                f"{self.size(Axis.PP) * n_virtual} virtual ones; list the layers of each in the order of the layers"
            )
        if n_virtual == 1 and len(layers) != self.size(Axis.PP):
            raise InputError(
                f"{self}: {len(layers)} stages are listed, but PP is {self.size(Axis.PP)}; list the layers "
                f"of each stage, or write PP{len(layers)}"
            )
        # A virtual stage may be empty, as those that hold MTP or the loss alone are; a rank has several.
        of_rank = [sum(layers[rank :: self.size(Axis.PP)]) for rank in range(self.size(Axis.PP))]
        if any(n < 0 for n in layers) or any(n == 0 for n in of_rank[1:-1]):
            raise InputError(
                f"{self}: a stage needs at least 1 layer; only the first and the last, which hold the "
                "embedding and the output layer, may have 0"
            )

    def __str__(self) -> str:
        stages = "" if self.stage_layers is None else f"[{','.join(str(n) for n in self.stage_layers)}]"
        sizes = dict(self.axes)
        hybrid = Axis.HSDP in sizes and [axis for axis, _ in self.axes].count(Axis.FSDP) == 1
        after = {Axis.PP: stages, Axis.HSDP: f"x{sizes[Axis.FSDP]}" if hybrid else ""}
        items = [
            f"{axis.upper()}{size}{after.get(axis, '')}" for axis, size in self.axes if not (hybrid and axis is Axis.FSDP)
        ]
        order = "" if self.rank_order is None else f" order={'-'.join(self.rank_order)}"
        return (" x ".join(items) or "TP1") + order

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ParallelSpec) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @property
    def _content(self) -> tuple[frozenset[tuple[Axis, int]], tuple[int, ...] | None, tuple[Axis, ...] | None]:
        said = frozenset((axis, size) for axis, size in self.axes if size > 1 or axis in (Axis.DP, Axis.FSDP))
        return said, self.stage_layers, self.rank_order

    def size(self, axis: Axis) -> int:
        """The size of an axis, 1 when it isn't named."""
        return dict(self.axes).get(axis, 1)

    def names(self, axis: Axis) -> bool:
        """Whether the axis was named, even with size 1."""
        return axis in dict(self.axes)


def parse_spec(text: str) -> ParallelSpec:
    """The specification that a text says: `parse_spec("tp4*pp2[3,5]")` has TP 4 and PP 2 with 3 and 5 layers.

    Raises InputError that quotes the part which can't be read and says what would be.
    """
    axes: list[tuple[Axis, int]] = []
    stage_layers: tuple[int, ...] | None = None
    at, rest = 0, text.strip()
    order = _ORDER.search(rest)
    rank_order: tuple[Axis, ...] | None = None
    if order is not None:
        rank_order = tuple(_axis(rest, name) for name in order["axes"].split("-"))
        rest = rest[: order.start()]
    if not rest:
        raise InputError(f"layout {text!r} is empty; write axes with sizes, such as {_EXAMPLE}")
    while True:
        item = _ITEM.match(rest, at)
        if item is None:
            raise _unreadable(rest, at)
        axis = _axis(rest, item["name"])
        axes.append((axis, _size(rest, item["size"])))
        if item["shards"] is not None and axis is Axis.HSDP:
            axes.append((Axis.FSDP, _size(rest, item["shards"])))
        elif item["shards"] is not None:
            raise _unreadable(rest, item.start("shards") - 1)
        if item["layers"] is not None:
            if axis is not Axis.PP:
                raise InputError(f"layout {rest!r}: {item[0]}: only PP takes a list, the layers of each of its stages")
            stage_layers = _layers(rest, item["layers"])
        at = item.end()
        if at == len(rest):
            return ParallelSpec(tuple(axes), stage_layers, rank_order)
        separator = _SEPARATOR.match(rest, at)
        if separator is None or separator.end() == len(rest):
            raise _unreadable(rest, at)
        at = separator.end()


def _axis(text: str, name: str) -> Axis:
    known = ", ".join(f"{axis.upper()} ({meaning})" for axis, meaning in _MEANINGS.items())
    try:
        return Axis(name.lower())
    except ValueError:
        close = difflib.get_close_matches(name.lower(), list(Axis), n=1)
        meant = f"did you mean {close[0].upper()}? The" if close else "the"
        raise InputError(f"layout {text!r}: axis {name!r} is unknown; {meant} axes are {known}") from None


def _size(text: str, digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise InputError(f"layout {text!r}: {digits} is above {MAX_RANKS}, the most ranks that are accepted")
    return int(digits)


def _layers(text: str, listed: str) -> tuple[int, ...]:
    parts = [part.strip() for part in listed[1:-1].split(",")]
    if not all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts):
        raise InputError(f"layout {text!r}: {listed} must list the layers of each stage, such as PP4[7,8,8,7]")
    return tuple(int(part) for part in parts)


def _unreadable(text: str, at: int) -> InputError:
    return InputError(f"layout {text!r}: can't read {text[at:]!r}; write axes with sizes and x between, such as {_EXAMPLE}")
