"""How SGLang stores a model for serving.

Ranks: tp is fastest, then pp, and dp slowest. DP means independent replicas of the whole model. A replica has as many ranks
a stage as the larger of TP and EP: with EP below TP ("TP8 x EP4") whole experts lie on 4 groups of 2 ranks, and each is cut
over the 2 (SGLang's moe_tp = tp_size / ep_size); with EP above TP attention is data parallel inside the replica
(--enable-dp-attention: TP is then SGLang's attention TP, and EP its tp_size).

Buffers are vLLM's (see there), but for these: MLA's fused buffer is fused_qkv_a_proj_with_mqa, GPT-OSS's attention keeps the
checkpoint's names, and EP must divide the experts. Shared experts are cut over TP as dense layers are; SGLang's fusion of a
shared expert into the routed ones (n_share_experts_fusion) is off, as it must be when weights are updated.
"""

from typing import Final

from shardroute.planner.layouts.conventions.serving import Server, lay_out_replicas
from shardroute.planner.layouts.conventions.sides import Side, check_axes
from shardroute.planner.layouts.models.parameters import Model
from shardroute.planner.layouts.notation import Axis, ParallelSpec
from shardroute.planner.shares import Told, untold
from shardroute.topologies.errors import InputError

SGLANG: Final = Server(
    name="sglang",
    fused_latent="fused_qkv_a_proj_with_mqa",
    renamed={"nemotron_h": {"backbone.embeddings.": "model.embed_tokens.", "backbone.": "model.", ".A_log": ".A"}},
    stages_in_groups=False,
    balances_experts=False,
)


def lay_out_sglang(model: Model, spec: ParallelSpec, first_rank: int = 0, progress: Told = untold) -> Side:
    """The model on ranks first_rank, first_rank + 1, ... as SGLang stores it.

    Raises InputError for sizes that don't divide what they split, an EP that neither divides TP nor is a multiple of it, and
    axes that SGLang doesn't have.
    """
    check_axes(spec, "sglang", (Axis.TP, Axis.PP, Axis.DP, Axis.EP))
    tp, ep = spec.size(Axis.TP), spec.size(Axis.EP)
    if ep > 1 and ep % tp and tp % ep and model.n_experts:
        raise InputError(
            f"{spec}: EP{ep} with TP{tp}: in sglang one must divide the other; use TP{tp} x EP{tp} or TP{ep} x EP{ep}"
        )
    return lay_out_replicas(SGLANG, model, spec, max(tp, ep), first_rank, progress)
