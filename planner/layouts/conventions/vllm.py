"""How vLLM stores a model for serving, as reinforcement-learning frameworks run it.

Ranks: tp is fastest, then pp, then the groups of data-parallel attention, and dp slowest. DP means independent replicas of
the whole model. EP is off, or a multiple of TP: vLLM's --enable-expert-parallel spreads whole experts over TP x its own
data parallel size, so "TP8 x EP8" is one group, and "EP32 x DP2" is two replicas of 32 ranks, each with 32 groups of
data-parallel attention of one rank (`-tp 1 -dp 32 --enable-expert-parallel`, as DeepSeek-V3 is deployed); "TP8 x EP32 x DP2"
has 4 groups of TP8 instead.

Buffers, by vLLM's names (they are those of the checkpoint but for the fused ones):
- qkv_proj: this rank's query heads, then its key heads, then its value heads. With more ranks than KV heads
each KV head is on tp / n_kv_heads neighbouring ranks: rank r has head r * n_kv_heads // tp, never a part of
one.
- fused_qkv_a_proj (MLA): q_a_proj's rows, then kv_a_proj_with_mqa's, whole on every rank; q_b_proj, kv_b_proj: rows over TP.
- gate_up_proj: gate rows of this rank, then its up rows; shared experts too, over TP whatever EP is. o_proj, down_proj:
columns over TP.
- experts.w13_weight [n_local, 2 * f / tp, h] (gate, then up) and w2_weight [n_local, h, f / tp]; f isn't cut
with EP. Experts go to EP ranks in order, the first ranks having one more when EP doesn't divide them (vLLM
`determine_expert_map`, linear). This is the layout that weights are loaded into, before a kernel rearranges
it: writing into the rearranged one is wrong, whatever its shape. GPT-OSS keeps gate and up rows in turn; its w2_bias is
on the first TP rank only, and zero elsewhere.
- embed_tokens, lm_head: rows over TP after padding the vocabulary to a multiple of 64; padding rows are in
the buffers, and no fragment covers them. A tied output layer is embed_tokens itself, on the last stage too.
- mixer.in_proj (Mamba-2): this rank's z, x, B, C and dt rows in whole heads and groups; a single group is on every rank.
mixer.A holds -exp(A_log): a loader must apply that to what arrives.
- scales: `weight_scale_inv` (fp8-block) or `weight_scale` (mxfp8) beside the weight. A cut inside a block is refused, as
vLLM does, because its kernels count blocks from the shard's first row.
- norms, the router (mlp.gate) and biases of column-cut layers are on every rank.
"""

from typing import Final

from shardroute.planner.layouts.conventions.serving import Server, lay_out_replicas
from shardroute.planner.layouts.conventions.sides import Side, check_axes
from shardroute.planner.layouts.models.parameters import Model
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.planner.shares import Told, untold
from shardroute.topologies.errors import InputError

VLLM: Final = Server(
    name="vllm",
    fused_latent="fused_qkv_a_proj",
    renamed={
        "gpt_oss": {".self_attn.": ".attn.", ".embed_tokens.": ".embedding."},
        "nemotron_h": {"backbone.embeddings.": "model.embed_tokens.", "backbone.": "model.", ".A_log": ".A"},
    },
    stages_in_groups=True,
    balances_experts=True,
)


def lay_out_vllm(model: Model, spec: ParallelSpec, first_rank: int = 0, progress: Told = untold) -> Side:
    """The model on ranks first_rank, first_rank + 1, ... as vLLM stores it.

    "TP8 x DP16" takes 128 ranks: 16 replicas, each of 8 ranks. "EP32 x DP2" takes 64: 2 replicas of 32.

    Raises InputError for sizes that don't divide what they split, an EP that is no multiple of TP, and axes vLLM doesn't have.
    """
    check_axes(spec, "vllm", (Axis.TP, Axis.PP, Axis.DP, Axis.EP))
    tp, ep = spec.size(Axis.TP), spec.size(Axis.EP)
    if ep > 1 and ep % tp and model.n_experts:
        raise InputError(
            f"{spec}: EP{ep} with TP{tp}: vllm spreads experts over TP x data-parallel attention, so EP is 1 or a multiple of "
            f"TP; use TP{tp} x EP{-(-ep // tp) * tp} or TP{ep} x EP{ep}, or leave EP out"
        )
    return lay_out_replicas(VLLM, model, spec, max(tp, ep), first_rank, progress)
