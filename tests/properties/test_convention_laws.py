import math
from collections.abc import Callable
from random import Random

import numpy as np
from framework_oracles import (
    PADDING,
    Array,
    Buffers,
    Job,
    flat,
    holding,
    layout_buffers,
    megatron_buffers,
    model_of,
    places,
    vllm_buffers,
    whole_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.planner.layouts import (
    Fragments,
    Model,
    lay_out,
    overlap,
    parse_spec,
)
from shardroute.planner.problems import Problem
from shardroute.planner.refits import refit_problem

MAX_RANKS = 16  # of one side: keeps the slow oracle quick


@st.composite
def refits(draw: st.DrawFn) -> tuple[Model, Job, Job]:
    """A random small model with a Megatron job and a vLLM job that fit it."""
    n_kv = draw(st.integers(1, 4))
    n_heads = n_kv * draw(st.integers(1, 4))
    head_dim, n_layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    fits = [t for t in range(1, 9) if n_heads % t == 0 and (n_kv % t == 0 or t % n_kv == 0)]
    train_tp = draw(st.sampled_from([t for t in fits if (n_heads + 2 * n_kv) * head_dim % t == 0]), label="train_tp")
    vocab = draw(st.integers(1, 300))
    padded = -(-vocab // 64) * 64
    serve_tp = draw(st.sampled_from([t for t in fits if padded % t == 0]), label="serve_tp")
    ep, etp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2]))
    family = draw(st.sampled_from(["llama", "qwen3", "qwen3_moe"]))
    if family != "qwen3_moe":
        ep = etp = 1
    whole_experts = family == "qwen3_moe" and draw(st.booleans())
    n_experts = ep * draw(st.integers(1, 2))
    serve_ep = serve_tp if whole_experts and serve_tp <= n_experts else 1
    model = model_of(
        model_type=family,
        num_hidden_layers=n_layers,
        hidden_size=draw(st.integers(1, 3)),
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv,
        head_dim=head_dim,
        intermediate_size=math.lcm(train_tp, serve_tp) * draw(st.integers(1, 2)),
        moe_intermediate_size=math.lcm(etp, serve_tp) * draw(st.integers(1, 2)),
        num_experts=n_experts,
        decoder_sparse_step=draw(st.integers(1, 2)),
        mlp_only_layers=draw(st.sampled_from([[], [0]])),
        vocab_size=vocab,
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )
    if not model.n_experts:  # every layer may have turned out dense
        ep = etp = serve_ep = 1
    smallest_dp = math.lcm(train_tp, ep * etp) // train_tp
    cp = draw(st.sampled_from([1, 2]))
    train = Job(
        stages=draw(stages(n_layers, MAX_RANKS // (train_tp * cp * smallest_dp))),
        tp=train_tp,
        cp=cp,
        dp=smallest_dp * draw(st.sampled_from([1, 2])),
        ep=ep,
        etp=etp,
    )
    dp = draw(st.integers(1, max(1, min(3, MAX_RANKS // serve_tp))))
    serve = Job(stages=draw(stages(n_layers, MAX_RANKS // (serve_tp * dp))), tp=serve_tp, dp=dp, ep=serve_ep)
    return model, train, serve


@st.composite
def stages(draw: st.DrawFn, n_layers: int, most: int) -> tuple[int, ...]:
    """Layers of each of at most `most` stages, in any split that leaves no stage without a layer."""
    n_cuts = draw(st.integers(0, max(0, min(n_layers, most) - 1)))
    cuts = sorted(draw(st.permutations(range(1, n_layers)))[:n_cuts])
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, n_layers], strict=True))


@given(refits())
@settings(max_examples=40)
def test_megatron_fragments_put_every_element_where_megatron_puts_it(case: tuple[Model, Job, Job]) -> None:
    model, job, _ = case

    side = lay_out("megatron", model, parse_spec(job.spec))

    assert side.n_ranks == job.n_ranks
    assert flat(layout_buffers(model, side.layout)) == flat(megatron_buffers(model, job))


@given(refits())
@settings(max_examples=40)
def test_vllm_fragments_put_every_element_where_vllm_puts_it(case: tuple[Model, Job, Job]) -> None:
    model, _, job = case

    side = lay_out("vllm", model, parse_spec(job.spec), 5)

    assert side.n_ranks == job.n_ranks
    assert flat(layout_buffers(model, side.layout)) == flat(vllm_buffers(model, job, 5))


@given(refits(), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_moving_the_pieces_of_megatron_buffers_gives_vllm_buffers(case: tuple[Model, Job, Job], random: Random) -> None:
    model, train, serve = case
    held = {key: b.ravel() for key, b in megatron_buffers(model, train).items()}

    problem, summary = refit_problem(model, parse_spec(train.spec), parse_spec(serve.spec))
    received = moved(problem, held, random.choice)

    assert (summary.n_src_gpus, summary.n_dst_gpus) == (train.n_ranks, serve.n_ranks)
    assert flat(received) == flat(vllm_buffers(model, serve, train.n_ranks))


def moved(problem: Problem, held: Buffers, choose: Callable[[list[int]], int]) -> Buffers:
    """The buffers of the destination ranks after each needer copied each piece from some holder."""
    out: Buffers = {}
    for n, (source, target) in enumerate(zip(problem.source.fragments, problem.target.fragments, strict=True)):
        pieces = overlap(source, target)
        for lo, hi, pattern in zip(pieces.lo, pieces.hi, pieces.pattern.tolist(), strict=True):
            for needer in pieces.needers[pattern].tolist():
                holder = choose(pieces.holders[pattern].tolist())
                i = next(holding(source, holder, lo, hi))
                content = held[holder, problem.source.buffers[n][int(source.buffer[i])]]
                for j in holding(target, needer, lo, hi):
                    key = (needer, problem.target.buffers[n][int(target.buffer[j])])
                    buffer = out.setdefault(key, np.full(int(target.buffer_size[j]), PADDING))
                    assert (buffer[piece_places(target, j, lo, hi)] == PADDING).all(), "written twice"
                    buffer[piece_places(target, j, lo, hi)] = content[piece_places(source, i, lo, hi)]
    return out


def piece_places(fragments: Fragments, i: int, lo: Array, hi: Array) -> Array:
    """Where each element of the box [lo, hi) lies in the buffer of fragment i."""
    inside = tuple(slice(int(a), int(b)) for a, b in zip(lo - fragments.lo[i], hi - fragments.lo[i], strict=True))
    return places(fragments, i)[inside]


@given(refits())
@settings(max_examples=30)
def test_the_ranks_of_a_side_and_each_replica_of_vllm_hold_every_element(case: tuple[Model, Job, Job]) -> None:
    model, train, serve = case
    every = sorted(np.concatenate([t.ravel() for t in whole_tensors(model).values()]).tolist())
    replica = serve.tp * len(serve.stages)

    source = layout_buffers(model, lay_out("megatron", model, parse_spec(train.spec)).layout)
    target = layout_buffers(model, lay_out("vllm", model, parse_spec(serve.spec)).layout)

    assert elements(source, range(train.n_ranks)) == every
    for dp in range(serve.dp):
        assert elements(target, range(dp * replica, (dp + 1) * replica)) == every


def elements(buffers: Buffers, ranks: range) -> list[int]:
    """The different elements that lie on some of the ranks."""
    held = [b for (rank, _), b in buffers.items() if rank in ranks]
    return sorted(set(np.concatenate(held).tolist()) - {PADDING})
