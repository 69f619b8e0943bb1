"""A layout from the command that starts it: Megatron-LM, torchtitan or accelerate (FSDP), vLLM, SGLang.

Rule: a flag that changes where weights lie and that no convention describes is refused; others are left alone. Defaults are the
frameworks' own: Megatron-LM `megatron/training/arguments.py`, torchtitan `config/job_config.py`, accelerate `commands/launch.py`,
vLLM `engine/arg_utils.py`, SGLang `srt/server_args.py`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from shardroute.planner.importers.flags import Flags, n_launched, parse_flags, refuse
from shardroute.planner.importers.imported import ImportedLayout, divided, spec_of
from shardroute.planner.importers.pipeline_layouts import parse_pipeline_layout
from shardroute.planner.layouts.notation import parse_spec
from shardroute.topologies.errors import InputError


def layout_of_command(command: str, n_gpus: int | None = None, framework: str | None = None) -> ImportedLayout:
    """The layout that a command starts, `vllm serve Qwen/Qwen3-8B -tp 4`.

    n_gpus is the number of GPUs where the command doesn't say it: trainers replicate over what is left (DP), servers are started
    as often as they fit. framework is one of FRAMEWORKS, None to tell by the words. Raises InputError for a command of none of
    them, sizes that don't fit together, and layouts that no convention describes.
    """
    flags = parse_flags(command)
    if framework is None:
        framework = _framework(flags, command)
    if framework not in FRAMEWORKS:
        raise InputError(f"framework {framework!r}: expected one of {', '.join(FRAMEWORKS)}")
    if n_gpus is not None and n_gpus < 1:
        raise InputError(f"GPUs: expected 1 or more, found {n_gpus}")
    return FRAMEWORKS[framework](flags, n_gpus)


def _framework(flags: Flags, command: str) -> str:
    words = [word.rpartition("/")[2] for word in flags.words]
    if "sglang" in words or any(word.startswith("sglang.launch_server") for word in words):
        return "sglang"
    if "vllm" in words or any(word.startswith("vllm.entrypoints") for word in words):
        return "vllm"
    if any(name.startswith("parallelism.") for name in flags.values):
        return "torchtitan"
    if flags.given("use-fsdp", "fsdp-sharding-strategy") is not None:
        return "accelerate"
    if flags.given("tensor-model-parallel-size", "pipeline-model-parallel-size", "expert-model-parallel-size") is not None:
        return "megatron"
    raise InputError(
        f"command {command[:60]!r}: no words of {', '.join(FRAMEWORKS)}; give the command with its program, such as "
        "'vllm serve MODEL -tp 8', or name the framework"
    )


def _megatron(flags: Flags, n_gpus: int | None) -> ImportedLayout:
    refuse(flags, "megatron", ("use-torch-fsdp2", "use-megatron-fsdp", "use-custom-fsdp"), "the sharding")
    refuse(flags, "megatron", ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"), "this split")
    tp = flags.size("tensor-model-parallel-size")
    pp, cp = flags.size("pipeline-model-parallel-size"), flags.size("context-parallel-size")
    ep = flags.size("expert-model-parallel-size")
    mixed = ep > 1 or flags.given("num-experts") not in (None, "None")
    etp = flags.size("expert-tensor-parallel-size") if flags.given("expert-tensor-parallel-size") is not None else tp
    world = n_launched(flags) if n_gpus is None else n_gpus
    dp = 1 if world is None else divided(world, tp * pp * cp, "--tensor-model-parallel-size and others")
    notes = []
    if world is None:
        notes.append("the command says no number of GPUs: DP is the smallest that EP fits; give --gpus")
    if flags.number("make-vocab-size-divisible-by", default=128) != 128:
        notes.append("--make-vocab-size-divisible-by isn't 128: the padding of the vocabulary is not as shown")
    layers, vpp, said = _megatron_stages(flags, pp)
    notes += said
    sizes = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "etp": etp if mixed else 1, "dp": dp}
    order = "tp-cp-ep-pp-dp" if flags.has("use-tp-pp-dp-mapping") else ""
    return ImportedLayout(spec_of(sizes, layers, order), "megatron", "", tuple(notes))


_OTHER_STAGES: Final = (
    "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
)  # fmt: skip


def _megatron_stages(flags: Flags, pp: int) -> tuple[tuple[int, ...], int, list[str]]:
    """The layers of each (virtual) stage in the order of layers, none if they are even, virtual stages a rank, and notes."""
    layout = flags.given("pipeline-model-parallel-layout")
    if layout is not None:
        if both := next((name for name in _OTHER_STAGES if flags.given(name) is not None), None):
            raise InputError(f"--pipeline-model-parallel-layout and --{both}: Megatron takes one of them; leave one out")
        return laid_out_stages(layout, pp, flags.number("num-layers", default=None))
    first = flags.number("decoder-first-pipeline-num-layers", default=None)
    last = flags.number("decoder-last-pipeline-num-layers", default=None)
    n_layers = flags.number("num-layers", default=None)
    vpp = flags.size("num-virtual-stages-per-pipeline-rank")
    per_virtual = flags.number("num-layers-per-virtual-pipeline-stage", default=None)
    if (first, last, per_virtual) == (None, None, None):
        return (), vpp, []
    if n_layers is None:
        raise InputError("--num-layers is missing: uneven and virtual stages can't be counted without it")
    return *stage_layers(n_layers, pp, first, last, per_virtual, vpp), []


def laid_out_stages(layout: str, pp: int, n_layers: int | None) -> tuple[tuple[int, ...], int, list[str]]:
    """The same of a pipeline layout, "Et*3|(tt|)*29,m|L". Raises InputError for one that isn't described."""
    found = parse_pipeline_layout(layout, pp, n_layers)
    notes = []
    if found.mtp_rank is not None and found.mtp_rank < pp - 1:
        notes.append(
            f"the MTP layers are on pipeline rank {found.mtp_rank} alone, which isn't described: plan without --mtp, which puts "
            "them on the last"
        )
    return (() if found.even else found.layers), found.n_virtual, notes


def stage_layers(
    n_layers: int, pp: int, first: int | None, last: int | None, per_virtual: int | None, vpp: int
) -> tuple[tuple[int, ...], int]:
    """Megatron-Core's split (`get_num_layers_to_build`): first and last as given, the rest even over the stages between.

    With virtual stages each stage's layers are cut evenly into them. Gives the layers of each (virtual) stage, none if all are
    alike, and virtual stages a rank. Raises InputError where something doesn't divide.
    """
    ends = [n for n in (first, last) if n is not None]
    between, left = pp - len(ends), n_layers - sum(ends)
    if between < 0 or left < 0 or (left % between if between else left):
        raise InputError(f"{n_layers} layers, {ends} of them at the ends: the rest doesn't divide over {between} of {pp} stages")
    each = [left // between if between else 0] * pp
    if first is not None:
        each[0] = first
    if last is not None:
        each[-1] = last
    if per_virtual is not None:
        if per_virtual < 1 or each[0] % per_virtual:
            raise InputError(f"--num-layers-per-virtual-pipeline-stage {per_virtual} doesn't divide a stage's {each[0]} layers")
        vpp = each[0] // per_virtual
    if any(n % vpp for n in each):
        raise InputError(f"stages of {each} layers can't be cut into {vpp} virtual ones")
    if len(set(each)) == 1:
        return (), vpp
    return tuple(n // vpp for _ in range(vpp) for n in each), vpp


def _torchtitan(flags: Flags, n_gpus: int | None) -> ImportedLayout:
    def degree(name: str) -> str:
        return f"parallelism.{name}-degree"

    refuse(flags, "FSDP", (degree("pipeline-parallel"), degree("expert-parallel")), "this axis")
    tp, cp = flags.size(degree("tensor-parallel")), flags.size(degree("context-parallel"))
    replicas = flags.size(degree("data-parallel-replicate"))
    shards = flags.number(degree("data-parallel-shard"), default=-1)
    assert shards is not None
    if shards == -1:
        world = n_launched(flags) if n_gpus is None else n_gpus
        if world is None:
            raise InputError(f"--{degree('data-parallel-shard')} is -1, all GPUs that are left; say by --gpus how many there are")
        shards = divided(world, tp * cp * replicas, "--parallelism")
    # torchtitan shards weights over the flattened axes dp_shard and cp.
    return fsdp_layout(shards * cp, replicas, tp)


def fsdp_layout(shards: int, replicas: int, tp: int, model: str = "") -> ImportedLayout:
    """FSDP over this many shards, or HSDP with replicas of them, each over TP ranks. Raises InputError below 1 shard."""
    if shards < 1:
        raise InputError(f"FSDP: expected 1 shard or more, found {shards}")
    sizes = f"HSDP{replicas}x{shards}" if replicas > 1 else f"FSDP{shards}"
    return ImportedLayout(parse_spec(sizes + (f" x TP{tp}" if tp > 1 else "")), "fsdp", model)


def _accelerate(flags: Flags, n_gpus: int | None) -> ImportedLayout:
    world = n_launched(flags) if n_gpus is None else n_gpus
    if world is None:
        raise InputError("--num_processes is missing: say how many GPUs there are")
    machines = flags.size("num-machines")
    match flags.given("fsdp-sharding-strategy"):
        case None | "FULL_SHARD" | "1":
            return fsdp_layout(world, 1, 1)
        case "HYBRID_SHARD" | "4":
            return fsdp_layout(divided(world, machines, "--num_machines"), machines, 1)
        case other:
            raise InputError(
                f"--fsdp_sharding_strategy {other}: weights are whole on every rank; expected FULL_SHARD or HYBRID_SHARD"
            )


def _vllm(flags: Flags, n_gpus: int | None) -> ImportedLayout:
    tp, pp = flags.size("tensor-parallel-size", "tp"), flags.size("pipeline-parallel-size", "pp")
    dp = flags.size("data-parallel-size", "dp")
    model = flags.given("model") or _after(flags, "serve")
    return vllm_layout(tp, pp, dp, flags.has("enable-expert-parallel", "ep"), n_gpus, model, _vllm_stages(flags))


def _vllm_stages(flags: Flags) -> tuple[int, ...]:
    name = "VLLM_PP_LAYER_PARTITION"
    text = flags.environment.get(name, "")
    stages = text.split(",") if text else []
    if any(re.fullmatch(r"\s*\d{1,9}\s*", stage) is None for stage in stages):
        raise InputError(f"{name} {text!r}: expected the layers of each stage, such as 7,8,8,7")
    return tuple(int(stage.strip()) for stage in stages)  # int itself takes fewer characters for space than \s does


def vllm_layout(
    tp: int, pp: int, dp: int, expert_parallel: bool, n_gpus: int | None, model: str, layers: tuple[int, ...] = ()
) -> ImportedLayout:
    """vLLM's engines: with expert parallelism experts spread over TP x DP of an engine, else each DP rank is a replica."""
    replicas = 1 if n_gpus is None else divided(n_gpus, tp * pp * dp, "vllm")
    if expert_parallel:
        return ImportedLayout(spec_of({"tp": tp, "pp": pp, "ep": tp * dp, "dp": replicas}, layers), "vllm", model)
    note = "without --enable-expert-parallel vLLM cuts experts over TP x DP, which isn't described: right for dense models only"
    return ImportedLayout(spec_of({"tp": tp, "pp": pp, "dp": dp * replicas}, layers), "vllm", model, (note,) if dp > 1 else ())


def _sglang(flags: Flags, n_gpus: int | None) -> ImportedLayout:
    tp = flags.size("tensor-parallel-size", "tp-size", "tp")
    pp = flags.size("pipeline-parallel-size", "pp-size", "pp")
    dp = flags.size("data-parallel-size", "dp-size", "dp")
    ep = flags.size("expert-parallel-size", "ep-size", "ep")
    # Both make ep_size the tp_size (ServerArgs.__post_init__).
    if flags.given("moe-a2a-backend") == "deepep" or flags.has("enable-deepep-moe", "enable-ep-moe"):
        ep = tp
    refuse(flags, "sglang", ("moe-dp-size",), "this axis")
    return sglang_layout(tp, pp, dp, ep, flags.has("enable-dp-attention"), n_gpus, flags.given("model-path", "model") or "")


def sglang_layout(
    tp: int, pp: int, dp: int, ep: int, dp_attention: bool, n_gpus: int | None, model: str
) -> ImportedLayout:
    """SGLang's servers: with --enable-dp-attention the DP groups are inside of TP, else each is a replica."""
    if not dp_attention or dp == 1:
        replicas = dp if n_gpus is None else divided(n_gpus, tp * pp, "sglang")
        return ImportedLayout(spec_of({"tp": tp, "pp": pp, "ep": ep, "dp": replicas}), "sglang", model)
    if tp % dp:
        raise InputError(f"--enable-dp-attention: --dp-size {dp} doesn't divide --tp-size {tp}")
    if ep != tp:
        raise InputError(
            f"--enable-dp-attention with --ep-size {ep} and --tp-size {tp}: experts cut over TP beside data-parallel attention "
            f"aren't described; --ep-size {tp} is"
        )
    replicas = 1 if n_gpus is None else divided(n_gpus, tp * pp, "sglang")
    return ImportedLayout(spec_of({"tp": tp // dp, "pp": pp, "ep": ep, "dp": replicas}), "sglang", model)


def _after(flags: Flags, word: str) -> str:
    at = flags.words.index(word) + 1 if word in flags.words else len(flags.words)
    return flags.words[at] if at < len(flags.words) and not flags.words[at].startswith("-") else ""


FRAMEWORKS: Final[Mapping[str, Callable[[Flags, int | None], ImportedLayout]]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "accelerate": _accelerate,
    "vllm": _vllm,
    "sglang": _sglang,
}
