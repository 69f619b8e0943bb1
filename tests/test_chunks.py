"""Chunks of every sequence layout against sets of tokens: who holds what, and who attends whom."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.ring.chunks import chunks_of, rows_of, seen, unmasked
from shardroute.planner.ring.workloads import Attention, SequenceLayout
from shardroute.topologies.errors import PlanError


@st.composite
def calls(draw):
    n_ranks, packed = draw(st.integers(1, 5)), draw(st.booleans())
    lengths = draw(st.lists(st.integers(1, 25), min_size=1, max_size=4)) if packed else [2 * n_ranks * draw(st.integers(1, 4))]
    layout, causal = draw(st.sampled_from(SequenceLayout)), draw(st.booleans())
    return Attention(tuple(lengths), n_ranks, 2, 1, 4, causal=causal, packed=packed, layout=layout)


def token_sets(call, chunks):
    """Of each chunk its tokens: (document, position, is real), and their numbers in the stream."""
    about = [(d, i, i < n) for d, (n, m) in enumerate(zip(call.lengths, call.padded, strict=True)) for i in range(m)]
    token = np.arange(call.n_tokens).reshape(call.seq_shape())
    numbers = [
        token[tuple(slice(a, b) for a, b in zip(lo, hi, strict=True))].ravel().tolist()
        for lo, hi in zip(chunks.lo.tolist(), chunks.hi.tolist(), strict=True)
    ]
    return [[about[i] for i in found] for found in numbers], numbers


@given(calls())
def test_every_token_lies_in_one_chunk_and_every_rank_holds_as_many(call: Attention) -> None:
    chunks = chunks_of(call)

    _, numbers = token_sets(call, chunks)
    assert sorted(i for found in numbers for i in found) == list(range(call.n_tokens))
    held = np.bincount(chunks.rank, weights=chunks.rows.n, minlength=call.n_ranks)
    assert (held == call.local_tokens).all()


@given(calls())
def test_chunks_lie_on_their_rank_one_after_the_other(call: Attention) -> None:
    chunks = chunks_of(call)

    for rank in range(call.n_ranks):
        mine = chunks.of(rank)
        assert chunks.local[mine].tolist() == np.cumsum([0, *chunks.rows.n[mine][:-1]]).tolist()


@given(calls())
def test_pairs_that_attend_are_those_that_the_mask_lets_through(call: Attention) -> None:
    chunks = chunks_of(call)
    sets, _ = token_sets(call, chunks)

    counted = unmasked(call, chunks.rows, chunks.rows)

    def sees(q, k):
        return q[2] and k[2] and q[0] == k[0] and (not call.causal or q[1] >= k[1])

    assert counted.tolist() == [[sum(sees(q, k) for q in a for k in b) for b in sets] for a in sets]
    assert counted.sum() == call.n_unmasked
    assert (seen(call, chunks.rows, chunks.rows) == (counted > 0)).all()


def test_zigzag_gives_every_rank_the_same_causal_work_and_contiguous_does_not() -> None:
    work = {}
    for layout in (SequenceLayout.ZIGZAG, SequenceLayout.CONTIGUOUS):
        call = Attention((64,), 4, 1, 1, 1, layout=layout)
        chunks = chunks_of(call)
        work[layout] = np.bincount(chunks.rank, weights=unmasked(call, chunks.rows, chunks.rows).sum(axis=1)).tolist()

    assert work[SequenceLayout.ZIGZAG] == [520.0] * 4  # 64 * 65 / 2 / 4
    assert work[SequenceLayout.CONTIGUOUS] == [136.0, 392.0, 648.0, 904.0]


def test_rows_of_two_documents_are_no_chunk() -> None:
    call = Attention((4, 4), 1, 1, 1, 1, packed=True)

    with pytest.raises(PlanError, match="expected rows of one document"):
        rows_of(call, np.array([[2]]), np.array([[6]]))


def test_the_flops_of_a_call_are_four_a_width_and_pair_forward_and_ten_backward() -> None:
    call = Attention((8,), 2, 4, 2, 16, batch=3)

    assert call.flops(backward=False) == 4 * 16 * 4 * 3 * (8 * 9 / 2)
    assert call.flops(backward=True) == 2.5 * call.flops(backward=False)
