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

    @property
    def hop_trees(self) -> Ints:
        """The tree of each hop."""
        return np.repeat(np.arange(len(self.tree_ptr) - 1), np.diff(self.tree_ptr))

    def depths(self) -> Ints:
        """Of each hop: how many hops come before it."""
        first = np.repeat(self.tree_ptr[:-1], np.diff(self.tree_ptr))
        above = np.where(self.parent >= 0, first + self.parent, -1)
        depth = (above >= 0).astype(np.int64)
        # Each round doubles how far `above` points up, and `depth` counts the hops so far passed.
        while (has := np.flatnonzero(above >= 0)).size:
            depth[has] += depth[above[has]]
            above[has] = above[above[has]]
        return depth

    def heights(self, depth: Ints) -> Ints:
        """Of each hop, from the depths: the longest chain of hops that come after it, one after the other."""
        first = np.repeat(self.tree_ptr[:-1], np.diff(self.tree_ptr))
        height = np.zeros(len(self.src), dtype=np.int64)
        order = np.argsort(depth, kind="stable")
        level_ptr = np.searchsorted(depth[order], np.arange(int(depth.max(initial=0)) + 2))
        for level in range(len(level_ptr) - 2, 0, -1):
            hop = order[level_ptr[level] : level_ptr[level + 1]]
            np.maximum.at(height, first[hop] + self.parent[hop], height[hop] + 1)
        return height
