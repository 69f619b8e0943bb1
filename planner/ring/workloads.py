"""One attention call under context parallelism: what is computed, and how its tokens lie over the ranks.

Rule: no plan and no machine is known here. What can't be split is refused when the value is made, with the reason.

Sequence layouts, for P ranks and a document of n tokens (n padded to a multiple of 2 P when documents are packed):

- contiguous: rank r holds the r-th of P equal parts. Causal work is uneven: the last rank has 2 - 1/P times the mean.
- zigzag: rank r holds parts r and 2P - 1 - r of 2 P; every rank has the same causal work (also known as DualChunkSwap).
- striped: token i lies on rank i mod P; causal work differs by single rows.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from shardroute.planner.layouts.tensors import DTYPES, dtype_name
from shardroute.topologies.errors import InputError

# The tensors of a call by name: those that have a row for each query, those that have one for each key, and the log-sum-exp,
# which has a number for each query and head.
QUERY_SIDE: Final = ("q", "o", "do", "dq")
KEY_SIDE: Final = ("k", "v", "dk", "dv")
LSE: Final = "lse"

# Dtypes in which attention is computed; others of the same width hold no real numbers.
_FLOATS = ("f16", "bf16", "f32", "f64")
# As for sums of elements elsewhere: tokens times heads times width stays far below 2^59.
MAX_TOKENS: Final = 2**40
# No count of ranks, heads, width or sequences comes near, and products with small numbers stay in 64 bits.
MAX_COUNT = 2**31
# Packed streams have tens, some hundreds of them. Masks of n chunks take n^2 numbers: of 2,048 documents a few hundred MB.
_MAX_DOCUMENTS = 2048


class SequenceLayout(StrEnum):
    """Which tokens of a document each rank holds."""

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"
    STRIPED = "striped"


@dataclass(frozen=True)
class Attention:
    """An attention call over `n_ranks` ranks, each of which holds an equal part of every document.

    lengths       tokens of each document; one document of the whole sequence unless `packed`
    packed        documents lie one after the other in one stream (thd), each padded to a multiple of 2 x n_ranks by itself
    n_kv_heads    each KV head serves n_heads / n_kv_heads query heads (GQA)
    dtype         of q, k, v, o and their gradients; the log-sum-exp is float32, or float64 with f64
    grad_dtype    in which dK and dV (and dQ, where that travels) are added up on their way; the dtype itself unless given

    Raises InputError for what no strategy can split.
    """

    lengths: tuple[int, ...]
    n_ranks: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    batch: int = 1
    causal: bool = True
    packed: bool = False
    layout: SequenceLayout = SequenceLayout.ZIGZAG
    dtype: str = "bf16"
    grad_dtype: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(int(n) for n in self.lengths))
        try:
            object.__setattr__(self, "layout", SequenceLayout(self.layout))
        except ValueError:
            raise InputError(f"sequence layout {self.layout!r} is not known; expected one of {_names(SequenceLayout)}") from None
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "grad_dtype", dtype_name(self.grad_dtype) if self.grad_dtype else self.dtype)
        for name in ("n_ranks", "n_heads", "n_kv_heads", "head_dim", "batch"):
            if not 1 <= getattr(self, name) <= MAX_COUNT:
                raise InputError(f"{name}: expected a count from 1 to 2^31, found {getattr(self, name)}")
        for name in ("dtype", "grad_dtype"):
            if getattr(self, name) not in _FLOATS:
                raise InputError(f"attention in {getattr(self, name)}: expected one of {', '.join(_FLOATS)}")
        if DTYPES[self.grad_dtype] < DTYPES[self.dtype]:
            raise InputError(f"gradients added up in {self.grad_dtype}, which is narrower than the {self.dtype} that they are of")
        if self.n_heads % self.n_kv_heads:
            raise InputError(f"{self.n_heads} heads over {self.n_kv_heads} KV heads: every KV head must serve equally many")
        self._check_lengths()

    def _check_lengths(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or sum(self.lengths) > MAX_TOKENS:
            raise InputError(f"documents of {list(self.lengths)} tokens: expected at least one, each from 1 to 2^40 tokens")
        if self.packed:
            if len(self.lengths) > _MAX_DOCUMENTS:
                raise InputError(
                    f"{len(self.lengths)} packed documents: at most {_MAX_DOCUMENTS} are planned, since masks are worked out "
                    "between any two; pack them into several calls"
                )
            if self.batch > 1:
                raise InputError(
                    f"packed documents with batch {self.batch}: documents are packed into one stream, whose ring has no batch "
                    "dim; pack them all and give batch 1"
                )
            return
        if len(self.lengths) > 1:
            raise InputError(f"{len(self.lengths)} documents that aren't packed; a batch holds sequences of one length")
        (seq,), unit = self.lengths, self._unit
        if seq % unit:
            parts = f"2 x {self.n_ranks}" if unit > self.n_ranks else str(self.n_ranks)
            raise InputError(
                f"a sequence of {seq} tokens can't be cut into {parts} equal parts ({self.layout} over {self.n_ranks} ranks); "
                f"pad it to {-(-seq // unit) * unit}, or pack it as a document, which pads by itself"
            )

    @property
    def _unit(self) -> int:
        return 2 * self.n_ranks if self.packed or self.layout is SequenceLayout.ZIGZAG else self.n_ranks

    @cached_property
    def padded(self) -> tuple[int, ...]:
        """Tokens that each document takes in the stream, padding included."""
        unit = self._unit
        return tuple(-(-n // unit) * unit for n in self.lengths)

    @property
    def n_tokens(self) -> int:
        """Tokens of the stream, padding included."""
        return sum(self.padded)

    @property
    def local_tokens(self) -> int:
        """Tokens that each rank holds."""
        return self.n_tokens // self.n_ranks

    @property
    def lse_dtype(self) -> str:
        """In which the log-sum-exp of each row is kept."""
        return "f64" if self.dtype == "f64" else "f32"

    @property
    def is_even(self) -> bool:
        """Whether all ranks' parts of the sequence have (about) equally many pairs that attend."""
        return not self.causal or self.layout is not SequenceLayout.CONTIGUOUS

    @property
    def n_unmasked(self) -> int:
        """Pairs of a query and a key that attend, over one head and one sequence of the batch."""
        return sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)

    def flops(self, *, backward: bool) -> float:
        """FLOPs of the call over all ranks, pairs that are masked left out: 2 matrix products forward, 5 backward."""
        return (10.0 if backward else 4.0) * self.head_dim * self.n_heads * self.batch * self.n_unmasked

    def seq_shape(self) -> tuple[int, ...]:
        """The token dims of every tensor: the stream, or for striped rows of one token a rank."""
        if self.layout is SequenceLayout.STRIPED:
            return (self.n_tokens // self.n_ranks, self.n_ranks)
        return (self.n_tokens,)

    def heads_of(self, tensor: str) -> int:
        """Heads of a tensor."""
        return self.n_kv_heads if tensor in KEY_SIDE else self.n_heads

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """The shape of a tensor: batch, tokens, heads and, but for the log-sum-exp, width."""
        shape = (self.batch, *self.seq_shape(), self.heads_of(tensor))
        return shape if tensor == LSE else (*shape, self.head_dim)


def _names(kind: type[StrEnum]) -> str:
    return ", ".join(kind)
