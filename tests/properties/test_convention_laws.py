import math
from random import Random

import numpy as np
from family_oracles import TINY, serving_family, tiny
from framework_oracles import (
    PADDING,
    Buffers,
    Job,
    flat,
    layout_buffers,
    megatron_buffers,
    model_of,
    moved,
    vllm_buffers,
    whole_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from shardroute.planner.coverage import coverage
from shardroute.planner.layouts import Model, lay_out, parse_spec
from shardroute.planner.refits import refit_problem
from shardroute.planner.testing import models

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


@st.composite
def family_refits(draw: st.DrawFn) -> tuple[Model, str, str, Job, str]:
    """A small model of any family with the source convention and its text, and a job of a server, all of which fit."""
    name = draw(st.sampled_from(sorted(TINY)))
    mtp = "num_nextn_predict_layers" in TINY[name] and draw(st.booleans())
    hidden, vocab = draw(st.integers(1, 5)), draw(st.integers(1, 200))
    model = tiny(name, mtp=mtp, hidden_size=hidden, vocab_size=vocab)
    has_tp = name not in ("gpt_oss", "nemotron_h")
    shards, fsdp_tp = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2])) if has_tp else 1
    replicas = draw(st.integers(1, 2))
    source = draw(st.sampled_from(["fsdp", "huggingface", "megatron", "sglang"]))
    spec = {
        "fsdp": f"HSDP{replicas}x{shards} x TP{fsdp_tp}",
        "huggingface": f"PP{draw(st.integers(1, 2))} x DP{replicas}",
        "megatron": f"TP{draw(st.sampled_from([1, 2, 4]))}" + (" x EP2" if model.n_experts and draw(st.booleans()) else ""),
        "sglang": "TP4 x EP2" if model.n_experts else "TP2",
    }[source]
    tp, grouped = draw(st.sampled_from([1, 2, 4])), bool(model.n_experts) and draw(st.booleans())
    job = Job((model.n_layers,), tp=tp, dp=draw(st.integers(1, 2)), ep=4 if grouped else 1)
    return model, source, spec, job, draw(st.sampled_from(["vllm", "sglang"]))


@given(family_refits(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_moving_the_pieces_of_any_source_gives_a_server_its_buffers(
    case: tuple[Model, str, str, Job, str], random: Random
) -> None:
    model, source, spec, job, server = case
    held = layout_buffers(model, lay_out(source, model, parse_spec(spec)).layout)

    problem, summary = refit_problem(
        model, parse_spec(spec), parse_spec(job.spec), from_convention=source, to_convention=server
    )
    received = moved(problem, held, random.choice)

    assert flat(received) == flat(serving_family(model, job, server, summary.n_src_gpus))


@given(models())
def test_any_model_on_one_rank_a_side_is_moved_whole(model: Model) -> None:
    problem, _ = refit_problem(model, parse_spec("TP1"), parse_spec("TP1"))

    found = coverage(problem)

    assert found.lacks == ()
    assert found.n_bytes_unneeded == 0
    # A tied embedding lies twice on one side but is needed once; everything else is needed once too.
    assert found.n_bytes_needed == problem.n_bytes
