"""Layouts from flags of Megatron, FSDP, vLLM and SGLang, and from recipes of NeMo RL and verl."""

import json
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardroute.planner.importers import known_model, layout_of_command, read_settings, refit_of_settings
from shardroute.planner.importers.commands import stage_layers
from shardroute.planner.layouts import parse_spec
from shardroute.topologies.errors import InputError

DATA = Path(__file__).parent / "data" / "recipes"
MEGATRON = (
    "torchrun --nnodes 16 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8"
)
ENDS = "--num-layers 94 --decoder-first-pipeline-num-layers 11 --decoder-last-pipeline-num-layers 11"
WHOLE = "--expert-model-parallel-size 16 --expert-tensor-parallel-size 1"
ORDER = "--context-parallel-size=2 --use-tp-pp-dp-mapping"
TITAN = "torchrun --nproc_per_node=8 train.py --parallelism.data_parallel_shard_degree=-1"


@pytest.mark.parametrize(
    ("command", "n_gpus", "convention", "spec"),
    [
        (MEGATRON, None, "megatron", "TP4 x PP8 x DP4"),
        (f"{MEGATRON} --expert-model-parallel-size 4 --num-experts 128", None, "megatron", "TP4 x PP8 x EP4 x ETP4 x DP4"),
        (f"{MEGATRON} {WHOLE}", None, "megatron", "TP4 x PP8 x EP16 x DP4"),
        (f"{MEGATRON} {ORDER}", 64, "megatron", "TP4 x PP8 x CP2 order=tp-cp-ep-pp-dp"),
        (f"{MEGATRON} {ENDS}", None, "megatron",
         "TP4 x PP8[11,12,12,12,12,12,12,11] x DP4"),
        (f"{MEGATRON} --num-layers 32 --num-layers-per-virtual-pipeline-stage 2", None, "megatron", "TP4 x PP8 x VPP2 x DP4"),
        (f"{MEGATRON} --pipeline-model-parallel-layout 'Et*3|t*4,|(t*5|)*5t*2L'", None, "megatron",
         "TP4 x PP8[3,4,5,5,5,5,5,2] x DP4"),
        (f"{MEGATRON} --pipeline-model-parallel-layout 'Et|(t|)*6tL' --num-layers 8", None, "megatron", "TP4 x PP8 x DP4"),
        ("t --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E|t*31|t*30|L'", 2, "megatron",
         "PP2[0,31,30,0] x VPP2"),
        ("pretrain_gpt.py --tensor_model_parallel_size 2", None, "megatron", "TP2"),
        (f"{TITAN} --parallelism.tensor_parallel_degree 2", None, "fsdp", "FSDP4 x TP2"),
        ("t --parallelism.data_parallel_shard_degree 4 --parallelism.context-parallel-degree 2 "
         "--parallelism.data_parallel_replicate_degree 3", None, "fsdp", "HSDP3x8"),
        ("accelerate launch --use_fsdp --num_processes 16 train.py", None, "fsdp", "FSDP16"),
        ("accelerate launch --use_fsdp --fsdp_sharding_strategy HYBRID_SHARD --num_machines 2 --num_processes 16 t.py", None,
         "fsdp", "HSDP2x8"),
        ("vllm serve Qwen/Qwen3-8B", None, "vllm", "TP1"),
        ("vllm serve m -tp 8 -pp 2", 64, "vllm", "TP8 x PP2 x DP4"),
        ("vllm serve m --tensor-parallel-size=1 -dp 32 --enable-expert-parallel", 64, "vllm", "EP32 x DP2"),
        ("vllm serve m -tp 8 -dp 4 --enable_expert_parallel", None, "vllm", "TP8 x EP32"),
        ("VLLM_PP_LAYER_PARTITION=10,12 python -m vllm.entrypoints.api_server --model m -pp 2", None, "vllm", "PP2[10,12]"),
        ("python -m sglang.launch_server --model-path m --tp 8 --ep-size 4 --dp 2", None, "sglang", "TP8 x EP4 x DP2"),
        ("sglang serve --model-path m --tp-size 16 --dp-size 4 --enable-dp-attention --moe-a2a-backend deepep", 32, "sglang",
         "TP4 x EP16 x DP2"),
    ],
)  # fmt: skip
def test_a_command_is_read_as_its_framework_would(command: str, n_gpus: int | None, convention: str, spec: str) -> None:
    found = layout_of_command(command, n_gpus)

    assert (found.convention, found.spec) == (convention, parse_spec(spec))


@pytest.mark.parametrize(
    ("command", "n_gpus", "words"),
    [
        ("python train.py", None, "no words of megatron"),
        ("vllm serve 'm", None, "can't be split into words"),
        ("vllm serve m -tp $TP", None, r"--tp '\$TP': expected a whole number; it is a variable of your shell"),
        ("vllm serve m -tp 0", None, "--tensor-parallel-size: expected 1 or more, found 0"),
        ("VLLM_PP_LAYER_PARTITION=7,x,8 vllm serve m -pp 2", None, "PARTITION '7,x,8': expected the layers of each stage"),
        ("VLLM_PP_LAYER_PARTITION=7,² vllm serve m -pp 2", None, "PARTITION '7,²': expected the layers of each stage"),
        ("vllm serve m -tp 8", 12, "vllm: 12 GPUs are no multiple of 8"),
        ("vllm serve m", 0, "GPUs: expected 1 or more, found 0"),
        (f"{MEGATRON} --context-parallel-size 3", None, "128 GPUs are no multiple of 96"),
        (f"{MEGATRON} --use-torch-fsdp2", None, "--use-torch-fsdp2: the sharding of megatron isn't described"),
        (f"{MEGATRON} --pipeline-model-parallel-layout 'E|t*3|L'", None, "its 3 stages are no multiple of the 8 pipeline ranks"),
        (f"{MEGATRON} --pipeline-model-parallel-layout 'Et|(t|)*6tL' --num-layers 9", None, "8 layers t, and the model has 9"),
        (f"{MEGATRON} --pipeline-model-parallel-layout 'x' --decoder-last-pipeline-num-layers 3", None, "takes one of them"),
        (f"{MEGATRON} --decoder-first-pipeline-num-layers 3", None, "--num-layers is missing"),
        (f"{MEGATRON} --num-layers 30 --decoder-first-pipeline-num-layers 3", None, "doesn't divide over 7 of 8 stages"),
        ("t --parallelism.data_parallel_shard_degree -1", None, "say by --gpus how many"),
        ("t --parallelism.pipeline_parallel_degree 2", 8, "--parallelism.pipeline-parallel-degree: this axis of FSDP"),
        ("accelerate launch --use_fsdp --fsdp_sharding_strategy NO_SHARD --num_processes 8 t.py", None, "whole on every rank"),
        ("python -m sglang.launch_server --tp 8 --dp 3 --enable-dp-attention", None, "--dp-size 3 doesn't divide --tp-size 8"),
        ("python -m sglang.launch_server --tp 8 --dp 8 --enable-dp-attention", None, "aren't described; --ep-size 8 is"),
    ],
)
def test_a_command_that_no_convention_describes_is_refused_with_the_flag(command: str, n_gpus: int | None, words: str) -> None:
    with pytest.raises(InputError, match=words):
        layout_of_command(command, n_gpus)


def test_vllm_without_expert_parallelism_is_said_to_be_right_for_dense_models_only() -> None:
    assert "dense models only" in layout_of_command("vllm serve m -dp 4").notes[0]


def test_a_script_may_go_on_over_lines_and_have_comments() -> None:
    script = "# serves\nvllm serve m \\\n  -tp 4 \\\n  --enable-expert-parallel  # whole experts\n"

    assert layout_of_command(script).spec == parse_spec("TP4 x EP4")


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 4)))
def test_stages_hold_every_layer_and_the_first_stage_what_it_was_given(pp: int, vpp: int, each: int, first: int | None) -> None:
    given_first = None if first is None else first * vpp
    n_layers = (each * vpp) * (pp - (first is not None)) + (given_first or 0)

    layers, found_vpp = stage_layers(n_layers, pp, given_first, None, None, vpp)

    assert found_vpp == vpp
    assert sum(layers) in (0, n_layers)
    assert not layers or sum(layers[::pp]) == given_first


def test_a_recipe_of_nemo_rl_gives_both_sides_and_their_gpus() -> None:
    refit = refit_of_settings(read_settings([DATA / "grpo-qwen3-235b.yaml"]))

    assert not refit.colocated
    assert (refit.source.convention, refit.target.convention) == ("megatron", "vllm")
    assert refit.source.spec == parse_spec("TP4 x PP8[11,12,12,12,12,12,12,11] x EP16 x DP4")
    assert refit.target.spec == parse_spec("TP8 x EP16 x DP8")
    assert known_model(refit.source.model) == "qwen3-235b-a22b"


def test_fsdp_of_nemo_rl_shards_over_dp_and_cp() -> None:
    keys = ["cluster.num_nodes=2", "cluster.gpus_per_node=8", "policy.dtensor_cfg.tensor_parallel_size=2"]

    refit = refit_of_settings(read_settings([DATA / "base.yaml"], [*keys, "policy.dtensor_cfg.context_parallel_size=4"]))

    assert refit.colocated
    assert refit.source.spec == parse_spec("FSDP8 x TP2")
    assert refit.target.spec == parse_spec("DP16")


def verl(**changes: str) -> list[str]:
    return [f"{key}={value}" for key, value in (VERL | changes).items()]


VERL = {
    "trainer.nnodes": "2", "trainer.n_gpus_per_node": "8", "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "actor_rollout_ref.actor.strategy": "fsdp", "actor_rollout_ref.rollout.name": "vllm",
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "source", "target"),
    [
        ({}, "FSDP16", "TP2 x DP8"),
        ({"actor_rollout_ref.actor.fsdp_config.fsdp_size": "8"}, "HSDP2x8", "TP2 x DP8"),
        ({"actor_rollout_ref.rollout.tensor_model_parallel_size": "4", "actor_rollout_ref.rollout.name": "sglang"},
         "FSDP16", "TP4 x DP4"),
        ({"actor_rollout_ref.actor.strategy": "megatron", "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "4",
          "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "2", "actor_rollout_ref.rollout.data_parallel_size": "2",
          "actor_rollout_ref.rollout.expert_parallel_size": "4"}, "TP4 x EP2 x ETP4 x DP4", "TP2 x EP4 x DP4"),
        ({"actor_rollout_ref.actor.strategy": "megatron", "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "2",
          "+actor_rollout_ref.actor.megatron.override_transformer_config.pipeline_model_parallel_layout": "Et*20|t*16,L"},
         "PP2[20,16] x DP8", "TP2 x DP8"),
    ],
)  # fmt: skip
def test_overrides_of_verl_are_a_recipe_of_their_own(keys: dict[str, str], source: str, target: str) -> None:
    refit = refit_of_settings(read_settings([], verl(**keys)))

    assert refit.colocated
    assert (refit.source.spec, refit.target.spec) == (parse_spec(source), parse_spec(target))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["a=1"], "neither NeMo RL's `policy` nor verl's"),
        (["a"], "expected KEY=VALUE"),
        (["policy.x=1"], "cluster.gpus_per_node is missing; add it"),
        (["policy.x=1", "cluster.gpus_per_node=eight"], "cluster.gpus_per_node: expected a whole number, found 'eight'"),
        (["policy.x=1", "cluster.gpus_per_node=${a.b}", "a.b=${cluster.gpus_per_node}"], "in a circle"),
        (["policy.x=1", "cluster.gpus_per_node=${oc.env:N}"], r"is '\$\{oc.env:N\}'; give cluster.gpus_per_node=VALUE"),
        (verl(**{"actor_rollout_ref.actor.strategy": "deepspeed"}), "expected megatron, fsdp or fsdp2"),
        (verl(**{"actor_rollout_ref.actor.strategy": "megatron",
                 "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "2",
                 "actor_rollout_ref.actor.megatron.pipeline_model_parallel_layout": "Et*3|tL"}),
         "it holds 4 layers t, and the model has 36"),
        (verl(**{"trainer.n_gpus_per_node": "3", "trainer.nnodes": "1"}), "3 GPUs are no multiple of 2"),
    ],
)  # fmt: skip
def test_settings_that_lack_something_are_refused_by_the_key(overrides: list[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        refit_of_settings(read_settings([], overrides))


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("a: 1\na: 2\n", "line 2: a stands twice"),
        ("a:\n\tb: 1\n", "line 2: a tab in the indentation"),
        ("a:\n  <<: *base\n", "line 2: a merge key"),
        ("just text\n", "line 1: expected KEY: VALUE"),
        ("a: 1\n---\na: 2\n", "line 2: a second document"),
        ("".join(f"{' ' * n}k{n}:\n" for n in range(20)), "line 17: keys nested more than 16 deep"),
        ("defaults: x.yaml\n", "x.yaml: can't be read"),
        ("defaults: s.yaml\n", "lead in a circle"),
    ],
)
def test_a_wrong_file_is_refused_by_its_line(tmp_path, yaml: str, words: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml)

    with pytest.raises(InputError, match=words):
        read_settings([path])


@pytest.mark.parametrize("value", ["*base", "&x 4", "!!int 4", "[1,\n  2]", "{b: 1}", "|\n  4", "\n  - 4", "'4\n  5'"])
def test_what_is_not_a_plain_value_is_refused_when_it_is_asked_for_and_the_rest_is_read(tmp_path, value: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(f"a: {value}\nc: 5\n")

    settings = read_settings([path])

    assert settings.number("c") == 5
    with pytest.raises(InputError, match=r"line 1: can't read the value of a|line 2: can't read the value of a"):
        settings.number("a")


def test_values_have_comments_quotes_and_references(tmp_path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("a:\n  b: '8' # eight\n  c: ${a.b}\n\n  d: \"x # y\"\ne: true\nf:\n  - g: 1\n  - h: 2\ni: null\n")

    settings = read_settings([path], ["++a.k=3"])

    assert (settings.number("a.b"), settings.number("a.c"), settings.number("a.k")) == (8, 8, 3)
    assert settings.text("a.d") == "x # y"
    assert settings.flag("e", False)
    assert settings.number("i", 7) == 7


def test_a_later_file_lies_over_an_earlier_one(tmp_path) -> None:
    (tmp_path / "a.yaml").write_text("x:\n  y: 1\n  z: 2\nw:\n  v: 1\n")
    (tmp_path / "b.yaml").write_text("defaults: a.yaml\nx:\n  y: 3\nw: null\n")

    settings = read_settings([tmp_path / "b.yaml"])

    assert (settings.number("x.y"), settings.number("x.z"), settings.number("w.v", 9)) == (3, 2, 9)


def test_the_printed_command_is_one_that_plans(cli) -> None:
    code, out, _ = cli("import", str(DATA / "base.yaml"), "policy.model_name=Qwen/Qwen3-0.6B", "cluster.gpus_per_node=4")
    assert code == 0
    command = out.splitlines()[-1]
    assert command.startswith("shardroute plan --model qwen3-0.6b --from \"FSDP4\"")

    arguments = [word.replace("MACHINE", "dgx-h100") for word in shlex.split(command)[1:]]
    assert cli(*arguments, "--strategy", "direct")[0] == 0


def test_json_holds_both_sides(cli) -> None:
    code, out, err = cli("import", "--train", MEGATRON, "--serve", "vllm serve Qwen/Qwen3-32B -dp 4", "--json")

    assert code == 0
    found = json.loads(out)
    assert found["from"]["spec"] == "TP4 x PP8 x DP4"
    assert found["to"]["convention"] == "vllm"
    assert found["model"] == "qwen3-32b"
    assert err.startswith("note: without --enable-expert-parallel")


def test_a_launch_script_is_read_from_its_file(cli, tmp_path) -> None:
    (tmp_path / "launch.sh").write_text(f"#!/bin/bash\n{MEGATRON} \\\n  --bf16\n")

    code, out, _ = cli("import", "--train", f"@{tmp_path / 'launch.sh'}")

    assert code == 0
    assert "TP4 x PP8 x DP4 (megatron)" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to import"),
        (["--gpus", "8"], "go with --train"),
        (["--train", "@none.sh"], "none.sh: can't be read"),
        (["--train", "x", "--train-framework", "jax"], "framework 'jax': expected one of megatron"),
        (["none.yaml"], "none.yaml: can't be read"),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(cli, arguments: list[str], words: str) -> None:
    code, out, err = cli("import", *arguments)

    assert (code, out) == (2, "")
    assert words in err
