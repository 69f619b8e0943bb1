import math
import time
from collections import Counter
from dataclasses import replace

import pytest
from family_oracles import tiny
from framework_oracles import (
    Job,
    flat,
    layout_buffers,
    megatron_buffers,
    model_of,
    vllm_buffers,
    whole_tensors,
)

from shardroute.planner.layouts import (
    CONVENTIONS,
    Fragments,
    Model,
    Role,
    Side,
    lay_out,
    load_model,
    overlap,
    parse_spec,
)
from shardroute.planner.layouts.conventions import roles
from shardroute.planner.refits import refit_problem
from shardroute.topologies.errors import InputError


def side_of(convention: str, model: Model, spec: str, first_rank: int = 0) -> Side:
    return lay_out(convention, model, parse_spec(spec), first_rank)


def of_tensor(side: Side, model: Model, name: str) -> tuple[Fragments, tuple[str, ...]]:
    i = [t.name for t in model.tensors].index(name)
    return side.layout.fragments[i], side.layout.buffers[i]


def rows(side: Side, model: Model, name: str) -> dict[int, list[tuple[int, int, int]]]:
    """For each rank, (first row, last row + 1, row in the buffer) of what it holds of a matrix."""
    fragments, _ = of_tensor(side, model, name)
    out: dict[int, list[tuple[int, int, int]]] = {}
    for i, rank in enumerate(fragments.rank.tolist()):
        at = int(fragments.offset[i] // fragments.strides[i, 0])
        out.setdefault(rank, []).append((int(fragments.lo[i, 0]), int(fragments.hi[i, 0]), at))
    return out


@pytest.fixture(scope="module")
def qwen() -> Model:
    return load_model("qwen3-235b-a22b")


def test_conventions_are_known_by_name() -> None:
    assert sorted(CONVENTIONS) == ["fsdp", "huggingface", "megatron", "sglang", "vllm"]
    with pytest.raises(InputError, match="convention 'trtllm' is unknown; expected one of fsdp, huggingface, megatron"):
        side_of("trtllm", model_of(), "TP1")


def test_qwen3_235b_takes_128_ranks_on_both_sides(qwen: Model) -> None:
    problem, summary = refit_problem(qwen, parse_spec("TP4 x PP8 x EP16"), parse_spec("TP8 x DP16"))

    assert (summary.n_src_gpus, summary.n_dst_gpus, problem.n_ranks) == (128, 128, 256)
    assert problem.source.ranks.tolist() == list(range(128))
    assert problem.target.ranks.tolist() == list(range(128, 256))
    assert problem.n_bytes == 2 * 235_093_634_560
    assert summary.n_parameters == 235_093_634_560
    assert summary.source["data parallel"] == "4 (inferred, the smallest that fits EP16 x ETP1)"
    assert summary.source["layers per stage"].startswith("11,12,12,12,12,12,12,11 (94 layers don't divide by 8")
    assert summary.source["experts"] == "8 of 128 a rank (EP16 x ETP1 x expert DP1)"
    assert summary.source["vocabulary"] == "151936 rows, padded to 152064"
    assert summary.target["KV heads"] == "each on 2 ranks of a replica"


def test_the_small_demo_takes_16_ranks_on_both_sides() -> None:
    model = load_model("qwen3-30b-a3b", scale=256)

    _, summary = refit_problem(model, parse_spec("EP8 x PP2"), parse_spec("TP8 x DP2"))

    assert (summary.n_src_gpus, summary.n_dst_gpus, summary.scale) == (16, 16, 256)


def test_qwen3_235b_expands_and_overlaps_in_under_a_second(qwen: Model) -> None:
    start = time.perf_counter()

    problem, _ = refit_problem(qwen, parse_spec("TP4 x PP8 x EP16"), parse_spec("TP8 x DP16"))
    classes = problem.classes
    pieces = [overlap(c.source, c.target) for c in classes]

    assert time.perf_counter() - start < 1
    assert len(classes) < 100
    covered = sum(int(p.n_elements.sum()) * len(c.members) for p, c in zip(pieces, classes, strict=True))
    assert covered == 235_093_634_560


def test_layers_of_one_stage_share_their_fragments(qwen: Model) -> None:
    side = side_of("megatron", qwen, "TP4 x PP8 x EP16")

    def q(layer: int) -> Fragments:
        return of_tensor(side, qwen, f"model.layers.{layer}.self_attn.q_proj.weight")[0]

    assert q(0) is q(10)
    assert q(10) is not q(11)
    assert set(q(11).rank.tolist()) == set(range(16, 32))


# What each framework stores, element by element. Random models are in properties/test_convention_laws.py.

MIXED = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "attention_bias": True, "intermediate_size": 12}


@pytest.mark.parametrize(
    "job",
    [
        Job(stages=(4,)),
        Job(stages=(2, 2), tp=2, dp=2, ep=4),
        Job(stages=(1, 2, 1), tp=2, cp=2, dp=2, ep=2, etp=2),
        Job(stages=(0, 4, 0), tp=4, dp=1, ep=4),
        Job(stages=(3, 1), tp=1, dp=4, ep=2),
    ],
    ids=lambda job: job.spec,
)
@pytest.mark.parametrize("tied", [False, True])
def test_megatron_stores_a_mixed_model_so(job: Job, tied: bool) -> None:
    model = model_of(tie_word_embeddings=tied, **MIXED)

    side = side_of("megatron", model, job.spec)

    assert side.n_ranks == job.n_ranks
    assert flat(layout_buffers(model, side.layout)) == flat(megatron_buffers(model, job))


@pytest.mark.parametrize(
    "job",
    [
        Job(stages=(4,)),
        Job(stages=(4,), tp=2, dp=3),
        Job(stages=(4,), tp=4, dp=2),
        Job(stages=(1, 3), tp=4, ep=4, dp=2),
        Job(stages=(0, 4, 0), tp=2, ep=2),
    ],
    ids=lambda job: job.spec,
)
@pytest.mark.parametrize("tied", [False, True])
def test_vllm_stores_a_mixed_model_so(job: Job, tied: bool) -> None:
    model = model_of(tie_word_embeddings=tied, **MIXED)

    side = side_of("vllm", model, job.spec, first_rank=3)

    assert side.n_ranks == job.n_ranks
    assert flat(layout_buffers(model, side.layout)) == flat(vllm_buffers(model, job, 3))


def test_vllm_gives_the_first_ranks_one_expert_more_when_ep_does_not_divide() -> None:
    model = model_of(num_experts=5)

    side = side_of("vllm", model, "TP4 x EP4")

    fragments, names = of_tensor(side, model, "model.layers.0.mlp.experts.*.up_proj.weight")
    held = sorted(zip(fragments.rank.tolist(), fragments.lo[:, 0].tolist(), fragments.hi[:, 0].tolist(), strict=True))
    assert held == [(0, 0, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5)]
    assert names == ("model.layers.0.mlp.experts.w13_weight",)
    assert flat(layout_buffers(model, side.layout)) == flat(vllm_buffers(model, Job((2,), tp=4, ep=4)))


def test_megatron_groups_query_heads_with_their_key_and_value_head() -> None:
    model = model_of(num_attention_heads=4, num_key_value_heads=2, head_dim=1)

    side = side_of("megatron", model, "TP2")

    whole = "q0 q1 k0 v0 q2 q3 k1 v1"  # rank 0 has the first four rows, rank 1 the others
    assert whole.split()[2] == "k0"
    assert rows(side, model, "model.layers.0.self_attn.q_proj.weight") == {0: [(0, 2, 0)], 1: [(2, 4, 0)]}
    assert rows(side, model, "model.layers.0.self_attn.k_proj.weight") == {0: [(0, 1, 2)], 1: [(1, 2, 2)]}
    assert rows(side, model, "model.layers.0.self_attn.v_proj.weight") == {0: [(0, 1, 3)], 1: [(1, 2, 3)]}


def test_megatron_cuts_a_group_over_ranks_when_tp_is_above_the_kv_heads() -> None:
    model = model_of(num_attention_heads=4, num_key_value_heads=1, head_dim=2)

    side = side_of("megatron", model, "TP4")

    # 12 rows, 3 a rank: q0 q0 q1 | q1 q2 q2 | q3 q3 k | k v v. No rank has a second copy of a row.
    assert rows(side, model, "model.layers.0.self_attn.q_proj.weight") == {
        0: [(0, 3, 0)],
        1: [(3, 6, 0)],
        2: [(6, 8, 0)],
    }
    assert rows(side, model, "model.layers.0.self_attn.k_proj.weight") == {2: [(0, 1, 2)], 3: [(1, 2, 0)]}
    assert rows(side, model, "model.layers.0.self_attn.v_proj.weight") == {3: [(0, 2, 1)]}


def test_field_01_each_kv_head_goes_whole_to_neighbouring_ranks(qwen: Model) -> None:
    side = side_of("vllm", qwen, "TP8")

    key = rows(side, qwen, "model.layers.0.self_attn.k_proj.weight")
    query = rows(side, qwen, "model.layers.0.self_attn.q_proj.weight")

    assert [key[rank][0][0] // 128 for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(hi - lo == 128 for ((lo, hi, _),) in key.values())
    assert [query[rank] for rank in range(8)] == [[(rank * 1024, (rank + 1) * 1024, 0)] for rank in range(8)]


def test_field_02_a_split_that_would_cut_a_kv_head_is_refused() -> None:
    model = model_of(num_attention_heads=12, num_key_value_heads=4)

    with pytest.raises(InputError) as caught:
        side_of("vllm", model, "TP6")

    assert str(caught.value) == (
        "TP6: TP6 doesn't fit tiny: it is neither a divisor nor a multiple of the 4 KV heads, so a head would "
        "be cut; valid TP: 1, 2, 4"
    )


@pytest.mark.parametrize("convention", ["megatron", "vllm"])
def test_field_05_every_rank_has_its_gate_rows_and_then_its_up_rows(convention: str) -> None:
    model = model_of(model_type="llama", intermediate_size=4, hidden_size=1)
    w = whole_tensors(model)
    (gate, up) = (w[f"model.layers.0.mlp.{p}_proj.weight"].ravel().tolist() for p in ("gate", "up"))

    side = side_of(convention, model, "TP2")

    name = {"megatron": "decoder.layers.0.mlp.linear_fc1.weight", "vllm": "model.layers.0.mlp.gate_up_proj.weight"}
    held = flat(layout_buffers(model, side.layout))
    assert held[0, name[convention]] == [*gate[:2], *up[:2]]
    assert held[1, name[convention]] == [*gate[2:], *up[2:]]


def test_field_14_a_tied_embedding_feeds_both_ends_of_the_pipeline_and_counts_once() -> None:
    model = model_of(model_type="llama", num_hidden_layers=4, tie_word_embeddings=True)

    problem, summary = refit_problem(model, parse_spec("PP4"), parse_spec("TP1"))

    (fragments, names) = of_tensor(side_of("megatron", model, "PP4"), model, "model.embed_tokens.weight")
    assert dict(zip(fragments.rank.tolist(), fragments.buffer.tolist(), strict=True)) == {0: 0, 3: 1}
    assert names == ("embedding.word_embeddings.weight", "output_layer.weight")
    assert problem.n_bytes == 2 * model.n_parameters == 2 * summary.n_parameters


def test_field_15_vocabularies_are_padded_by_each_side_s_own_rule() -> None:
    model = model_of(vocab_size=32008, hidden_size=1)
    name = "model.embed_tokens.weight"

    vllm, megatron = side_of("vllm", model, "TP2"), side_of("megatron", model, "TP2")

    assert rows(vllm, model, name) == {0: [(0, 16032, 0)], 1: [(16032, 32008, 0)]}
    assert of_tensor(vllm, model, name)[0].buffer_size.tolist() == [16032, 16032]  # 56 rows of padding
    assert rows(megatron, model, name) == {0: [(0, 16128, 0)], 1: [(16128, 32008, 0)]}
    assert of_tensor(megatron, model, name)[0].buffer_size.tolist() == [16128, 16128]


def test_a_rank_whose_vocabulary_rows_are_all_padding_holds_no_fragment() -> None:
    model = model_of(vocab_size=70)

    side = side_of("megatron", model, "TP2")

    assert rows(side, model, "model.embed_tokens.weight") == {0: [(0, 70, 0)]}


# Virtual stages, and other orders of ranks.


def layers_of(side: Side, model: Model) -> dict[int, list[int]]:
    """The layers of which each rank holds the norm."""
    out: dict[int, list[int]] = {}
    for i, p in enumerate(model.parameters):
        if p.layer is not None and p.role is Role.INPUT_NORM:
            for rank in side.layout.fragments[i].rank.tolist():
                out.setdefault(rank, []).append(p.layer)
    return out


def test_virtual_stages_go_round_the_pipeline() -> None:
    model = model_of(num_hidden_layers=8)

    even, given = side_of("megatron", model, "PP2 x VPP2"), side_of("megatron", model, "PP2[1,2,3,2] x VPP2")

    assert layers_of(even, model) == {0: [0, 1, 4, 5], 1: [2, 3, 6, 7]}
    assert layers_of(given, model) == {0: [0, 3, 4, 5], 1: [1, 2, 6, 7]}
    assert of_tensor(even, model, "lm_head.weight")[0].rank.tolist() == [1]
    assert of_tensor(even, model, "model.embed_tokens.weight")[0].rank.tolist() == [0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("PP2 x VPP3", "PP2 x VPP3: PP2 x VPP3 = 6 virtual stages don't divide the 8 layers of tiny, and no list is given"),
        ("VPP2", "VPP2: VPP2 splits the layers of a pipeline rank, but PP is 1; leave VPP out"),
        ("PP2[1,2,3,4] x VPP2", "the stages hold 10 layers, but tiny has 8; an even choice is PP2[2,2,2,2]"),
    ],
)
def test_virtual_stages_that_do_not_fit_are_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        side_of("megatron", model_of(num_hidden_layers=8), spec)

    assert message in str(caught.value)


def coordinates(sizes: dict[str, int], order: str) -> list[dict[str, int]]:
    """The place of each rank along each axis, ranks counted with the first axis of `order` the fastest."""
    names = order.split("-")
    found = []
    for rank in range(math.prod(sizes.values())):
        place, rest = {}, rank
        for name in names:
            place[name], rest = rest % sizes[name], rest // sizes[name]
        found.append(place)
    return found


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp", "cp-tp-dp-ep-pp", "tp-ep-cp-dp-pp"])
def test_ranks_are_counted_in_the_order_that_is_given(order: str) -> None:
    model = model_of(num_hidden_layers=2)

    side = side_of("megatron", model, f"TP2 x CP2 x DP2 x EP4 x PP2 order={order}")

    dense = coordinates({"tp": 2, "cp": 2, "ep": 1, "dp": 2, "pp": 2}, order)
    expert = coordinates({"tp": 1, "cp": 1, "ep": 4, "dp": 2, "pp": 2}, order)
    q, _ = of_tensor(side, model, "model.layers.1.self_attn.q_proj.weight")
    experts, _ = of_tensor(side, model, "model.layers.1.mlp.experts.*.gate_proj.weight")
    assert dict(zip(q.rank.tolist(), (q.lo[:, 0] // 4).tolist(), strict=True)) == {
        rank: place["tp"] for rank, place in enumerate(dense) if place["pp"] == 1
    }
    assert dict(zip(experts.rank.tolist(), experts.lo[:, 0].tolist(), strict=True)) == {
        rank: place["ep"] for rank, place in enumerate(expert) if place["pp"] == 1
    }


@pytest.mark.parametrize(("family", "spec"), [("llama", "TP2 x DP2 x PP2"), ("qwen3_moe", "TP2 x ETP2 x DP2 x PP2")])
def test_pipeline_stages_may_be_faster_than_data_parallel_ranks_where_experts_agree(family: str, spec: str) -> None:
    model = model_of(model_type=family, num_hidden_layers=2)

    side = side_of("megatron", model, f"{spec} order=tp-pp-dp")

    assert layers_of(side, model) == {0: [0], 1: [0], 2: [1], 3: [1], 4: [0], 5: [0], 6: [1], 7: [1]}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("TP2 x DP2 order=tp-pp", "DP isn't in the rank order; list tp, cp, ep, dp and pp, the fastest first"),
        ("TP2 order=tp-etp", "ETP has no place in it; list tp, cp, ep, dp and pp"),
        ("TP2 x PP2 x EP4 order=tp-pp-cp-ep-dp", "this rank order gives experts and attention different stages; put pp last"),
    ],
)
def test_a_rank_order_that_says_too_little_or_splits_stages_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        side_of("megatron", model_of(), spec)

    assert message in str(caught.value)


# Serving with more expert-parallel ranks than tensor-parallel ones.


def test_ep_beyond_tp_means_data_parallel_attention_inside_each_replica() -> None:
    model = load_model("deepseek-v3")

    side = side_of("vllm", model, "EP32 x DP2")

    assert side.n_ranks == 64
    assert side.facts["attention"] == "data parallel over 32 groups of TP1 in a replica"
    experts, _ = of_tensor(side, model, "model.layers.3.mlp.experts.*.gate_proj.weight")
    assert dict(zip(experts.rank.tolist(), experts.lo[:, 0].tolist(), strict=True)) == {r: r % 32 * 8 for r in range(64)}
    assert (experts.hi[:, 0] - experts.lo[:, 0]).tolist() == [8] * 64
    q, _ = of_tensor(side, model, "model.layers.3.self_attn.q_b_proj.weight")
    assert (q.hi[:, 0] - q.lo[:, 0]).tolist() == [24576] * 64


def test_groups_of_tp_inside_a_replica_repeat_attention_and_share_experts() -> None:
    model = load_model("deepseek-v3")

    side = side_of("vllm", model, "TP8 x EP32 x DP2")

    q, _ = of_tensor(side, model, "model.layers.3.self_attn.q_b_proj.weight")
    assert dict(zip(q.rank.tolist(), (q.lo[:, 0] // 3072).tolist(), strict=True)) == {rank: rank % 8 for rank in range(64)}


def test_deepseek_v3_goes_from_pp16_ep16_to_tp32_dp8_without_a_list_of_stages() -> None:
    model = load_model("deepseek-v3", mtp=True)

    problem, summary = refit_problem(model, parse_spec("PP16 x EP16"), parse_spec("TP32 x DP8"))
    pieces = [overlap(c.source, c.target) for c in problem.classes]

    assert (summary.n_src_gpus, summary.n_dst_gpus) == (256, 256)
    assert summary.source["layers per stage"].startswith("4,4,4,4,4,4,4,4,4,4,4,4,4,4,4,1 (61 layers don't divide by 16; ")
    assert "Megatron-Bridge" in summary.source["layers per stage"]
    covered = sum(int(p.n_elements.sum()) * len(c.members) for p, c in zip(pieces, problem.classes, strict=True))
    assert covered == 671_026_419_200 + 11_610_068_224


def test_the_layer_that_predicts_further_tokens_is_on_the_last_stage_with_an_embedding() -> None:
    model = tiny("deepseek_v3", mtp=True)

    side = side_of("megatron", model, "PP3")

    assert of_tensor(side, model, "model.layers.3.eh_proj.weight")[0].rank.tolist() == [2]
    assert of_tensor(side, model, "model.layers.3.eh_proj.weight")[1] == ("mtp.layers.0.eh_proj.weight",)
    assert of_tensor(side, model, "model.embed_tokens.weight")[0].rank.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("convention", "spec", "message"),
    [
        ("fsdp", "TP2", "TP2: fsdp needs the number of shards; write FSDP8, or HSDP4x8 for 4 replicas of 8 shards"),
        ("fsdp", "FSDP2 x TP4", "TP4 doesn't fit tiny: it doesn't divide the 2 KV heads, so a head would be cut; valid TP: 1, 2"),
        ("fsdp", "FSDP2 x PP2", "fsdp has no PP; it takes FSDP, HSDP, TP; leave PP2 out"),
        ("huggingface", "TP2", "TP2: a checkpoint holds tensors whole; leave TP2 out"),
        ("huggingface", "PP3", "PP3: PP3 is above the 2 layers of tiny; at most PP2 fits"),
        ("sglang", "TP4 x EP3", "TP4 x EP3: EP3 with TP4: in sglang one must divide the other; use TP4 x EP4 or TP3 x EP3"),
        ("sglang", "EP3", "EP3: EP3 doesn't divide the 4 experts of tiny, as sglang needs"),
        ("megatron", "FSDP4", "megatron has no FSDP; it takes TP, CP, EP, DP, PP, ETP, VPP; leave FSDP4 out or use the conv"),
    ],
)
def test_what_another_convention_lacks_is_refused_with_what_it_takes(convention: str, spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        side_of(convention, model_of(), spec)

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("TP8", "it doesn't divide the 4 attention heads"),
        ("TP4", "TP4 doesn't fit nemotron_h: it doesn't divide the 2 heads or groups of Mamba; valid TP: 1, 2"),
    ],
)
@pytest.mark.parametrize("convention", ["megatron", "vllm", "sglang"])
def test_a_split_that_would_cut_a_group_of_mamba_is_refused(convention: str, spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        side_of(convention, tiny("nemotron_h", n_groups=2), spec)

    assert message in str(caught.value)


def test_a_single_group_of_mamba_is_on_every_serving_rank() -> None:
    model = tiny("nemotron_h", n_groups=1)

    side = side_of("vllm", model, "TP2")

    # rows: z 8, x 8, B 3, C 3, dt 4; each rank has half of z, x and dt, and all of B and C
    assert rows(side, model, "backbone.layers.0.mixer.in_proj.weight") == {
        0: [(0, 4, 0), (8, 12, 4), (16, 19, 8), (19, 22, 11), (22, 24, 14)],
        1: [(4, 8, 0), (12, 16, 4), (16, 19, 8), (19, 22, 11), (24, 26, 14)],
    }


def test_every_role_is_in_exactly_one_group() -> None:
    counts = Counter(role for group in roles.GROUPS for role in group)

    assert counts == Counter(Role)


# Which ranks, and how many.


@pytest.mark.parametrize(
    ("spec", "n_ranks"),
    [
        ("TP1", 1),
        ("EP4", 4),
        ("TP2 x EP4", 4),
        ("TP4 x EP2", 4),
        ("TP2 x CP2 x EP4", 4),
        ("EP4 x ETP2 x PP2", 16),
        ("EP2 x DP6", 6),
        ("TP2 x CP3", 6),
        ("TP2 x CP3 x EP4", 12),
    ],
)  # fmt: skip
def test_megatron_takes_the_fewest_ranks_that_experts_and_the_rest_both_fill(spec: str, n_ranks: int) -> None:
    side = side_of("megatron", model_of(), spec)

    assert side.n_ranks == n_ranks
    assert side.layout.ranks.tolist() == list(range(n_ranks))


def test_megatron_uses_an_even_split_before_a_shipped_one(qwen: Model) -> None:
    shipped = replace(qwen.pipeline_splits[0], layers=(40, 54))

    side = side_of("megatron", replace(qwen, pipeline_splits=(shipped,)), "PP2")

    assert side.facts["layers per stage"] == "47,47 (even)"


def test_a_given_split_comes_before_everything_else(qwen: Model) -> None:
    side = side_of("megatron", qwen, "PP8[12,12,12,12,12,12,12,10]")

    assert side.facts["layers per stage"] == "12,12,12,12,12,12,12,10 (as given)"


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "expected"),
    [(94, 4, "23,24,24,23"), (61, 2, "31,30"), (61, 4, "15,15,16,15"), (43, 10, "4,4,4,4,4,4,5,5,5,4"), (4, 2, "2,2")],
)  # fmt: skip
def test_vllm_puts_what_is_left_over_before_the_last_stage(n_layers: int, n_stages: int, expected: str) -> None:
    side = side_of("vllm", model_of(num_hidden_layers=n_layers), f"PP{n_stages}")

    assert side.facts["layers per stage"].startswith(expected + " (")


# What is refused.

MEGATRON_REFUSALS = [
    ("TP3", "TP3: TP3 doesn't fit tiny: it doesn't divide the 4 attention heads; valid TP: 1, 2, 4"),
    ("EP3", "EP3: EP3 doesn't fit tiny: it doesn't divide the 4 experts; valid EP: 1, 2, 4"),
    ("ETP3", "ETP3: ETP3 doesn't fit tiny: it doesn't divide moe_intermediate_size 4; valid ETP: 1, 2, 4"),
    ("EP4 x DP6", "EP4 x DP6: EP4 x ETP1 = 4 doesn't divide the 6 ranks of a stage (TP x CP x DP = 1 x 6); "
                  "use DP4 or DP8, or leave DP out"),
    ("TP2 x EP4 x DP1", "TP2 x EP4 x DP1: EP4 x ETP1 = 4 doesn't divide the 2 ranks of a stage "
                        "(TP x CP x DP = 2 x 1); use DP2, or leave DP out"),
    ("PP2[1,2]", "PP2[1,2]: the stages hold 3 layers, but tiny has 2; an even choice is PP2[1,1]"),
    ("PP3", "PP3: PP3 doesn't divide the 2 layers of tiny, and no list is given; use PP2"),
    ("CP1048576 x DP2", "CP1048576 x DP2: takes 2097152 ranks, above 1048576, the most that are accepted"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "message"), MEGATRON_REFUSALS)
def test_megatron_refuses_what_does_not_fit_and_says_what_does(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        side_of("megatron", model_of(), spec)

    assert str(caught.value) == message


VLLM_REFUSALS = [
    ("TP3", "TP3: TP3 doesn't fit tiny: it doesn't divide the 4 attention heads; valid TP: 1, 2, 4"),
    ("TP4 x EP2", "TP4 x EP2: EP2 with TP4: vllm spreads experts over TP x data-parallel attention, so EP is 1 or a "
                  "multiple of TP; use TP4 x EP4 or TP2 x EP2, or leave EP out"),
    ("FSDP4", "FSDP4: vllm has no FSDP; it takes TP, PP, DP, EP; leave FSDP4 out or use the convention fsdp"),
    ("TP2 order=tp-dp", "TP2 order=tp-dp: vllm has one order of ranks; leave order=tp-dp out"),
    ("TP2 x ETP2", "TP2 x ETP2: vllm has no ETP; it takes TP, PP, DP, EP; leave ETP2 out"),
    ("TP2 x CP2", "TP2 x CP2: vllm has no CP; it takes TP, PP, DP, EP; leave CP2 out"),
    ("PP3", "PP3: PP3 is above the 2 layers of tiny; at most PP2 fits"),
    ("PP1[3]", "PP1[3]: the stages hold 3 layers, but tiny has 2; an even choice is PP1[2]"),
    ("DP1048576 x PP2", "DP1048576 x PP2: takes 2097152 ranks, above 1048576, the most that are accepted"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "message"), VLLM_REFUSALS)
def test_vllm_refuses_what_does_not_fit_and_says_what_does(spec: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        side_of("vllm", model_of(), spec)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("convention", "values", "spec", "message"),
    [
        ("megatron", {"mlp_only_layers": [0], "intermediate_size": 6}, "TP4", "it doesn't divide intermediate_size 6"),
        ("megatron", {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 1}, "TP4",
         "it doesn't divide the 18 rows of linear_qkv"),
        ("megatron", {"num_attention_heads": 12, "num_key_value_heads": 4}, "TP6",
         "it is neither a divisor nor a multiple of the 4 KV heads"),
        ("vllm", {"mlp_only_layers": [0], "intermediate_size": 6}, "TP4", "it doesn't divide intermediate_size 6"),
        ("vllm", {"moe_intermediate_size": 6}, "TP4", "it doesn't divide moe_intermediate_size 6"),
        ("vllm", {"num_attention_heads": 6, "vocab_size": 64, "moe_intermediate_size": 6}, "TP6",
         "it doesn't divide the 64 rows of the padded vocabulary"),
        ("vllm", {"num_experts": 2}, "TP4 x EP4", "EP4 is above the experts of tiny; at most EP2 fits"),
        ("megatron", {"model_type": "llama"}, "EP2", "tiny has no experts; leave EP2 out"),
        ("megatron", {"model_type": "llama"}, "ETP2", "tiny has no experts; leave ETP2 out"),
        ("vllm", {"model_type": "llama"}, "TP2 x EP2", "tiny has no experts; leave EP2 out"),
    ],
)  # fmt: skip
def test_a_model_that_an_axis_cannot_split_is_named_with_its_size(
    convention: str, values: dict[str, object], spec: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        side_of(convention, model_of(**values), spec)

    assert message in str(caught.value)


def test_whole_experts_need_no_intermediate_size_that_tp_divides() -> None:
    side = side_of("vllm", model_of(moe_intermediate_size=6), "TP4 x EP4")

    assert side.facts["experts"] == "whole, over EP4"


def test_field_12_layers_that_do_not_divide_by_pp_are_refused_with_nearest_pp_and_an_example() -> None:
    model = model_of(num_hidden_layers=30)

    with pytest.raises(InputError) as caught:
        side_of("megatron", model, "PP4")

    assert str(caught.value) == (
        "PP4: PP4 doesn't divide the 30 layers of tiny, and no list is given; use PP3 or PP5, or list the layers "
        "of each stage: PP4[7,8,8,7]"
    )
    assert side_of("megatron", model, "PP4[7,8,8,7]").n_ranks == 4


@pytest.mark.parametrize(("n_layers", "n_stages"), [(5, 2), (5, 3), (30, 4), (30, 7), (30, 16), (61, 2), (61, 16), (61, 60)])
def test_the_example_of_a_refused_pp_is_even_and_is_itself_accepted(n_layers: int, n_stages: int) -> None:
    model = model_of(num_hidden_layers=n_layers)
    with pytest.raises(InputError) as caught:
        side_of("megatron", model, f"PP{n_stages}")
    example = str(caught.value).rpartition(": ")[2]

    side = side_of("megatron", model, example)

    layers = parse_spec(example).stage_layers
    assert layers is not None
    assert max(layers) - min(layers) == 1
    assert side.n_ranks == n_stages


def test_more_stages_than_layers_are_refused_without_an_example() -> None:
    with pytest.raises(InputError) as caught:
        side_of("megatron", model_of(num_hidden_layers=5), "PP7")

    assert str(caught.value).endswith("no list is given; use PP5")
