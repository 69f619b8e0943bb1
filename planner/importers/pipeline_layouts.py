"""Megatron-Core's `--pipeline-model-parallel-layout`: which layers each stage of a pipeline holds, "Et*3|(tt|)*29,m|L".

E is the embedding, t a transformer layer, m one that predicts further tokens (MTP), L the output layer and the loss. Stages
have | between them, first those of virtual rank 0 on every pipeline rank, then those of virtual rank 1. x*3 is xxx, (xy|)*3
repeats a run, commas mean nothing (Megatron-Core `transformer/pipeline_parallel_layer_layout.py`, `parse_str_to_list`).
"""

import re
from dataclasses import dataclass
from typing import Final

from shardroute.planner.layouts.notation import MAX_RANKS
from shardroute.topologies.errors import InputError

_REPEATED: Final = (re.compile(r"\(([^()]+)\)\*(\d{1,7})"), re.compile(r"([^*()])\*(\d{1,7})"))
_KINDS: Final = {"E": "embedding", "t": "transformer layer", "m": "MTP layer", "L": "loss"}


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Layers of each virtual stage in the order of the layers, virtual stages a rank, and the pipeline rank of MTP layers."""

    layers: tuple[int, ...]
    n_virtual: int
    mtp_rank: int | None

    @property
    def even(self) -> bool:
        """Whether every stage has as many layers."""
        return len(set(self.layers)) == 1


def parse_pipeline_layout(text: str, pp: int, n_layers: int | None = None) -> PipelineLayout:
    """The layout that a text says, for a pipeline of `pp` ranks; n_layers is what it must hold, where that is known.

    "Et*3|(tt|)*29,m|L" with pp 16 has 2 virtual stages a rank, of 3, 2, ..., 2, 0 and 0 layers, and MTP on rank 14. Raises
    InputError for what Megatron-Core refuses, and where the embedding isn't on the first stage or the loss not on the last.
    """
    stages = _unrolled(text).split("|")
    flat = "".join(stages)
    if not flat.startswith("E") or not flat.endswith("L") or flat.count("E") != 1 or flat.count("L") != 1:
        raise _wrong(text, "one E must come first, and one L last")
    if "m" in flat and "t" in flat[flat.index("m") :]:
        raise _wrong(text, "layers t must come before the MTP layers m")
    if len(stages) % pp:
        raise _wrong(text, f"its {len(stages)} stages are no multiple of the {pp} pipeline ranks")
    if "E" not in stages[0] or "L" not in stages[-1]:
        raise _wrong(text, "E on another stage than the first, or L on another than the last, isn't described")
    layers = tuple(stage.count("t") for stage in stages)
    if n_layers is not None and sum(layers) != n_layers:
        raise _wrong(text, f"it holds {sum(layers)} layers t, and the model has {n_layers}")
    with_mtp = sorted({i % pp for i, stage in enumerate(stages) if "m" in stage})
    if len(with_mtp) > 1:
        raise _wrong(text, "all MTP layers m must be on one stage")
    return PipelineLayout(layers, len(stages) // pp, with_mtp[0] if with_mtp else None)


def _unrolled(text: str) -> str:
    """The text without repetitions and commas; its length is bounded before each is written out."""
    plain = re.sub(r"[,\s]", "", text)
    for pattern in _REPEATED:
        n_after = len(plain) + sum(len(found[1]) * int(found[2]) for found in pattern.finditer(plain))
        if n_after > MAX_RANKS:
            raise _wrong(text, f"written out it has {n_after} letters, more than {MAX_RANKS}")
        plain = pattern.sub(lambda found: found[1] * int(found[2]), plain)
    if unknown := re.search(r"[^EtmL|]", plain):
        raise _wrong(text, f"can't read {unknown[0]!r}")
    return plain


def _wrong(text: str, fault: str) -> InputError:
    kinds = ", ".join(f"{letter} ({kind})" for letter, kind in _KINDS.items())
    return InputError(
        f"pipeline layout {text[:200]!r}: {fault}; expected stages of {kinds} with | between, such as 'Et*3|(tt|)*29,m|L'"
    )
