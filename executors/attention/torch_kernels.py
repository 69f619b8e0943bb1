"""Attention on blocks of keys, forward and backward, in torch: what a COMPUTE step does on GPUs, and on CPUs if asked to.

Rule: these are the Kernels of `seam`, on tensors of any device; everything is put on torch's current stream, and nothing waits
for it. Where every row of a block sees the same keys or each one more than the row before, which is all that a causal mask makes
of chunks, a block is one or two rectangles and a square; each is one fused call, and what they give is merged by its log-sum-exp.
The backward call of a part takes the output and the log-sum-exp of the whole row, from which it computes its own weights anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shardroute.executors.attention.seam import Block
from shardroute.planner.ring.chunks import Rows
from shardroute.planner.ring.workloads import Attention

if TYPE_CHECKING:
    import torch

# Rows of scores that are made at a time where no fused kernel takes the dtype or the width.
_ROWS: Final = 512
# Fused kernels on GPUs: FlashAttention-2 in torch takes heads up to this width (torch's sdp_utils.cpp), in steps of 8.
_MOST_WIDTH, _WIDTH_STEP = 256, 8
# The efficient kernel's log-sum-exp has rows in multiples of this (kAlignLSE of torch's kernel_backward.h).
_LSE_STEP: Final = 32


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of queries and rows of keys that all see each other or, where `causal`, of which row i sees the first i + 1."""

    rows: slice
    keys: slice
    causal: bool


def parts_of(attention: Attention, queries: Rows, keys: Rows) -> list[Part]:
    """What a chunk of queries sees of a chunk of keys. Row i sees min(max(a + i, 0), n) keys, see chunks.unmasked."""
    n_rows, n_keys = int(queries.n_real[0]), int(keys.n_real[0])
    if queries.document[0] != keys.document[0] or not n_rows or not n_keys:
        return []
    everything = [Part(slice(0, n_rows), slice(0, n_keys), False)]
    if not attention.causal:
        return everything
    a = int(queries.start[0] - keys.start[0]) // keys.stride + 1
    if a >= n_keys:
        return everything
    first = min(max(1 - a, 0), n_rows)  # the first row that sees any
    last = min(n_keys - a + 1, n_rows)  # behind the last row that sees one more than the row before
    found = []
    if first < last:
        base = a + first - 1
        if base:
            found.append(Part(slice(first, last), slice(0, base), False))
        found.append(Part(slice(first, last), slice(base, base + last - first), True))
    if last < n_rows:
        found.append(Part(slice(last, n_rows), slice(0, n_keys), False))
    return found


def attend(
    attention: Attention, queries: "Sequence[Block[torch.Tensor]]", keys: "Sequence[Block[torch.Tensor]]", *, fresh: bool
) -> None:
    """Add to o and lse of the queries what they see in these keys; with `fresh` begin anew."""
    import torch

    scale = attention.head_dim**-0.5
    for block in queries:
        q, o, lse = (block.arrays[name] for name in ("q", "o", "lse"))
        found_o = torch.zeros(o.shape, dtype=_wide(o.dtype), device=o.device)  # summed wide, and rounded once
        found_lse = torch.full(lse.shape, -torch.inf, dtype=lse.dtype, device=lse.device)
        for part, heads, other, shared, counts in _pairs(attention, block, keys):
            k, v = (_repeated(_heads_first(other.arrays[n][:, part.keys, shared]), counts) for n in ("k", "v"))
            given_o, given_lse = _forward(_heads_first(q[:, part.rows, heads]), k, v, part.causal, scale)
            at = (slice(None), part.rows, heads)
            _merge_into(found_o[at], found_lse[at], given_o.transpose(1, 2), given_lse.transpose(1, 2))
        if fresh:
            o.copy_(found_o)
            lse.copy_(found_lse)
        else:
            _merge_into(o, lse, found_o, found_lse)


def grad(
    attention: Attention, queries: "Sequence[Block[torch.Tensor]]", keys: "Sequence[Block[torch.Tensor]]", *, fresh_dq: bool,
    fresh_dkv: bool,
) -> None:  # fmt: skip
    """Add to dq, dk and dv what these queries and keys give; begin anew those that are said to be fresh."""
    scale = attention.head_dim**-0.5
    sums = [(b.arrays["dq"], fresh_dq) for b in queries] + [(b.arrays[name], fresh_dkv) for b in keys for name in ("dk", "dv")]
    wide = {id(out): _begun(out, fresh) for out, fresh in sums}  # summed wide, and rounded once
    for block in queries:
        arrays = block.arrays
        for part, heads, other, shared, counts in _pairs(attention, block, keys):
            at = (slice(None), part.rows, heads)
            do, q, o = (_heads_first(arrays[name][at]) for name in ("do", "q", "o"))
            k, v = (_repeated(_heads_first(other.arrays[n][:, part.keys, shared]), counts) for n in ("k", "v"))
            lse = arrays["lse"][at].transpose(1, 2)
            dq, dk, dv = _backward(do, q, k, v, o, lse, part.causal, scale)
            wide[id(arrays["dq"])][at].add_(dq.transpose(1, 2))
            for name, slope in (("dk", dk), ("dv", dv)):
                wide[id(other.arrays[name])][:, part.keys, shared].add_(_summed(slope, counts).transpose(1, 2))
    for out, _ in sums:
        if wide[id(out)] is not out:
            out.copy_(wide[id(out)])


def merge(
    o: "torch.Tensor", lse: "torch.Tensor", parts: "Sequence[tuple[torch.Tensor, torch.Tensor]]", *, fresh: bool
) -> None:
    """Merge outputs of the same queries over different keys, each an o and its lse, into `o` and `lse`."""
    for other, found in parts:
        if fresh:
            o.copy_(other)
            lse.copy_(found)
        else:
            _merge_into(o, lse, other, found)
        fresh = False


def add(out: "torch.Tensor", parts: "Sequence[torch.Tensor]", *, fresh: bool) -> None:
    """Add the parts to `out`, or their sum anew."""
    if fresh:
        out.copy_(parts[0])
        parts = parts[1:]
    for part in parts:
        out.add_(part)


def _begun(out: "torch.Tensor", fresh: bool) -> "torch.Tensor":
    """A sum that is added to: `out` itself where its dtype is wide, else a copy."""
    if out.dtype == _wide(out.dtype):
        return out.zero_() if fresh else out
    return out.new_zeros(out.shape, dtype=_wide(out.dtype)) if fresh else out.to(_wide(out.dtype))


def _pairs(
    attention: Attention, block: "Block[torch.Tensor]", keys: "Sequence[Block[torch.Tensor]]"
) -> "Iterator[tuple[Part, slice, Block[torch.Tensor], slice, list[int]]]":
    """What a block of queries meets: a part, its query heads, the block of keys, its KV heads, and how many of the query heads
    each of these serves.
    """
    served = attention.n_heads // attention.n_kv_heads
    for other in keys:
        first = max(block.first_head, other.first_head * served)
        end = min(block.first_head + block.n_heads, (other.first_head + other.n_heads) * served)
        if first >= end:
            continue
        kv_heads = range(first // served, -(-end // served))
        counts = [min((head + 1) * served, end) - max(head * served, first) for head in kv_heads]
        shared = slice(kv_heads.start - other.first_head, kv_heads.stop - other.first_head)
        for part in parts_of(attention, block.rows, other.rows):
            yield part, slice(first - block.first_head, end - block.first_head), other, shared, counts


def _heads_first(tensor: "torch.Tensor") -> "torch.Tensor":
    """[batch, heads, rows, width], as fused kernels take it."""
    return tensor.transpose(1, 2)


def _repeated(tensor: "torch.Tensor", counts: list[int]) -> "torch.Tensor":
    """Each KV head as often as it serves a query head."""
    import torch

    if max(counts) == 1:
        return tensor
    return torch.cat([tensor[:, i : i + 1].expand(-1, n, -1, -1) for i, n in enumerate(counts)], dim=1)


def _summed(tensor: "torch.Tensor", counts: list[int]) -> "torch.Tensor":
    """The sum over the query heads that each KV head serves."""
    import torch

    if max(counts) == 1:
        return tensor
    wide = _wide(tensor.dtype)
    return torch.cat([part.sum(1, keepdim=True, dtype=wide) for part in torch.split(tensor, counts, dim=1)], dim=1)


def _forward(
    q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool, scale: float
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Output and log-sum-exp, [batch, heads, rows, width] and [batch, heads, rows]."""
    import torch

    aten = torch.ops.aten
    if q.device.type == "cpu":
        o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return o, lse
    match _fused(q):
        case "flash":
            o, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
            return o, lse
        case "efficient":
            o, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
            return o, lse[..., : q.shape[2]]
        case _:
            return plain_forward(q, k, v, causal, scale)


def _backward(
    do: "torch.Tensor", q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", o: "torch.Tensor", lse: "torch.Tensor",
    causal: bool, scale: float,
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":  # fmt: skip
    import torch

    aten = torch.ops.aten
    if q.device.type == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(do, q, k, v, o, lse, 0.0, causal, scale=scale)
        return dq, dk, dv
    match _fused(q):
        case "flash":
            seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # of dropout, of which there is none
            dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, o, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed, scale=scale
            )
            return dq, dk, dv
        case "efficient":
            seed = torch.zeros((), dtype=torch.int64, device=q.device)
            rows = q.shape[2]
            padded = torch.nn.functional.pad(lse, (0, -rows % _LSE_STEP), value=torch.inf)  # rows that no key is a part of
            dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
                do, q, k, v, None, o, padded.contiguous(), seed, seed, 0.0, [True, True, True, False], causal, scale=scale
            )
            return dq, dk, dv
        case _:
            return plain_backward(do, q, k, v, o, lse, causal, scale)


def _fused(q: "torch.Tensor") -> str:
    """Which of torch's fused kernels takes such queries on a GPU, or "" for none."""
    import torch

    width = q.shape[-1]
    if width % _WIDTH_STEP or width > _MOST_WIDTH or q.dtype == torch.float64:
        return ""
    return "efficient" if q.dtype == torch.float32 else "flash"


def plain_forward(
    q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", causal: bool, scale: float
) -> "tuple[torch.Tensor, torch.Tensor]":
    """The same by products of matrices, some rows at a time: for dtypes and widths that no fused kernel takes."""
    import torch

    wide = _wide(q.dtype)
    q, k, v = (x.to(wide) for x in (q, k, v))
    outputs, sums = [], []
    for _, scores in _scores(q, k, causal, scale):
        sums.append(torch.logsumexp(scores, dim=-1))
        outputs.append(torch.exp(scores - sums[-1][..., None]) @ v)
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def plain_backward(
    do: "torch.Tensor", q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor", o: "torch.Tensor", lse: "torch.Tensor",
    causal: bool, scale: float,
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":  # fmt: skip
    """dq, dk and dv, as `plain_forward`."""
    import torch

    wide = _wide(q.dtype)
    do, q, k, v, o = (x.to(wide) for x in (do, q, k, v, o))
    delta = (do * o).sum(-1, keepdim=True)
    slopes = []
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows, scores in _scores(q, k, causal, scale):
        weights = torch.exp(scores - lse[:, :, rows, None])
        dv += weights.transpose(-1, -2) @ do[:, :, rows]
        slope = weights * (do[:, :, rows] @ v.transpose(-1, -2) - delta[:, :, rows]) * scale
        dk += slope.transpose(-1, -2) @ q[:, :, rows]
        slopes.append(slope @ k)
    return torch.cat(slopes, dim=2), dk, dv


def _scores(
    q: "torch.Tensor", k: "torch.Tensor", causal: bool, scale: float
) -> "Iterator[tuple[slice, torch.Tensor]]":
    import torch

    for first in range(0, q.shape[2], _ROWS):
        rows = slice(first, min(first + _ROWS, q.shape[2]))
        scores = q[:, :, rows] @ k.transpose(-1, -2) * scale
        if causal:
            unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1 + first)
            scores = scores.masked_fill(unseen, -torch.inf)
        yield rows, scores


def _merge_into(o: "torch.Tensor", lse: "torch.Tensor", other: "torch.Tensor", found: "torch.Tensor") -> None:
    import torch

    both = torch.logaddexp(lse, found)
    finite = torch.where(torch.isneginf(both), 0.0, both)  # where a row has seen nothing yet, differences stay -inf
    keep, take = torch.exp(lse - finite)[..., None], torch.exp(found - finite)[..., None]
    o.copy_(o * keep + take * other)
    lse.copy_(both)


def _wide(dtype: "torch.dtype") -> "torch.dtype":
    """In which sums over parts are kept before they are rounded."""
    import torch

    return torch.float64 if dtype == torch.float64 else torch.float32
