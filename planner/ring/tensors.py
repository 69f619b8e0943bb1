"""The tensors of an attention call, cut into pieces, and how they lie on both sides.

Rule: a piece is one chunk of rows times one group of heads; piece number = chunk * n_groups + group, so whatever a strategy moves
is named without a search. Query heads are cut into `q_groups` groups, KV heads into `kv_groups`.

Before the call every rank holds its own chunks of q, k and v. A strategy that splits heads works on other parts than these; what
it keeps for the backward pass (q, k, v, o, lse) stays where it worked, its *residents*: all chunks of `split` neighbouring ranks,
one group of heads. With split 1 both are the same.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from shardroute.planner.layouts.fragments import Fragments, Ints, dense_strides
from shardroute.planner.layouts.tensors import Layout, Tensor
from shardroute.planner.plans import Boxes
from shardroute.planner.problems import Problem
from shardroute.planner.ring.chunks import Chunks
from shardroute.planner.ring.workloads import KEY_SIDE, LSE, Attention
from shardroute.topologies.errors import InputError


class Pass(StrEnum):
    """What of the call a plan computes."""

    FORWARD = "forward"
    BACKWARD = "backward"  # from q, k, v, o and lse, which were kept
    RECOMPUTE = "recompute"  # backward from q, k and v alone: forward again first

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors that are there before."""
        match self:
            case Pass.FORWARD:
                return ("q", "k", "v")
            case Pass.BACKWARD:
                return ("q", "k", "v", "o", LSE, "do")
            case Pass.RECOMPUTE:
                return ("q", "k", "v", "do")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The tensors that are computed."""
        forward, backward = ("o", LSE), ("dq", "dk", "dv")
        match self:
            case Pass.FORWARD:
                return forward
            case Pass.BACKWARD:
                return backward
            case Pass.RECOMPUTE:
                return (*forward, *backward)


@dataclass(frozen=True, slots=True)
class Heads:
    """How heads are cut: groups of query heads and of KV heads, and over how many neighbouring ranks (`split`)."""

    q_groups: int = 1
    kv_groups: int = 1
    split: int = 1

    def groups(self, tensor: str) -> int:
        """Groups that the heads of a tensor are cut into."""
        return self.kv_groups if tensor in KEY_SIDE else self.q_groups

    def group_of(self, tensor: str, place: int) -> int:
        """The group of heads that the rank at this place among its `split` neighbours works on."""
        return place * self.groups(tensor) // self.split


def dtype_of(attention: Attention, tensor: str) -> str:
    """In which a tensor is kept and sent."""
    if tensor == LSE:
        return attention.lse_dtype
    return attention.grad_dtype if tensor in ("dq", "dk", "dv") else attention.dtype


def problem_of(attention: Attention, chunks: Chunks, what: Pass, heads: Heads) -> Problem:
    """The tensors of the call with their layouts before (inputs) and after (outputs)."""
    names = tuple(dict.fromkeys((*what.inputs, *what.outputs)))
    nothing = {name: _fragments(attention, chunks, name, heads, ranks=False, resident=False) for name in names}
    source, target = [], []
    for name in names:
        kept = what is Pass.BACKWARD and name != "do"
        stays = name == LSE or (name == "o" and what is Pass.RECOMPUTE)
        source.append(_fragments(attention, chunks, name, heads, resident=kept) if name in what.inputs else nothing[name])
        target.append(_fragments(attention, chunks, name, heads, resident=stays) if name in what.outputs else nothing[name])
    tensors = tuple(Tensor(name, attention.shape_of(name), dtype_of(attention, name)) for name in names)
    buffers = tuple((name,) for name in names)
    about = (("attention", describe(attention)), ("pass", what.value))
    return Problem(tensors, Layout(tuple(source), buffers), Layout(tuple(target), buffers), attention.n_ranks, about)


def describe(attention: Attention) -> str:
    """The call in one line for people."""
    documents = f"{len(attention.lengths)} packed documents of {sum(attention.lengths):,}" if attention.packed else ""
    tokens = documents or f"{attention.batch} x {attention.n_tokens:,}"
    grads = f", gradients {attention.grad_dtype}" if attention.grad_dtype != attention.dtype else ""
    return (
        f"{tokens} tokens, {attention.layout}, {'causal' if attention.causal else 'full'}; {attention.n_heads} heads "
        f"({attention.n_kv_heads} KV) of {attention.head_dim}, {attention.dtype}{grads}"
    )


def boxes_of(attention: Attention, chunks: Chunks, tensor: str, heads: Heads) -> Boxes:
    """The pieces of a tensor, in order of their numbers."""
    groups = heads.groups(tensor)
    if attention.heads_of(tensor) % groups:
        raise InputError(f"{attention.heads_of(tensor)} heads of {tensor} can't be cut into {groups} equal groups")
    chunk, group = (x.ravel() for x in np.meshgrid(np.arange(len(chunks)), np.arange(groups), indexing="ij"))
    size = attention.heads_of(tensor) // groups
    return Boxes(*_corners(attention, chunks, tensor, chunk, group * size, (group + 1) * size))


def _corners(attention: Attention, chunks: Chunks, tensor: str, chunk: Ints, first: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Lower and upper corners of boxes of whole chunks and heads `first` to `end`."""
    zero = np.zeros((len(chunk), 1), dtype=np.int64)
    width = [] if tensor == LSE else [attention.head_dim]
    lo = np.concatenate([zero, chunks.lo[chunk], first[:, None], *(zero for _ in width)], axis=1)
    hi = np.concatenate([zero + attention.batch, chunks.hi[chunk], end[:, None], *(zero + w for w in width)], axis=1)
    return lo, hi


def _fragments(
    attention: Attention, chunks: Chunks, tensor: str, heads: Heads, *, resident: bool, ranks: bool = True
) -> Fragments:
    """Each rank's chunks of all heads in one buffer, or its residents; with ranks=False nobody's."""
    split = heads.split if resident else 1
    chunk = np.repeat(np.arange(len(chunks)), split) if ranks else np.zeros(0, np.int64)
    place = np.tile(np.arange(split), len(chunks)) if ranks else chunk
    owner = chunks.rank[chunk] // split * split + place
    size = attention.heads_of(tensor) // (heads.groups(tensor) if split > 1 else 1)
    first = place * heads.groups(tensor) // split * size
    lo, hi = _corners(attention, chunks, tensor, chunk, first, first + size)
    local = attention.local_tokens
    before = chunks.local[chunk] + (chunks.rank[chunk] % split) * local
    one = (attention.batch, split * local, *([1] if len(attention.seq_shape()) > 1 else []), size)
    buffer = np.array([one if tensor == LSE else (*one, attention.head_dim)], dtype=np.int64)
    strides = dense_strides(buffer)
    n = len(chunk)
    order = np.lexsort((chunk, owner))
    return Fragments(
        attention.shape_of(tensor), owner[order].astype(np.int32), lo[order], hi[order], np.zeros(n, np.int32),
        before[order] * strides[0, 1], np.repeat(strides, n, axis=0), np.full(n, buffer.prod(dtype=np.int64)),
    )  # fmt: skip
