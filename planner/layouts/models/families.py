"""The families of models, by the `model_type` of their config. A family is one file and one entry here.

Rule: names, shapes and defaults are those of the family's class in Transformers.
"""

from collections.abc import Callable, Mapping

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.deepseek import build_deepseek_v3
from shardroute.planner.layouts.models.glm import build_glm4_moe
from shardroute.planner.layouts.models.gpt_oss import build_gpt_oss
from shardroute.planner.layouts.models.llama import build_llama
from shardroute.planner.layouts.models.mixtral import build_mixtral
from shardroute.planner.layouts.models.nemotron_h import build_nemotron_h
from shardroute.planner.layouts.models.parameters import Model
from shardroute.planner.layouts.models.qwen import build_qwen2, build_qwen2_moe, build_qwen3, build_qwen3_moe
from shardroute.topologies.errors import InputError

Family = Callable[[str, Config], Model]

FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": build_deepseek_v3,
    "glm4_moe": build_glm4_moe,
    "gpt_oss": build_gpt_oss,
    "kimi_k2": build_deepseek_v3,
    "llama": build_llama,
    "mixtral": build_mixtral,
    "nemotron_h": build_nemotron_h,
    "qwen2": build_qwen2,
    "qwen2_moe": build_qwen2_moe,
    "qwen3": build_qwen3,
    "qwen3_moe": build_qwen3_moe,
}


def family_of(config: Config) -> Family:
    """The builder for a config's `model_type`. Raises InputError, with the supported ones, for any other."""
    model_type = config.text("model_type")
    if model_type not in FAMILIES:
        raise InputError(
            f"{config.where}: model_type {model_type!r} isn't known; expected {', '.join(sorted(FAMILIES))}. Any other model "
            "can be moved too: --from-json and --to-json take a layout of your own (docs/layouts.md) or a safetensors checkpoint "
            "with its model.safetensors.index.json"
        )
    return FAMILIES[model_type]
