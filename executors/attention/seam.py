"""The seam between what a COMPUTE step says and the library that computes it.

Rule: arrays in, sums added to arrays; no plan, no transport and no library is known. `kernels` does it in NumPy, `torch_kernels`
in torch on whatever device its tensors lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from shardroute.planner.ring.chunks import Rows
from shardroute.planner.ring.workloads import Attention

Array = TypeVar("Array")


class Arithmetic(StrEnum):
    """What computes attention."""

    NUMPY = "numpy"
    TORCH = "torch"


@dataclass(frozen=True, slots=True, eq=False)
class Block(Generic[Array]):
    """A piece of one side: its rows (see `Rows`), its heads, and its tensors by name, each [batch, rows, heads, width].

    lse has no width.
    """

    rows: Rows
    first_head: int
    n_heads: int
    arrays: dict[str, Array]


class Kernels(Protocol[Array]):
    """Attention on blocks."""

    def attend(
        self, attention: Attention, queries: Sequence[Block[Array]], keys: Sequence[Block[Array]], *, fresh: bool
    ) -> None:
        """Add to o and lse of the queries what they see in these keys; with `fresh` begin anew."""

    def grad(
        self, attention: Attention, queries: Sequence[Block[Array]], keys: Sequence[Block[Array]], *, fresh_dq: bool,
        fresh_dkv: bool,
    ) -> None:  # fmt: skip
        """Add to dq, dk and dv what these queries and keys give; begin anew those that are said to be fresh."""

    def merge(self, o: Array, lse: Array, parts: Sequence[tuple[Array, Array]], *, fresh: bool) -> None:
        """Merge outputs of the same queries over different keys, each an o and its lse, into `o` and `lse`."""

    def add(self, out: Array, parts: Sequence[Array], *, fresh: bool) -> None:
        """Add the parts to `out`, or their sum anew."""
