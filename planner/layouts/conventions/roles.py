"""How tensor parallelism splits each role: the part that Megatron-Core, vLLM and SGLang agree on.

Rule: every role is in exactly one group. What a framework fuses, pads or replicates besides is for its convention to say.
"""

from collections.abc import Iterator

from shardroute.planner.layouts.models.parameters import Model, Role

# Rows (dim 0) over TP.
ROWS = frozenset({
    Role.Q_B_PROJ, Role.LATENT_Q_PROJ, Role.KV_B_PROJ, Role.SINKS, Role.UNGATED_UP, Role.SHARED_UNGATED_UP, Role.MAMBA_NORM,
})  # fmt: skip
# Columns (dim 1) over TP.
COLUMNS = frozenset({Role.O_PROJ, Role.DOWN_PROJ, Role.SHARED_DOWN, Role.MAMBA_OUT})
# On every rank of a stage, whole.
WHOLE = frozenset({
    Role.FINAL_NORM, Role.INPUT_NORM, Role.POST_ATTENTION_NORM, Role.Q_NORM, Role.K_NORM, Role.O_BIAS, Role.DOWN_BIAS,
    Role.ROUTER, Role.ROUTER_BIAS, Role.ROUTER_CORRECTION, Role.SHARED_ROUTER, Role.LATENT_IN, Role.LATENT_OUT, Role.Q_A_PROJ,
    Role.Q_A_NORM, Role.KV_A_PROJ, Role.KV_A_NORM, Role.MIXER_NORM, Role.MTP_EMBEDDING_NORM, Role.MTP_HIDDEN_NORM, Role.MTP_PROJ,
    Role.MTP_FINAL_NORM,
})  # fmt: skip
# Query, key and value rows of one fused buffer.
QUERY = frozenset({Role.Q_PROJ, Role.Q_BIAS})
VALUE = frozenset({Role.V_PROJ, Role.V_BIAS})
HEADS = QUERY | VALUE | {Role.K_PROJ, Role.K_BIAS}
# Rows over TP, gate and up in one fused buffer.
GATES = frozenset({Role.GATE_PROJ, Role.GATE_BIAS, Role.SHARED_GATE})
UPS = frozenset({Role.UP_PROJ, Role.UP_BIAS, Role.SHARED_UP})
# Rows over TP after padding.
VOCABULARY = frozenset({Role.EMBEDDING, Role.LM_HEAD})
# Rows in segments, each over TP.
SEGMENTED = frozenset({Role.MAMBA_IN, Role.MAMBA_CONV, Role.MAMBA_CONV_BIAS, Role.MAMBA_HEAD})
# Over the ranks of the experts' own order: experts first, then their rows or columns.
EXPERTS = frozenset({
    Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_UNGATED_UP, Role.EXPERT_DOWN, Role.EXPERT_GATE_UP, Role.EXPERT_GATE_UP_BIAS,
    Role.EXPERT_DOWN_TRANSPOSED, Role.EXPERT_DOWN_BIAS,
})  # fmt: skip
GROUPS = (ROWS, COLUMNS, WHOLE, HEADS, GATES, UPS, VOCABULARY, SEGMENTED, EXPERTS)

# The dim that is split and the config's word for its size.
_WIDTHS = {
    Role.GATE_PROJ: (0, "intermediate_size"),
    Role.UNGATED_UP: (0, "intermediate_size"),
    Role.SHARED_GATE: (0, "the width of the shared experts"),
    Role.SHARED_UNGATED_UP: (0, "the width of the shared experts"),
}
_EXPERT_WIDTHS = {Role.EXPERT_GATE: 1, Role.EXPERT_UNGATED_UP: 1, Role.EXPERT_GATE_UP: 2}


def split_widths(model: Model) -> Iterator[tuple[str, int]]:
    """Name and size of every width that TP must divide, experts apart."""
    for role, (dim, key) in _WIDTHS.items():
        for shape in model.shapes(role):
            yield key, shape[dim]


def expert_widths(model: Model) -> Iterator[int]:
    """Every width of one expert (moe_intermediate_size)."""
    for role, dim in _EXPERT_WIDTHS.items():
        for shape in model.shapes(role):
            yield shape[dim]


def segment_units(model: Model) -> set[int]:
    """How many units (heads, groups) the segments of the model's Mamba layers have."""
    return {segment.n_units for parameter in model.parameters for segment in parameter.segments}
