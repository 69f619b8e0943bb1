"""Inputs that broke real systems, each with the right answer, as a test of its whole kind. The text of a case is quoted.

Cases that other tests own:
field-11  a plan run twice with changed base addresses      tests/test_plan_files.py: a plan holds offsets, no pointers
field-22, 23, 24  ring attention over uneven, packed or causal input        the issue on ring attention
field-25  too many point-to-point operations in one group                   the issue on executors
field-26  control latency for each of many tensors, field-27 peak memory    the issue on prediction
field-28, 29, 30  NVL72 cliques and NIC lists                               the issue on machines
"""

from collections.abc import Callable

import numpy as np
import pytest
from family_oracles import TINY, serving_family, tiny
from framework_oracles import Job, flat, layout_buffers, model_of, moved, whole_tensors

from shardroute.planner.layouts import Fragments, Mesh, Model, Role, Shard, Side, lay_out, load_model, overlap, parse_spec, place
from shardroute.planner.layouts.conventions.buffers import even
from shardroute.planner.layouts.conventions.scales import shared_blocks
from shardroute.planner.layouts.holdings import totals
from shardroute.planner.layouts.models.precisions import with_scales
from shardroute.planner.problems import one_tensor
from shardroute.planner.refits import refit_problem
from shardroute.topologies.errors import InfeasibleError, InputError


def side_of(convention: str, model: Model, spec: str) -> Side:
    return lay_out(convention, model, parse_spec(spec))


def of_tensor(side: Side, model: Model, name: str) -> tuple[Fragments, tuple[str, ...]]:
    i = [t.name for t in model.tensors].index(name)
    return side.layout.fragments[i], side.layout.buffers[i]


def rows(side: Side, model: Model, name: str) -> dict[int, tuple[int, int]]:
    """First row and last row + 1 that each rank holds of a matrix, where that is one run."""
    fragments, _ = of_tensor(side, model, name)
    assert len(set(fragments.rank.tolist())) == len(fragments)
    return {int(r): (int(a), int(b)) for r, a, b in zip(fragments.rank, fragments.lo[:, 0], fragments.hi[:, 0], strict=True)}


def first(choices: list[int]) -> int:
    return choices[0]


last: Callable[[list[int]], int] = max


@pytest.mark.parametrize(("n_heads", "n_kv", "tp"), [(64, 4, 8), (32, 4, 8), (8, 2, 4), (8, 1, 8), (8, 8, 8), (12, 3, 6)])
@pytest.mark.parametrize("convention", ["vllm", "sglang"])
def test_field_01_a_kv_head_goes_to_neighbouring_ranks_and_queries_are_still_split(
    convention: str, n_heads: int, n_kv: int, tp: int
) -> None:
    """kv=4, TP=8 (Qwen3-235B/30B): dst ranks (0,1)->kv0,(2,3)->kv1,...; each kv head sent to 2 ranks; Q still split 8 ways"""
    model = model_of(num_attention_heads=n_heads, num_key_value_heads=n_kv, head_dim=2, moe_intermediate_size=24, vocab_size=192)

    side = side_of(convention, model, f"TP{tp}")

    copies = tp // n_kv
    for projection in ("k_proj", "v_proj"):
        held = rows(side, model, f"model.layers.0.self_attn.{projection}.weight")
        assert held == {rank: (rank // copies * 2, rank // copies * 2 + 2) for rank in range(tp)}
    n = n_heads // tp * 2
    assert rows(side, model, "model.layers.0.self_attn.q_proj.weight") == {rank: (rank * n, (rank + 1) * n) for rank in range(tp)}


@pytest.mark.parametrize("name", ["qwen3-235b-a22b", "qwen3-30b-a3b"])
def test_field_01_in_the_models_that_broke(name: str) -> None:
    model = load_model(name)

    held = rows(side_of("vllm", model, "TP8"), model, "model.layers.0.self_attn.k_proj.weight")

    assert [held[rank][0] // 128 for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("convention", "spec"), [("vllm", "TP6"), ("sglang", "TP6"), ("fsdp", "FSDP2 x TP6"), ("fsdp", "FSDP2 x TP8")]
)
def test_field_02_a_row_split_that_cuts_a_kv_head_is_refused(convention: str, spec: str) -> None:
    """kv*hd=512, TP=8: refuse a row split that cuts a head unless destination declares replication"""
    model = model_of(num_attention_heads=24, num_key_value_heads=4, head_dim=128, moe_intermediate_size=24)

    with pytest.raises(InputError, match="so a head would be cut; valid TP: 1, 2, 4"):
        side_of(convention, model, spec)


def test_field_03_a_qkv_fused_for_8_ranks_is_read_at_tp_16_part_by_part() -> None:
    """fused qkv stored for 8 ranks, read at TP16: planner must split per component then replicate KV"""
    model = model_of(num_attention_heads=16, num_key_value_heads=8, moe_intermediate_size=16, vocab_size=256)
    stored = serving_family(model, Job((2,), tp=8), "vllm")

    problem, _ = refit_problem(model, parse_spec("TP8"), parse_spec("TP16"), from_convention="vllm")
    received = moved(problem, {key: content.ravel() for key, content in stored.items()}, last)

    assert flat(received) == flat(serving_family(model, Job((2,), tp=16), "vllm", 8))


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize(
    ("convention", "spec"), [("megatron", "TP2"), ("vllm", "TP4"), ("sglang", "TP2"), ("fsdp", "FSDP3"), ("huggingface", "PP2")]
)
def test_field_04_putting_all_shards_together_gives_every_tensor_back_in_order(name: str, convention: str, spec: str) -> None:
    """property test: concatenating all ranks shards must reproduce the full tensor bit-exactly (shape checks alone pass)"""
    model = tiny(name)
    w = whole_tensors(model)
    side = side_of(convention, model, spec)
    held = layout_buffers(model, side.layout)

    for tensor, fragments, names in zip(model.tensors, side.layout.fragments, side.layout.buffers, strict=True):
        rebuilt = np.full(tensor.shape, -1)
        for i in range(len(fragments)):
            content = held[int(fragments.rank[i]), names[int(fragments.buffer[i])]]
            strides = [int(s) * content.itemsize for s in fragments.strides[i]]
            shape = [int(n) for n in fragments.extent[i]]
            box = tuple(slice(int(a), int(b)) for a, b in zip(fragments.lo[i], fragments.hi[i], strict=True))
            rebuilt[box] = np.lib.stride_tricks.as_strided(content[int(fragments.offset[i]) :], shape, strides)
        assert rebuilt.tolist() == w[tensor.name].tolist()


@pytest.mark.parametrize("convention", ["megatron", "vllm", "sglang"])
@pytest.mark.parametrize(("f", "tp"), [(4, 2), (4, 4), (12, 3), (6, 1)])
def test_field_05_a_rank_of_a_fused_gate_up_has_its_own_gate_and_up_rows(convention: str, f: int, tp: int) -> None:
    """fused gate_up F=4,TP=2: even split of [g0..g3,u0..u3] gives rank0 only gate rows; required rank0=[g0,g1,u0,u1]"""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12}
    model = model_of(model_type="llama", intermediate_size=f, hidden_size=1, vocab_size=192, **heads)
    w = whole_tensors(model)
    gate, up = (w[f"model.layers.0.mlp.{p}_proj.weight"].ravel().tolist() for p in ("gate", "up"))

    side = side_of(convention, model, f"TP{tp}")

    name = "decoder.layers.0.mlp.linear_fc1.weight" if convention == "megatron" else "model.layers.0.mlp.gate_up_proj.weight"
    held, n = flat(layout_buffers(model, side.layout)), f // tp
    for rank in range(tp):
        assert held[rank, name] == gate[rank * n : (rank + 1) * n] + up[rank * n : (rank + 1) * n]


@pytest.mark.parametrize("tp", [2, 4])
def test_field_06_gathered_fused_shards_are_put_in_order_and_not_just_joined(tp: int) -> None:
    """gather of fused destination shards at TP=2 must be un-interleaved; compare ordered, not as multiset"""
    model = model_of(num_attention_heads=4, num_key_value_heads=4, head_dim=1, hidden_size=1)
    w = whole_tensors(model)
    q, k, v = (w[f"model.layers.0.self_attn.{p}_proj.weight"].ravel().tolist() for p in "qkv")
    shards = serving_family(model, Job((2,), tp=tp), "vllm")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    joined = [x for rank in range(tp) for x in shards[rank, name].ravel().tolist()]

    problem, _ = refit_problem(model, parse_spec(f"TP{tp}"), parse_spec("TP1"), from_convention="vllm")
    received = moved(problem, {key: content.ravel() for key, content in shards.items()}, first)

    assert received[tp, name].tolist() == q + k + v
    assert joined != q + k + v
    assert sorted(joined) == sorted(q + k + v)  # why a comparison of multisets passed


def test_field_07_a_missing_expert_is_found_before_anything_moves() -> None:
    """completeness check: union of sources covers every destination byte once"""
    shape = (8, 2, 3)
    every = place(shape, Mesh.of({"ep": 4}), [Shard(0)])
    lo, hi = every.lo[:-1], every.hi[:-1]
    target = place(shape, Mesh.of({"tp": 2}, range(4, 6)), [Shard(1)])

    with pytest.raises(InfeasibleError, match=r"rank 4 needs \[6:8, 0:1, 0:3\] of a tensor of shape \(8, 2, 3\), but no source"):
        overlap(Fragments.dense(shape, every.rank[:-1], lo, hi), target)


@pytest.mark.parametrize("block", [2, 4])
def test_field_08_a_block_major_kernel_layout_is_one_of_its_own_and_is_filled_block_by_block(block: int) -> None:
    """destination descriptor 4-D block layout must be a distinct layout class needing a staging buffer (BlockMajorK)"""
    n_experts, n, k = 2, 3, 8
    source = place((n_experts, n, k), Mesh.of({"ep": 2}), [Shard(0)])
    plain = place((n_experts, n, k), Mesh.of({"ep": 1}, [2]), [Shard(0)])
    e, kb = np.indices((n_experts, k // block)).reshape(2, -1)
    lo = np.stack([e, np.zeros_like(e), kb * block], axis=1)
    blocked = Fragments(  # [E, K / block, N, block] on rank 2
        shape=(n_experts, n, k),
        rank=np.full(len(e), 2, np.int32),
        lo=lo,
        hi=np.stack([e + 1, np.full_like(e, n), (kb + 1) * block], axis=1),
        buffer=np.zeros(len(e), np.int32),
        offset=e * n * k + kb * n * block,
        strides=np.tile([n * k, block, 1], (len(e), 1)),
        buffer_size=np.full(len(e), n_experts * n * k),
    )
    whole = np.arange(n_experts * n * k)
    expected = whole.reshape(n_experts, n, k // block, block).transpose(0, 2, 1, 3).ravel()

    problem = one_tensor((n_experts, n, k), "bf16", source, blocked)
    received = moved(problem, {(r, "tensor"): whole[r * n * k :][: n * k] for r in (0, 1)}, first)

    assert blocked != plain
    assert blocked.buffer_size[0] == plain.buffer_size[0]  # a check of sizes alone would let a raw write pass
    assert received[2, "tensor"].tolist() == expected.tolist()
    assert received[2, "tensor"].tolist() != whole.tolist()


@pytest.mark.parametrize("convention", ["vllm", "sglang"])
def test_field_09_the_shared_expert_is_cut_over_tp_and_routed_ones_over_ep(convention: str) -> None:
    """GLM-4.7-Flash: 64 routed + 1 shared, TP4 EP4 ETP4: shared expert sharded by TP, routed by EP"""
    model = tiny("glm4_moe", n_routed_experts=64, moe_intermediate_size=8)

    side = side_of(convention, model, "TP4 x EP4")

    assert rows(side, model, "model.layers.1.mlp.experts.*.gate_proj.weight") == {r: (r * 16, (r + 1) * 16) for r in range(4)}
    assert rows(side, model, "model.layers.1.mlp.shared_experts.gate_proj.weight") == {r: (r * 2, (r + 1) * 2) for r in range(4)}
    _, names = of_tensor(side, model, "model.layers.1.mlp.shared_experts.up_proj.weight")
    assert names == ("model.layers.1.mlp.shared_experts.gate_up_proj.weight",)  # not a 65th row of experts.w13_weight


@pytest.mark.parametrize(("n_experts", "ep"), [(8, 4), (5, 4), (16, 2)])
def test_field_10_a_global_expert_has_its_local_place_on_the_one_rank_that_owns_it(n_experts: int, ep: int) -> None:
    """8 experts, EP=4: rank1 owns global [2,3]; routing [2,3,0,5,2,7] must map to local [0,1,-1,-1,0,-1]"""
    model = model_of(num_experts=n_experts, num_attention_heads=4, num_key_value_heads=4)

    fragments, _ = of_tensor(side_of("vllm", model, f"TP{ep} x EP{ep}"), model, "model.layers.0.mlp.experts.*.down_proj.weight")

    local = np.full((ep, n_experts), -1)
    for i, rank in enumerate(fragments.rank.tolist()):
        lo, hi = int(fragments.lo[i, 0]), int(fragments.hi[i, 0])
        start = int(fragments.offset[i] // fragments.strides[i, 0])
        local[rank, lo:hi] = np.arange(start, start + hi - lo)
    assert ((local >= 0).sum(axis=0) == 1).all()
    for rank in range(ep):
        assert sorted(local[rank][local[rank] >= 0].tolist()) == list(range((local[rank] >= 0).sum()))
    if (n_experts, ep) == (8, 4):
        assert local[1][[2, 3, 0, 5, 2, 7]].tolist() == [0, 1, -1, -1, 0, -1]


@pytest.mark.parametrize(("n_layers", "pp"), [(30, 4), (61, 16), (5, 2), (7, 3)])
def test_field_12_layers_that_pp_does_not_divide_need_a_list(n_layers: int, pp: int) -> None:
    """L=30, PP=4 without explicit split must raise; DSV3 L=61 PP16 needs explicit layout"""
    model = model_of(num_hidden_layers=n_layers)
    sizes = ",".join(str(len(part)) for part in np.array_split(np.arange(n_layers), pp))

    with pytest.raises(InputError, match=f"PP{pp} doesn't divide the {n_layers} layers of tiny, and no list is given"):
        side_of("megatron", model, f"PP{pp}")

    assert side_of("megatron", model, f"PP{pp}[{sizes}]").facts["layers per stage"] == f"{sizes} (as given)"


def test_field_12_deepseek_v3_has_a_list_of_its_own_with_its_source() -> None:
    text = side_of("megatron", load_model("deepseek-v3"), "PP16 x EP16").facts["layers per stage"]

    split = "4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,1"
    assert text.startswith(f"{split} (61 layers don't divide by 16; the split of NVIDIA-NeMo/Megatron-Bridge")


@pytest.mark.parametrize("split", [(1, 2, 2, 3), (3, 2, 2, 1), (2, 2, 2, 2)])
def test_field_13_the_bytes_of_a_rank_are_those_of_its_own_stage(split: tuple[int, ...]) -> None:
    """8 layers, PP [1,2,2,3]: peak bytes from the heaviest stage"""
    model = model_of(model_type="llama", num_hidden_layers=8, vocab_size=1)
    layer = sum(p.tensor.n_bytes for p in model.parameters if p.layer == 0)
    first_only, last_only = (
        sum(p.tensor.n_bytes for p in model.parameters if p.role in found)
        for found in ({Role.EMBEDDING}, {Role.LM_HEAD, Role.FINAL_NORM})
    )
    side = side_of("megatron", model, f"PP4[{','.join(map(str, split))}]")

    held = totals(model.tensors, side.layout).n_bytes

    assert (held - np.array(split) * layer).tolist() == [first_only, 0, 0, last_only]
    if split == (1, 2, 2, 3):
        assert held.argmax() == 3
        assert side.facts["weights"].endswith("most on rank 3")


@pytest.mark.parametrize("spec", ["PP2", "PP4", "PP2 x VPP2"])
@pytest.mark.parametrize(("target", "pp"), [("TP1", 1), ("PP2", 2)])
def test_field_14_a_tied_embedding_is_one_tensor_at_both_ends(spec: str, target: str, pp: int) -> None:
    """tied=True, PP=4: lm_head lives on last stage, embed on first; both destinations fed from one tensor; count bytes once"""
    model = model_of(model_type="llama", num_hidden_layers=4, tie_word_embeddings=True)

    problem, summary = refit_problem(model, parse_spec(spec), parse_spec(target))

    n = summary.n_src_gpus
    i = [t.name for t in problem.tensors].index("model.embed_tokens.weight")
    assert sorted(problem.source.fragments[i].rank.tolist()) == [0, n - 1]
    assert problem.source.buffers[i] == ("embedding.word_embeddings.weight", "output_layer.weight")
    assert sorted(problem.target.fragments[i].rank.tolist()) == sorted({n, n + pp - 1})
    assert problem.n_bytes == 2 * model.n_parameters
    assert not any("lm_head" in t.name for t in problem.tensors)


@pytest.mark.parametrize(("vocab", "tp"), [(32008, 2), (32000, 4), (151936, 8), (70, 2), (1, 2)])
def test_field_15_each_side_pads_the_vocabulary_by_its_own_rule_and_leaves_padding_alone(vocab: int, tp: int) -> None:
    """V=32008, pad 64, TP=2: rank1 real rows 16032..32007, 56 padding rows untouched; Megatron pads to 128*TP, so pads differ"""
    model = model_of(vocab_size=vocab, hidden_size=1, num_attention_heads=8, num_key_value_heads=8, moe_intermediate_size=8)
    name = "model.embed_tokens.weight"

    for convention, multiple in (("vllm", 64), ("sglang", 64), ("megatron", 128 * tp)):
        fragments, _ = of_tensor(side_of(convention, model, f"TP{tp}"), model, name)
        per_rank = -(-vocab // multiple) * multiple // tp
        real = {r: (r * per_rank, min((r + 1) * per_rank, vocab)) for r in range(tp) if r * per_rank < vocab}
        assert rows(side_of(convention, model, f"TP{tp}"), model, name) == real
        assert set(fragments.buffer_size.tolist()) == {per_rank}
    if vocab == 32008:
        assert rows(side_of("vllm", model, "TP2"), model, name)[1] == (16032, 32008)


@pytest.mark.parametrize(
    ("n_rows", "n_parts", "block", "shared"),
    [
        (1536, 8, 128, {1: (0, 1), 4: (2, 3), 7: (4, 5), 10: (6, 7)}),
        (2048, 32, 128, {b: (2 * b, 2 * b + 1) for b in range(16)}),
        (1536, 12, 128, {}),
        (320, 1, 128, {}),
        (96, 4, 128, {0: (0, 1, 2, 3)}),
    ],
)
def test_field_16_and_18_a_block_that_a_cut_goes_through_is_needed_on_every_side_of_it(
    n_rows: int, n_parts: int, block: int, shared: dict[int, tuple[int, ...]]
) -> None:
    """moe_intermediate=1536, TP=8, block 128: boundary at 192 inside block 1 (128..255), needed by ranks 0 and 1; 2048, TP=32"""
    assert shared_blocks(even(n_rows, n_parts), block) == shared


def test_field_16_trainers_replicate_such_scales_and_servers_refuse_the_cut() -> None:
    model = load_model("qwen3-235b-a22b", precision="fp8-block")
    trained = side_of("megatron", model, "EP8 x ETP8")

    held, _ = of_tensor(trained, model, "model.layers.0.mlp.experts.*.gate_proj.weight_scale_inv")
    by_rank = {r: (int(a), int(b)) for r, a, b in zip(held.rank.tolist(), held.lo[:, 1], held.hi[:, 1], strict=True)}

    assert [by_rank[rank] for rank in range(4)] == [(0, 2), (1, 3), (3, 5), (4, 6)]
    with pytest.raises(InputError, match=r"block 1 \(rows 128 to 255\), whose scale parts 0, 1 of 8 need; vllm counts blocks"):
        side_of("vllm", model, "TP8")
    assert side_of("vllm", model, "TP8 x EP8").n_ranks == 8


@pytest.mark.parametrize(("f", "fits"), [(320, False), (384, True), (64, False), (128, True)])
def test_field_17_gate_and_up_that_would_share_a_block_of_a_fused_buffer_are_refused(f: int, fits: bool) -> None:
    """F=320 block 128: gate rows 0..319, up rows 320..639: block 2 (256..383) mixes gate and up"""
    model = with_scales(tiny("qwen3_moe", moe_intermediate_size=f, head_dim=128), "fp8-block")

    if fits:
        assert side_of("vllm", model, "TP1").n_ranks == 1
        return

    with pytest.raises(InputError) as caught:
        side_of("vllm", model, "TP1")

    assert f"up_proj.weight: it starts at {f} of a fused buffer, inside scale block {f // 128} of it" in str(caught.value)


def test_field_18_deepseek_v3_at_tp_32_has_64_rows_of_a_block_of_128() -> None:
    """moe_intermediate=2048, TP=32, block 128"""
    model = load_model("deepseek-v3", precision="fp8-block")

    with pytest.raises(InputError, match="use a TP that leaves each rank a multiple of 128, or EP for experts"):
        side_of("vllm", model, "TP32")

    assert side_of("vllm", load_model("deepseek-v3"), "TP32 x DP8").n_ranks == 256
    assert side_of("vllm", model, "TP16 x EP256").n_ranks == 256


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek-v3", "absorb kv_b_proj into the attention's own W_UK and W_UV again"),
        ("nemotron-3-nano-30b-a3b", "apply -exp to what arrives in mixer.A"),
        ("gpt-oss-120b", "keep w2_bias zero on all but the first rank of each expert"),
    ],
)
def test_field_19_what_a_server_derives_from_weights_is_listed_as_a_step_after_loading(name: str, text: str) -> None:
    """manifest completeness: plan must list derived tensors or a post-load recompute step"""
    facts = side_of("vllm", load_model(name), "TP2").facts

    assert facts["after loading"] == text
    assert "after loading" not in side_of("vllm", load_model("llama-3-8b"), "TP2").facts


@pytest.mark.parametrize(("n_rows", "dp", "tp"), [(4, 2, 2), (16, 4, 2), (12, 3, 2), (10, 2, 2)])
def test_field_20_fsdp_over_tp_cuts_what_tp_left(n_rows: int, dp: int, tp: int) -> None:
    """mesh (dp=2,tp=2), dim0=4 rows colwise: local rows rank(dp,tp): (0,0)=0,(1,0)=1,(0,1)=2,(1,1)=3; naive gives 0,2,1,3"""
    model = model_of(model_type="llama", intermediate_size=n_rows)
    parts = [np.arange(n_rows)[i * -(-n_rows // tp) : (i + 1) * -(-n_rows // tp)] for i in range(tp)]

    held = rows(side_of("fsdp", model, f"FSDP{dp} x TP{tp}"), model, "model.layers.0.mlp.gate_proj.weight")

    for rank, (lo, hi) in held.items():
        part = parts[rank % tp]
        step = -(-len(part) // dp)
        assert list(range(lo, hi)) == part[rank // tp * step : (rank // tp + 1) * step].tolist()
    if (n_rows, dp, tp) == (4, 2, 2):
        assert [held[rank][0] for rank in range(4)] == [0, 2, 1, 3]  # rank = dp * 2 + tp


@pytest.mark.parametrize(
    ("convention", "spec"), [("megatron", "TP2"), ("vllm", "TP4"), ("sglang", "TP2"), ("fsdp", "FSDP1 x TP2")]
)
def test_field_21_tensor_parallel_cuts_leave_heads_whole_so_that_rows_can_be_permuted_in_each(convention: str, spec: str) -> None:
    """q_proj with permutation must be sliced in whole heads before permuting"""
    model = model_of(num_attention_heads=8, num_key_value_heads=4, head_dim=6)

    side = side_of(convention, model, spec)

    for projection in ("q_proj", "k_proj"):
        fragments, _ = of_tensor(side, model, f"model.layers.0.self_attn.{projection}.weight")
        assert (fragments.lo[:, 0] % 6 == 0).all()
        assert (fragments.hi[:, 0] % 6 == 0).all()
    assert "heads" not in side.facts


def test_field_21_shards_that_end_inside_a_head_are_said() -> None:
    model = model_of(num_attention_heads=8, num_key_value_heads=4, head_dim=6)

    assert side_of("fsdp", model, "FSDP5").facts["heads"].startswith("shards end inside heads of 6 rows; gather rows before")
    assert "heads" not in side_of("fsdp", model, "FSDP8").facts
