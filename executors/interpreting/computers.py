"""A rank's calls as arrays over its memory, made once, and run when their steps are due.

Rule: what to compute on was laid out when the plan was compiled, how is `attention`'s; here the one is handed to the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.executors.attention.kernels import Block, Floats, add, attend, grad, merge
from shardroute.executors.interpreting.calls import REDUCE, Calls
from shardroute.planner.plans import Kind, Mode
from shardroute.planner.ring.chunks import Rows, rows_of
from shardroute.planner.ring.workloads import KEY_SIDE, LSE, Attention

View = Callable[[int, int, str, tuple[int, ...], tuple[int, ...]], NDArray[np.generic]]
# NumPy's names of the dtypes in which attention is run.
NUMPY_DTYPES = {"f32": "<f4", "f64": "<f8"}


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    tensor: str
    mode: Mode
    key: tuple[int, ...]  # its rows and first head: pieces of one side with the same key are one block
    rows: Rows
    first_head: int
    array: Floats


class Computer:
    """The calls of one rank. `view` gives an array over an arena: owner, address, dtype, shape, strides in bytes."""

    def __init__(self, calls: Calls, attention: Attention, tensors: Sequence[tuple[str, str]], rank: int, view: View) -> None:
        self._attention = attention
        self._calls: dict[int, tuple[int, list[_Piece]]] = {}
        token_dims = len(attention.seq_shape())
        for row in np.flatnonzero(calls.rank == rank).tolist():
            pieces = []
            for i in range(int(calls.ptr[row]), int(calls.ptr[row + 1])):
                name, dtype = tensors[int(calls.tensor[i])]
                array = view(
                    int(calls.owner[i]), int(calls.address[i]), NUMPY_DTYPES[dtype], tuple(calls.extent[i].tolist()),
                    tuple(calls.stride[i].tolist()),
                )  # fmt: skip
                rows = rows_of(attention, calls.lo[i : i + 1, :token_dims], calls.hi[i : i + 1, :token_dims])
                key = (*calls.lo[i].tolist(), *calls.hi[i].tolist(), int(calls.first_head[i]))
                floats: Floats = array[..., 0] if name == LSE else array  # type: ignore[assignment]  # dtype is a float's
                pieces.append(_Piece(name, Mode(int(calls.mode[i])), key, rows, int(calls.first_head[i]), floats))
            self._calls[int(calls.step[row])] = int(calls.kind[row]), pieces

    def run(self, step: int) -> None:
        """Do what this rank computes in the step, if anything."""
        if step not in self._calls:
            return
        kind, pieces = self._calls[step]
        if kind == REDUCE:
            _add(pieces)
            return
        match Kind(kind):
            case Kind.ATTEND:
                attend(self._attention, *_sides(pieces), fresh=_is_fresh(pieces, "o"))
            case Kind.GRAD:
                fresh_dq, fresh_dkv = _is_fresh(pieces, "dq"), _is_fresh(pieces, "dk")
                grad(self._attention, *_sides(pieces), fresh_dq=fresh_dq, fresh_dkv=fresh_dkv)
            case Kind.ADD:
                _add(pieces)
            case Kind.MERGE:
                _merge(pieces)


def _is_fresh(pieces: list[_Piece], tensor: str) -> bool:
    return all(piece.mode is Mode.WRITE for piece in pieces if piece.tensor == tensor)


def _sides(pieces: list[_Piece]) -> tuple[list[Block], list[Block]]:
    """The blocks of queries and those of keys."""
    sides: tuple[dict[tuple[int, ...], Block], dict[tuple[int, ...], Block]] = ({}, {})
    for piece in pieces:
        side = sides[piece.tensor in KEY_SIDE]
        side.setdefault(piece.key, Block(piece.rows, piece.first_head, {})).arrays[piece.tensor] = piece.array
    return list(sides[0].values()), list(sides[1].values())


def _by_sum(pieces: list[_Piece]) -> dict[tuple[str, tuple[int, ...]], tuple[_Piece, list[Floats]]]:
    """Each sum with its parts, by tensor and block."""
    sums = {(piece.tensor, piece.key): (piece, list[Floats]()) for piece in pieces if piece.mode is not Mode.READ}
    for piece in pieces:
        if piece.mode is Mode.READ:
            sums[piece.tensor, piece.key][1].append(piece.array)
    return sums


def _add(pieces: list[_Piece]) -> None:
    for out, parts in _by_sum(pieces).values():
        add(out.array, parts, fresh=out.mode is Mode.WRITE)


def _merge(pieces: list[_Piece]) -> None:
    sums = _by_sum(pieces)
    for (tensor, key), (out, parts) in sums.items():
        if tensor == "o":
            lse, found = sums[LSE, key]
            merge(out.array, lse.array, list(zip(parts, found, strict=True)), fresh=out.mode is Mode.WRITE)
