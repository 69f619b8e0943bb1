"""Both sides of a refit from a recipe: NeMo RL's and verl's settings.

Rule: a key that is left out has the framework's own default: NeMo RL `examples/configs/grpo_math_1B.yaml`, verl
`verl/trainer/config` (rollout/rollout.yaml, engine/megatron.yaml, engine/fsdp.yaml). Numbers of GPUs have none here.
"""

from typing import Final

from shardroute.planner.importers.commands import fsdp_layout, laid_out_stages, sglang_layout, stage_layers, vllm_layout
from shardroute.planner.importers.imported import ImportedLayout, ImportedRefit, divided, known_model, spec_of
from shardroute.planner.importers.settings import Settings
from shardroute.planner.layouts.models import load_model
from shardroute.topologies.errors import InputError

_VERL: Final = "actor_rollout_ref"


def refit_of_settings(settings: Settings) -> ImportedRefit:
    """The training and the inference layout of a recipe of NeMo RL (it has `policy`) or of verl (`actor_rollout_ref`).

    Raises InputError for other settings, for GPUs that the sizes don't divide, and for what no convention describes.
    """
    if settings.has(_VERL):
        return _verl(settings)
    if settings.has("policy"):
        return _nemo_rl(settings)
    raise InputError(f"neither NeMo RL's `policy` nor verl's `{_VERL}` is in the settings; give the recipe's file, or KEY=VALUE")


def _nemo_rl(settings: Settings) -> ImportedRefit:
    per_node, nodes = settings.size("cluster.gpus_per_node"), settings.size("cluster.num_nodes")
    colocated = settings.flag("policy.generation.colocated.enabled", True)
    n_train = n_serve = per_node * nodes
    if not colocated:
        # With one node a part of it generates, else whole nodes do (NeMo RL `grpo.setup`).
        resources = "policy.generation.colocated.resources"
        if nodes == 1:
            n_serve = settings.size(f"{resources}.gpus_per_node")
        else:
            n_serve = settings.size(f"{resources}.num_nodes") * settings.size(f"{resources}.gpus_per_node", per_node)
        n_train -= n_serve
        if n_train < 1:
            raise InputError(f"policy.generation.colocated.resources take all of {n_serve} GPUs; none is left for training")
    model = settings.text("policy.model_name", "")
    backend = settings.text("policy.generation.backend", "vllm")
    if backend != "vllm":
        raise InputError(f"policy.generation.backend: {backend!r} isn't read; vllm is, and for others give --serve COMMAND")
    cfg = "policy.generation.vllm_cfg"
    tp, pp = settings.size(f"{cfg}.tensor_parallel_size"), settings.size(f"{cfg}.pipeline_parallel_size", 1)
    ep = settings.size(f"{cfg}.expert_parallel_size", 1)
    if ep > 1 and ep % tp:
        raise InputError(f"{cfg}.expert_parallel_size: {ep} is no multiple of tensor_parallel_size {tp}")
    target = vllm_layout(tp, pp, max(1, ep // tp), ep > 1, n_serve, model)
    if settings.flag("policy.megatron_cfg.enabled", False):
        cfg = "policy.megatron_cfg"
        source = _megatron(settings, cfg, n_train, model, settings.size(f"{cfg}.expert_tensor_parallel_size", 1))
    else:
        if settings.size("policy.dtensor_cfg.expert_parallel_size", 1) > 1:
            raise InputError("policy.dtensor_cfg.expert_parallel_size: FSDP with expert parallelism isn't described")
        tp = settings.size("policy.dtensor_cfg.tensor_parallel_size", 1)
        # fully_shard goes over the flattened axes dp and cp.
        source = fsdp_layout(divided(n_train, tp, "policy.dtensor_cfg"), 1, tp, model)
    return ImportedRefit(source, target, colocated)


def _verl(settings: Settings) -> ImportedRefit:
    n_gpus = settings.size("trainer.n_gpus_per_node") * settings.size("trainer.nnodes")
    model = settings.text(f"{_VERL}.model.path", "")
    rollout = f"{_VERL}.rollout"
    tp, dp = settings.size(f"{rollout}.tensor_model_parallel_size", 2), settings.size(f"{rollout}.data_parallel_size", 1)
    pp, ep = settings.size(f"{rollout}.pipeline_model_parallel_size", 1), settings.size(f"{rollout}.expert_parallel_size", 1)
    match settings.text(f"{rollout}.name"):
        case "vllm":
            if ep not in (1, tp * dp):
                raise InputError(f"{rollout}.expert_parallel_size: expected 1 or TP x DP = {tp * dp} for vllm, found {ep}")
            target = vllm_layout(tp, pp, dp, ep > 1, n_gpus, model)
        case "sglang":
            target = sglang_layout(tp, pp, dp, ep, dp > 1 and ep > 1, n_gpus, model)
        case other:
            raise InputError(f"{rollout}.name: expected vllm or sglang, found {other!r}")
    actor = f"{_VERL}.actor"
    match settings.text(f"{actor}.strategy"):
        case "megatron":
            cfg = f"{actor}.megatron"
            etp = settings.size(f"{cfg}.expert_tensor_parallel_size", settings.size(f"{cfg}.tensor_model_parallel_size", 1))
            mixed = settings.size(f"{cfg}.expert_model_parallel_size", 1) > 1
            source = _megatron(settings, cfg, n_gpus, model, etp if mixed else 1)
        case "fsdp" | "fsdp2":
            shards = settings.number(f"{actor}.fsdp_config.fsdp_size", -1)
            shards = n_gpus if shards < 1 or shards >= n_gpus else shards
            source = fsdp_layout(shards, divided(n_gpus, shards, f"{actor}.fsdp_config.fsdp_size"), 1, model)
        case other:
            raise InputError(f"{actor}.strategy: expected megatron, fsdp or fsdp2, found {other!r}")
    return ImportedRefit(source, target, colocated=True)


def _megatron(settings: Settings, cfg: str, n_gpus: int, model: str, etp: int) -> ImportedLayout:
    tp, pp = settings.size(f"{cfg}.tensor_model_parallel_size", 1), settings.size(f"{cfg}.pipeline_model_parallel_size", 1)
    cp, ep = settings.size(f"{cfg}.context_parallel_size", 1), settings.size(f"{cfg}.expert_model_parallel_size", 1)
    vpp = settings.size(f"{cfg}.virtual_pipeline_model_parallel_size", 1)
    ends = _ends(settings, cfg)
    layers: tuple[int, ...] = ()
    notes: list[str] = []
    layout = _laid_out(settings, cfg)
    if layout:
        if ends != (None, None):
            raise InputError(f"{cfg}: pipeline_model_parallel_layout and layers of the first or last stage; leave one out")
        name = known_model(model)
        layers, vpp, notes = laid_out_stages(layout, pp, None if name is None else load_model(name).n_layers)
    elif ends != (None, None):
        n_layers = _n_layers(settings, cfg, model)
        layers, vpp = stage_layers(n_layers, pp, *ends, None, vpp)
    elif settings.number(f"{cfg}.num_layers_per_virtual_pipeline_stage", 0):
        per_virtual = settings.size(f"{cfg}.num_layers_per_virtual_pipeline_stage")
        layers, vpp = stage_layers(_n_layers(settings, cfg, model), pp, None, None, per_virtual, vpp)
    dp = divided(n_gpus, tp * pp * cp, cfg)
    sizes = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "etp": etp, "dp": dp}
    return ImportedLayout(spec_of(sizes, layers), "megatron", model, tuple(notes))


def _laid_out(settings: Settings, cfg: str) -> str:
    """The pipeline layout that Megatron-Core is given, "" if none is."""
    keys = [f"{place}.pipeline_model_parallel_layout" for place in (cfg, f"{cfg}.override_transformer_config")]
    given = [settings.text(key, "") for key in keys]
    return next((text for text in given if text), "")


def _ends(settings: Settings, cfg: str) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage, where they are given."""
    found: list[int | None] = []
    for end in ("first", "last"):
        places = (cfg, f"{cfg}.override_transformer_config")
        given = [n for place in places if (n := settings.number(f"{place}.num_layers_in_{end}_pipeline_stage", 0)) > 0]
        found.append(given[0] if given else None)
    return found[0], found[1]


def _n_layers(settings: Settings, cfg: str, model: str) -> int:
    name = known_model(model)
    if name is None:
        raise InputError(
            f"{cfg}: uneven stages need the layers of {model or 'the model'}, which isn't shipped; list them, PP4[7,8,8,7]"
        )
    return load_model(name).n_layers
