"""Attention by torch equals attention on one device, block by block; what it cuts a mask into is that mask."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.executors.attention.floats import decode, encode
from shardroute.executors.attention.references import one_device
from shardroute.executors.attention.seam import Block
from shardroute.executors.attention.torch_kernels import parts_of
from shardroute.planner.ring.chunks import chunks_of
from shardroute.planner.ring.tiles import keys_seen
from shardroute.planner.ring.workloads import Attention, SequenceLayout

torch = pytest.importorskip("torch")
from shardroute.executors.attention import torch_kernels  # noqa: E402  # needs torch


@st.composite
def calls(draw: st.DrawFn) -> Attention:
    n_ranks, packed = draw(st.integers(1, 3)), draw(st.booleans())
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3)) if packed else [2 * n_ranks * draw(st.integers(1, 6))]
    kv = draw(st.integers(1, 2))
    return Attention(
        tuple(lengths), n_ranks, kv * draw(st.integers(1, 3)), kv, 8, batch=1 if packed else 2, causal=draw(st.booleans()),
        packed=packed, layout=draw(st.sampled_from(SequenceLayout)), dtype="f64",
    )  # fmt: skip


@given(calls())
@settings(max_examples=60, deadline=None)
def test_parts_are_the_mask_each_pair_once(call: Attention) -> None:
    rows = chunks_of(call).rows

    for q in range(len(rows)):
        for k in range(len(rows)):
            queries, keys = rows.take(np.array([q])), rows.take(np.array([k]))
            found = np.zeros((int(queries.n[0]), int(keys.n[0])), dtype=int)
            for part in parts_of(call, queries, keys):
                square = found[part.rows, part.keys]
                square += np.tri(*square.shape, dtype=int) if part.causal else 1
                assert not part.causal or square.shape[0] == square.shape[1]
            n_real = int(queries.n_real[0])
            seen = keys_seen(call, queries, 0, keys, 0, np.arange(n_real))
            wanted = np.zeros_like(found)
            wanted[:n_real] = np.arange(int(keys.n[0])) < seen[:, None]
            assert (found == wanted).all()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@given(calls(), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_blocks_in_any_order_give_what_one_device_gives(fused: bool, call: Attention, seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = (call.batch, call.n_tokens)
    arrays = {n: random.uniform(-2, 2, (*shape, call.heads_of(n), call.head_dim)) for n in ("q", "k", "v", "do")}
    arrays |= {n: np.full_like(arrays[like], 7.0) for n, like in (("o", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v"))}
    arrays["lse"] = np.full(arrays["q"].shape[:3], 7.0)
    queries, keys = _blocks(call, arrays, ("q", "o", "lse", "do", "dq")), _blocks(call, arrays, ("k", "v", "dk", "dv"))
    order = random.permutation(len(keys)).tolist()

    with pytest.MonkeyPatch.context() as patch:
        if not fused:
            patch.setattr(torch_kernels, "_ROWS", 3)
            patch.setattr(torch_kernels, "_forward", torch_kernels.plain_forward)
            patch.setattr(torch_kernels, "_backward", torch_kernels.plain_backward)
        for n, k in enumerate(order):
            torch_kernels.attend(call, queries, [keys[k]], fresh=n == 0)
        for n, k in enumerate(order):
            torch_kernels.grad(call, queries, [keys[k]], fresh_dq=n == 0, fresh_dkv=True)

    for name, expected in one_device(call, arrays, backward=True).items():
        np.testing.assert_allclose(arrays[name], expected, rtol=0, atol=1e-12, err_msg=name)


def _blocks(call: Attention, arrays: dict[str, np.ndarray], names: tuple[str, ...]) -> list[Block[torch.Tensor]]:
    """Each chunk's part of these tensors, as views."""
    chunks, found = chunks_of(call), []
    for i in range(len(chunks)):
        index = (slice(None), *(slice(a, b) for a, b in zip(chunks.lo[i], chunks.hi[i], strict=True)))
        views = {n: arrays[n].reshape(call.batch, *call.seq_shape(), *arrays[n].shape[2:])[index] for n in names}
        tensors = {n: torch.from_numpy(v[:, :, 0] if len(call.seq_shape()) == 2 else v) for n, v in views.items()}
        found.append(Block(chunks.rows.take(np.array([i])), 0, tensors[names[0]].shape[2], tensors))
    return found


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_what_a_gpu_is_asked_for_are_calls_that_torch_has(dtype: torch.dtype, kernel: str) -> None:
    """On tensors without memory, which have the GPU kernels' shapes: no GPU has run this."""
    q, k = (torch.empty(2, 4, n, 64, dtype=dtype, device="meta") for n in (40, 24))

    o, lse = torch_kernels._forward(q, k, k, False, 0.1)
    slopes = torch_kernels._backward(o, q, k, k, o, lse, False, 0.1)

    assert torch_kernels._fused(q) == kernel
    assert (o.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [slope.shape for slope in slopes] == [q.shape, k.shape, k.shape]


def test_widths_and_dtypes_without_a_fused_kernel_are_computed_plainly() -> None:
    shapes = [(torch.float64, 64), (torch.bfloat16, 20), (torch.bfloat16, 512)]

    assert [torch_kernels._fused(torch.empty(1, 1, 1, width, dtype=dtype)) for dtype, width in shapes] == ["", "", ""]


def test_bf16_on_the_host_is_torchs() -> None:
    values = np.concatenate([np.random.default_rng(0).normal(size=10_000), [0.0, -np.inf, 1 + 2**-9, 1 + 3 * 2**-9, 3e38]])

    bits = encode(values, "bf16")

    assert (bits == torch.from_numpy(values).float().bfloat16().view(torch.uint16).numpy()).all()
    assert (decode(bits, "bf16") == torch.from_numpy(values).float().bfloat16().double().numpy()).all()
    assert np.isnan(decode(encode(np.array([np.nan]), "bf16"), "bf16")).all()
