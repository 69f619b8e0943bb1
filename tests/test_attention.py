"""Attention on blocks equals attention on one device, and that equals its definition."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.executors.attention.kernels import attend, grad, merge
from shardroute.executors.attention.references import one_device
from shardroute.executors.attention.seam import Block
from shardroute.planner.ring import tiles
from shardroute.planner.ring.chunks import chunks_of
from shardroute.planner.ring.tiles import Work, work
from shardroute.planner.ring.workloads import Attention, SequenceLayout


@st.composite
def calls(draw):
    n_ranks, packed = draw(st.integers(1, 3)), draw(st.booleans())
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=3)) if packed else [2 * n_ranks * draw(st.integers(1, 8))]
    kv = draw(st.integers(1, 2))
    return Attention(
        tuple(lengths), n_ranks, kv * draw(st.integers(1, 3)), kv, 3, batch=1 if packed else 2, causal=draw(st.booleans()),
        packed=packed, layout=draw(st.sampled_from(SequenceLayout)), dtype="f64",
    )  # fmt: skip


def inputs(call, seed=0):
    random = np.random.default_rng(seed)
    shape = (call.batch, call.n_tokens)
    return {n: random.uniform(-2, 2, (*shape, call.heads_of(n), call.head_dim)) for n in ("q", "k", "v", "do")}


def blocks(call, arrays, names):
    """Each chunk's part of these tensors, as views."""
    chunks = chunks_of(call)
    found = []
    for i in range(len(chunks)):
        index = (slice(None), *(slice(a, b) for a, b in zip(chunks.lo[i], chunks.hi[i], strict=True)))
        views = {n: arrays[n].reshape(call.batch, *call.seq_shape(), *arrays[n].shape[2:])[index] for n in names}
        views = {n: v[:, :, 0] if len(call.seq_shape()) == 2 else v for n, v in views.items()}
        found.append(Block(chunks.rows.take(np.array([i])), 0, next(iter(views.values())).shape[2], views))
    return found


@given(calls(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_blocks_in_any_order_give_what_one_device_gives(call: Attention, seed: int) -> None:
    arrays = inputs(call)
    arrays |= {n: np.full_like(arrays[like], 7.0) for n, like in (("o", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v"))}
    arrays["lse"] = np.full(arrays["q"].shape[:3], 7.0)
    queries, keys = blocks(call, arrays, ("q", "o", "lse", "do", "dq")), blocks(call, arrays, ("k", "v", "dk", "dv"))
    order = np.random.default_rng(seed).permutation(len(keys))

    with pytest.MonkeyPatch.context() as patch:  # tiles so small that calls have many
        patch.setattr(tiles, "TILE_ROWS", 4)
        patch.setattr(sys.modules[attend.__module__], "TILE_KEYS", 5)
        for n, k in enumerate(order.tolist()):
            attend(call, queries, [keys[k]], fresh=n == 0)
        for n, k in enumerate(order.tolist()):
            grad(call, queries, [keys[k]], fresh_dq=n == 0, fresh_dkv=True)

    for name, expected in one_device(call, arrays, backward=True).items():
        np.testing.assert_allclose(arrays[name], expected, rtol=0, atol=1e-12, err_msg=name)


@given(calls())
@settings(max_examples=40)
def test_the_work_of_chunks_is_what_the_loops_over_tiles_do(call: Attention) -> None:
    arrays = inputs(call)
    arrays |= {"o": np.zeros_like(arrays["q"]), "lse": np.zeros(arrays["q"].shape[:3])}
    counted = Work()

    def note(scores, tile, heads):
        nonlocal counted
        masked = 0 if tile.seen is None else scores.size
        sees = np.full(scores.shape[0], scores.shape[1]) if tile.seen is None else np.repeat(tile.seen, heads.stop - heads.start)
        pairs = int(np.clip(sees, 0, scores.shape[1]).sum())
        counted += Work(pairs, scores.size, masked, sum(scores.shape), 1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_ROWS", 4)
        for module in (tiles, sys.modules[attend.__module__]):
            patch.setattr(module, "TILE_KEYS", 5)
        patch.setattr(sys.modules[attend.__module__], "_mask", note)
        attend(call, blocks(call, arrays, ("q", "o", "lse")), blocks(call, arrays, ("k", "v")), fresh=True)
        tiles._work.cache_clear()
        rows, served = chunks_of(call).rows, call.n_heads // call.n_kv_heads
        total = Work()
        for q in range(len(rows)):
            for k in range(len(rows)):
                total += work(call, rows, q, rows, k, served).times(call.n_kv_heads * call.batch)
        tiles._work.cache_clear()

    assert total == counted
    assert total.n_pairs == call.n_unmasked * call.n_heads * call.batch


def test_merging_with_nothing_changes_nothing_and_two_nothings_stay_nothing() -> None:
    o, lse = np.array([[[[1.0, 2.0]], [[0.0, 0.0]]]]), np.array([[[0.5], [-np.inf]]])
    nothing = np.zeros_like(o), np.full_like(lse, -np.inf)

    merge(o, lse, [nothing], fresh=False)

    assert o.ravel().tolist() == [1.0, 2.0, 0.0, 0.0]
    assert lse.ravel().tolist() == [0.5, -np.inf]


class TestOneDevice:
    """The oracle of runs, against its own definition and against PyTorch."""

    def test_two_tokens_by_hand(self) -> None:
        call = Attention((2,), 1, 1, 1, 1, layout=SequenceLayout.CONTIGUOUS)
        given = {"q": [1.0, 2.0], "k": [0.0, np.log(3.0)], "v": [10.0, 20.0], "do": [1.0, 1.0]}
        found = one_device(call, {n: np.array(v).reshape(1, 2, 1, 1) for n, v in given.items()}, backward=True)

        # Token 0 sees itself only; token 1 weighs keys by exp(0) = 1 and exp(2 ln 3) = 9.
        assert found["o"].ravel() == pytest.approx([10.0, 19.0])
        assert found["lse"].ravel() == pytest.approx([0.0, np.log(10.0)])
        assert found["dv"].ravel() == pytest.approx([1.0 + 0.1, 0.9])
        # dk = weight * (v - o) * q: 0.1 * (10 - 19) * 2 and 0.9 * (20 - 19) * 2; token 0's softmax is constant.
        assert found["dk"].ravel() == pytest.approx([-1.8, 1.8])
        assert found["dq"].ravel() == pytest.approx([0.0, 0.9 * np.log(3.0)])

    def test_its_gradients_are_the_slopes_of_its_outputs(self) -> None:
        call = Attention((3, 5), 1, 2, 1, 2, packed=True)
        given = inputs(call)
        found = one_device(call, given, backward=True)
        step = 1e-6

        for name in ("q", "k", "v"):
            for index in [(0, 0, 0, 0), (0, 4, 0, 1), (0, 8, 0, 0)]:
                ends = []
                for sign in (1, -1):
                    moved = {n: a.copy() for n, a in given.items()}
                    moved[name][index] += sign * step
                    ends.append((one_device(call, moved, backward=False)["o"] * given["do"]).sum())
                assert found["d" + name][index] == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-7)

    @pytest.mark.parametrize("causal", [True, False])
    def test_it_equals_pytorchs_attention(self, causal) -> None:
        torch = pytest.importorskip("torch")
        call = Attention((12,), 1, 4, 2, 8, batch=2, causal=causal)
        given = inputs(call)
        q, k, v, do = (torch.tensor(given[n]).transpose(1, 2).requires_grad_() for n in ("q", "k", "v", "do"))

        o = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=causal
        )
        o.backward(do)

        found = one_device(call, given, backward=True)
        for name, tensor in (("o", o), ("dq", q.grad), ("dk", k.grad), ("dv", v.grad)):
            np.testing.assert_allclose(found[name], tensor.detach().transpose(1, 2).numpy(), rtol=0, atol=1e-12)
