"""A rank's calls as arrays over its memory, made once, and run when their steps are due.

Rule: what to compute on was laid out when the plan was compiled, how is `attention`'s; here the one is handed to the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np

from shardroute.executors.attention.seam import Array, Block, Kernels
from shardroute.executors.interpreting.calls import REDUCE, Calls
from shardroute.planner.plans import Kind, Mode
from shardroute.planner.ring.chunks import Rows, rows_of
from shardroute.planner.ring.workloads import KEY_SIDE, LSE, Attention

# An array over an arena: owner, address, dtype as plans name it, shape, strides in bytes.
View = Callable[[int, int, str, tuple[int, ...], tuple[int, ...]], Array]


@dataclass(frozen=True, slots=True, eq=False)
class _Piece(Generic[Array]):
    tensor: str
    mode: Mode
    key: tuple[int, ...]  # its rows and first head: pieces of one side with the same key are one block
    rows: Rows
    first_head: int
    n_heads: int
    array: Array


class Computer(Generic[Array]):
    """The calls of one rank, by these kernels on what `view` gives."""

    def __init__(
        self, calls: Calls, attention: Attention, tensors: Sequence[tuple[str, str]], rank: int, view: "View[Array]",
        kernels: Kernels[Array],
    ) -> None:  # fmt: skip
        self._attention, self._kernels = attention, kernels
        self._calls: dict[int, tuple[int, list[_Piece[Array]]]] = {}
        token_dims = len(attention.seq_shape())
        for row in np.flatnonzero(calls.rank == rank).tolist():
            pieces = []
            for i in range(int(calls.ptr[row]), int(calls.ptr[row + 1])):
                name, dtype = tensors[int(calls.tensor[i])]
                shape, strides = tuple(calls.extent[i].tolist()), tuple(calls.stride[i].tolist())
                if name == LSE:  # which has no width
                    shape, strides = shape[:-1], strides[:-1]
                array = view(int(calls.owner[i]), int(calls.address[i]), dtype, shape, strides)
                rows = rows_of(attention, calls.lo[i : i + 1, :token_dims], calls.hi[i : i + 1, :token_dims])
                key = (*calls.lo[i].tolist(), *calls.hi[i].tolist(), int(calls.first_head[i]))
                pieces.append(_Piece(name, Mode(int(calls.mode[i])), key, rows, int(calls.first_head[i]), shape[2], array))
            self._calls[int(calls.step[row])] = int(calls.kind[row]), pieces

    def computes(self, step: int) -> bool:
        """Whether this rank computes anything in the step."""
        return step in self._calls

    def run(self, step: int) -> None:
        """Do what this rank computes in the step, if anything."""
        if step not in self._calls:
            return
        kind, pieces = self._calls[step]
        if kind == REDUCE:
            self._add(pieces)
            return
        match Kind(kind):
            case Kind.ATTEND:
                self._kernels.attend(self._attention, *_sides(pieces), fresh=_is_fresh(pieces, "o"))
            case Kind.GRAD:
                fresh_dq, fresh_dkv = _is_fresh(pieces, "dq"), _is_fresh(pieces, "dk")
                self._kernels.grad(self._attention, *_sides(pieces), fresh_dq=fresh_dq, fresh_dkv=fresh_dkv)
            case Kind.ADD:
                self._add(pieces)
            case Kind.MERGE:
                self._merge(pieces)

    def _add(self, pieces: list[_Piece[Array]]) -> None:
        for out, parts in _by_sum(pieces).values():
            self._kernels.add(out.array, parts, fresh=out.mode is Mode.WRITE)

    def _merge(self, pieces: list[_Piece[Array]]) -> None:
        sums = _by_sum(pieces)
        for (tensor, key), (out, parts) in sums.items():
            if tensor == "o":
                lse, found = sums[LSE, key]
                self._kernels.merge(
                    out.array, lse.array, list(zip(parts, found, strict=True)), fresh=out.mode is Mode.WRITE
                )


def _is_fresh(pieces: Sequence[_Piece[Array]], tensor: str) -> bool:
    return all(piece.mode is Mode.WRITE for piece in pieces if piece.tensor == tensor)


def _sides(pieces: Sequence[_Piece[Array]]) -> tuple[list[Block[Array]], list[Block[Array]]]:
    """The blocks of queries and those of keys."""
    sides: tuple[dict[tuple[int, ...], Block[Array]], dict[tuple[int, ...], Block[Array]]] = ({}, {})
    for piece in pieces:
        side = sides[piece.tensor in KEY_SIDE]
        block = side.setdefault(piece.key, Block(piece.rows, piece.first_head, piece.n_heads, {}))
        block.arrays[piece.tensor] = piece.array
    return list(sides[0].values()), list(sides[1].values())


def _by_sum(pieces: Sequence[_Piece[Array]]) -> dict[tuple[str, tuple[int, ...]], tuple[_Piece[Array], list[Array]]]:
    """Each sum with its parts, by tensor and block."""
    sums: dict[tuple[str, tuple[int, ...]], tuple[_Piece[Array], list[Array]]] = {
        (piece.tensor, piece.key): (piece, []) for piece in pieces if piece.mode is not Mode.READ
    }
    for piece in pieces:
        if piece.mode is Mode.READ:
            sums[piece.tensor, piece.key][1].append(piece.array)
    return sums
