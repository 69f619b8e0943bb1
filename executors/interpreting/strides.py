"""Strided boxes with as few dims as they can have, so that copying and filling work on long runs."""

import numpy as np

from shardroute.planner.layouts.fragments import Ints


def coalesce(extent: Ints, src_strides: Ints, dst_strides: Ints) -> tuple[Ints, Ints, Ints]:
    """The same blocks with dims ordered by destination stride and merged where both sides allow it.

    All arrays are int64[n, n_dims]; merged dims leave leading dims of extent 1. A 4 x 8 box that fills its buffer on both sides
    becomes extents (1, 32), strides (0, 1).
    """
    order = np.argsort(np.where(extent == 1, -np.inf, -np.abs(dst_strides)), axis=1, kind="stable")
    extent, src, dst = (np.take_along_axis(x, order, axis=1) for x in (extent, src_strides, dst_strides))
    n, n_dims = extent.shape
    count, a, b = np.ones_like(extent), np.zeros_like(extent), np.zeros_like(extent)
    top = np.full(n, n_dims)  # the outermost merged dim of each row so far
    for dim in reversed(range(n_dims)):
        live = extent[:, dim] != 1
        at = np.minimum(top, n_dims - 1)
        inner_count, inner_src, inner_dst = (np.take_along_axis(x, at[:, None], axis=1)[:, 0] for x in (count, a, b))
        fits = live & (top < n_dims) & (src[:, dim] == inner_src * inner_count) & (dst[:, dim] == inner_dst * inner_count)
        rows = np.flatnonzero(fits)
        count[rows, top[rows]] *= extent[rows, dim]
        rows = np.flatnonzero(live & ~fits)
        top[rows] -= 1
        count[rows, top[rows]], a[rows, top[rows]], b[rows, top[rows]] = extent[rows, dim], src[rows, dim], dst[rows, dim]
    return count, a, b
