"""Blocks cut so that each fits a window: what is packed on its way to another rank, or unpacked by adding it up, in parts.

Rule: the parts of a block follow each other as the whole did, so what they write, and the order in which it is packed, stays.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardroute.executors.interpreting.blocks import LINEAR, Blocks, Forms
from shardroute.planner.layouts.fragments import Ints
from shardroute.planner.plans import ranges

# The longest element; the length of every other divides it.
_ELEMENT_BYTES = 8

_Strides = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a block: how far it begins behind the whole on both sides, its bytes, and how often its run is repeated (as
    `Forms.count`); once along all dims where it is one run of bytes.
    """

    src: int
    dst: int
    n_bytes: int
    count: tuple[int, ...]


def cut_blocks(step: Ints, rank: Ints, blocks: Blocks, forms: Forms, most: int) -> tuple[Ints, Ints, Blocks, Forms]:
    """What `lay_blocks` has found, with blocks to other ranks in parts of at most `most` bytes where they may be packed. A single
    run that is copied stays whole: it is sent from where it lies. With `most` 0 nothing is packed, or cut.

    Forms of parts follow the others, whose numbers stay.
    """
    packs = (blocks.to != rank) & (blocks.n_bytes > most) & ((blocks.form != LINEAR) | (blocks.sums > 0)) & (most > 0)
    if not packs.any():
        return step, rank, blocks, forms
    rows = np.flatnonzero(packs)
    # Blocks that lie alike are cut alike: a plan has a few kinds of them, and may have millions of blocks.
    kinds, kind = np.unique(
        np.stack([blocks.form[rows], blocks.n_bytes[rows], blocks.sums[rows] > 0], dtype=np.int64), axis=1, return_inverse=True
    )
    added = _Added(forms)
    parts, counts = [(0, 0, 0, LINEAR)], [1]  # first what stands for blocks that aren't cut
    for form, n_bytes, adds in kinds.T.tolist():
        found = list(_parts_of(forms, form, n_bytes, most, adds=bool(adds)))
        parts += [(part.src, part.dst, part.n_bytes, added.number(form, part.count)) for part in found]
        counts.append(len(found))
    src, dst, n_bytes_of, form_of = np.array(parts, dtype=np.int64).T
    of_block = np.zeros(len(packs), dtype=np.int64)
    of_block[rows] = kind.ravel() + 1
    part, owner = ranges(np.cumsum([0, *counts]), of_block)
    whole, is_part = blocks.take(owner), packs[owner]
    cut = Blocks(
        whole.src + src[part], whole.dst + dst[part], whole.to, np.where(is_part, n_bytes_of[part], whole.n_bytes),
        np.where(is_part, form_of[part], whole.form).astype(np.int32), whole.sums,
    )  # fmt: skip
    return step[owner], rank[owner], cut, added.forms()


class _Added:
    """Forms, and behind them those of parts."""

    def __init__(self, forms: Forms) -> None:
        self._forms = forms
        self._number: dict[tuple[int, tuple[int, ...]], int] = {}

    def number(self, form: int, count: tuple[int, ...]) -> int:
        """The number of the form that repeats a form's run so often; LINEAR for once."""
        if all(n == 1 for n in count):
            return LINEAR
        return self._number.setdefault((form, count), len(self._forms.run) + len(self._number))

    def forms(self) -> Forms:
        forms = self._forms
        of = np.array([form for form, _ in self._number], dtype=np.int64)
        count = np.array([count for _, count in self._number], dtype=np.int64).reshape(-1, forms.count.shape[1])
        return Forms(
            np.append(forms.run, forms.run[of]), np.concatenate([forms.count, count]),
            np.concatenate([forms.src_stride, forms.src_stride[of]]), np.concatenate([forms.dst_stride, forms.dst_stride[of]]),
        )  # fmt: skip


def _parts_of(forms: Forms, form: int, n_bytes: int, most: int, *, adds: bool) -> Iterator[_Part]:
    if form == LINEAR:
        return _parts(_Part(0, 0, n_bytes, ()), ((), ()), most, adds=adds)
    strides = tuple(forms.src_stride[form].tolist()), tuple(forms.dst_stride[form].tolist())
    return _parts(_Part(0, 0, n_bytes, tuple(forms.count[form].tolist())), strides, most, adds=adds)


def _parts(whole: _Part, strides: _Strides, most: int, *, adds: bool) -> Iterator[_Part]:
    """The part in order, cut along its outermost dim, and its slices along theirs where one is still too long."""
    if whole.n_bytes <= most:
        yield whole
        return
    dim = next((d for d, n in enumerate(whole.count) if n > 1), None)
    if dim is None:
        yield from _runs(whole, most, adds=adds)
        return
    n = whole.count[dim]
    inner = whole.n_bytes // n
    at_once = max(1, most // inner)
    for first in range(0, n, at_once):
        some = min(at_once, n - first)
        count = (*whole.count[:dim], some, *whole.count[dim + 1 :])
        part = _Part(whole.src + first * strides[0][dim], whole.dst + first * strides[1][dim], inner * some, count)
        yield from _parts(part, strides, most, adds=adds)


def _runs(run: _Part, most: int, *, adds: bool) -> Iterator[_Part]:
    """A run, between elements in parts where it is added up, as that is never received in place."""
    step = max(most - most % _ELEMENT_BYTES, _ELEMENT_BYTES) if adds else run.n_bytes
    for first in range(0, run.n_bytes, step):
        yield _Part(run.src + first, run.dst + first, min(step, run.n_bytes - first), run.count)
