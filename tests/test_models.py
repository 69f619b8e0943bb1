import json
import math
import os
import tomllib
from pathlib import Path

import pytest
from family_oracles import tiny
from framework_oracles import config_of, model_of

from shardroute.planner.layouts import Role, load_model, model_names
from shardroute.planner.layouts.conventions.sides import divisors
from shardroute.planner.layouts.models import Model
from shardroute.topologies.errors import InputError

# Counted from the dimensions by others than this code (slime's and torchtitan's configs), or published to the parameter.
PUBLISHED = {
    "deepseek-v3": 671_026_419_200,
    "glm-4.5": 352_797_829_024,
    "glm-4.5-air": 106_852_251_264,
    "gpt-oss-120b": 116_829_156_672,
    "kimi-k2": 1_026_408_232_448,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "nemotron-3-ultra-550b-a55b": 549_308_993_536,
    "qwen3-0.6b": 596_049_920,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
}
# The card's rounded total is not our count, though the dimensions are confirmed by others: `models show` says DIFFERS.
UNEXPLAINED = {"glm-4.5", "glm-4.5-air"}
# Buffers that a published total leaves out: the fp32 bias of the router, 128 in each of the 23 layers with experts.
NOT_COUNTED = {"nemotron-3-nano-30b-a3b": 23 * 128}
MTP = {"deepseek-v3": 11_610_068_224, "glm-4.5": 3_988_069_792, "glm-4.5-air": 2_375_059_584}


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in model.tensors}


def saved(folder: Path, **values: object) -> Path:
    """A config.json with these values in place of a small Qwen3-MoE's; None leaves a key out."""
    config = {key: value for key, value in config_of(**values).items() if value is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_the_shipped_models_are_listed_in_alphabetical_order() -> None:
    assert model_names() == tuple(PUBLISHED)
    assert list(PUBLISHED) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_of_a_shipped_model_add_up_to_the_published_count(name: str) -> None:
    model = load_model(name)

    assert model.n_parameters == PUBLISHED[name] + NOT_COUNTED.get(name, 0)
    assert model.published is not None
    assert model.published.agrees_with(model.n_parameters) == (name not in UNEXPLAINED)
    assert "huggingface.co/" in model.published.source
    assert {t.dtype for t in model.tensors if not t.name.endswith("e_score_correction_bias")} == {"bf16"}
    assert len({t.name for t in model.tensors}) == len(model.tensors)


@pytest.mark.parametrize("name", MTP)
def test_layers_that_predict_further_tokens_are_added_on_request_with_what_is_their_own(name: str) -> None:
    plain, more = load_model(name), load_model(name, mtp=True)

    assert more.n_parameters - plain.n_parameters == MTP[name]
    assert more.n_layers == plain.n_layers
    extra = {p.tensor.name: p.role for p in more.parameters if p not in plain.parameters}
    assert {p.rpartition(".layers.")[2].split(".")[0] for p in extra} == {str(plain.n_layers)}
    assert extra[f"model.layers.{plain.n_layers}.eh_proj.weight"] is Role.MTP_PROJ
    assert not any("embed_tokens" in n or "shared_head.head" in n for n in extra)


def test_a_model_without_such_layers_has_none_to_add() -> None:
    with pytest.raises(InputError, match="kimi-k2: it has no layers that predict further tokens"):
        load_model("kimi-k2", mtp=True)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_shipped_split_holds_all_layers_and_names_its_source(name: str) -> None:
    model = load_model(name)

    for split in model.pipeline_splits:
        assert sum(split.layers) == model.n_layers
        assert ".yaml" in split.source or ".py" in split.source


def test_the_shipped_splits_of_qwen3_235b_are_those_of_nemo_rl() -> None:
    model = load_model("qwen3-235b-a22b")

    assert [split.layers for split in model.pipeline_splits] == [
        (11, 12, 12, 12, 12, 12, 12, 11),
        (23, 24, 24, 23),
    ]


def test_a_layer_of_qwen3_30b_has_these_tensors() -> None:
    model = load_model("qwen3-30b-a3b")

    layer = {p.tensor.name: (p.tensor.shape, p.role) for p in model.parameters if p.layer == 7}

    assert layer == {
        "model.layers.7.input_layernorm.weight": ((2048,), Role.INPUT_NORM),
        "model.layers.7.self_attn.q_proj.weight": ((4096, 2048), Role.Q_PROJ),
        "model.layers.7.self_attn.k_proj.weight": ((512, 2048), Role.K_PROJ),
        "model.layers.7.self_attn.v_proj.weight": ((512, 2048), Role.V_PROJ),
        "model.layers.7.self_attn.o_proj.weight": ((2048, 4096), Role.O_PROJ),
        "model.layers.7.self_attn.q_norm.weight": ((128,), Role.Q_NORM),
        "model.layers.7.self_attn.k_norm.weight": ((128,), Role.K_NORM),
        "model.layers.7.post_attention_layernorm.weight": ((2048,), Role.POST_ATTENTION_NORM),
        "model.layers.7.mlp.gate.weight": ((128, 2048), Role.ROUTER),
        "model.layers.7.mlp.experts.*.gate_proj.weight": ((128, 768, 2048), Role.EXPERT_GATE),
        "model.layers.7.mlp.experts.*.up_proj.weight": ((128, 768, 2048), Role.EXPERT_UP),
        "model.layers.7.mlp.experts.*.down_proj.weight": ((128, 2048, 768), Role.EXPERT_DOWN),
    }


def test_a_layer_of_llama_3_has_these_tensors() -> None:
    model = load_model("llama-3-8b")

    layer = {p.tensor.name: p.tensor.shape for p in model.parameters if p.layer == 31}

    assert layer == {
        "model.layers.31.input_layernorm.weight": (4096,),
        "model.layers.31.self_attn.q_proj.weight": (4096, 4096),
        "model.layers.31.self_attn.k_proj.weight": (1024, 4096),
        "model.layers.31.self_attn.v_proj.weight": (1024, 4096),
        "model.layers.31.self_attn.o_proj.weight": (4096, 4096),
        "model.layers.31.post_attention_layernorm.weight": (4096,),
        "model.layers.31.mlp.gate_proj.weight": (14336, 4096),
        "model.layers.31.mlp.up_proj.weight": (14336, 4096),
        "model.layers.31.mlp.down_proj.weight": (4096, 14336),
    }


def test_a_layer_of_deepseek_v3_has_these_tensors() -> None:
    model = load_model("deepseek-v3")

    layer = {p.tensor.name.removeprefix("model.layers.3."): p.tensor.shape for p in model.parameters if p.layer == 3}
    dense = {p.tensor.name.removeprefix("model.layers.2.mlp.") for p in model.parameters if p.layer == 2}

    assert layer == {
        "input_layernorm.weight": (7168,),
        "self_attn.q_a_proj.weight": (1536, 7168),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (24576, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (32768, 512),
        "self_attn.o_proj.weight": (7168, 16384),
        "post_attention_layernorm.weight": (7168,),
        "mlp.gate.weight": (256, 7168),
        "mlp.gate.e_score_correction_bias": (256,),
        "mlp.experts.*.gate_proj.weight": (256, 2048, 7168),
        "mlp.experts.*.up_proj.weight": (256, 2048, 7168),
        "mlp.experts.*.down_proj.weight": (256, 7168, 2048),
        "mlp.shared_experts.gate_proj.weight": (2048, 7168),
        "mlp.shared_experts.up_proj.weight": (2048, 7168),
        "mlp.shared_experts.down_proj.weight": (7168, 2048),
    }
    assert {"gate_proj.weight", "up_proj.weight", "down_proj.weight"} < dense


def test_a_layer_of_gpt_oss_has_these_tensors() -> None:
    model = load_model("gpt-oss-120b")

    layer = {p.tensor.name.removeprefix("model.layers.0."): p.stored or p.tensor.shape for p in model.parameters if p.layer == 0}

    assert layer == {
        "input_layernorm.weight": (2880,),
        "self_attn.q_proj.weight": (4096, 2880),
        "self_attn.q_proj.bias": (4096,),
        "self_attn.k_proj.weight": (512, 2880),
        "self_attn.k_proj.bias": (512,),
        "self_attn.v_proj.weight": (512, 2880),
        "self_attn.v_proj.bias": (512,),
        "self_attn.o_proj.weight": (2880, 4096),
        "self_attn.o_proj.bias": (2880,),
        "self_attn.sinks": (64,),
        "post_attention_layernorm.weight": (2880,),
        "mlp.router.weight": (128, 2880),
        "mlp.router.bias": (128,),
        "mlp.experts.gate_up_proj": (128, 2880, 5760),
        "mlp.experts.gate_up_proj_bias": (128, 5760),
        "mlp.experts.down_proj": (128, 2880, 2880),
        "mlp.experts.down_proj_bias": (128, 2880),
    }
    assert all(math.prod(p.stored) == p.tensor.n_elements for p in model.parameters if p.stored)


# Of models that aren't shipped: their config's sizes, and the total of their safetensors files on Hugging Face.
UNSHIPPED = {
    "Qwen/Qwen2.5-7B": (
        {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
         "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 18944, "vocab_size": 152064},
        7_615_616_512,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        {"model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16,
         "num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 5632, "vocab_size": 151936, "num_experts": 60,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1},
        14_315_784_192,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSHIPPED)
def test_the_parameters_of_any_config_of_a_family_add_up_to_the_published_count(name: str) -> None:
    values, published = UNSHIPPED[name]

    assert model_of(**values).n_parameters == published


def test_the_layers_of_a_hybrid_follow_its_pattern() -> None:
    model = load_model("nemotron-3-nano-30b-a3b")

    def of(layer: int) -> dict[str, tuple[int, ...]]:
        prefix = f"backbone.layers.{layer}."
        return {p.tensor.name.removeprefix(prefix): p.tensor.shape for p in model.parameters if p.layer == layer}

    assert of(0) == {
        "norm.weight": (2688,),
        "mixer.in_proj.weight": (4096 + 4096 + 2 * 8 * 128 + 64, 2688),
        "mixer.conv1d.weight": (4096 + 2 * 8 * 128, 1, 4),
        "mixer.conv1d.bias": (4096 + 2 * 8 * 128,),
        "mixer.dt_bias": (64,),
        "mixer.A_log": (64,),
        "mixer.D": (64,),
        "mixer.norm.weight": (4096,),
        "mixer.out_proj.weight": (2688, 4096),
    }
    assert of(1) == {
        "norm.weight": (2688,),
        "mixer.gate.weight": (128, 2688),
        "mixer.gate.e_score_correction_bias": (128,),
        "mixer.experts.*.up_proj.weight": (128, 1856, 2688),
        "mixer.experts.*.down_proj.weight": (128, 2688, 1856),
        "mixer.shared_experts.up_proj.weight": (3712, 2688),
        "mixer.shared_experts.down_proj.weight": (2688, 3712),
    }
    assert of(5) == {
        "norm.weight": (2688,),
        "mixer.q_proj.weight": (4096, 2688),
        "mixer.k_proj.weight": (256, 2688),
        "mixer.v_proj.weight": (256, 2688),
        "mixer.o_proj.weight": (2688, 4096),
    }


def test_experts_of_a_latent_size_work_in_it_beside_two_projections() -> None:
    whole, latent = tiny("nemotron_h"), tiny("nemotron_h", moe_latent_size=8)

    widths = {t.name.split(".", 3)[-1]: t.shape for t in latent.tensors}
    hidden = next(t.shape[1] for t in whole.tensors if t.name.endswith("mixer.gate.weight"))
    assert widths["mixer.fc1_latent_proj.weight"] == (8, hidden)
    assert widths["mixer.fc2_latent_proj.weight"] == (hidden, 8)
    assert widths["mixer.experts.*.up_proj.weight"][2] == widths["mixer.experts.*.down_proj.weight"][1] == 8
    assert {t.shape for t in whole.tensors if "shared" in t.name} == {t.shape for t in latent.tensors if "shared" in t.name}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "M*E-X"}, "has 5 layers and the unknown X; expected 5 of M (Mamba-2)"),
        ("nemotron_h", {"hybrid_override_pattern": "M*"}, "has 2 layers; expected 5 of"),
        ("nemotron_h", {"mamba_proj_bias": True}, "mamba_proj_bias is set, which isn't known for nemotron_h"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = true isn't known for deepseek_v3; expected false"),
        ("deepseek_v3", {"kv_lora_rank": None}, "key 'kv_lora_rank' is missing"),
    ],
)  # fmt: skip
def test_a_config_that_a_family_cannot_have_is_refused(name: str, values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        tiny(name, **values)

    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["deepseek-v3", "nemotron-3-nano-30b-a3b", "gpt-oss-120b", "glm-4.5-air"])
def test_every_family_can_be_scaled_down(name: str) -> None:
    full, small = load_model(name), load_model(name, scale=64)

    assert [t.name for t in small.tensors] == [t.name for t in full.tensors]
    assert full.n_parameters / 64 * 0.9 < small.n_parameters < full.n_parameters / 64 * 1.3


def test_a_tied_embedding_is_one_tensor_that_counts_once() -> None:
    tied, untied = model_of(tie_word_embeddings=True), model_of(tie_word_embeddings=False)

    assert set(shapes(untied)) - set(shapes(tied)) == {"lm_head.weight"}
    assert untied.n_parameters - tied.n_parameters == 70 * 3


def test_attention_biases_come_with_attention_bias() -> None:
    plain, biased = model_of(attention_bias=False), model_of(attention_bias=True)

    extra = {name: shape for name, shape in shapes(biased).items() if name not in shapes(plain)}

    assert {name: shape for name, shape in extra.items() if ".layers.0." in name} == {
        "model.layers.0.self_attn.q_proj.bias": (8,),
        "model.layers.0.self_attn.k_proj.bias": (4,),
        "model.layers.0.self_attn.v_proj.bias": (4,),
        "model.layers.0.self_attn.o_proj.bias": (3,),
    }


def test_experts_are_in_every_step_th_layer_but_those_of_mlp_only_layers() -> None:
    model = model_of(num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])

    routed = [p.layer for p in model.parameters if p.role is Role.ROUTER]
    dense = [p.layer for p in model.parameters if p.role is Role.DOWN_PROJ]

    assert routed == [1, 5]
    assert dense == [0, 2, 3, 4]


def test_a_mixture_without_an_expert_layer_is_dense() -> None:
    model = model_of(mlp_only_layers=[0, 1])

    assert model.n_experts == 0


def test_the_number_of_experts_is_also_read_as_transformers_5_spells_it(tmp_path: Path) -> None:
    path = saved(tmp_path, num_experts=None, num_local_experts=6)

    assert load_model(str(path)).n_experts == 6


def test_a_llama_config_without_kv_heads_and_head_dim_has_one_kv_head_a_head() -> None:
    model = model_of(model_type="llama", hidden_size=8, num_key_value_heads=None, head_dim=None)

    assert (model.n_kv_heads, model.head_dim) == (4, 2)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_is_that_of_the_config(key: str) -> None:
    model = model_of(**{key: "float16"})

    assert {t.dtype for t in model.tensors} == {"f16"}


def test_a_config_is_found_by_its_file_and_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model-v1.5"
    folder.mkdir()
    file = saved(folder)

    by_file, by_folder = load_model(str(file)), load_model(str(folder))

    assert by_file == by_folder
    assert by_file.name == "My-Model-v1.5"
    assert by_file.published is None


def test_a_config_under_any_file_name_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path).rename(tmp_path / "tiny.json")

    assert load_model(str(path)).name == "tiny"


def test_scale_divides_every_width_by_its_root_and_keeps_the_structure() -> None:
    full, small = load_model("qwen3-30b-a3b"), load_model("qwen3-30b-a3b", scale=256)

    assert small.scale == 256
    assert (small.n_layers, small.n_heads, small.n_kv_heads, small.n_experts) == (48, 32, 4, 128)
    for before, after in zip(full.parameters, small.parameters, strict=True):
        (a, b), role = (before.tensor, after.tensor), before.role
        if role in {Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN}:
            assert b.shape == (128, a.shape[1] // 16, a.shape[2] // 16)
        elif role is Role.ROUTER:
            assert b.shape == (128, a.shape[1] // 16)
        else:
            assert b.shape == tuple(n // 16 for n in a.shape)


@pytest.mark.parametrize(
    ("name", "scale"),
    [("qwen3-30b-a3b", 256), ("qwen3-235b-a22b", 256), ("qwen3-235b-a22b", 1024), ("qwen3-235b-a22b", 4096)],
)
def test_the_scales_that_small_runs_need_are_valid(name: str, scale: int) -> None:
    full, small = load_model(name), load_model(name, scale)

    assert 0.9 < small.n_parameters * scale / full.n_parameters < 1.2
    assert small.published == full.published


@pytest.mark.parametrize("scale", [0, -4, 2, 9, 36, 65536])
def test_a_scale_that_does_not_fit_is_refused_with_the_valid_ones(scale: int) -> None:
    with pytest.raises(InputError) as caught:
        load_model("qwen3-30b-a3b", scale)

    message = str(caught.value)
    assert message.startswith(f"scale {scale} doesn't fit qwen3-30b-a3b: it must be the square")
    assert "moe_intermediate_size 768" in message
    assert "valid scales: 1, 4, 16, 64, 256, 1024, 4096, 16384" in message


def test_a_width_that_no_layer_uses_does_not_limit_the_scale(tmp_path: Path) -> None:
    path = saved(tmp_path, hidden_size=6, intermediate_size=7)

    model = load_model(str(path), scale=4)

    assert shapes(model)["model.embed_tokens.weight"] == (35, 3)


def test_an_unknown_name_is_refused_with_close_ones_and_the_way_out() -> None:
    with pytest.raises(InputError) as caught:
        load_model("Qwen3-235B")

    message = str(caught.value)
    assert message.startswith("model 'Qwen3-235B' is unknown; did you mean qwen3-235b-a22b")
    assert ", ".join(model_names()) in message
    assert message.endswith("or the path of a config.json (a file or the folder that holds it)")


@pytest.mark.parametrize("name", ["", "zzz", "a" * 5000, "nul\0byte"])
def test_any_text_that_names_nothing_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"is unknown; expected one of deepseek-v3, glm-4\.5"):
        load_model(name)


@pytest.mark.parametrize(
    "key",
    ["num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
     "vocab_size", "num_experts", "moe_intermediate_size", "model_type"],
)  # fmt: skip
def test_a_config_without_a_needed_key_is_refused_with_file_and_key(tmp_path: Path, key: str) -> None:
    path = saved(tmp_path, **{key: None})

    with pytest.raises(InputError) as caught:
        load_model(str(path))

    assert str(caught.value) == (f"{path}: key {key!r} is missing; the model's shapes can't be known without it")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", "8", "a whole number of at least 1, found \"8\""),
        ("hidden_size", 0, "a whole number of at least 1, found 0"),
        ("num_hidden_layers", True, "a whole number of at least 1, found true"),
        ("vocab_size", 1.5, "a whole number of at least 1, found 1.5"),
        ("num_experts", -1, "a whole number of at least 0, found -1"),
        ("tie_word_embeddings", 1, "true or false, found 1"),
        ("mlp_only_layers", 3, "a list of whole numbers, found 3"),
        ("model_type", 3, "text, found 3"),
        ("torch_dtype", 3, "text, found 3"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_with_file_key_and_value(
    tmp_path: Path, key: str, value: object, expected: str
) -> None:
    path = saved(tmp_path, **{key: value})

    with pytest.raises(InputError) as caught:
        load_model(str(path))

    assert f"{path}: {key}" in str(caught.value)
    assert str(caught.value).endswith(f"expected {expected}")


def test_kv_heads_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, num_key_value_heads=3)

    with pytest.raises(InputError, match="num_key_value_heads = 3 doesn't divide num_attention_heads = 4"):
        load_model(str(path))


def test_an_unsupported_model_type_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    path = saved(tmp_path, model_type="mamba")

    with pytest.raises(InputError) as caught:
        load_model(str(path))

    message = str(caught.value)
    assert "model_type 'mamba' isn't known; expected deepseek_v3, glm4_moe, gpt_oss, kimi_k2, llama" in message
    assert "--from-json and --to-json take a layout of your own" in message


def test_an_unknown_dtype_is_refused_with_its_key(tmp_path: Path) -> None:
    path = saved(tmp_path, torch_dtype="int3")

    with pytest.raises(InputError, match=r"torch_dtype: dtype 'int3' is not known"):
        load_model(str(path))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "expected the JSON of a Hugging Face config"),
        ("[" * 100_000, "expected the JSON of a Hugging Face config"),
        ("[1]", "expected a JSON object, as a Hugging Face config is, found a list"),
        ("null", "expected a JSON object, as a Hugging Face config is, found null"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)

    with pytest.raises(InputError) as caught:
        load_model(str(path))

    assert str(caught.value).startswith(f"{path}: {expected}")


def test_a_folder_without_a_config_is_refused_with_the_file_that_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: can't be read \(No such file or directory\)"):
        load_model(str(tmp_path))


def test_every_shipped_folder_holds_a_config_and_what_is_published(repo: Path) -> None:
    folders = [p for p in (repo / "planner/layouts/models/configs").iterdir() if p.is_dir()]

    assert sorted(p.name for p in folders) == list(model_names())
    for folder in folders:
        about = tomllib.loads((folder / "about.toml").read_text())
        assert about["published"]["source"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected at most 10000"),
        ({"num_experts": 10**9}, "num_experts: expected at most 100000"),
        ({"num_hidden_layers": 9999, "num_experts": 99999}, "at most 1000000 experts in all layers"),
        ({"hidden_size": 10**9}, "hidden_size: expected at most 16777216"),
        ({"num_attention_heads": 2**63}, "num_attention_heads: expected at most 16777216"),
        ({"moe_intermediate_size": 10**9}, "moe_intermediate_size: expected at most 16777216"),
    ],
)
def test_sizes_far_above_any_model_are_refused_before_anything_is_made_of_them(tmp_path: Path, values, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        load_model(str(saved(tmp_path, **values)))


def test_divisors_are_all_numbers_that_divide() -> None:
    for n in (1, 2, 36, 97, 128, 5000):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]


def test_a_config_is_read_from_a_regular_file_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")

    with pytest.raises(InputError, match="it is a pipe or socket, expected a file"):
        load_model(str(tmp_path))
