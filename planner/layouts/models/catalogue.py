"""Models by name or path: the shipped configs with what is published about them, and any other config.json.

Rule: a shipped model is a folder of `configs/` with the `config.json` of Hugging Face and an `about.toml`
beside it.
"""

import difflib
import math
import os
from dataclasses import replace
from pathlib import Path

import msgspec

from shardroute.planner.layouts.models.config_files import Config
from shardroute.planner.layouts.models.families import family_of
from shardroute.planner.layouts.models.parameters import Model, PipelineSplit, PublishedCount
from shardroute.planner.layouts.models.precisions import with_scales
from shardroute.topologies.documents import read_toml
from shardroute.topologies.errors import InputError

_CONFIGS = Path(__file__).parent / "configs"


class _Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    n_parameters: int
    source: str
    within: int = 0


class _Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layers: tuple[int, ...]
    source: str


class _About(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`about.toml`: what a config doesn't say."""

    published: _Published
    pipeline_splits: tuple[_Split, ...] = ()


def model_names() -> tuple[str, ...]:
    """The names of the shipped models, in alphabetical order."""
    return tuple(sorted(path.parent.name for path in _CONFIGS.glob("*/config.json")))


def load_model(name_or_path: str, scale: int = 1, *, mtp: bool = False, precision: str | None = None) -> Model:
    """The model of a shipped name, or of a config.json given by its path or by the folder that holds it.

    `scale` N divides every width (hidden, intermediate, head_dim, vocabulary) by sqrt(N), so that each matrix
    holds 1/N of its elements while layers, heads, KV heads and experts stay: qwen3-30b-a3b at 256 has hidden
    128, head_dim 8 and 128 experts. `mtp` adds the layers that predict further tokens, where the model has any;
    `precision` ("fp8-block", "mxfp8") stores linear weights in 8 bits with their scales. Raises InputError for an
    unknown name, an unreadable or unsupported config, a missing key, and a scale or a precision that doesn't fit.
    """
    model = _found(name_or_path, scale, mtp)
    if mtp and not model.has_mtp:
        raise InputError(f"{model.name}: it has no layers that predict further tokens (num_nextn_predict_layers); leave MTP out")
    return model if precision is None else with_scales(model, precision)


def _found(name_or_path: str, scale: int, mtp: bool) -> Model:
    if name_or_path in model_names():
        folder = _CONFIGS / name_or_path
        about = read_toml(folder / "about.toml", _About)
        return replace(
            _build(name_or_path, Config.read(folder, mtp), scale),
            published=PublishedCount(about.published.n_parameters, about.published.source, about.published.within),
            pipeline_splits=tuple(PipelineSplit(split.layers, split.source) for split in about.pipeline_splits),
        )
    if not os.path.exists(name_or_path):  # unlike Path.exists, false for a name that no file can have
        raise _unknown(name_or_path)
    path = Path(name_or_path).resolve()
    if path.is_dir():
        return _build(path.name, Config.read(path, mtp), scale)
    return _build(path.parent.name if path.name == "config.json" else path.stem, Config.read(path, mtp), scale)


def _build(name: str, config: Config, scale: int) -> Model:
    build = family_of(config)
    model = build(name, config)
    if scale == 1:
        return model
    factor = math.isqrt(scale) if scale > 0 else 0
    if factor == 0 or factor * factor != scale or config.common_width % factor:
        widths = ", ".join(f"{key} {value}" for key, value in config.widths.items())
        valid = [f * f for f in range(1, config.common_width + 1) if config.common_width % f == 0]
        raise InputError(
            f"scale {scale} doesn't fit {name}: it must be the square of a number that divides every width "
            f"({widths}); valid scales: {', '.join(str(n) for n in valid)}"
        )
    return replace(build(name, config.shrunk(factor)), scale=scale)


def _unknown(name: str) -> InputError:
    starting = [known for known in model_names() if name and known.startswith(name.lower())]
    close = starting or difflib.get_close_matches(name.lower(), model_names(), n=3, cutoff=0.4)
    meant = f"did you mean {' or '.join(close)}? Expected" if close else "expected"
    return InputError(
        f"model {name!r} is unknown; {meant} one of {', '.join(model_names())}, "
        "or the path of a config.json (a file or the folder that holds it)"
    )
