from dataclasses import replace

import numpy as np
import pytest
from family_oracles import TINY, megatron_family, serving_family, tiny
from framework_oracles import Array, Buffers, Job, flat, layout_buffers

from shardroute.planner.layouts import Layout, Model, Side, lay_out, load_model, overlap, parse_spec
from shardroute.planner.layouts.conventions.buffers import even
from shardroute.planner.layouts.conventions.scales import shared_blocks
from shardroute.planner.layouts.models.precisions import QUANTISED, with_scales
from shardroute.planner.refits import refit_problem
from shardroute.topologies.errors import InputError

BLOCK = 128
# Dims of the small models that are blocks here: a model with each of them times 128 has scales of the small model's shape.
WIDTHS = (
    "hidden_size", "head_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "moe_intermediate_size", "intermediate_size",
)  # fmt: skip


def side_of(convention: str, model: Model, spec: str) -> Side:
    return lay_out(convention, model, parse_spec(spec))


def scaled_up(name: str) -> tuple[Model, Model]:
    """A small model, and the one whose 128 x 128 blocks are its elements."""
    small = tiny(name)
    widths = {key: value * BLOCK for key, value in TINY[name].items() if key in WIDTHS and isinstance(value, int)}
    return small, with_scales(tiny(name, **widths), "fp8-block")


def scale_buffers(model: Model, layout: Layout) -> Buffers:
    """The buffers of scales, their elements numbered as `whole_tensors` of a model that has only scales would."""
    of_scales = [i for i, p in enumerate(model.parameters) if p.weight is not None]
    only = replace(model, parameters=tuple(model.parameters[i] for i in of_scales))
    part = Layout(tuple(layout.fragments[i] for i in of_scales), tuple(layout.buffers[i] for i in of_scales))
    return layout_buffers(only, part)


def renumbered(small: Model, buffers: Buffers) -> Buffers:
    """The oracle's buffers of quantised weights, renamed, with elements numbered over those weights alone."""
    order = np.full(small.n_parameters, -1)
    first = place = 0
    for p in small.parameters:
        if p.role in QUANTISED:
            order[first : first + p.tensor.n_elements] = place + np.arange(p.tensor.n_elements)
            place += p.tensor.n_elements
        first += p.tensor.n_elements
    out = {}
    for (rank, name), content in buffers.items():
        if (content >= 0).all() and (order[content] >= 0).all():
            out[rank, name + "_scale_inv"] = order[content]
    return out


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_moe", "mixtral", "llama"])
@pytest.mark.parametrize("tp", [1, 2])
def test_scales_lie_where_weights_of_a_size_in_blocks_would(name: str, tp: int) -> None:
    small, large = scaled_up(name)
    ep = 2 if small.n_experts else 1
    train = Job((small.n_layers,), tp=tp, dp=2, ep=ep)
    serve = Job((small.n_layers,), tp=tp, ep=tp if small.n_experts else 1)

    trained, served = side_of("megatron", large, train.spec), side_of("vllm", large, serve.spec)

    assert flat(scale_buffers(large, trained.layout)) == flat(renumbered(small, megatron_family(small, train)))
    assert flat(scale_buffers(large, served.layout)) == flat(renumbered(small, serving_family(small, serve, "vllm")))


ODD = {"hidden_size": 200, "intermediate_size": 384, "moe_intermediate_size": 192, "head_dim": 40, "num_hidden_layers": 1}


@pytest.mark.parametrize("precision", ["fp8-block", "mxfp8"])
@pytest.mark.parametrize(
    ("convention", "spec"), [("megatron", "TP2 x EP2 x ETP2"), ("fsdp", "FSDP3"), ("fsdp", "FSDP5 x TP2"), ("huggingface", "TP1")]
)
def test_a_rank_holds_the_scale_of_every_block_that_it_touches_and_no_other(precision: str, convention: str, spec: str) -> None:
    model = with_scales(tiny("qwen3_moe", **ODD), precision)

    side = side_of(convention, model, spec)

    for i, scales in enumerate(model.parameters):
        if scales.weight is None:
            continue
        weight, held = side.layout.fragments[i - 1], side.layout.fragments[i]
        assert model.parameters[i - 1] == scales.weight
        for rank in range(side.n_ranks):
            touched = set()
            for j in np.flatnonzero(weight.rank == rank).tolist():
                box = zip(weight.lo[j].tolist(), weight.hi[j].tolist(), scales.block, strict=True)
                touched |= set(_cells([range(lo // b, (hi - 1) // b + 1) for lo, hi, b in box]))
            has = [cell for j in np.flatnonzero(held.rank == rank).tolist() for cell in _cells(_ranges(held.lo[j], held.hi[j]))]
            assert sorted(has) == sorted(touched)


def _ranges(lo: Array, hi: Array) -> list[range]:
    return [range(int(a), int(b)) for a, b in zip(lo, hi, strict=True)]


def _cells(ranges: list[range]) -> list[tuple[int, ...]]:
    cells: list[tuple[int, ...]] = [()]
    for values in ranges:
        cells = [(*cell, value) for cell in cells for value in values]
    return cells


def test_scales_are_not_counted_as_parameters_and_travel_as_tensors() -> None:
    plain, fp8 = load_model("deepseek-v3"), load_model("deepseek-v3", precision="fp8-block")

    scale = next(t for t in fp8.tensors if t.name == "model.layers.3.mlp.experts.*.gate_proj.weight_scale_inv")

    assert fp8.n_parameters == plain.n_parameters == 671_026_419_200
    assert (scale.shape, scale.dtype) == ((256, 16, 56), "f32")
    names = {t.name for t in fp8.tensors}
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv" in names
    assert not {n for n in names if "mlp.gate.weight_scale_inv" in n or ("embed" in n and "scale" in n) or "norm.weight_s" in n}


def test_the_last_block_of_a_dim_may_be_short() -> None:
    fp8 = load_model("deepseek-v3", precision="fp8-block")

    shapes = {t.name: t.shape for t in fp8.tensors}

    assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert shapes["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (5, 56)


def test_mxfp8_has_a_power_of_two_for_each_32_inputs() -> None:
    model = load_model("qwen3-30b-a3b", precision="mxfp8")

    scale = next(t for t in model.tensors if t.name == "model.layers.0.mlp.experts.*.down_proj.weight_scale")

    assert (scale.shape, scale.dtype) == ((128, 2048, 24), "f8_e8m0")


def test_a_scale_block_on_two_training_ranks_can_come_from_either() -> None:
    assert shared_blocks(even(1536, 8), 128)[1] == (0, 1)
    model = with_scales(tiny("qwen3_moe", **ODD), "fp8-block")

    problem, summary = refit_problem(model, parse_spec("FSDP3"), parse_spec("TP1"), to_convention="huggingface")
    i = [t.name for t in problem.tensors].index("model.layers.0.self_attn.q_proj.weight_scale_inv")
    pieces = overlap(problem.source.fragments[i], problem.target.fragments[i])

    shared = "block 0 of dim 0 of model.layers.0.self_attn.q_proj.weight is needed by parts 0, 1, 2 of 3"
    assert shared in summary.source["scales"]
    held = {tuple(lo): pieces.holders[p].tolist() for lo, p in zip(pieces.lo.tolist(), pieces.pattern.tolist(), strict=True)}
    assert held[0, 0] == [0, 1, 2]  # 160 rows over 3 ranks: 54, 54 and 52; block 0 is rows 0 to 127
    assert held[1, 0] == [2]


def test_a_fused_buffer_whose_parts_share_a_block_is_refused() -> None:
    model = with_scales(tiny("qwen3_moe", **ODD), "fp8-block")

    with pytest.raises(InputError) as caught:
        side_of("vllm", model, "TP1")

    assert "k_proj.weight: it starts at 160 of a fused buffer, inside scale block 1 of it" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("qwen3-235b-a22b", "TP8", "a cut goes through scale block 1 (rows 128 to 255), whose scale parts 0, 1 of 8 need"),
        ("deepseek-v3", "TP32", "a cut goes through scale block 4 (rows 512 to 639), whose scale parts 0, 1 of 32 need"),
        ("glm-4.5-air", "TP8", "a cut goes through scale block"),
    ],
)
@pytest.mark.parametrize("convention", ["vllm", "sglang"])
def test_a_server_that_counts_blocks_from_its_shard_refuses_a_cut_inside_one(
    convention: str, name: str, spec: str, message: str
) -> None:
    model = load_model(name, precision="fp8-block")

    with pytest.raises(InputError) as caught:
        side_of(convention, model, spec)

    assert message in str(caught.value)
    assert "use a TP that leaves each rank a multiple of 128, or EP for experts" in str(caught.value)


def test_whole_experts_have_whole_blocks() -> None:
    model = load_model("deepseek-v3", precision="fp8-block")

    side = side_of("vllm", model, "TP8 x EP32")

    assert side.n_ranks == 32


@pytest.mark.parametrize(("name", "precision", "message"), [
    ("deepseek-v3", "int4", "precision 'int4' is unknown; expected one of fp8-block, mxfp8"),
    ("gpt-oss-120b", "mxfp8", "mxfp8 isn't known for its stacked experts, which are published as MXFP4"),
])  # fmt: skip
def test_a_precision_that_a_model_cannot_have_is_refused(name: str, precision: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(name, precision=precision)

    assert message in str(caught.value)
