"""Attention on one device, as its formula says: what a run is compared with.

Rule: whole score matrices in float64, softmax by its definition; it shares nothing with `attention` but the call's description.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardroute.planner.ring.tensors import Pass
from shardroute.planner.ring.workloads import Attention
from shardroute.planner.shares import Told, untold

Doubles: TypeAlias = NDArray[np.float64]

# Score matrices are made for this many rows at a time, so that memory stays in bounds; each row is computed whole.
_ROWS: Final = 512
# Above this a comparison would take minutes: NumPy does some 3e10 float64 FLOP/s on a core.
MAX_REFERENCE_FLOPS: Final = 1e12


def reference_flops(attention: Attention, what: Pass) -> float:
    """FLOPs that `one_device` takes for a call; nothing that is masked is left out."""
    products = 4.0 if what is Pass.FORWARD else 14.0
    return products * attention.head_dim * attention.n_heads * attention.batch * float(attention.n_tokens) ** 2


def one_device(
    attention: Attention, inputs: dict[str, Doubles], *, backward: bool, rounded: Callable[[Doubles], Doubles] = lambda x: x,
    told: Told = untold,
) -> dict[str, Doubles]:
    """o and lse, and dq, dk, dv if `backward`: arrays of [batch, tokens, heads, width] (lse without width), from q, k, v (do).

    A row that sees nothing (padding) has o = 0 and lse = -inf. `rounded` is done to whatever a device that computes in a narrower
    dtype would write to memory: scores, weights, slopes, and results. `told` is told the share of rows that is done.
    """
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    seen = _Seen(attention)
    served, scale = attention.n_heads // attention.n_kv_heads, attention.head_dim**-0.5
    found = {"o": np.zeros_like(q), "lse": np.full(q.shape[:3], -np.inf)}
    if backward:
        found |= {"dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v)}
    n_rows, n_done = attention.batch * attention.n_heads * attention.n_tokens, 0
    for batch in range(attention.batch):
        for head in range(attention.n_heads):
            at, kv = (batch, slice(None), head), (batch, slice(None), head // served)
            for first in range(0, attention.n_tokens, _ROWS):
                rows = (batch, slice(first, min(first + _ROWS, attention.n_tokens)), head)
                scores = np.where(seen.of(rows[1]), rounded(q[rows] @ k[kv].T * scale), -np.inf)
                top = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - np.where(np.isneginf(top), 0.0, top))
                total = weights.sum(axis=1, keepdims=True)
                weights = rounded(weights / np.where(total > 0, total, 1.0))
                with np.errstate(divide="ignore"):
                    found["lse"][rows] = (np.where(np.isneginf(top), 0.0, top) + np.log(total))[:, 0]
                found["o"][rows] = rounded(weights @ v[kv])
                if backward:
                    do = inputs["do"][rows]
                    slope = rounded(do @ v[kv].T)
                    slope = rounded(weights * (slope - (weights * slope).sum(axis=1, keepdims=True)))
                    found["dq"][rows] = slope @ k[kv] * scale
                    found["dk"][kv] += slope.T @ q[at][rows[1]] * scale
                    found["dv"][kv] += weights.T @ do
                n_done += len(top)
                told(n_done / n_rows)
    for name in ("dq", "dk", "dv") if backward else ():
        found[name] = rounded(found[name])
    return found


class _Seen:
    """The mask, by rows."""

    def __init__(self, attention: Attention) -> None:
        self._causal = attention.causal
        lengths = list(zip(attention.padded, attention.lengths, strict=True))
        self._document = np.repeat(np.arange(len(lengths)), attention.padded)
        self._real = np.concatenate([np.arange(padded) < real for padded, real in lengths])

    def of(self, rows: slice) -> NDArray[np.bool_]:
        """Which tokens each of these rows sees, bool[rows, tokens]."""
        seen = (self._document[rows, None] == self._document) & self._real & self._real[rows, None]
        if self._causal:
            token = np.arange(len(self._document))
            seen &= token <= token[rows, None]
        return np.asarray(seen)
