"""Routes: which way every piece goes, as columns. What strategies make and lowering turns into steps."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.layouts.fragments import Ints, Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """Trees, CSR over hops, and which tree each entry (a piece of a tensor) takes.

    src, dst, lane   of each hop
    parent           the hop of the same tree that brings the piece to `src`, counted from the tree's first; -1: `src` holds it
    staged           the hop lands in staging memory of `dst`, which doesn't need the piece but passes it on
    tensor, piece, n_bytes, tree   of each entry: index in the problem, index in its class, bytes, its tree
    """

    tree_ptr: Ints
    src: Ranks
    dst: Ranks
    lane: NDArray[np.uint8]
    parent: Ints
    staged: NDArray[np.bool_]
    tensor: Ints
    piece: Ints
    n_bytes: Ints
    tree: Ints

    def depth_and_root(self) -> tuple[Ints, Ints]:
        """Of each hop: how many hops come before it, and the first of these (counted from the tree's first hop)."""
        first = np.repeat(self.tree_ptr[:-1], np.diff(self.tree_ptr))
        root = np.arange(len(self.src), dtype=np.int64)
        depth = np.zeros(len(self.src), dtype=np.int64)
        while (below := self.parent[root] >= 0).any():
            depth += below
            root = np.where(below, first + self.parent[root], root)
        return depth, root - first
