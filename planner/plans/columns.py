"""The columns of a plan: bundles, steps, what COMPUTE steps do, and pieces; cast, frozen and compared in length when made."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints, volumes
from shardroute.topologies.errors import PlanError


def places(key: NDArray[np.integer]) -> Ints:
    """Each row's place among those of its key, from 0; rows of one key must stand together."""
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    return np.arange(len(key)) - np.repeat(starts, np.diff(np.append(starts, len(key))))


def ranges(ptr: Ints, rows: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """For CSR rows: the flat positions of all their items, and for each item the index into `rows` that it came from."""
    length = ptr[rows + 1] - ptr[rows]
    owner = np.repeat(np.arange(len(rows), dtype=np.int64), length)
    first = np.repeat(ptr[rows] - (np.cumsum(length) - length), length)
    return first + np.arange(len(owner), dtype=np.int64), owner


class _Columns:
    """Mix-in of the column groups below: cast, freeze and compare lengths once, when made."""

    __slots__ = ()

    def _freeze(self, dtypes: dict[str, type[np.integer]]) -> None:
        for name, dtype in dtypes.items():
            given = np.asarray(getattr(self, name))
            column: NDArray[np.generic] = np.ascontiguousarray(given, dtype=dtype)
            if given.ndim != 1 or (given.dtype != column.dtype and (given != column).any()):
                raise PlanError(f"column {name}: expected a list of {np.dtype(dtype).name} values")
            column.setflags(write=False)
            object.__setattr__(self, name, column)

    def columns(self) -> Iterator[tuple[str, NDArray[np.generic]]]:
        """Each column with its name, in a fixed order."""
        for entry in fields(self):  # type: ignore[arg-type]
            yield entry.name, getattr(self, entry.name)


def check_ptr(name: str, ptr: Ints, n_rows: int | None, n_items: int) -> None:
    """Raise PlanError unless ptr has the row starts of CSR rows with so many items (None: however many rows)."""
    if (
        len(ptr) < 1
        or (n_rows is not None and len(ptr) != n_rows + 1)
        or ptr[0] != 0
        or ptr[-1] != n_items
        or (np.diff(ptr) < 0).any()
    ):
        raise PlanError(f"column {name}: row starts must rise from 0 to {n_items}, one more than rows")


@dataclass(frozen=True, slots=True, eq=False)
class Bundles(_Columns):
    """Lists of pieces, CSR. Entry columns: tensor (index in the problem), piece (index in its class), offset (bytes, in
    slots; -1 = never staged).
    """

    ptr: NDArray[np.int64]
    tensor: NDArray[np.int32]
    piece: NDArray[np.int32]
    offset: NDArray[np.int64]

    def __post_init__(self) -> None:
        self._freeze({"ptr": np.int64, "tensor": np.int32, "piece": np.int32, "offset": np.int64})
        check_ptr("bundles.ptr", self.ptr, None, len(self.tensor))
        if not len(self.tensor) == len(self.piece) == len(self.offset):
            raise PlanError("bundles: columns differ in length")

    def __len__(self) -> int:
        return len(self.ptr) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Steps(_Columns):
    """One row a step, in the plan's global order.

    op, backend         the enums above
    lane                lane and queue, see `queued`
    bundle              what travels
    src                 the rank that sends (of a COPY or BROADCAST; else -1)
    dst                 the rank that receives a COPY (-1 for collectives)
    group               the group of a collective (-1 for a COPY)
    src_at, dst_at      places: SOURCE, TARGET or a slot number (SOURCE and TARGET for a BARRIER or COMPUTE)
    after_ptr, after    CSR: earlier steps that must be complete
    """

    op: NDArray[np.uint8]
    lane: NDArray[np.uint8]
    backend: NDArray[np.uint8]
    bundle: NDArray[np.int32]
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    group: NDArray[np.int32]
    src_at: NDArray[np.int16]
    dst_at: NDArray[np.int16]
    after_ptr: NDArray[np.int64]
    after: NDArray[np.int32]

    def __post_init__(self) -> None:
        self._freeze(
            {"op": np.uint8, "lane": np.uint8, "backend": np.uint8, "bundle": np.int32, "src": np.int32, "dst": np.int32,
             "group": np.int32, "src_at": np.int16, "dst_at": np.int16, "after_ptr": np.int64, "after": np.int32}
        )  # fmt: skip
        n = len(self.op)
        if any(len(c) != n for name, c in self.columns() if name not in ("after_ptr", "after")):
            raise PlanError("steps: columns differ in length")
        check_ptr("steps.after_ptr", self.after_ptr, n, len(self.after))
        owner = np.repeat(np.arange(n), np.diff(self.after_ptr))
        if len(self.after) and (self.after.min() < 0 or (self.after >= owner).any()):
            i = int(owner[np.argmax((self.after < 0) | (self.after >= owner))])
            raise PlanError(f"step {i}: its `after` list must name earlier steps only")

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True, eq=False)
class Computes(_Columns):
    """One row a COMPUTE step, in their order: its step, its Kind, and its operands, CSR: bundle, place and Mode of each."""

    step: NDArray[np.int32]
    kind: NDArray[np.uint8]
    ptr: NDArray[np.int64]
    bundle: NDArray[np.int32]
    at: NDArray[np.int16]
    mode: NDArray[np.uint8]

    def __post_init__(self) -> None:
        self._freeze({"step": np.int32, "kind": np.uint8, "ptr": np.int64, "bundle": np.int32, "at": np.int16, "mode": np.uint8})
        check_ptr("computes.ptr", self.ptr, len(self.step), len(self.bundle))
        if not len(self.step) == len(self.kind) or not len(self.bundle) == len(self.at) == len(self.mode):
            raise PlanError("computes: columns differ in length")

    @classmethod
    def none(cls) -> Self:
        """Of a plan that only moves."""
        return cls(
            np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int16),
            np.zeros(0, np.uint8),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """The pieces of one class: half-open boxes, int64[n, n_dims]."""

    lo: Ints
    hi: Ints

    @property
    def n_elements(self) -> Ints:
        """Elements in each box."""
        return volumes(self.lo, self.hi)


def check_boxes(boxes: Boxes, shape: tuple[int, ...]) -> None:
    """Raise PlanError unless every box lies in a tensor of this shape."""
    wanted = (len(boxes.lo), len(shape))
    if boxes.lo.shape != wanted or boxes.hi.shape != wanted:
        raise PlanError(f"pieces: boxes of shapes {boxes.lo.shape} and {boxes.hi.shape}, the tensors have {len(shape)} dims")
    if ((boxes.lo < 0) | (boxes.lo > boxes.hi) | (boxes.hi > np.array(shape, dtype=np.int64))).any():
        raise PlanError(f"a piece leaves the tensor of shape {shape}, or ends before it begins")
